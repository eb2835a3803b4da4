"""GPUs of several kinds: which a job has, what it is on each of them, and tables whose columns are (kind, GPUs).

A job has GPUs of one kind at a time. One that Slurm started on several, as it may where no kind was asked for, trains
at the pace of the slowest; it counts as one with all its GPUs of that kind until it is moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ones_db.reasons import Reason
from slurm_ones.policy.build import build_schedule
from slurm_ones.policy.contract import Allocation, ClusterView, Floats, Ints, JobView, Schedule
from slurm_ones.policy.ledger import free_by_node
from slurm_ones.policy.tables import BatchRule, Tables, build_tables


def kinds_held(cluster: ClusterView, job: JobView) -> tuple[str, ...]:
    """Kinds of the GPUs that the job has, in the cluster's order; none where it waits."""
    mine = {node.kind for node in cluster.nodes if job.nodes.get(node.name)}
    return tuple(kind for kind in cluster.kinds if kind in mine)


def accepts(job: JobView, kind: str) -> bool:
    """Whether the job may use GPUs of that kind."""
    return not job.on or kind in job.on


def view_on(job: JobView, kind: str, *, runs: bool) -> JobView:
    """The job as it is on one kind of GPU: with its model there, waiting unless it `runs` there, and without sizes on a
    kind that it does not accept."""
    limits = job.limits if accepts(job, kind) else replace(job.limits, gpus=())
    found = replace(job, model=job.on.get(kind, job.model), on={}, limits=limits)
    return found if runs else replace(found, shape=None, nodes={}, smaller=None, joins=False, nodes_at=None)


def part_of(cluster: ClusterView, kind: str, holders: Sequence[JobView]) -> ClusterView:
    """The nodes of that kind, less what the `holders` have there."""
    taken: Counter[str] = Counter()
    for job in holders:
        taken.update(job.nodes)
    part = cluster.of_kind(kind)
    nodes = tuple(replace(node, gpus=max(node.gpus - taken[node.name], 0)) for node in part.nodes)
    return replace(part, nodes=nodes, node_gpus=part.gpus_per_node)


def slowest(job: JobView, kinds: Sequence[str]) -> str:
    """Of the kinds that the job has GPUs of the one which sets its pace."""
    if len(kinds) < 2 or not job.on or job.shape is None:
        return kinds[0]
    at = np.array([job.shape.nodes]), np.array([job.shape.gpus]), np.array([job.batch])
    known = [kind for kind in kinds if kind in job.on] or list(kinds)
    return min(known, key=lambda kind: float(job.on.get(kind, job.model).throughput(*at)[0]))


def free_of_kind(cluster: ClusterView, holders: Sequence[JobView]) -> Ints:
    """(K,) GPUs of each kind that the `holders` leave."""
    free = free_by_node(cluster, holders)
    kind = np.array([cluster.kinds.index(node.kind) for node in cluster.nodes], dtype=np.int64)
    found: Ints = np.bincount(kind, weights=free, minlength=len(cluster.kinds)).astype(np.int64)
    return found


@dataclass(frozen=True)
class KindTables:
    """Tables of the same jobs on each kind of GPU, side by side. Column 0 is waiting."""

    tables: Tables
    """`sizes` are GPUs, whatever their kind: ascending within a kind."""
    kind: Ints
    """(U,) place of each column's kind; -1 for column 0."""
    offset: tuple[int, ...]
    """Of each kind what is added to a column of its own table, but for 0, to get its column here."""


def side_by_side(jobs: Sequence[JobView], parts: Sequence[Tables]) -> KindTables:
    """One table out of one for each kind; each has a row for all `jobs`, and a job runs in one of them at most."""
    offset = tuple(np.cumsum([0, *(len(part.sizes) - 1 for part in parts[:-1])]).tolist())
    current = np.zeros(len(jobs), dtype=np.int64)
    for part, before in zip(parts, offset, strict=True):
        current = np.where(part.current > 0, part.current + before, current)
    kind = np.concatenate([[-1], *(np.full(len(part.sizes) - 1, k) for k, part in enumerate(parts))])

    def joined(name: str) -> Ints:
        found = [getattr(part, name) for part in parts]
        along = found[0].ndim - 1
        first = found[0][..., :1]
        return np.concatenate([first, *(one[..., 1:] for one in found)], axis=along)

    columns = {name: joined(name) for name in ("sizes", "nodes", "allowed", "batch", "speed", "goodput", "uncertainty")}
    return KindTables(Tables(jobs=tuple(jobs), current=current, **columns), kind.astype(np.int64), offset)  # type: ignore[arg-type]


def relative_speeds(tables: KindTables, count: int) -> Floats:
    """(K,) how much more a GPU of each kind brings than one of the first, in the middle of the jobs; 1 where no job
    tells."""
    at = tables.tables
    each = np.where(at.allowed, at.goodput / np.maximum(at.sizes, 1), 0.0)
    best = np.stack([each[:, tables.kind == k].max(axis=1, initial=0.0) for k in range(count)])
    found = np.ones(count)
    for k in range(1, count):
        both = (best[0] > 0) & (best[k] > 0)
        found[k] = float(np.median(best[k, both] / best[0, both])) if both.any() else 1.0
    return found


Wanted = Mapping[int, tuple[str, int]]
"""Kind and number of GPUs, by job id."""


def views_on(cluster: ClusterView, jobs: Sequence[JobView], kind: str) -> list[JobView]:
    """Each job as it is on that kind of GPU."""
    return [view_on(job, kind, runs=kinds_held(cluster, job) == (kind,)) for job in jobs]


def build_by_kind(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Mapping[int, Reason],
    wanted: Wanted,
    rule: BatchRule,
    why: Reason,
    score: float = float("nan"),
) -> Schedule:
    """As `build_schedule`, within each kind by itself. `wanted` in order of precedence; jobs left out wait. Jobs whose
    GPUs are of several kinds, or of none here, keep them where they are `fixed`."""
    held = {job.job_id: kinds_held(cluster, job) for job in jobs}
    stays = [job for job in jobs if job.job_id in fixed and job.shape is not None and len(held[job.job_id]) != 1]
    kind_of = {job.job_id: wanted.get(job.job_id, ((*held[job.job_id], *cluster.kinds, "")[0], 0))[0] for job in jobs}
    kind_of |= {job.job_id: held[job.job_id][0] for job in jobs if job.job_id in fixed and held[job.job_id]}
    allocations: dict[int, Allocation] = {}
    reasons = {job.job_id: fixed[job.job_id] for job in stays}
    parked: frozenset[int] = frozenset()
    for kind in cluster.kinds or ("",):
        part = part_of(cluster, kind, stays)
        mine = views_on(cluster, [job for job in jobs if kind_of[job.job_id] == kind and job not in stays], kind)
        here = {job.job_id: fixed[job.job_id] for job in mine if job.job_id in fixed}
        tables = build_tables(part, [job for job in mine if job.job_id not in here], rule)
        counts = {id_: gpus for id_, (on, gpus) in wanted.items() if kind_of[id_] == on == kind and id_ not in here}
        found = build_schedule(part, mine, here, tables, counts, why)
        allocations |= {id_: replace(got, kind=kind) for id_, got in found.allocations.items()}
        reasons |= found.reasons
        parked |= found.parked
    allocations |= {job.job_id: Allocation(job.shape, job.batch) for job in stays if job.shape is not None}
    return Schedule(allocations, reasons, score, parked)
