"""Deadlines: which are promised, and what the promised ones need now.

A promise is given only if it can be kept: with the job's speed less its doubt, and the work that is not exceeded with
the probability `sure`. The job and all that were promised before must end in time together. Running jobs without a
promise keep what they cannot be without, and reservations hold. All this is by their minimum satisfactory shares
(`policy.timeline`, after ElasticFlow, ASPLOS 2023).

What a promised job cannot be without now follows from what can be put off. A size at which it is slower counts as
`UNMET` times what all jobs' waiting counts, so that a promise comes first in the search. GPUs beyond it are given as to
any other job. PAC-ML (arXiv 2301.13799; known to us from summaries only) learns for one job at a time the smallest size
that meets its deadline.

A job that was refused is asked about again while its deadline is ahead, since others leave. While a promised job that
must keep its GPUs for now needs more of them later, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.ones.sizes import UNKNOWN
from slurm_ones.ones.terms import Priced, Term
from slurm_ones.policy.contract import Bools, Floats, Ints, JobView, Promise, Reserved
from slurm_ones.policy.figures import within
from slurm_ones.policy.tables import Tables, predict
from slurm_ones.policy.timeline import Filled, FreeTimeline, SpeedCurve, admitted, filled

UNMET = 4.0
"""Times the weight of all jobs that a promised job without what it needs counts."""
FORCED = 0.01
"""Share of its worth that a size keeps which does not repay the pause before it, where some have to give way."""
ASKED = 8
"""Jobs that are considered for a promise in one decision, those first that were not refused."""
SPARE = 0.03
"""Share of the time to its deadline that is kept in reserve as a promise is given, or put off."""
ROUND_S = 60.0
"""Seconds that are kept besides, for a decision that comes late; and one pause."""
NEXT_S = 300.0
"""Seconds up to which what a job needs now is not put off."""
LONGEST = 1e12


class Promises(Term):
    """Promised deadlines come before all else that is weighed. It remembers what it settled in the last decision."""

    def __init__(self, sure: float) -> None:
        """`sure` is the probability with which a job has no more to do than is reckoned with."""
        self._sure = sure
        self._found: Deadlines | None = None

    def worth(self, at: Priced, worth: Floats) -> Floats:
        tables = at.tables
        known = np.asarray((tables.allowed & (tables.uncertainty < UNKNOWN)).any(axis=1))
        known &= not any(_needs_more(job, self._sure, at.now) for job in at.running)
        self._found = found = decide_deadlines(
            tables, at.speed, self._sure, at.nodes.gpus, at.now, at.cluster.reserved, known
        )
        if not found.needs.any():
            return worth
        # No change of a young job repays its pause: all sizes but its own are worth nothing. One that has to give way
        # takes the best that is left, and not any of them.
        training = at.unit[:, None] * at.speed
        worth = np.where(worth == 0.0, FORCED * training, worth)
        return worth + found.worth(at.speed, tables.sizes, at.weight)

    def promises(self) -> Mapping[int, Promise]:
        return self._found.promises if self._found is not None else {}

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        if self._found is None:
            return {}
        told, tables = {}, at.tables
        for j in np.flatnonzero(self._found.needs).tolist():
            needed, got = int(self._found.needs[j]), int(tables.sizes[columns[j]])
            if got < needed:
                told[tables.jobs[j].job_id] = reason("deadline_short", gpus=needed)
            elif got == needed and columns[j] != tables.current[j]:
                told[tables.jobs[j].job_id] = reason("deadline_needs", gpus=needed)
        return told


@dataclass(frozen=True)
class Deadlines:
    """Claims of promised deadlines on one decision."""

    needs: Ints
    """(J,) GPUs that each job needs now; 0 for none."""
    promises: Mapping[int, Promise] = field(default_factory=dict)
    """Given and refused in this decision, by job id."""

    def worth(self, rate: Floats, sizes: Ints, weight: Floats) -> Floats:
        """(J, U) worth that each size loses by being slower than what is needed. `rate` (J, U) is progress/s there,
        `weight` (J,) what a second of each job's waiting counts."""
        needed = np.where(sizes == self.needs[:, None], rate, 0.0).max(axis=1)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            short = np.where(needed > 0, np.maximum(1.0 - rate / needed, 0.0), 0.0)
        result: Floats = -UNMET * float(weight.sum()) * (short + (short > 0))
        return result


def decide_deadlines(
    tables: Tables,
    rate: Floats,
    sure: float,
    gpus: int,
    now: float,
    reserved: Sequence[Reserved] = (),
    known: Bools | None = None,
) -> Deadlines:
    """Promises and needs of the jobs of `tables`, which share `gpus`.

    `rate` (J, U) is progress/s at each size that counts on, 0 if the job cannot have it. `known` (J,) tells whether a
    job's speed is more than a guess; without that nothing is promised. Jobs whose views were not asked about, since
    they may not change now, hold their GPUs outside of these.
    """
    jobs = tables.jobs
    nothing = Deadlines(np.zeros(len(jobs), dtype=np.int64))
    due = [j for j, job in enumerate(jobs) if job.deadline is not None and job.deadline == job.deadline]
    if not due:
        return nothing
    least = np.where(tables.current > 0, _smallest(rate, tables.sizes), 0)
    curves = {j: _curve(tables, j, rate[j], sure, now, int(least[j])) for j in due}
    timeline = _timeline(tables, rate, least, curves, gpus, now, reserved)
    promised = [j for j in due if jobs[j].promised]
    shares = filled(timeline, [curves[j] for j in promised])
    promises: dict[int, Promise] = {}
    for j in _asked(jobs, due, known):
        found = _promise(timeline, [curves[p] for p in promised], shares, curves[j])
        if found.given or jobs[j].promised is None:
            promises[jobs[j].job_id] = found
        if found.given:
            promised.append(j)
            shares = filled(timeline, [curves[p] for p in promised])
    needs = nothing.needs
    needs[promised] = _now(timeline, [curves[p] for p in promised], shares)
    return Deadlines(needs, promises)


def _now(timeline: FreeTimeline, curves: Sequence[SpeedCurve], shares: Sequence[Filled]) -> list[int]:
    """GPUs that each promised job cannot be without now: the fewest with which it still ends in time, at whatever level
    later. The others keep their `shares`, or what these have put off.

    The share itself would have long jobs train evenly up to their deadlines, while short ones wait for them.
    """
    found = [0] * len(curves)
    left = timeline
    for curve, share in zip(curves, shares, strict=True):
        left = left.taken(share, curve.least)
    for i in sorted(range(len(curves)), key=lambda i: curves[i].due_s):
        curve, share = curves[i], shares[i]
        mine = replace(left, free=left.free + np.maximum(share.gpus - curve.least, 0))
        best = share
        if share.met:
            for first in [curve.least, *(n for n in curve.sizes.tolist() if curve.least < n < share.gpus[0])]:
                later = mine.fill(_hurried(curve), first)
                if later.met:
                    best = later
                    break
        found[i] = int(best.gpus[0])
        left = mine.taken(best, curve.least)
    return found


def _hurried(curve: SpeedCurve) -> SpeedCurve:
    reserve = reserve_s(curve.due_s, float(curve.pause_s.max(initial=0.0)))
    return replace(curve, due_s=max(curve.due_s - reserve, 0.0))


def reserve_s(due_s: float, pause_s: float) -> float:
    """Seconds kept in reserve of those to a deadline, for a job that a change stops for `pause_s`."""
    return SPARE * due_s + ROUND_S + pause_s


def pause_s(job: JobView) -> float:
    """Seconds from a change of the job's size until it trains there."""
    return within(job.resize_s, 0.0, LONGEST) + within(job.prepare_s, 0.0, LONGEST)


def _smallest(rate: Floats, sizes: Ints) -> Ints:
    can = rate > 0
    found: Ints = np.where(can.any(axis=1), sizes[can.argmax(axis=1)], 0)
    return found


def _curve(tables: Tables, j: int, rate: Floats, sure: float, now: float, least: int) -> SpeedCurve:
    job = tables.jobs[j]
    due = within((job.deadline or 0.0) - now, 0.0, LONGEST)
    pauses = np.where(tables.sizes == tables.sizes[tables.current[j]], 0.0, pause_s(job))
    return SpeedCurve.of(tables.sizes, rate, work_of(job, sure), due, pauses, least)


def work_of(job: JobView, sure: float) -> float:
    """Progress to come, in samples of the base batch, that is not exceeded with the probability `sure`."""
    alpha, beta = within(job.progress.alpha, 0.01, LONGEST), within(job.progress.beta, 0.01, LONGEST)
    concentration = within(job.progress.concentration, 1e-3, 1e3)
    told = type(job.progress)(alpha, beta, concentration, job.progress.most)
    return max(job.dataset, 1) * within(told.to_come(sure), 0.0, LONGEST)


def _needs_more(job: JobView, sure: float, now: float) -> bool:
    if job.shape is None or job.deadline is None or not job.promised or not job.deadline > now:
        return False
    nodes, gpus = np.array([job.shape.nodes]), np.array([job.shape.gpus])
    _, goodput = predict(job, nodes, gpus, np.array([[max(job.batch, 1)]]))
    return work_of(job, sure) > (job.deadline - now) * float(goodput[0, 0])


def _timeline(
    tables: Tables,
    rate: Floats,
    least: Ints,
    curves: Mapping[int, SpeedCurve],
    gpus: int,
    now: float,
    reserved: Sequence[Reserved],
) -> FreeTimeline:
    """The GPUs to come, less what running jobs keep whatever happens: those whose promised deadline is ahead until it,
    the others until they are expected to end at their smallest size."""
    running = np.flatnonzero(least > 0)
    slowest = np.where(rate > 0, rate, np.inf).min(axis=1)
    ends = {
        j: curves[j].due_s
        if j in curves and tables.jobs[j].promised and curves[j].due_s > 0
        else work_of(tables.jobs[j], 0.5) / float(slowest[j])
        for j in running.tolist()
    }
    moments = [curve.due_s for curve in curves.values() if curve.due_s < LONGEST]
    last = max(moments, default=0.0)
    cuts = [*moments, *(at for at in (NEXT_S, *ends.values()) if at < last)]
    timeline = FreeTimeline.of(gpus, cuts, now, reserved)
    for running_job, end in ends.items():
        timeline = timeline.less(timeline.held(int(least[running_job]), end))
    return timeline


def _asked(jobs: Sequence[JobView], due: Sequence[int], known: Bools | None) -> list[int]:
    open_ = [j for j in due if not jobs[j].promised and (known is None or known[j])]
    return sorted(open_, key=lambda j: (jobs[j].promised is not None, jobs[j].submitted, jobs[j].job_id))[:ASKED]


def _promise(
    timeline: FreeTimeline, promised: Sequence[SpeedCurve], shares: Sequence[Filled], curve: SpeedCurve
) -> Promise:
    if curve.due_s <= 0:
        return Promise(False, reason("deadline_passed"))
    hurried = _hurried(curve)
    found, broken = admitted(timeline, promised, hurried, shares)
    if not found.met:
        alone = FreeTimeline.of(int(timeline.free.max(initial=0)) + curve.least, [curve.due_s], 0.0).fill(hurried)
        if not alone.met:
            return Promise(False, reason("deadline_too_soon", percent=100 * alone.share))
        return Promise(False, reason("deadline_no_room", percent=100 * found.share))
    if broken is not None:
        return Promise(False, reason("deadline_breaks"))
    return Promise(True, reason("deadline_promised", gpus=int(found.gpus.max(initial=0))))
