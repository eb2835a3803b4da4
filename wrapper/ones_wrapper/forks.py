"""One start of a job's ranks, forked from the process of a test. For `ones_wrapper.testing`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import SkipTest

import torch

from ones_wrapper import ending
from ones_wrapper.signals import FLAGS, Flags

GRACE_S = 2.0
"""How long the other ranks may go on after one failed."""

_PR_SET_PDEATHSIG = 1
_TELL_STACK = signal.SIGRTMIN + 1
_FOREIGN = ("ONES_", "SLURM_", "PMI_", "PMIX_", "OMPI_")


class RankFailed(AssertionError):
    """A rank raised, vanished or hung; the message says which, at which start, and where."""


@dataclass(frozen=True)
class Said:
    """What a rank's process tells at its end."""

    wanted: int | None = None
    """World size of the next start."""
    put: tuple[Any, ...] = ()
    trace: str = ""
    """Traceback of what it raised; empty where it did not fail."""
    raised: BaseException | None = None
    skipped: str = ""
    """Why the body cannot run here."""


class Rank:
    """The rank that this process is."""

    this: Rank | None = None

    def __init__(self, pipe: Connection) -> None:
        self.put: list[Any] = []
        self._pipe = pipe

    def live(self, body: Callable[[], int | None]) -> None:
        """The body, the run's goodbye, and what there is to tell."""
        Rank.this = self
        wanted, trace, raised, skipped = None, "", None, ""
        try:
            wanted = body()
            if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
                raise TypeError(f"a test returns the next world size or None, not {wanted!r}")
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                trace, raised = traceback.format_exc(), error
            if type(error).__name__ in ("Skipped", "SkipTest"):  # pytest's own cannot be pickled
                raised, skipped = None, str(error) or "skipped"
        ending.ended(int(bool(trace)), ending.describe(raised) if raised else "")
        self._say(Said(wanted, tuple(self.put), trace, raised, skipped))

    def die(self, wanted: int) -> NoReturn:
        """End as SIGKILL does."""
        self._say(Said(wanted, tuple(self.put)))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def _say(self, said: Said) -> None:
        try:
            told = pickle.dumps(said)
        except Exception:  # an exception that cannot be pickled: its traceback has to do
            told = pickle.dumps(Said(trace=said.trace or traceback.format_exc()))
        self._pipe.send_bytes(told)


class Start:
    """One start of all ranks."""

    def __init__(self, number: int, world: int, directory: Path) -> None:
        """`directory` holds the job's directory, which starts have in common."""
        self._number, self._world, self._directory = number, world, directory
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, Connection] = {}

    def fork(self, body: Callable[[], int | None], env: Mapping[str, str]) -> None:
        """Begin the ranks."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self._world):
            receiver, sender = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _die_with(parent)
                    self._become(rank, port, env)
                    Rank(sender).live(body)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:  # what the test process does at its end is not for this one
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            sender.close()
            self._pids[rank], self._pipes[rank] = pid, receiver

    def _become(self, rank: int, port: int, env: Mapping[str, str]) -> None:
        """In the rank's process: everything as after a start by the node launcher."""
        for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
            del os.environ[name]
        place = {
            "RANK": rank,
            "WORLD_SIZE": self._world,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self._world,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "SLURM_RESTART_COUNT": self._number,
            "ONES_NODES": 1,
            "ONES_GPUS_PER_NODE": self._world,
            "ONES_LAUNCHED": time.time(),
            "ONES_JOB_DIR": self._directory / "job",
            "OMP_NUM_THREADS": 1,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(env)
        torch.set_num_threads(1)  # a pool of threads does not survive the fork
        vars(FLAGS).update(vars(Flags()))
        ending._callbacks.clear()
        faulthandler.register(_TELL_STACK, self._stack(rank).open("w"), all_threads=False)

    def outcome(self, timeout_s: float) -> list[Said]:
        """What the ranks said at their end, by rank. Raises RankFailed where one failed or the time is over."""
        until = time.monotonic() + timeout_s
        said: dict[int, Said] = {}
        failed: list[int] = []
        while len(said) < self._world and time.monotonic() < until:
            found = self._listen([rank for rank in self._pipes if rank not in said])
            said |= found
            more = [rank for rank, one in found.items() if one.trace]
            if more and not failed:
                until = time.monotonic() + GRACE_S
            failed += more
        if failed:
            self._raise(said, failed)
        if hung := [rank for rank in self._pipes if rank not in said]:
            where = "\n".join(f"{self._name(rank)} is at\n{self._ask_stack(rank)}" for rank in hung)
            raise RankFailed(f"still running after {timeout_s:g} s:\n{where}")
        return [said[rank] for rank in range(self._world)]

    def _raise(self, said: dict[int, Said], failed: list[int]) -> NoReturn:
        first = said[failed[0]]
        if first.skipped:
            raise SkipTest(first.skipped)
        others = "".join(f"\n{self._name(rank)}, then: {_last_line(said[rank].trace)}" for rank in failed[1:])
        raise RankFailed(f"{self._name(failed[0])}:\n{first.trace}{others}") from first.raised

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._world}, start {self._number}"

    def _listen(self, ranks: list[int]) -> dict[int, Said]:
        """What came from these ranks within a moment."""
        wait([self._pipes[rank] for rank in ranks], 0.05)
        found: dict[int, Said] = {}
        for rank in ranks:
            # Asked first: who is gone by now has said what he had to say.
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid:
                del self._pids[rank]
            try:
                if self._pipes[rank].poll():
                    found[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                    continue
            except EOFError:  # the pipe's end may come a moment before the process's
                pass
            if pid:
                code = os.waitstatus_to_exitcode(status)
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                found[rank] = Said(trace=f"it ended without a word, by {how}")
        return found

    def _stack(self, rank: int) -> Path:
        return self._directory / f"stack-{rank}"

    def _ask_stack(self, rank: int) -> str:
        os.kill(self._pids[rank], _TELL_STACK)
        time.sleep(0.2)
        return self._stack(rank).read_text()

    def end(self) -> None:
        """End the ranks that are left, and collect them."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        for pipe in self._pipes.values():
            pipe.close()


def _last_line(trace: str) -> str:
    return trace.strip().splitlines()[-1]


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
