"""Started once a node: imports torch once, forks the node's ranks, and looks after them.

A rank that imports torch by itself costs seconds of CPU, and a resize restarts every rank; a fork costs
milliseconds (`benchmarks/restart_import.py`). Nothing here may initialise CUDA, which does not survive a
fork.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ones_wrapper.ending import describe, ended
from ones_wrapper.launch import exit_code_path
from ones_wrapper.signals import CHECKPOINT, FLAGS, STOP, STOP_CODE

GRACE_S = 5.0
"""How long the other ranks of a node may go on after one failed, to say goodbye."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """Where this node stands in the run."""

    node: int
    nodes: int
    gpus_per_node: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Place:
        """From what `ones-run` and `srun` set; outside Slurm one node."""
        return cls(int(env.get("SLURM_NODEID", "0")), int(env["ONES_NODES"]), int(env["ONES_GPUS_PER_NODE"]))

    def rank_env(self, local_rank: int) -> dict[str, str]:
        """The variables of one rank, as torch's `env://` and other launchers name them."""
        return {
            "RANK": str(self.node * self.gpus_per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.nodes * self.gpus_per_node),
            "LOCAL_WORLD_SIZE": str(self.gpus_per_node),
            "GROUP_RANK": str(self.node),
        }


def preload(modules: Sequence[str]) -> None:
    """Import what every rank needs before the fork: torch, ourselves, and what the user named.

    A module that is missing is left for the script to stumble over, where the error makes sense.
    """
    importlib.import_module("ones_wrapper.api")
    # torch.optim imports this at its first use, so every rank would.
    for module in ("torch._dynamo", *modules):
        with suppress(ImportError):
            importlib.import_module(module)


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run the script as `python SCRIPT ARGS` would; the exit code, after everybody heard of it."""
    sys.argv = [script, *arguments]
    code, note = 0, ""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            code = leaving.code
        elif leaving.code is not None:
            print(leaving.code, file=sys.stderr)
            code, note = 1, str(leaving.code)[:300]
    except BaseException as error:
        traceback.print_exc()
        code, note = 1, describe(error)
    ended(code, note)
    return code


def leave(code: int) -> None:
    """End this rank as the interpreter would, but for taking itself apart.

    While it does that, a thread of gloo that still holds a Python callback aborts the process now and then
    (torch 2.13), and a finished job would count as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, ends idle pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_rank(place: Place, local_rank: int, parent: int) -> None:
    """First thing in the child: die with the launcher, keep signals as flags, know the place."""
    _die_with(parent)
    FLAGS.install()
    os.environ.update(place.rank_env(local_rank))


class Launcher:
    """The parent of a node's ranks."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        """Local rank of each living process."""
        self.asked: set[int] = set()
        self.failed: int | None = None
        self.failed_at = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks; before there are any, remember it."""
        self.asked.add(number)
        self._send(signal.SIGTERM if number in STOP else number)

    def _send(self, number: int) -> None:
        for pid in list(self.ranks):
            os.kill(pid, number)

    def fork(self, place: Place) -> int | None:
        """Fork the ranks. Returns a rank's number in the child, None in the parent."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()  # keeps the collector from copying the shared pages in every rank
        for local_rank in range(place.gpus_per_node):
            pid = os.fork()
            if pid == 0:
                _become_rank(place, local_rank, parent)
                return local_rank
            self.ranks[pid] = local_rank
        for number in self.asked:  # came while forking
            self._send(number)
        return None

    def wait(self) -> int:
        """Wait for all ranks. After one failed the others get `GRACE_S`; the code is that of the first that
        failed.
        """
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                self._end_grace()
                time.sleep(0.02)
                continue
            local_rank = self.ranks.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code
            if local_rank is not None and code and self.failed is None:
                self.failed, self.failed_at = code, time.monotonic()
                if not self.asked & set(STOP):
                    leave_exit_code(code)
                    print(f"ones-run: local rank {local_rank} ended with exit code {code}", file=sys.stderr)
        return self.failed or 0

    def _end_grace(self) -> None:
        if self.failed is not None and time.monotonic() - self.failed_at > GRACE_S:
            self._send(signal.SIGKILL)


def leave_exit_code(code: int) -> None:
    """Tell `ones-run` the code, unless another node did so before."""
    path = exit_code_path(Path(os.environ["ONES_JOB_DIR"]), int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    try:
        with path.open("x") as file:
            file.write(str(code))
    except OSError:
        pass  # srun's own code then has to do


def main(argv: Sequence[str]) -> int:
    """Run `SCRIPT ARGS` in every rank of this node."""
    script, *arguments = argv
    sys.path[0] = str(Path(script).resolve().parent)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "SLURM_JOB_ID" not in os.environ:  # there, slurmstepd looks after us
        _die_with(os.getppid())
    place = Place.of(os.environ)
    launcher = Launcher()
    for number in STOP + CHECKPOINT:
        signal.signal(number, launcher.handle)
    preload([name for name in os.environ.get("ONES_PRELOAD", "").split(",") if name])
    if launcher.asked & set(STOP):
        return STOP_CODE
    local_rank = launcher.fork(place)
    if local_rank is None:
        return launcher.wait()
    code = run_script(script, arguments)
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
