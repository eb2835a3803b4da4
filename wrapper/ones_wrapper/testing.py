"""Tests of resize logic in seconds, without Slurm. A test's body runs in forked ranks, and is started again at each
resize.

    @testing.elastic(ranks=2)
    def test_resize() -> int | None:
        job = ones.init(batch=8, epochs=1)
        ...                                     # the script's own set-up
        for _ in job.epochs():
            for x, y in loader:
                if job.progress.step == 5:      # five steps are done, this one is not begun
                    job.checkpoint()
                    return 3                    # go on with three ranks
                ...                             # a step
        testing.put(parameters)                 # for later starts, and for the caller of `testing.run`
        return None                             # the end

Each start is a new run of the same job, as after a requeue: SLURM_RESTART_COUNT rises, the job's directory stays. The
test passes when a start returns None on all ranks. (A test that returns its next world size is AdaptDL's idea; Qiao et
al., OSDI 2021.) A fork has the modules that the test's process imported, so a start takes a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import SkipTest

import torch
import torch.distributed as dist

from ones_wrapper.devices.defaults import set_defaults
from ones_wrapper.launch.rank import end_with_parent
from ones_wrapper.network import rendezvous
from ones_wrapper.network.door import listen
from ones_wrapper.network.job_network import STORE
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import StoreServer
from ones_wrapper.process import hooks as process_hooks
from ones_wrapper.process.hooks import FLAGS, Flags
from ones_wrapper.process.placement import free_port, placement_on
from ones_wrapper.protocol import HOT

__all__ = ["Put", "RankFailed", "die", "elastic", "put", "run", "values"]


@dataclass(frozen=True)
class Put:
    """A value that a rank gave to `put`."""

    start: int
    rank: int
    world: int
    value: Any


_earlier: list[Put] = []


def put(value: Any) -> None:
    """Keep a picklable value for later starts and for the caller of `run`."""
    _this("put").put.append(value)


def values() -> list[Put]:
    """Return the values that ranks gave to `put` in earlier starts, ordered by start and rank."""
    return list(_earlier)


def die(ranks: int) -> NoReturn:
    """End this rank as SIGKILL would. The next start has `ranks` ranks. All ranks must call this."""
    _this("die").die(ranks)


def _this(name: str) -> Rank:
    if Rank.this is None:
        raise RuntimeError(f"testing.{name}: call it in a body that testing.elastic or testing.run runs")
    return Rank.this


def elastic(
    ranks: int = 1, *, timeout_s: float = 60.0, most_starts: int = 32, env: Mapping[str, str] | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Decorate a test, so that `run` runs its body: in `ranks` processes, then in the number that it returned, until it
    returns None. The other arguments are those of `run`."""

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            body = functools.partial(function, *args, **kwargs)
            run(body, ranks=ranks, timeout_s=timeout_s, most_starts=most_starts, env=env)

        return test

    return decorate


def run(
    body: Callable[[], int | None],
    *,
    ranks: int = 1,
    timeout_s: float = 60.0,
    most_starts: int = 32,
    env: Mapping[str, str] | None = None,
) -> list[Put]:
    """Run `body` in `ranks` processes, then in the number that it returned, until it returns None. Return the values
    that were given to `put`.

    `timeout_s` limits each start; `env` is added to the ranks' environment. Raises RankFailed if a rank raises,
    vanishes or hangs, if ranks return different numbers, and after `most_starts` starts. Raises RuntimeError if this
    process cannot be forked, because it uses a GPU or has a process group.
    """
    if torch.cuda.is_initialized() or dist.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("testing: this process uses a GPU or has a process group, which no fork survives")
    # Each rank would import them otherwise; torch.optim imports the second at its first use.
    for module in ("ones_wrapper.api", "torch._dynamo"):
        importlib.import_module(module)
    _earlier.clear()
    try:
        with tempfile.TemporaryDirectory(prefix="ones-test-") as directory:
            for number in range(most_starts):
                start = Start(number, ranks, Path(directory))
                try:
                    start.fork(body, env or {})
                    results = start.outcome(timeout_s)
                finally:
                    start.end()
                _earlier.extend(
                    Put(number, rank, ranks, value) for rank, one in enumerate(results) for value in one.put
                )
                wanted = [one.wanted for one in results]
                if len(set(wanted)) > 1:
                    raise RankFailed(f"start {number}: the ranks returned different sizes: {wanted}")
                if wanted[0] is None:
                    return list(_earlier)
                ranks = wanted[0]
        raise RankFailed(f"the job has not ended after {most_starts} starts")
    finally:
        _earlier.clear()


_LOCAL = "127.0.0.1"
GRACE_S = 2.0
"""Seconds after the failure of one rank in which results of the other ranks are still collected."""

_STACK_SIGNAL = signal.SIGRTMIN + 1
_LAUNCHER_PREFIXES = ("ONES_", "SLURM_", "PMI_", "PMIX_", "OMPI_")


class RankFailed(AssertionError):
    """Error of a rank that raised, vanished or hung. The message names the rank, the start, and the place in the
    code."""


@dataclass(frozen=True)
class RankResult:
    """Result of a rank's process."""

    wanted: int | None = None
    put: tuple[Any, ...] = ()
    trace: str = ""
    """Traceback of the rank's error; empty if the rank did not fail."""
    raised: BaseException | None = None
    skipped: str = ""
    """Reason why the test was skipped; empty if it was not."""


class Rank:
    """This process as a rank of a test."""

    this: Rank | None = None

    def __init__(self, pipe: Connection) -> None:
        self.put: list[Any] = []
        self._pipe = pipe

    def run(self, body: Callable[[], int | None]) -> None:
        """Run the body and the exit hooks, and send the result to the test's process."""
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
        process_hooks.run_exit_hooks(int(bool(trace)), process_hooks.describe_error(raised) if raised else "")
        self._send(RankResult(wanted, tuple(self.put), trace, raised, skipped))

    def die(self, wanted: int) -> NoReturn:
        """End as SIGKILL does."""
        self._send(RankResult(wanted, tuple(self.put)))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def _send(self, results: RankResult) -> None:
        try:
            message = pickle.dumps(results)
        except Exception:  # an exception that cannot be pickled: its traceback has to do
            message = pickle.dumps(RankResult(trace=results.trace or traceback.format_exc()))
        self._pipe.send_bytes(message)


class Start:
    """One start of all ranks."""

    def __init__(self, number: int, world: int, directory: Path) -> None:
        """`directory` holds the job's directory, which all starts share."""
        self._number, self._world, self._directory = number, world, directory
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, Connection] = {}

    def fork(self, body: Callable[[], int | None], env: Mapping[str, str]) -> None:
        """Fork the ranks."""
        listener, parent = listen(_LOCAL), os.getpid()
        place = {
            "MASTER_PORT": str(free_port()),
            STORE: f"{_LOCAL}:{listener.getsockname()[1]}",
            "ONES_LAUNCHED": str(time.time()),
        }
        hot = Path(env.get("ONES_JOB_DIR", self._directory / "job")) / HOT
        hot.mkdir(0o700, parents=True, exist_ok=True)
        secret = JobSecret.make(hot)
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self._world):
            receiver, sender = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                # Garbage of the test's process may own threads (as groups do), which a fork lacks. If this rank
                # collected the garbage, the rank would wait for these threads for ever.
                gc.freeze()
                code = 1
                try:
                    end_with_parent(parent)
                    self._set_up(rank, {**place, **env})
                    if rank == 0:
                        StoreServer(listener, secret)
                    else:
                        listener.close()
                    Rank(sender).run(body)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:  # what the test process does at its end is not for this one
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            sender.close()
            self._pids[rank], self._pipes[rank] = pid, receiver
        listener.close()

    def _set_up(self, rank: int, env: Mapping[str, str]) -> None:
        """Set the environment of a rank's process, as the node launcher does."""
        for name in [name for name in os.environ if name.startswith(_LAUNCHER_PREFIXES)]:
            del os.environ[name]
        place = {
            **placement_on(0, 1, self._world, rank).env(),
            "MASTER_ADDR": _LOCAL,
            "SLURM_RESTART_COUNT": self._number,
            "ONES_NODES": 1,
            "ONES_GPUS_PER_NODE": self._world,
            "ONES_JOB_DIR": self._directory / "job",
            "OMP_NUM_THREADS": 1,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(env)
        set_defaults(os.environ)
        rendezvous.install(os.environ)
        torch.set_num_threads(1)  # a pool of threads does not survive the fork
        vars(FLAGS).update(vars(Flags()))
        FLAGS.tested = True
        process_hooks._callbacks.clear()
        stack = self._stack(rank).open("a", buffering=1)
        faulthandler.register(_STACK_SIGNAL, stack, all_threads=False)
        stack.write(f"begun, process {os.getpid()}\n")

    def outcome(self, timeout_s: float) -> list[RankResult]:
        """Return the ranks' results, in rank order. Raises RankFailed if a rank failed or has no result after
        `timeout_s` seconds."""
        half, until = time.monotonic() + timeout_s / 2, time.monotonic() + timeout_s
        results: dict[int, RankResult] = {}
        failed: list[int] = []
        while len(results) < self._world and time.monotonic() < until:
            if time.monotonic() > half:  # two stacks tell a hang from slowness
                half = until
                for rank in self._pids:
                    self._ask_stack(rank, timeout_s / 2)
            found = self._receive([rank for rank in self._pipes if rank not in results])
            results |= found
            more = [rank for rank, one in found.items() if one.trace]
            if more and not failed:
                until = time.monotonic() + GRACE_S
            failed += more
        if failed:
            self._raise(results, failed)
        if hung := [rank for rank in self._pipes if rank not in results]:
            for rank in hung:
                self._ask_stack(rank, timeout_s)
            time.sleep(0.2)
            where = "\n".join(f"{self._name(rank)} is at\n{self._stack(rank).read_text()}" for rank in hung)
            raise RankFailed(f"still running after {timeout_s:g} s:\n{where}")
        return [results[rank] for rank in range(self._world)]

    def _raise(self, results: dict[int, RankResult], failed: list[int]) -> NoReturn:
        first = results[failed[0]]
        if first.skipped:
            raise SkipTest(first.skipped)
        last = {rank: results[rank].trace.strip().splitlines()[-1] for rank in failed[1:]}
        others = "".join(f"\n{self._name(rank)}, then: {line}" for rank, line in last.items())
        raise RankFailed(f"{self._name(failed[0])}:\n{first.trace}{others}") from first.raised

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._world}, start {self._number}"

    def _receive(self, ranks: list[int]) -> dict[int, RankResult]:
        wait([self._pipes[rank] for rank in ranks], 0.05)
        found: dict[int, RankResult] = {}
        for rank in ranks:
            # Asked first: a process that is gone by now has sent its result.
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
                found[rank] = RankResult(trace=f"it ended without a word, by {how}")
        return found

    def _stack(self, rank: int) -> Path:
        return self._directory / f"stack-{rank}"

    def _ask_stack(self, rank: int, after_s: float) -> None:
        """Signal a rank to write its stack, if the rank has begun."""
        stack = self._stack(rank)
        begun = stack.exists() and "begun, " in stack.read_text()
        with stack.open("a") as file:
            file.write(f"after {after_s:g} s: " if begun else f"not begun after {after_s:g} s\n")
        if begun:
            os.kill(self._pids[rank], _STACK_SIGNAL)

    def end(self) -> None:
        """Kill the remaining ranks, and wait until they have ended."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        for pipe in self._pipes.values():
            pipe.close()
