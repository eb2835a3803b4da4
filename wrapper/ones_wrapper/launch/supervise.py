"""Supervisor of the ranks: starts them, forwards signals, waits, and starts them again or requeues the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from ones_wrapper.files.job_directory import STEP_NAME, ExitCodes, RunSummary, newest_checkpoint, summarize_reports
from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.launch.batch_shell import DIES, BatchShell, killed_by_warning
from ones_wrapper.launch.blocks import OtherBlocks
from ones_wrapper.launch.launchers import Started
from ones_wrapper.launch.restart_policy import GOOD_S, Action, Decision, RestartLimits, StartOutcome, Tries, decide
from ones_wrapper.launch.slurm import run_slurm
from ones_wrapper.process.exit_codes import CRASHED, STOP_CODE
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import NodeAllocation
from ones_wrapper.protocol.fields import build, types_of
from ones_wrapper.protocol.slurm_commands import again_command

WARNED_S = 90.0
"""Seconds in which the ranks must end after the warning of the time limit. After that the job is requeued with the
newest checkpoint. The templates request the warning 120 s before the limit."""
BEFORE_END_S = 20.0
"""Seconds before the job's end, as Slurm has set it, at which the ranks must have ended."""
COMPANION_S = 30.0
"""Seconds that a drained job waits for the companion to requeue it, before it requeues itself."""

TRIES = "tries.json"
"""File with the numbers of restarts and requeues. Each is counted in it before it is tried."""
MOST_BYTES = 4096

_SHELLS = {"sh", "bash", "dash", "ksh", "zsh"}


def _receiver(pid: int) -> tuple[int, str]:
    """Return (id, program's name) of the process, `pid` or its descendant, that must get a signal. `ibrun` and some
    `mpirun` are shell scripts, which would die of the signal and leave the ranks behind."""
    while True:
        try:
            name = Path(f"/proc/{pid}/exe").readlink().name
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return pid, ""
        if name not in _SHELLS or not children:
            return pid, name
        pid = int(children[-1])


def _time_left_s(env: Mapping[str, str], now: float) -> float:
    """Return the seconds in which the ranks must end after the warning; `WARNED_S` if the job's end is unknown or far
    away."""
    end = env.get("SLURM_JOB_END_TIME", "")
    left = float(end) - now if end.isdigit() else 0.0
    return max(5.0, left - BEFORE_END_S) if 0 < left < 900 else WARNED_S


class Supervisor:
    """The supervisor of one `ones-run`."""

    def __init__(
        self,
        job_dir: Path,
        env: Mapping[str, str],
        has: NodeAllocation,
        limits: RestartLimits,
        blocks: OtherBlocks | None = None,
    ) -> None:
        """`blocks` are the job's other blocks, if this is a block."""
        self._job_dir, self._env, self._job_id, self._restart = job_dir, env, has.job_id, has.restart
        self._limits, self._blocks = limits, blocks
        self._task = blocks.block.task if blocks else None
        self._codes = ExitCodes(job_dir, has.restart, self._task)
        self._started = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._launch: Started | None = None
        self._stopped = False
        self._warned_at = 0.0
        self._shell = BatchShell() if has.job_id else None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal, such as one of `--signal=B:…` or `kill`, to the ranks. SIGTERM, SIGINT and SIGUSR2 become
        the launcher's stop signal."""
        self._stopped = self._stopped or number in (signal.SIGTERM, signal.SIGINT)
        if number == signal.SIGUSR2 and not self._warned_at:
            self._warned_at = time.time()
        process = self._process
        if process is not None and self._launch is not None and process.poll() is None:
            receiver, name = process.pid, ""
            if self._launch.launcher in ("ibrun", "mpirun"):
                receiver, name = _receiver(process.pid)
            if number not in (signal.SIGUSR1, signal.SIGURG):
                number = self._launch.stop or (signal.SIGTERM if name.startswith("mpiexec") else signal.SIGUSR2)
            with suppress(ProcessLookupError):  # it has ended, which `_once` is about to note
                os.kill(receiver, number)

    def run(self, plan: Callable[..., Started]) -> int:
        """Start the ranks until they need no further start; return the script's exit code, or 128+n after signal n.
        `plan(attempt=N)` returns the launch after N earlier starts."""
        attempt = 0
        if self._shell is not None and self._shell.pid:
            log(DIES, "ones-run")
        while True:
            code = self._once(plan(attempt=attempt))
            step = self._decide(code)
            if step.why:
                log(step.why, "ones-run")
            if step.action is Action.RESTART and write_tries(self._job_dir, step.tries, self._task):
                time.sleep(step.delay_s)
                if self._blocks and (why := self._blocks.not_wanted()):
                    log(why, "ones-run")
                    return 0
                if not (self._stopped or self._warned_at):
                    attempt += 1
                    continue
                step = self._decide(code)  # a signal came while the ranks were down
            if step.action is Action.REQUEUE and self._requeue(step):
                return STOP_CODE
            if self._blocks:
                self._blocks.ended(code, self._stopped)
            return code

    def _once(self, launch: Started) -> int:
        self._codes.remove()
        self._launch = launch
        self._started = time.monotonic()
        # Its own process group: Ctrl-C in a terminal reaches the ranks once, through us. srun handles Ctrl-C itself.
        self._process = process = subprocess.Popen(
            launch.command, env=launch.env, stdin=subprocess.DEVNULL, start_new_session=launch.launcher != "srun"
        )
        if self._stopped or self._warned_at:  # came before the ranks were there
            self._handle(signal.SIGTERM if self._stopped else signal.SIGUSR2, None)
        while True:
            try:
                code = process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                if self._shell is not None and self._shell.died and not (self._warned_at or self._stopped):
                    self._handle(signal.SIGUSR2, None)  # the warning killed the shell
                if self._overdue():
                    return STOP_CODE
        code = 128 - code if code < 0 else code
        # Also if the launcher returns 0: srun does not learn of a requested stop.
        left = self._codes.explaining()
        self._codes.remove()
        if left or not code:
            return left
        # A rank that was killed leaves no exit code; Hydra then returns the signal's number.
        if launch.launcher in ("ibrun", "mpirun") and 128 + code in (*CRASHED, STOP_CODE):
            code += 128
        # A node launcher without ranks dies of the signal by which a stop is passed on, and srun kills the others.
        return STOP_CODE if self._stopped and code in CRASHED else code

    def _overdue(self) -> bool:
        """Return True if the ranks have not ended in time after the warning, and a requeue is possible."""
        if not self._warned_at or self._stopped:
            return False
        if time.time() - self._warned_at < _time_left_s(self._env, self._warned_at):
            return False
        return self._decide(STOP_CODE).action is Action.REQUEUE

    def _decide(self, code: int) -> Decision:
        newest = newest_checkpoint(self._job_dir)
        reports = self._reports()
        name = newest.name if newest else ""
        end = StartOutcome(
            code,
            stopped=self._stopped,
            warned=bool(self._warned_at),
            drained=reports.drained,
            checkpoint=name,
            ours=name in reports.checkpoints,
            steady=not self._blocks or self._blocks.alone() or time.monotonic() - self._started > GOOD_S,
            no_requeue=self._no_requeue(),
        )
        return decide(end, self._tries(), self._limits)

    def _reports(self) -> RunSummary:
        return self._blocks.reports() if self._blocks else summarize_reports(self._job_dir, self._restart)

    def _tries(self) -> Tries:
        return read_tries(self._job_dir, self._job_id, self._task)

    def _no_requeue(self) -> str:
        if not self._job_id:
            return "this is not a Slurm job"
        if shutil.which("scontrol") is None:
            return "there is no scontrol here; submit it again, with the same ONES_JOB_DIR, or leave that to slurm-ones"
        if self._blocks and self._warned_at and self._blocks.others_train():
            return "other blocks of the job still train"
        return ""

    def _requeue(self, step: Decision) -> bool:
        """Requeue this job; do not count a requeue that Slurm refuses."""
        if self._reports().drained:
            log(f"the companion drained this job; waiting {COMPANION_S:g} s for its requeue", "ones-run")
            until = time.monotonic() + COMPANION_S
            while time.monotonic() < until and not self._stopped:
                time.sleep(0.2)
        if self._shell is not None and self._shell.died and not killed_by_warning(self._job_id):
            log("the batch shell ended by something else than the warning, so the job is not requeued", "ones-run")
            return False
        before = self._tries()
        # Counted first: Slurm may end us before it answers.
        if self._stopped or not write_tries(self._job_dir, step.tries, self._task):
            return False
        # By the task's name: one task's id is also the id of the whole array.
        block = self._blocks.block if self._blocks else None
        name = f"{block.array}_{block.task}" if block else self._job_id
        _, refusal = run_slurm(again_command(name, hold=False))
        if refusal:
            log(f"Slurm did not requeue the job ({refusal}); submit it with --requeue, or submit it again", "ones-run")
            write_tries(self._job_dir, before, self._task)
        return not refusal


def _tries_name(task: int | None) -> str:
    return TRIES if task is None else f"tries-{task}.json"


def read_tries(job_dir: Path, job_id: int, task: int | None = None) -> Tries:
    """Return the numbers of restarts and requeues of this job; those of another job in the directory do not count."""
    try:
        tries = build(Tries, types_of(Tries), read_json(job_dir / _tries_name(task), MOST_BYTES))
    except (OSError, ValueError):
        return Tries(job_id)
    sound = all(not name or STEP_NAME.fullmatch(name) for name in (tries.requeued_at, tries.failed_at))
    return tries if sound and tries.job_id == job_id else Tries(job_id)


def write_tries(job_dir: Path, tries: Tries, task: int | None = None) -> bool:
    """Write the numbers; return False if that failed. A restart or requeue that cannot be counted is not tried."""
    path = job_dir / _tries_name(task)
    try:
        replace_small(path, (json.dumps(asdict(tries), indent=1) + "\n").encode())
    except OSError as error:
        log(f"{path} cannot be written ({error.strerror}), so nothing is tried again", "ones-run")
        return False
    return True
