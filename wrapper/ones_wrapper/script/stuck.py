"""Detection of ranks that wait for each other for ever, because one made fewer backward passes than another.

For example a rank skips a loss, or has one micro-batch less. It is at its next step boundary while other ranks wait for
its gradients. Each rank counts the gradient exchanges that it began. A rank without progress writes its counts to a
file in the job's directory, and reads the files of other ranks. A rank that made fewer exchanges than another in as
many steps logs its line and ends with an error.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ones_wrapper.process.background import run_behind
from ones_wrapper.process.exit_codes import HUNG
from ones_wrapper.script.line import line

PREFIX = ".at-rank-"
LOOKS = 60
"""Number of checks, one a second, after which ranks that wait at different places count as stuck. A network may pause
for tens of seconds."""
STILL_S = 4.0
"""Fewest seconds without progress after which a rank writes its counts; with slow steps, three times a step's time."""
ALL = "All ranks must make equally many: skip on all ranks or on none, `if job.any(bad): continue`"
UNEQUAL = (
    "rank {mine.rank} made {fewer} backward pass(es) fewer than rank {other.rank} by step {mine.steps}, so the ranks "
    "wait for each other: it is{mine.line}, rank {other.rank}{other.line}. " + ALL
)


def fewer_passes(rank: int, fewer: int) -> str:
    """Return the error at a step boundary if ranks began different numbers of exchanges. `fewer` is the number missing
    on this rank; 0 if exchanges are missing on another rank."""
    if not fewer:
        return "another rank made fewer backward passes than this one: see that rank's message"
    return (
        f"rank {rank} made {fewer} backward pass(es) fewer than others up to this step{line()}, so gradients of "
        f"different steps were averaged. {ALL}"
    )


class Standpoint(NamedTuple):
    """Position of one rank: its completed steps, its gradient exchanges and its line in the script."""

    rank: int
    steps: int
    begun: int
    """Number of gradient exchanges begun since the ranks started."""
    done: int
    """Number of gradient exchanges in the completed steps."""
    waits: str
    """Function in which this rank waits for others; `EXCHANGE` if it waits for gradients, empty if it does not wait."""
    line: str


EXCHANGE = "_engine_run_backward"
_WAITS = (
    "autograd/graph.py",
    "ones_wrapper/group/__init__.py",
    "torch/distributed/distributed_c10d.py",
    "nn/parallel/distributed.py",
)
"""Ends of the paths of files in whose functions a rank waits for others."""
APART = (
    "rank {mine.rank} waits{mine.line} for other ranks, and rank {other.rank} elsewhere{other.line}: calls that all "
    "ranks make together (job.evaluate, job.mean, job.checkpoint, the end of job.epochs(), a forward pass with "
    "buffers) must not depend on the rank. To use the model on one rank, take job.unwrap(model)"
)
Counts = tuple[int, int, int, float]
"""(completed steps, exchanges begun, exchanges in completed steps, seconds per step)."""


class Watch:
    """Search for ranks with fewer backward passes than others. Methods are not collective."""

    POLL_S = 1.0

    def __init__(
        self,
        directory: Path,
        rank: int,
        world: int,
        meeting: str,
        now: Callable[[], Counts],
        end: Callable[[str, int], None],
    ) -> None:
        """`meeting` identifies this start of the `world` ranks. `now` returns this rank's counts. `end` ends the
        process with a message and an exit code."""
        self._directory, self._rank, self._world, self._meeting = directory, rank, world, meeting
        self._now, self._end = now, end
        self._own = directory / f"{PREFIX}{rank}"
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._last, self._since = tuple[int, ...](), 0.0
        self._compared: Future[None] = Future()
        self._compared.set_result(None)
        self._written: Standpoint | None = None
        self._forget()

    def run(self) -> None:
        """Look every second until `close`."""
        mine = os.getpid()
        while not self._stop.wait(self.POLL_S) and os.getpid() == mine:
            self.look()

    def look(self) -> None:
        """Start a thread that compares this rank with others, if it makes no progress. Call this at least every second.
        It reads no files, since these may hang."""
        now = self._now()
        counts, step_s = now[:3], now[3]
        if counts != self._last:
            self._last, self._since = counts, time.monotonic()
        still = time.monotonic() - self._since > max(STILL_S, 3 * step_s)
        if still and counts[1] and self._compared.done() and not self._stop.is_set():
            with suppress(RuntimeError):  # the process may have as many threads as it can
                self._compared = run_behind("ones-places", lambda: self._compare(counts))

    def close(self) -> None:
        """End the search, and remove this rank's file from the directory."""
        self._stop.set()
        self._forget()

    def _forget(self) -> None:
        with suppress(OSError):
            self._own.unlink(missing_ok=True)
        self._written = None

    def _compare(self, counts: tuple[int, int, int]) -> None:
        mine, looks = os.getpid(), 0
        while self._now()[:3] == counts:
            place = Standpoint(self._rank, *counts, *self._place())
            self._write(place)
            others = self._others()
            fewer, waits = unequal(place, others), apart([place, *others], self._world)
            looks = looks + 1 if waits else 0
            if fewer or looks > LOOKS:
                self._stop.set()
                self._end(fewer or waits, 1 if fewer else HUNG)  # HUNG: the network may have paused, so start again
            if self._stop.wait(self.POLL_S) or os.getpid() != mine:
                return
        self._forget()

    def _place(self) -> tuple[str, str]:
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "", ""
        return frame.f_code.co_name if frame.f_code.co_filename.endswith(_WAITS) else "", line(frame)

    def _write(self, here: Standpoint) -> None:
        if here == self._written:
            return
        new = self._own.with_name(f"{self._own.name}.new")
        with suppress(OSError):
            new.write_text("\n".join((self._meeting, *map(str, here))))
            new.replace(self._own)
            self._written = here

    def _others(self) -> list[Standpoint]:
        found = []
        for path in self._directory.glob(f"{PREFIX}*"):
            with suppress(OSError, ValueError):
                meeting, *numbers, waits, place = path.read_text(errors="replace")[:1000].split("\n")
                if meeting == self._meeting and path != self._own and "\x1b" not in place:
                    rank, steps, begun, done = map(int, numbers)
                    found.append(Standpoint(rank, steps, begun, done, waits, place))
        return found


def meeting(env: Mapping[str, str], generation: int) -> str:
    """Return an identifier of this start of the ranks, by which files of other starts are ignored."""
    names = ("ONES_LAUNCHED", "ONES_ATTEMPT", "ONES_FORK", "SLURM_RESTART_COUNT", "MASTER_PORT")
    return "/".join((*(env.get(name, "") for name in names), str(generation)))


def unequal(mine: Standpoint, others: list[Standpoint]) -> str:
    """Return the error if this rank made fewer exchanges than another rank in at least as many steps; else empty."""
    for other in sorted(others):
        ahead = mine.steps > other.steps and mine.begun < other.begun
        if ahead or (mine.steps == other.steps and mine.done < other.done):
            fewer = (other.begun - mine.begun) if ahead else (other.done - mine.done)
            return UNEQUAL.format(mine=mine, other=other, fewer=fewer)
    return ""


def apart(all_: list[Standpoint], world: int) -> str:
    """Return the error if all ranks wait, but at different places; empty if they do not, or if all wait for
    gradients."""
    waiting = sorted((one for one in all_ if one.waits), key=lambda one: one.rank)
    if len(waiting) < world or {one.waits for one in waiting} == {EXCHANGE}:
        return ""
    other = next((one for one in waiting if (one.waits, one.line) != (waiting[0].waits, waiting[0].line)), None)
    return APART.format(mine=waiting[0], other=other) if other is not None else ""
