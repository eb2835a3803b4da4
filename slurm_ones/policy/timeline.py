"""Free GPUs over time, and the fewest GPUs with which a job meets its deadline: its minimum satisfactory share.

Gu et al., "ElasticFlow: An Elastic Serverless Training Platform for Distributed Deep Learning", ASPLOS 2023, serves
jobs in order of deadlines by progressive filling. Each job has a level: the most GPUs that it takes at any moment. Its
level is the lowest at which its work is done in time.

Our sources are the abstract, the authors' code and others' accounts of §4, not the paper itself. Two things differ
here. Intervals end at changes of the free GPUs, not after equal times, and a job pauses before it trains at another
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.policy.contract import Floats, Ints, Reserved

MOST_EDGES = 64
"""Largest number of edges of a timeline's intervals; of more, evenly spaced ones are kept."""
NEAR_S = 0.5
"""Largest difference, in seconds, between two moments that count as one."""


@dataclass(frozen=True)
class SpeedCurve:
    """Speed of a job at each size, and the work that remains."""

    sizes: Ints
    """(A,) numbers of GPUs above 0, ascending; the job is faster at each larger number."""
    rate: Floats
    """(A,) progress per second at each size."""
    work: float
    """Remaining progress, in the unit in which `rate` counts progress."""
    due_s: float
    """Seconds from now to the job's deadline; infinite without one."""
    pause_s: Floats
    """(A,) seconds from now until the job trains at each size."""
    least: int = 0
    """GPUs that the job keeps at any time; above 0 for a running job, so that it is never stopped."""

    @classmethod
    def of(
        cls, sizes: Ints, rate: Floats, work: float, due_s: float, pause_s: Floats | float = 0.0, least: int = 0
    ) -> SpeedCurve:
        """Return the curve of the sizes (U,) that are faster than all smaller ones. `rate` is 0 at a size that the job
        cannot have."""
        before = np.concatenate([[0.0], np.maximum.accumulate(rate)[:-1]])
        faster = rate > before
        pauses = np.broadcast_to(np.asarray(pause_s, dtype=np.float64), rate.shape)
        return cls(sizes[faster], rate[faster], work, due_s, pauses[faster], least)


@dataclass(frozen=True)
class Filled:
    """GPUs that progressive filling gives a job, and how far the job gets with them."""

    gpus: Ints
    """(T,) GPUs in each of the timeline's intervals; 0 after the job's end."""
    share: float
    """Fraction of the job's work that is done by its deadline; 1 if the deadline is met."""
    gpu_s: float
    """GPU-seconds that the job uses up to its deadline."""

    @property
    def met(self) -> bool:
        return self.share >= 1.0


@dataclass(frozen=True)
class FreeTimeline:
    """Number of free GPUs in each interval of time from now on."""

    starts: Floats
    """(T,) start of each interval in seconds from now, ascending from 0."""
    ends: Floats
    """(T,) end of each interval in seconds from now."""
    free: Ints
    """(T,) free GPUs in each interval."""

    @classmethod
    def of(cls, gpus: int, moments: Iterable[float], now: float, reserved: Sequence[Reserved] = ()) -> FreeTimeline:
        """Return the timeline of `gpus` GPUs minus the reserved ones. An interval ends at each of `moments` (seconds
        from now), and where a reservation starts or ends. The timeline ends at the last finite moment."""
        last = max((m for m in moments if np.isfinite(m)), default=NEAR_S)
        edges = [m for m in moments if 0 < m < last]
        edges += [at - now for one in reserved for at in (one.start, one.end) if 0 < at - now < last]
        cuts = _thinned(sorted(edges))
        starts = np.array([0.0, *cuts])
        ends = np.array([*cuts, max(last, NEAR_S)])
        free = np.full(len(starts), gpus, dtype=np.int64)
        for one in reserved:
            # The reservation takes every interval that it touches as a whole: rather too few free GPUs than too many.
            free[(starts < one.end - now) & (ends > one.start - now)] -= one.gpus
        return cls(starts, ends, np.maximum(free, 0))

    def less(self, gpus: Ints) -> FreeTimeline:
        """Return the timeline minus `gpus` (T,) in each interval."""
        return FreeTimeline(self.starts, self.ends, np.maximum(self.free - gpus, 0))

    def held(self, gpus: int, until_s: float) -> Ints:
        """Return an array (T,) that is `gpus` in each interval that starts before `until_s`, and 0 afterwards."""
        return np.where(self.starts < until_s, gpus, 0).astype(np.int64)

    def fill(self, curve: SpeedCurve, first: int | None = None) -> Filled:
        """Return the job's GPUs at its lowest level (see the module) that meets the deadline. If none does, return its
        GPUs at the level at which it does the most work.

        With `first`, the job has this number of GPUs in the first interval, whatever the level.
        """
        levels = len(curve.sizes)
        nothing = np.zeros(len(self.free), dtype=np.int64)
        if not levels:
            return Filled(nothing, 0.0, 0.0)
        room = np.maximum(np.searchsorted(curve.sizes, self.free + curve.least, side="right") - 1, -1)
        at = np.minimum(np.arange(levels)[:, None], room)
        if first is not None:
            at[:, 0] = int(np.searchsorted(curve.sizes, first, side="right")) - 1
        rate, sizes = np.append(curve.rate, 0.0), np.append(curve.sizes, 0)
        end = np.minimum(self.ends, curve.due_s)
        usable = np.maximum(end - np.maximum(self.starts, np.append(curve.pause_s, 0.0)[at[:, :1]]), 0.0)
        done = np.cumsum(rate[at] * usable, axis=1)
        enough = np.flatnonzero(done[:, -1] >= curve.work)
        level = int(enough[0]) if len(enough) else int(done[:, -1].argmax())
        took = done[level]
        goes_on = (np.append(0.0, took[:-1]) < curve.work) & (self.starts < curve.due_s)
        gpus = np.where(goes_on, np.maximum(sizes[at[level]], min(curve.least, int(curve.sizes[-1]))), 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(took > curve.work, 1.0 - (took - curve.work) / np.diff(took, prepend=0.0), 1.0)
        length = np.maximum(np.minimum(self.ends, curve.due_s) - self.starts, 0.0)
        gpu_s = float((gpus * length * np.where(goes_on, part, 0.0)).sum())
        share = min(float(took[-1]) / curve.work, 1.0) if curve.work > 0 else 1.0
        return Filled(gpus.astype(np.int64), share, gpu_s)

    def taken(self, filled: Filled, least: int = 0) -> FreeTimeline:
        """Return the timeline minus the GPUs of a filled job, except its `least` GPUs, which were never free here."""
        return self.less(np.maximum(filled.gpus - least, 0))


def _thinned(moments: Sequence[float]) -> list[float]:
    """Return ascending moments that are more than `NEAR_S` apart, at most `MOST_EDGES`."""
    found: list[float] = []
    for moment in moments:
        if not found or moment - found[-1] > NEAR_S:
            found.append(moment)
    if len(found) <= MOST_EDGES:
        return found
    kept = np.unique(np.linspace(0, len(found) - 1, MOST_EDGES).round().astype(int))
    return [found[i] for i in kept]


def admitted(
    timeline: FreeTimeline, promised: Sequence[SpeedCurve], new: SpeedCurve, before: Sequence[Filled] | None = None
) -> tuple[Filled, int | None]:
    """Return the filling of a `new` job among the `promised` ones. Also return the index of the first promised job that
    would then miss its deadline, or None.

    Jobs with earlier deadlines are filled first. `before` are the promised jobs' fillings without the new job.
    """
    before = filled(timeline, promised) if before is None else before
    order = sorted(range(len(promised)), key=lambda i: promised[i].due_s)
    left, found, broken = timeline, None, None
    for i in order:
        if found is None and promised[i].due_s > new.due_s:
            found = left.fill(new)
            left = left.taken(found, new.least)
        # Jobs that come before the new one are filled as without it.
        now = before[i] if found is None else left.fill(promised[i])
        left = left.taken(now, promised[i].least)
        if before[i].met and not now.met and broken is None:
            broken = i
    return (left.fill(new) if found is None else found), broken


def filled(timeline: FreeTimeline, curves: Sequence[SpeedCurve]) -> list[Filled]:
    """Fill the jobs in order of deadlines; return the fillings in the order of `curves`."""
    found: dict[int, Filled] = {}
    for i in sorted(range(len(curves)), key=lambda i: curves[i].due_s):
        found[i] = timeline.fill(curves[i])
        timeline = timeline.taken(found[i], curves[i].least)
    return [found[i] for i in range(len(curves))]
