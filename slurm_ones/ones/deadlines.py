"""Deadlines: which ones are promised, and how many GPUs the jobs with a promise need now.

A promise is given only if this job and all jobs promised before can end in time. The `sure` quantile of each job's
remaining work is assumed, and its predicted speed less a margin. Running jobs without a promise keep their smallest
size, and reservations keep their GPUs. The method is minimum satisfactory shares (`policy.timeline`, after ElasticFlow,
ASPLOS 2023).

A job's need is the fewest GPUs with which it can run now and still keep its promise by growing later. A slower size
loses at least `UNMET` times the weight of all jobs, so the search serves promises first. GPUs beyond the need are
assigned as to any other job. PAC-ML (arXiv 2301.13799; known to us from summaries only) learns the smallest size that
meets a deadline, for one job at a time.

A refused deadline is considered again until it has passed, since other jobs may end. While a job has too few GPUs to
keep its promise, and may not be resized, no further promise is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.ones.sizes import UNKNOWN
from slurm_ones.ones.terms import Priced, Term
from slurm_ones.policy.contract import Bools, Floats, Ints, JobView, Promise, Reserved
from slurm_ones.policy.tables import Tables, predict, within
from slurm_ones.policy.timeline import Filled, FreeTimeline, SpeedCurve, admitted, filled

UNMET = 4.0
"""Penalty for giving a job fewer GPUs than its promise needs, as a multiple of the weight of all jobs."""
FORCED = 0.01
"""Fraction of a size's worth that counts for a job that must change, though the change does not repay its pause."""
CONSIDERED = 8
"""Largest number of jobs considered for a promise in one decision. Jobs that were never refused come first."""
SPARE = 0.03
"""Fraction of the time to a deadline that is kept in reserve."""
ROUND_S = 60.0
"""Further reserve, in seconds, for a late decision. One pause of the job is added to it."""
NEXT_S = 300.0
"""Seconds from now that are an interval of their own, so that work due in them is not postponed."""
LONGEST = 1e12


class Promises(Term):
    """Rule that serves promised deadlines before everything else, with the last decision's promises and needs."""

    def __init__(self, sure: float) -> None:
        """Create the rule. `sure` is the quantile of a job's remaining work that is assumed."""
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
        # No change of a young job repays its pause, so all sizes but its present one are worth 0. If it must change, it
        # should still get the best of them.
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
    """Result for one decision: which deadlines are promised, and what jobs with a promise need."""

    needs: Ints
    """(J,) GPUs that each job needs now to keep its promise; 0 for a job without a promise."""
    promises: Mapping[int, Promise] = field(default_factory=dict)
    """Deadlines that this decision promises or refuses, by job id."""

    def worth(self, rate: Floats, sizes: Ints, weight: Floats) -> Floats:
        """Return the addition to the worth (J, U) of each size: negative if it is slower than the needed size, else 0.
        `rate` (J, U) is the progress/s at each size, `weight` (J,) the weight of a second of each job's waiting."""
        needed = np.where(sizes == self.needs[:, None], rate, 0.0).max(axis=1)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            short = np.where(needed > 0, np.maximum(1.0 - rate / needed, 0.0), 0.0)
        return -UNMET * float(weight.sum()) * (short + (short > 0))


def decide_deadlines(
    tables: Tables,
    rate: Floats,
    sure: float,
    gpus: int,
    now: float,
    reserved: Sequence[Reserved] = (),
    known: Bools | None = None,
) -> Deadlines:
    """Return the promises and needs of the jobs of `tables`, which share `gpus` GPUs.

    `rate` (J, U) is the progress/s at each size, 0 at a size that the job may not have. `known` (J,) is False if a
    job's speed is only a guess; it then gets no promise.
    """
    jobs = tables.jobs
    nothing = Deadlines(np.zeros(len(jobs), dtype=np.int64))
    due = [j for j, job in enumerate(jobs) if job.deadline is not None and job.deadline == job.deadline]
    if not due:
        return nothing
    can = rate > 0
    least = np.where((tables.current > 0) & can.any(axis=1), tables.sizes[can.argmax(axis=1)], 0)
    curves = {j: _curve(tables, j, rate[j], sure, now, int(least[j])) for j in due}
    timeline = _timeline(tables, rate, least, curves, gpus, now, reserved)
    promised = [j for j in due if jobs[j].promised]
    shares = filled(timeline, [curves[j] for j in promised])
    promises: dict[int, Promise] = {}
    open_ = [j for j in due if not jobs[j].promised and (known is None or known[j])]
    open_.sort(key=lambda j: (jobs[j].promised is not None, jobs[j].submitted, jobs[j].job_id))
    for j in open_[:CONSIDERED]:
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
    """Return the fewest GPUs with which each job with a promise can run now and still end in time by growing later.
    `shares` are GPUs over time with which all these jobs end in time."""
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
    """Return the seconds before a deadline that are kept in reserve, for a job whose change takes `pause_s` seconds."""
    return SPARE * due_s + ROUND_S + pause_s


def pause_s(job: JobView) -> float:
    """Return the seconds from the start of the job's change until it trains at its new size."""
    return within(job.resize_s, 0.0, LONGEST) + within(job.prepare_s, 0.0, LONGEST)


def _curve(tables: Tables, j: int, rate: Floats, sure: float, now: float, least: int) -> SpeedCurve:
    job = tables.jobs[j]
    due = within((job.deadline or 0.0) - now, 0.0, LONGEST)
    pauses = np.where(tables.sizes == tables.sizes[tables.current[j]], 0.0, pause_s(job))
    return SpeedCurve.of(tables.sizes, rate, work_of(job, sure), due, pauses, least)


def work_of(job: JobView, sure: float) -> float:
    """Return the `sure` quantile of the job's remaining progress, in samples at the base batch."""
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
    """Return the free GPUs over time, minus the smallest size of each running job: with a promise until its deadline,
    else until its expected end at this size."""
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
