"""What a run claims, held against Slurm's clock and against what it claimed before.

A job's reports are its user's word. What decides about GPUs is how fast it says it trains and how much it says is
left. Slurm knows when each run began and where it runs; the rest must agree with itself:

- a report lies within its run, as far as clocks agree (`SKEW_S`);
- the seconds of training that a run claims are no more than went by, and where they are less than `DUTY` of them,
  they are taken for so many more: with q = (Σ seconds + `GRACE_S`) / elapsed below `DUTY`, a stretch of s seconds
  counts s · `DUTY` / q. So a job that divides its seconds by any number is believed 1 / `DUTY` of its true speed in the
  long run, and one that trains for half of its time or more is believed what it says;
- samples, cursor and epochs tell of the same training: a stretch holds no more samples than the cursor moved by, and
  no fewer but for the steps that no report measures;
- a sample is worth no more at a large batch than at the base batch, and the progress that a stretch made agrees with
  the noise scale that it reports.

What does not hold is left out before it is stored. The next claim is judged against the last as it was made, believed
or not, so that one lost line costs one stretch. Nothing here can tell that a job trains at all: what a lie that agrees
with itself gains is bounded in `learn`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

from ones_db import ReportLine
from ones_wrapper.protocol import Batch, Epoch, First, Hello, Throughput

SKEW_S = 300.0
"""How far a node's clock may be from ours."""
LENGTHS = 1.05
"""Measured lengths may be longer than the time they were measured in by this factor."""
DUTY = 0.5
"""Share of a run's time that is training, at least, where speeds are believed as claimed."""
GRACE_S = 15.0
"""Time of a run, after its first step, that need not be training."""
UNMEASURED = 3
"""Steps after a start of the ranks of which no stretch tells (its first two warm up), and one more."""
WORTH = 1.5
"""What a stretch says of a sample's worth may be off by this factor: noise scales jump."""


@dataclass(frozen=True)
class Run:
    """What Slurm, and the job's spec, say of a run."""

    start: float = 0.0
    """Unix seconds; 0 where not known."""
    end: float = math.inf
    """Its end, or now."""
    gpus: int = 0
    """In all; 0 where not known."""
    dataset: int = 0
    """Samples in an epoch; 0 where not known."""
    base_batch: int = 0


@dataclass
class Claimed:
    """What a run has claimed so far, believed or not; `judge` goes on from a copy.

    A companion that starts anew begins with nothing, as a run does: it takes the next report for where the run stands.
    """

    number: int = 0
    since: float | None = None
    """When its first step ended, or else its first report came: lengths count from there."""
    first: bool = False
    seconds: float = 0.0
    """Of training, since then."""
    place: tuple[int, int] | None = None
    """Epoch and cursor at the last stretch's end, or at the start."""
    time: float = 0.0
    """Of that place."""
    furthest: tuple[int, int] = (0, 0)
    epoch: int = -1
    """The last that ended."""
    fastest: float = 0.0
    """Samples/s."""
    batch: int = 0
    """In force; 0 where not known."""
    noise: float | None = None
    progress: float | None = None
    fresh: bool = True
    """No stretch has come since the ranks started."""
    gap: bool = False
    """Lines are missing since that place."""
    doubted: int = 0
    """Reports that were not believed as they were told."""


@dataclass(frozen=True)
class Judged:
    """Lines of one look, as far as they are believed."""

    lines: tuple[ReportLine, ...]
    claimed: Claimed
    """What is to be judged against at the next look, once these lines are stored."""
    doubt: str
    """What was not believed of them, in words for the job's owner; empty where everything was."""


def judge(lines: Iterable[ReportLine], run: Run, before: Claimed) -> Judged:
    """What of a run's new lines, in their order, is believed. Pure."""
    court = _Court(run, copy(before))
    kept = tuple(line for said in lines if (line := court.hear(said)) is not None)
    count = court.told.doubted
    news = count > before.doubted
    return Judged(kept, court.told, f"{count} of its reports not believed as told, the last: {court.last}" * news)


class _Court:
    """Judges one line after the other."""

    def __init__(self, run: Run, told: Claimed) -> None:
        self.run = run
        self.told = told
        self.last = ""
        """What was not believed last."""

    def hear(self, line: ReportLine) -> ReportLine | None:
        """The line as it is believed; None where it is not."""
        told = self.told
        told.gap = told.gap or line.number != told.number + 1
        told.number = line.number
        told.since = line.time if told.since is None else told.since
        low, high = self.run.start - SKEW_S, self.run.end + SKEW_S
        if not low <= line.time <= high:
            ahead = line.time - high if line.time > high else line.time - low
            self._doubt(line, f"is {abs(ahead):.0f} s {'after' if ahead > 0 else 'before'} its run, by Slurm's clock")
            if isinstance(line.report, (Throughput, Epoch)):
                return None
            line = replace(line, time=min(max(line.time, low), high))
        match line.report:
            case Hello():
                return self._hello(line, line.report)
            case First() if not told.first:
                told.first, told.since, told.seconds = True, line.time, 0.0
            case Batch(batch=batch):
                told.batch, told.fastest = batch, 0.0
            case Epoch():
                return self._epoch(line, line.report)
            case Throughput():
                return self._stretch(line, line.report)
        return line

    def _hello(self, line: ReportLine, said: Hello) -> ReportLine:
        """The ranks start, the first time or again: no further than the run had come."""
        told, place = self.told, (said.epoch, said.cursor)
        if told.place is not None and not told.gap and self._beyond(told.furthest, place) > UNMEASURED * said.batch:
            self._doubt(line, f"starts again in epoch {place[0]} at {place[1]}, further than the run had come")
            place = told.furthest
            said = replace(said, epoch=place[0], cursor=place[1], progress=told.progress)
        if 0 < self.run.gpus < said.nodes * said.gpus_per_node:
            self._doubt(line, f"tells of {said.nodes} x {said.gpus_per_node} GPUs, and Slurm gave it {self.run.gpus}")
            said = replace(said, nodes=0, gpus_per_node=0)
        told.batch, told.fresh = said.batch, True
        self._moves(line, said, place)
        return replace(line, report=said)

    def _moves(self, line: ReportLine, said: Hello | Throughput, place: tuple[int, int]) -> None:
        told = self.told
        told.place, told.time, told.furthest, told.epoch = place, line.time, max(place, told.furthest), said.epoch - 1
        told.noise, told.progress, told.gap = said.noise, said.progress, False

    def _epoch(self, line: ReportLine, said: Epoch) -> ReportLine | None:
        """An epoch ended: the one after the last, and not before its samples could be used."""
        told, end = self.told, (said.epoch + 1, 0)
        last, told.epoch, told.furthest = told.epoch, said.epoch, max(told.furthest, end)
        if told.place is None or told.gap:
            return line
        if said.epoch > max(last + 1, told.place[0]):
            self._doubt(line, f"ends epoch {said.epoch}, and none ended between it and epoch {last}")
            return None
        used, could = self._beyond(told.place, end), told.fastest * (line.time - told.time + SKEW_S)
        if told.fastest and self.run.dataset and used > LENGTHS / DUTY * could:
            self._doubt(line, f"ends epoch {said.epoch} where {used / told.fastest:.0f} s of training were to come")
            return None
        return line

    def _stretch(self, line: ReportLine, said: Throughput) -> ReportLine | None:
        """A stretch of steps: its samples, its seconds, its batch, its worth."""
        told, now = copy(self.told), self.told
        elapsed = max(line.time - (line.time if told.since is None else told.since), 0.0)
        now.seconds = total = told.seconds + said.seconds
        now.batch, now.fresh = told.batch or said.batch, False
        self._moves(line, said, (said.epoch, said.cursor))
        if told.batch and said.batch != told.batch:
            self._doubt(line, f"has a batch of {said.batch}, while {told.batch} is in force")
            return None
        if total > LENGTHS * elapsed + SKEW_S:
            self._doubt(line, f"makes it {total:.0f} s of training in {elapsed:.0f} s")
            return None
        if told.place is not None and (why := self._disagrees(told, said)):
            self._doubt(line, why)
            return None
        share = (total + GRACE_S) / max(elapsed, 1e-9)
        if share < DUTY:
            self._doubt(
                line, f"makes it {total:.0f} s of training in {elapsed:.0f} s: speeds count {share / DUTY:.2f} times"
            )
            said = replace(said, seconds=said.seconds * DUTY / share)
        if said.seconds > 0:
            now.fastest = max(told.fastest, said.samples / said.seconds)
        if told.place is not None and told.progress is not None and said.progress is not None and not told.gap:
            said = self._worth(line, told, said)
        return line if said is line.report else replace(line, report=said)

    def _disagrees(self, told: Claimed, said: Throughput) -> str:
        """Why its samples are not those by which the cursor moved; empty where they are."""
        assert told.place is not None
        crossed = said.epoch - told.place[0]
        if crossed and not self.run.dataset:
            return ""  # nobody knows how many samples an epoch has
        moved = self._beyond(told.place, (said.epoch, said.cursor))
        # An epoch's last step may be a smaller one, or none.
        slack = said.batch * (1 + abs(crossed))
        if said.samples > moved + slack:
            return f"has {said.samples} samples, while its cursor moved by {moved}"
        if not told.gap and moved > said.samples + slack + said.batch * UNMEASURED * told.fresh:
            return f"has {said.samples} samples, while its cursor moved by {moved}"
        return ""

    def _worth(self, line: ReportLine, told: Claimed, said: Throughput) -> Throughput:
        """Without the noise scale and the progress where they contradict physics, or each other."""
        assert told.place is not None and told.progress is not None and said.progress is not None
        moved = self._beyond(told.place, (said.epoch, said.cursor))
        if (said.epoch != told.place[0] and not self.run.dataset) or moved <= 0 or not self.run.base_batch:
            return said
        least, most = self._worths(said.batch, (told.noise, said.noise))
        made = said.progress - told.progress
        # The reports' numbers are rounded, and a batch's length may be off where an epoch ends.
        if made > WORTH * most * (moved + said.batch):
            self._doubt(line, f"has {made:.0f} samples' worth of progress in {moved} samples")
            said = replace(said, progress=told.progress + most * moved)
            self.told.progress = said.progress
            return said
        if made < least / WORTH * (moved - said.batch):
            self._doubt(line, f"has a noise scale by which its progress is {least * moved:.0f} samples, not {made:.0f}")
            return replace(said, noise=None)
        return said

    def _worths(self, batch: int, noises: Iterable[float | None]) -> tuple[float, float]:
        """Least and most that a sample at that batch is worth by these noise scales."""
        base = self.run.base_batch
        if batch <= base:
            return 1.0, 1.0
        # A job that has not measured its noise yet counts samples whole.
        each = [1.0 if noise is None else (noise + base) / (noise + batch) for noise in noises]
        return min(each), max(each)

    def _beyond(self, place: tuple[int, int], other: tuple[int, int]) -> int:
        """Samples from one place to another, as far as an epoch's length is known."""
        return (other[0] - place[0]) * self.run.dataset + other[1] - place[1]

    def _doubt(self, line: ReportLine, why: str) -> None:
        self.last = f"report {line.number} {why}"
        self.told.doubted += 1
