"""The node launcher: imports torch, forks the node's ranks, and watches them.

A resize starts all ranks again. An import of torch takes seconds of CPU time, a fork milliseconds
(`benchmarks/restart_import.py`). The launcher must not initialise CUDA, which does not survive a fork.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ones_wrapper.devices.defaults import set_defaults
from ones_wrapper.files.job_directory import ExitCodes, newest_checkpoint
from ones_wrapper.files.node_memory import FOLDER
from ones_wrapper.launch import container
from ones_wrapper.launch.main_module import first_on_path
from ones_wrapper.launch.pieces import LentMemory
from ones_wrapper.launch.rank import (
    DUMP,
    end_with_parent,
    prefetch_checkpoint,
    preload,
    run_script,
    take_card,
    take_signals,
)
from ones_wrapper.launch.restart_policy import fork_delay_s, newer
from ones_wrapper.membership.agent import NodeAgent
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.process import hang_detector
from ones_wrapper.process.block import own_block
from ones_wrapper.process.ending import leave
from ones_wrapper.process.exit_codes import (
    CRASHED,
    HUNG,
    NEXT_TERM,
    OUT_OF_MEMORY,
    PEER_LOST,
    STOP_CODE,
    USAGE_ERROR,
    explaining_code,
)
from ones_wrapper.process.hooks import CHECKPOINT, LOOK, STOP
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import LaunchError, own_node, placement_on, require_torch
from ones_wrapper.protocol import HOT

GRACE_S = 5.0
"""Seconds that the node's other ranks have for their last reports after one has failed."""

RESCUE_S = 30.0
"""Value of `GRACE_S` in a block. It is longer, since a rank may be writing the rescue checkpoint for which the next
term waits (`membership.rescue`)."""

_END = (*STOP, signal.SIGINT)
_PASSED_ON = _END + CHECKPOINT + LOOK
_POLL_S = 0.02
_DUMP_S = 1.0
"""Seconds that hung ranks have to print their stacks."""


class Ranks:
    """The parent process of a node's ranks."""

    def __init__(
        self,
        count: int,
        hang_s: float,
        grace_s: float = GRACE_S,
        others_failed: Callable[[], bool] = bool,
        agent: NodeAgent | None = None,
    ) -> None:
        """`others_failed` returns True if ranks of another node ended with an error. A block's ranks use `agent`."""
        self._count, self._grace_s, self._hang_s = count, grace_s, hang_s
        self._board = hang_detector.Heartbeats(count)
        self._still = hang_detector.Standstill()
        self._living: dict[int, int] = {}
        self.received: set[int] = set()
        self._codes: list[int] = []
        self._kill_at = float("inf")
        self._others_failed, self._look_at = others_failed, 0.0
        self._rest = agent.turn if agent is not None else lambda seconds: time.sleep(seconds)
        self._agent = agent

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the ranks, or store it until they are forked."""
        self.received.add(number)
        self._send(signal.SIGTERM if number in _END else number)

    @property
    def stopped(self) -> bool:
        """True once the ranks are asked to stop."""
        return bool(self.received & set(_END))

    def _send(self, number: int) -> None:
        for pid in list(self._living):
            with suppress(ProcessLookupError):  # ended, and `wait` has not noted that yet
                os.kill(pid, number)

    def fork(self) -> int | None:
        """Fork the ranks; return the local rank in a child, None in the parent."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._codes:  # started again: all requests by signal were answered, but for a stop
            self.received.intersection_update(_END)
        self._codes.clear()
        self._kill_at = float("inf")
        for local_rank in range(self._count):
            # A signal that comes now waits until the rank can take it, and until this process knows the rank.
            signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
            pid = os.fork()
            if pid == 0:
                end_with_parent(parent)
                take_signals()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
                hang_detector.watch_rank(self._board, local_rank)
                if self._agent is not None:
                    self._agent.serve_in_child()
                return local_rank
            self._living[pid] = local_rank
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        for number in tuple(self.received):  # came while forking
            self.handle(number, None)
        return None

    def wait(self) -> int:
        """Wait for all ranks; return the exit code of the first cause (`explaining_code`). After a failure the other
        ranks have `grace_s` seconds."""
        self._still.look()
        while self._living:
            if stood_s := self._still.look():
                self._kill_at += stood_s
                self._board.stood_still(time.monotonic(), stood_s)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                self._check()
                self._rest(_POLL_S)
            elif pid in self._living:
                self._ended(self._living.pop(pid), os.waitstatus_to_exitcode(status))
        self._rest(0.0)  # the last rank's end is passed on now, not only after the pause before the next start
        return explaining_code(self._codes)

    def _ended(self, local_rank: int, code: int) -> None:
        self._board.beat(local_rank, 0.0)
        code = 128 - code if code < 0 else code
        if not code or (code in CRASHED and time.monotonic() > self._kill_at):  # then we killed it
            return
        first = not self._codes
        self._codes.append(code)
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        # Later failures are mere consequences, and restarts are logged elsewhere.
        if not self.stopped and code not in (PEER_LOST, NEXT_TERM, OUT_OF_MEMORY) and (first or code in CRASHED):
            log(f"local rank {local_rank} ended with exit code {code}", "ones-run")

    def _check(self) -> None:
        now = time.monotonic()
        if self.stopped and now > self._look_at and self._kill_at == float("inf"):
            self._look_at = now + 1.0
            if self._others_failed():  # ranks that wait for failed ranks in NCCL answer no signal
                self._kill_at = now + GRACE_S
        if now > self._kill_at:
            self._send(signal.SIGKILL)
        elif not self._codes and (hung := self._board.hung(now, self._hang_s)):
            self._end_hung(hung)

    def _end_hung(self, hung: list[int]) -> None:
        """Make the hung ranks print their stacks, and end all ranks."""
        local = ", ".join(map(str, hung))
        log(
            f"local rank {local} reached no step boundary for {self._hang_s:g} s (ONES_HANG_S); ending the ranks",
            "ones-run",
        )
        self._codes.append(HUNG)
        self._send(DUMP)
        time.sleep(_DUMP_S)
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + GRACE_S


class Forks:
    """Repeated starts of a block's ranks, after they lost other blocks or a term has ended."""

    def __init__(self, job_dir: Path) -> None:
        self.count = 0
        self._job_dir = job_dir
        self._row = 0
        self._newest = ""
        self._code = 0

    def wait(self, code: int) -> bool:
        """Wait until the ranks may start again. `code` is the exit code of their last start. Return False after too
        many starts in a row without a newer checkpoint."""
        self._code = code
        path = newest_checkpoint(self._job_dir)
        name = path.name if path else ""
        self._row = 1 if newer(name, self._newest) else self._row + 1
        self._newest = name
        delay_s = fork_delay_s(self._row)
        if delay_s is None:
            return False
        self.count += 1
        time.sleep(delay_s)
        return True

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that differ from the first start's."""
        if not self.count:
            return {}
        return {
            "ONES_FORK": str(self.count),
            "TORCHELASTIC_RESTART_COUNT": str(int(env.get("ONES_ATTEMPT", "0")) + self.count),
            "ONES_LAUNCHED": f"{time.time():.3f}",
            "ONES_IMPORT_S": "0.000",
            **({"ONES_NEXT_TERM": "1"} if self._code == NEXT_TERM else {}),
        }


def main(argv: Sequence[str]) -> int:
    """Run `SCRIPT ARGS` in every rank of this node."""
    script, *arguments = argv
    env = os.environ
    try:
        container.arrive(env)
    except LaunchError as error:
        log(str(error), "ones-run")
        return USAGE_ERROR
    sys.path[0] = first_on_path(script)
    set_defaults(env)
    if env.get("ONES_LAUNCHER", "local") == "local":  # elsewhere the starter's daemon looks after us
        end_with_parent(os.getppid())
    job_dir, codes, block = Path(env["ONES_JOB_DIR"]), ExitCodes.of(env), own_block(env)
    count = int(env["ONES_GPUS_PER_NODE"])

    def others_failed() -> bool:
        return codes.explaining() not in (0, STOP_CODE)

    agent = NodeAgent(lambda: JobNetwork.found(env, job_dir / HOT).secret) if block else None
    ranks = Ranks(count, hang_detector.limit_s(env), RESCUE_S if block else GRACE_S, others_failed, agent)
    # Until the ranks are forked, a stop ends this process: importing torch may take minutes, and nothing is lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in CHECKPOINT + LOOK:
        signal.signal(number, ranks.handle)
    try:
        node = own_node(env)
        require_torch()
    except LaunchError as error:
        log(str(error), "ones-run")
        codes.write(0, USAGE_ERROR)
        return USAGE_ERROR
    prefetch_checkpoint(job_dir)
    env["ONES_IMPORT_S"] = f"{preload(env):.3f}"
    for number in _END:
        signal.signal(number, ranks.handle)
    forks, memory = Forks(job_dir), LentMemory(env, job_dir, block) if block else None
    env[FOLDER] = memory.text if memory else ""
    while True:
        again = forks.env(env)
        local_rank = ranks.fork()
        if local_rank is not None:
            break
        code = ranks.wait()
        if code in (PEER_LOST, NEXT_TERM) and block:
            if not ranks.stopped and forks.wait(code) and not ranks.stopped:
                if code == PEER_LOST:
                    log("other blocks were lost; starting the ranks again", "ones-run")
                continue
            code = STOP_CODE if ranks.stopped else PEER_LOST
        if memory:
            ranks.received.clear()
            memory.end(left=not code, stopped=lambda: ranks.stopped)
        written = bool(code) and codes.write(node, code)
        # srun would take a requested stop for an error, and end ranks of other nodes that are not done yet.
        asked = written and code == STOP_CODE and env.get("ONES_LAUNCHER") == "srun"
        return 0 if asked else code
    env.update(again)
    env.update(placement_on(node, int(env["ONES_NODES"]), count, local_rank).env())
    if not take_card(env, local_rank, count):
        return USAGE_ERROR
    code = run_script(script, arguments)
    return leave(code, main=vars(sys.modules["__main__"]))


if __name__ == "__main__":
    # End as the ranks do: unloading torch costs seconds of a busy processor, for which Slurm waits.
    leave(main(sys.argv[1:]))
