"""Bounds on the cost of growth: a job's GPU-hours until its end, compared with those at the size that it asked for.

A job may grow while its past and predicted GPU-hours are at most a factor times those at the requested size. The factor
is 1.10, or the job's own `cost=`. Growth is free for a job without an account, or if growth is not charged (UsageFactor
0). No bound takes GPUs that a job has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ones_db.reasons import reason
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.policy.contract import ClusterView, Floats, JobView, Schedule
from slurm_ones.policy.tables import Tables, build_tables
from slurm_ones.rules.blocks import hot
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.gate import JobRules

LOWER = 0.8416
"""Standard deviations from the mean of a normal distribution down to its 20 % quantile."""


def charge_of(elastic: Elastic, settings: Settings, factors: Mapping[str, float]) -> float:
    """Return the charge for a GPU-hour of growth, relative to a GPU-hour at the requested size; 0 if growth is free."""
    job, guests = elastic.job.home, settings.guests.get(elastic.partition)
    own = factors.get(job.qos, 1.0)
    if not job.account or not own:
        return 0.0
    if guests is None or not (elastic.takes_guests and hot(elastic)):
        return 1.0
    return (factors.get(guests.qos or job.qos, 1.0) if guests.charged else 0.0) / own


def factor_of(elastic: Elastic, settings: Settings) -> float:
    """Return the factor by which growth may raise the job's GPU-hours: `cost=` of its owner, or else the site's."""
    own = elastic.optin.cost if elastic.optin is not None else None
    return own if own is not None else settings.limits.growth_cost


def cost_caps(
    cluster: ClusterView,
    views: Sequence[JobView],
    jobs: Mapping[int, JobRules],
    settings: Settings,
    factors: Mapping[str, float],
) -> tuple[Cap, ...]:
    """Return a cap for each job whose largest sizes would cost too much."""
    charges = {id_: charge_of(job.elastic, settings, factors) for id_, job in jobs.items()}
    may_grow = [v for v in views if v.fixed is None and max(v.limits.gpus, default=0) > v.requested > 0]
    charged = [view for view in may_grow if charges[view.job_id]]
    if not charged:
        return ()
    most: dict[int, int] = dict.fromkeys((view.job_id for view in charged), 0)
    dearer: dict[int, dict[tuple[str, int], float]] = {view.job_id: {} for view in charged}
    parts = [("", cluster, charged)]
    if len(cluster.kinds) > 1:
        parts = [(kind, cluster.of_kind(kind), cluster.views_on(kind, charged)) for kind in cluster.kinds]
    for kind, part, there in parts:
        here = [_with_asked(view) for view in there if view.limits.gpus]
        tables = build_tables(part, here)
        for row, view in enumerate(here):
            job = jobs[view.job_id]
            factor = factor_of(job.elastic, settings)
            costs = _affordable(tables, row, job, charges[view.job_id], factor)
            paid = np.isfinite(costs)
            most[view.job_id] = max(most[view.job_id], int(tables.sizes[paid].max(initial=view.requested)))
            for place in np.flatnonzero(paid & (costs > factor) & (tables.sizes > view.requested)):
                dearer[view.job_id][kind, int(tables.sizes[place])] = float(costs[place])
    caps = []
    for view in charged:
        gpus = max(most[view.job_id], view.requested)
        if gpus < view.limits.gpus[-1] or dearer[view.job_id]:
            factor = factor_of(jobs[view.job_id].elastic, settings)
            why = reason("growth_cost", gpus=gpus, factor=factor, asked=view.requested)
            caps.append(Cap(gpus, frozenset({view.job_id}), why, dearer=dearer[view.job_id]))
    return tuple(caps)


def with_costs(schedule: Schedule, jobs: Sequence[JobView], caps: Sequence[Cap]) -> Schedule:
    """Return the schedule in which the reason of a growth says so if a sample costs more than the factor there."""
    dearer = {job_id: cap for cap in caps if cap.dearer for job_id in cap.jobs}
    found = {}
    for job in (job for job in jobs if job.job_id in dearer and job.job_id in schedule.reasons):
        cap, got = dearer[job.job_id], schedule.allocations.get(job.job_id)
        grows = got is not None and (job.shape is None or got.shape.gpus > job.shape.gpus)
        times = cap.dearer.get((got.kind, got.shape.gpus)) if got is not None and grows else None
        if times is not None:
            why, factor = str(schedule.reasons[job.job_id]), dict(cap.reason.arguments)["factor"]
            found[job.job_id] = reason("growth_dearer", why=why, times=times, factor=factor)
    return replace(schedule, reasons={**schedule.reasons, **found}) if found else schedule


def _with_asked(view: JobView) -> JobView:
    if view.requested in view.limits.gpus:
        return view
    gpus = tuple(sorted({*view.limits.gpus, view.requested}))
    return replace(view, limits=replace(view.limits, gpus=gpus))


def _affordable(tables: Tables, row: int, job: JobRules, charge: float, factor: float) -> Floats:
    """Return the GPU-hours of a sample at each size (U,), relative to the requested size; infinite beyond the bound.

    They are 0 at all allowed sizes if the goodput at the requested size is unknown.
    """
    view, history = tables.jobs[row], job.history
    sizes, goodput, allowed = tables.sizes, tables.goodput[row], tables.allowed[row]
    asked = int(np.searchsorted(sizes, view.requested))
    if asked >= len(sizes) or sizes[asked] != view.requested or not goodput[asked] > 0.0:
        return np.where(allowed, 0.0, np.inf)
    there = goodput[asked]
    if all(point.shape.gpus != view.requested for point in (history.throughput if history is not None else ())):
        # The requested size may be better than predicted. So its cost is taken at the lower 20 % bound.
        there *= 1.0 + LOWER * tables.uncertainty[row, asked]
    counted = np.minimum(sizes, view.requested) + charge * np.maximum(sizes - view.requested, 0)
    each = counted / np.where(allowed & (goodput > 0.0), goodput, np.nan)
    base = view.requested / there
    left = min(view.progress.beta, view.progress.most) * view.dataset
    if not left:
        within = each <= factor * base
    else:
        ran = [(shape.gpus, seconds) for shape, seconds in (history.ran if history is not None else ())]
        spent = sum(s * (min(n, view.requested) + charge * max(n - view.requested, 0)) for n, s in ran)
        within = spent + left * each + counted * view.resize_s <= factor * (view.samples + left) * base
    return np.where(allowed & within, each / base, np.inf)
