"""The job's other blocks, for a block's `ones-run` before its ranks start and after they have ended.

Starting torch takes seconds, which a block that is not wanted should not spend. So this module only reads files, and
checks whether a leader answers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ones_wrapper.files.job_directory import RunSummary, newest_run, summarize_reports
from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.launch.guests import GuestKeeper
from ones_wrapper.launch.restart_policy import script_failed
from ones_wrapper.launch.slurm import run_slurm
from ones_wrapper.membership.files import OVER, HotFolder, Leader, living
from ones_wrapper.membership.plan import plan_of
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.block import Block
from ones_wrapper.process.exit_codes import DONT_RESTART
from ones_wrapper.process.log import log
from ones_wrapper.protocol import HOT, MAX_INT
from ones_wrapper.protocol.slurm_commands import cancel_waiting_command

FIRST_WAIT_S = 60.0
"""Seconds that a block waits for a leader if no order names the block. A first block leads only after it has imported
torch."""
_LOOK_S = 0.5


class OtherBlocks:
    """View of one block on the job's other blocks."""

    def __init__(
        self, block: Block, job_dir: Path, env: Mapping[str, str], answers: Callable[[Leader], bool] | None = None
    ) -> None:
        """`answers` returns True if a leader is alive. Raises `LaunchError` if the folder can't be used."""
        self.block, self._job_dir = block, job_dir
        self._hot = HotFolder(job_dir, block.array)
        self._spool = Path(env["ONES_SPOOL"]) if env.get("ONES_SPOOL") else None
        self._guests: GuestKeeper | None = None
        self._first = env.get("SLURM_ARRAY_TASK_MIN", str(block.task)) == str(block.task)
        self._hot.prepare()
        self._answers = answers or partial(living, secret=JobSecret.make(self._hot.path))

    def not_wanted(self, wait_s: float = 0.0) -> str:
        """Return why this block has nothing to do; empty if it must train.

        A block that no order names trains only if no block leads the job. It first waits up to `wait_s` seconds for a
        leader. If there is no order at all, the array's first task does not wait.
        """
        until = time.monotonic() + wait_s
        while True:
            if self._hot.over():
                return f"job {self.block.array} has ended; to train on, remove {self._job_dir / HOT / OVER}"
            leader = self._hot.newest()
            tasks = self._ordered(leader)
            if leader is not None and self._trains(leader):
                if tasks is None:
                    return (
                        f"task {leader.task} trains already, and no order says that task {self.block.task} shall join "
                        "it; without slurm-ones, submit with --array=0-7%1, so that tasks start one after the other"
                    )
                if self.block.task not in tasks:
                    return f"task {self.block.task} is not wanted now; wanted tasks: {', '.join(map(str, tasks))}"
            own_turn = (leader is not None or self._first) if tasks is None else self.block.task in tasks
            if own_turn or time.monotonic() >= until:
                return ""
            time.sleep(_LOOK_S)

    def keep_guests(self, nodes: int, gpus_per_node: int) -> None:
        """Start a thread that manages guests of this shape while this block leads, if the job's comment names a guest
        queue."""
        self._guests = GuestKeeper(self.block, self._job_dir, self._spool, (nodes, gpus_per_node))
        self._guests.start()

    def others_train(self) -> bool:
        """Return True if another block leads the job and its board answers."""
        leader = self._hot.newest()
        return leader is not None and self._trains(leader)

    def _trains(self, leader: Leader) -> bool:
        return not self._own(leader) and self._answers(leader)

    def term(self) -> int:
        """Return the term of the newest leader, whose reports describe the job."""
        leader = self._hot.newest()
        return leader.term if leader else 0

    def reports(self) -> RunSummary:
        """Return the summary of the newest term with reports. A term has no reports before its ranks have met and
        loaded the state."""
        return summarize_reports(self._job_dir, newest_run(self._job_dir, self.term()))

    def alone(self) -> bool:
        """Return True if no other block trained in the newest term, by its reports or else by its announcement."""
        term = self.term()
        tasks = summarize_reports(self._job_dir, term).tasks or self._announced(term)
        return not {*tasks} - {self.block.task}

    def ended(self, code: int, stopped: bool) -> None:
        """Clean up after this block's ranks have ended for good. `code` is their exit code; `stopped` is True if a
        signal ended them. If the job is over, or its script failed, waiting tasks are cancelled."""
        if self._guests is not None:
            self._guests.stop()
        leader = self._hot.newest()
        led = leader is not None and self._own(leader)
        left = code == 0 and summarize_reports(self._job_dir, self.term()).ended
        if led and (left or code == DONT_RESTART):
            self._hot.end()  # perhaps the ranks ended before they did so
        if led and self._hot.over():
            self._cancel_waiting()
        elif script_failed(code) and not stopped and self.alone() and not self.others_train():
            log("the script failed, and would fail again: tasks that wait are cancelled", "ones-run")
            self._cancel_waiting()

    def _announced(self, term: int) -> tuple[int, ...]:
        try:
            plan = plan_of((self._hot.announced() or {}).get("plan"))
        except ValueError:
            return ()
        return plan.tasks if plan.term == term else ()

    def _own(self, leader: Leader) -> bool:
        return (leader.task, leader.restart) == (self.block.task, self.block.restart)

    def _ordered(self, leader: Leader | None) -> tuple[int, ...] | None:
        """Return the tasks in the newest order; None if no order names tasks."""
        term = leader.term if leader else MAX_INT
        order = OrderReader(self._job_dir, term, self._spool, self.block.array).poll()
        return order.blocks if order else None

    def _cancel_waiting(self) -> None:
        if shutil.which("scancel") is None:
            return
        _, why = run_slurm(cancel_waiting_command(self.block.array))
        if why:
            log(f"waiting tasks were not cancelled ({why}); cancel them: scancel {self.block.array}", "ones-run")
