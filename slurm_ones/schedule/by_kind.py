"""The schedule of policies that say of each job which kind of GPU it gets, and how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ones_db.reasons import Reason
from slurm_ones.schedule.build import build_schedule
from slurm_ones.schedule.kinds import accepts, kinds_held, view_on
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, Schedule
from slurm_ones.schedule.tables import BatchRule, build_tables

Wanted = Mapping[int, tuple[str, int]]
"""Kind and number of GPUs, by job id."""


def views_on(cluster: ClusterView, jobs: Sequence[JobView], kind: str) -> list[JobView]:
    """Each job as it is on that kind of GPU; where it does not accept it, with the size alone that it has there."""
    found = []
    for job in jobs:
        view = view_on(job, kind, runs=kinds_held(cluster, job) == (kind,))
        found.append(view if accepts(job, kind) else replace(view, limits=replace(view.limits, gpus=())))
    return found


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
    taken: dict[str, int] = {}
    for job in stays:
        taken |= {name: taken.get(name, 0) + gpus for name, gpus in job.nodes.items()}
    kind_of = {job.job_id: wanted.get(job.job_id, ((*held[job.job_id], *cluster.kinds, "")[0], 0))[0] for job in jobs}
    kind_of |= {job.job_id: held[job.job_id][0] for job in jobs if job.job_id in fixed and held[job.job_id]}
    allocations: dict[int, Allocation] = {}
    reasons = {job.job_id: fixed[job.job_id] for job in stays}
    parked: frozenset[int] = frozenset()
    for kind in cluster.kinds or ("",):
        part = cluster.of_kind(kind)
        nodes = tuple(replace(node, gpus=max(node.gpus - taken.get(node.name, 0), 0)) for node in part.nodes)
        part = replace(part, nodes=nodes, node_gpus=part.gpus_per_node)
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
