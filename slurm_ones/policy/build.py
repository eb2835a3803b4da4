"""Building of a schedule from the sizes that a policy wants: which jobs stay, which shapes fit, and why.

A policy that weighs sizes gives the number of GPUs of each job to `build_schedule`. A policy that only ranks the jobs
calls `allocate_in_order`, which gives each job the shape that its user asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.policy.contract import Allocation, ClusterView, Ints, JobView, Schedule
from slurm_ones.policy.ledger import Ledger, free_by_node, pick_nodes
from slurm_ones.policy.shapes import shape_of, takes
from slurm_ones.policy.tables import Tables, requested_allocation


def fixed_jobs(cluster: ClusterView, jobs: Sequence[JobView]) -> dict[int, Reason]:
    """Return, by job id, the reason of each job that may not change in this round. Besides `fixed` jobs, these are jobs
    whose GPUs contradict the cluster's nodes, for example because a node was drained."""
    held: dict[str, int] = {}
    for job in jobs:
        for name, gpus in job.nodes.items():
            held[name] = held.get(name, 0) + gpus
    sound = {node.name for node in cluster.nodes if held.get(node.name, 0) <= node.gpus}
    found = {
        job.job_id: reason("nodes_do_not_add_up")
        for job in jobs
        if (job.shape.gpus if job.shape else 0) != sum(job.nodes.values()) or not sound.issuperset(job.nodes)
    }
    return found | {job.job_id: job.fixed for job in jobs if job.fixed}


def mobile_jobs(jobs: Sequence[JobView], fixed: Collection[int]) -> list[JobView]:
    """Return the jobs not named in `fixed`, in order of submission."""
    return sorted((job for job in jobs if job.job_id not in fixed), key=lambda job: (job.submitted, job.job_id))


def free_after_fixed(cluster: ClusterView, jobs: Sequence[JobView], fixed: Collection[int]) -> Ints:
    """Return the GPUs (N,) that the running jobs among `fixed` leave free on each node."""
    return free_by_node(cluster, [job for job in jobs if job.job_id in fixed])


def place(cluster: ClusterView, jobs: Sequence[JobView], wanted: Mapping[int, int]) -> dict[int, Shape]:
    """Return the shape of each job that gets GPUs, by job id. `wanted` is the number of GPUs that the policy wants for
    each job; `jobs` are in order of precedence.

    Fixed jobs, jobs of unchanged size, and jobs that can be resized in place keep their nodes. All other jobs are
    placed in order. A job whose wanted size does not fit gets its largest smaller size that fits, or none.
    """
    by_id = {job.job_id: job for job in jobs}
    found: dict[int, Shape] = {}
    staying, growing = [], []
    for job in jobs:
        want = wanted.get(job.job_id, 0)
        if job.shape is not None and (job.fixed or want == job.shape.gpus):
            staying.append(job)
            found[job.job_id] = job.shape
        elif cluster.uniform and (kept := stays_on(job, want)) is not None and (shape := shape_of(cluster, want)):
            staying.append(replace(job, nodes=kept))
            found[job.job_id] = shape
            growing += [job] if want > sum(kept.values()) else []
    ledger = Ledger.of_cluster(cluster, staying)
    moving = [job for job in jobs if job.job_id not in found and not job.fixed and wanted.get(job.job_id, 0) > 0]
    admitted: list[tuple[int, int]] = []
    budget = ledger.gpus
    for job in moving:
        gpus = wanted[job.job_id]
        if gpus <= budget:
            admitted.append((job.job_id, gpus))
            budget -= gpus
    # Large shapes come first; small ones fit into what is left.
    for job_id, gpus in sorted(admitted, key=lambda pair: -pair[1]):
        limits, own = by_id[job_id].limits, by_id[job_id].shape
        before = own.gpus if own is not None else 0  # these GPUs were not kept, and at this size it would not move
        smaller = (n for n in sorted(limits.gpus, reverse=True) if n < gpus and n != before and takes(limits, n))
        for count in (gpus, *smaller):
            shape = shape_of(cluster, count)
            if shape is not None and ledger.take(shape):
                found[job_id] = shape
                break
    for job in growing:
        has, gpus = job.shape.gpus if job.shape is not None else 0, wanted[job.job_id]
        counts = [gpus, *(n for n in reversed(job.limits.gpus) if has < n < gpus and takes(job.limits, n))]
        fits = (shape for n in counts if (shape := shape_of(cluster, n)) and ledger.take_any(n - has))
        if (shape := next(fits, job.shape)) is not None:
            found[job.job_id] = shape
    return found


def stays_on(job: JobView, gpus: int) -> Mapping[str, int] | None:
    """Return the GPUs on each node that a running job keeps when its size becomes `gpus`; None if it must be placed
    again. GPUs that it gains may be anywhere."""
    if job.shape is None or not gpus:
        return None
    if gpus > job.shape.gpus:
        return job.nodes if job.joins else None
    return (job.smaller or {}).get(gpus)


def build_schedule(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Mapping[int, Reason],
    tables: Tables,
    wanted: Mapping[int, int],
    why: Reason,
    score: float = float("nan"),
) -> Schedule:
    """Return the schedule that gives each job the GPUs `wanted`. `wanted` is by job id, in order of precedence.

    `jobs` are all jobs of the round, `fixed` the jobs that may not change (see `fixed_jobs`). `tables` have at least a
    row for every other job. A job whose size does not fit gets a smaller size from its limits in `tables`; a job that
    cannot grow keeps its size. `why` is the reason that the schedule gives for each size.
    """
    limited = {job.job_id: job for job in tables.jobs}
    rank = {job_id: i for i, job_id in enumerate(wanted)}
    ordered = sorted(jobs, key=lambda job: rank.get(job.job_id, len(rank)))
    views = [limited.get(job.job_id, job) for job in ordered]
    counts = dict(wanted)
    counts |= {job.job_id: job.shape.gpus for job in jobs if job.job_id in fixed and job.shape is not None}
    while True:
        shapes = place(cluster, views, counts)
        cannot_grow = [job for job in views if _cannot_grow(job, counts, shapes)]
        if not cannot_grow:
            break
        counts |= {job.job_id: job.shape.gpus for job in cannot_grow if job.shape is not None}
    row = {job.job_id: j for j, job in enumerate(tables.jobs)}
    column = {int(gpus): u for u, gpus in enumerate(tables.sizes)}
    free = int(free_after_fixed(cluster, jobs, fixed).sum())
    allocations, reasons, parked = {}, dict(fixed), set()
    for job in jobs:
        if job.job_id in fixed:
            if job.shape is not None:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
            continue
        shape, j = shapes.get(job.job_id), row[job.job_id]
        if shape is None:
            parked.add(job.job_id)
        else:
            allocations[job.job_id] = Allocation(shape, int(tables.batch[j, column[shape.gpus]]))
        got, most, possible = shape.gpus if shape else 0, wanted.get(job.job_id, 0), tables.sizes[tables.allowed[j]]
        if not len(possible):
            reasons[job.job_id] = fits_nowhere(job)
        elif got != most or (not got and possible[0] > free):
            reasons[job.job_id] = reason("no_room", gpus=most or int(possible[0]))
        else:
            reasons[job.job_id] = why
    return Schedule(allocations, reasons, score, frozenset(parked))


def _cannot_grow(job: JobView, counts: Mapping[int, int], shapes: Mapping[int, Shape]) -> bool:
    if job.shape is None or counts.get(job.job_id, 0) <= job.shape.gpus:
        return False
    got = shapes.get(job.job_id)
    return got is None or got.gpus <= job.shape.gpus


def fits_nowhere(job: JobView) -> Reason:
    """Return the reason for a pending job that is too large even for an empty cluster."""
    return reason("fits_nowhere", counts=", ".join(map(str, job.limits.gpus)) or "none")


def build_by_kind(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    fixed: Mapping[int, Reason],
    parts: Sequence[Tables],
    wanted: Mapping[int, tuple[str, int]],
    why: Reason,
    score: float = float("nan"),
) -> Schedule:
    """Build a schedule on each kind of GPU by `build_schedule`, and join them. `parts` are the tables of each kind, in
    the order of the cluster's kinds.

    `wanted` gives each job's kind and number of GPUs, in order of precedence; a job that is missing waits. A `fixed`
    job keeps its GPUs, even if they are of several kinds or outside this cluster.
    """
    held = {job.job_id: cluster.kinds_held(job) for job in jobs}
    stays = [job for job in jobs if job.job_id in fixed and job.shape is not None and len(held[job.job_id]) != 1]
    kind_of = {job.job_id: wanted.get(job.job_id, ((*held[job.job_id], *cluster.kinds, "")[0], 0))[0] for job in jobs}
    kind_of |= {job.job_id: held[job.job_id][0] for job in jobs if job.job_id in fixed and held[job.job_id]}
    allocations: dict[int, Allocation] = {}
    reasons = {job.job_id: fixed[job.job_id] for job in stays}
    parked: frozenset[int] = frozenset()
    for kind, tables in zip(cluster.kinds or ("",), parts, strict=True):
        part = cluster.of_kind(kind).without(stays)
        mine = cluster.views_on(kind, [job for job in jobs if kind_of[job.job_id] == kind and job not in stays])
        here = {job.job_id: fixed[job.job_id] for job in mine if job.job_id in fixed}
        counts = {id_: gpus for id_, (on, gpus) in wanted.items() if kind_of[id_] == on == kind and id_ not in here}
        found = build_schedule(part, mine, here, tables, counts, why)
        allocations |= {id_: replace(got, kind=kind) for id_, got in found.allocations.items()}
        reasons |= found.reasons
        parked |= found.parked
    allocations |= {job.job_id: Allocation(job.shape, job.batch) for job in stays if job.shape is not None}
    return Schedule(allocations, reasons, score, parked)


def allocate_in_order(cluster: ClusterView, jobs: Sequence[JobView], order: Sequence[JobView], first: str) -> Schedule:
    """Return the schedule that gives GPUs to the jobs in this `order` until none are left; fixed jobs stay as
    they are.

    If a job does not fit, later jobs may still start. A running job keeps its shape, batch and nodes if enough GPUs are
    left at its turn; otherwise it is parked (`Schedule.parked`). If `cluster.uniform`, it is also parked if an earlier
    job needs its nodes. `first` names the jobs at the front in reasons, such as "jobs submitted earlier".
    """
    fixed = fixed_jobs(cluster, jobs)
    wanted: dict[int, Allocation] = {}
    for job in order:
        got = requested_allocation(cluster, job) if job.shape is None else Allocation(job.shape, job.batch)
        if job.job_id not in fixed and got is not None:
            wanted[job.job_id] = got
    queue = [job for job in order if job.job_id in wanted]
    free = free_after_fixed(cluster, jobs, fixed)
    in_time, late = _by_count(queue, wanted, int(free.sum()))
    if cluster.uniform:
        chosen = _placed(cluster, free, in_time, late, wanted)
    else:
        chosen = {job.job_id for job in in_time}
    allocations = {j.job_id: Allocation(j.shape, j.batch) for j in jobs if j.job_id in fixed and j.shape is not None}
    parked, reasons = set(), dict(fixed)
    for job in order:
        if job.job_id in fixed:
            continue
        if job.job_id in chosen:
            allocations[job.job_id], reasons[job.job_id] = wanted[job.job_id], reason("turn", first=first)
            continue
        parked.add(job.job_id)
        if (got := wanted.get(job.job_id)) is None:
            reasons[job.job_id] = fits_nowhere(job)
        elif job.shape is None:
            reasons[job.job_id] = reason("no_room", gpus=got.shape.gpus)
        else:
            reasons[job.job_id] = reason("interrupted", first=first)
    return Schedule(allocations, reasons, parked=frozenset(parked))


def _by_count(
    queue: Sequence[JobView], wanted: Mapping[int, Allocation], gpus: int
) -> tuple[list[JobView], list[JobView]]:
    """Return two lists: jobs with enough GPUs left at their turn, counted over all nodes, and all other jobs."""
    in_time: list[JobView] = []
    late: list[JobView] = []
    for job in queue:
        fits = wanted[job.job_id].shape.gpus <= gpus
        gpus -= wanted[job.job_id].shape.gpus if fits else 0
        (in_time if fits else late).append(job)
    return in_time, late


def _placed(
    cluster: ClusterView,
    free: Ints,
    in_time: Sequence[JobView],
    late: Sequence[JobView],
    wanted: Mapping[int, Allocation],
) -> set[int]:
    """Return the ids of the jobs that fit the `free` (N,) GPUs; running jobs stay on their own nodes. A starting job
    avoids, if it can, the GPUs of running jobs in `in_time`."""
    at = {node.name: i for i, node in enumerate(cluster.nodes)}
    own = {
        job.job_id: (np.array([at[name] for name in job.nodes], dtype=np.int64), np.array(list(job.nodes.values())))
        for job in [*in_time, *late]
        if job.shape is not None
    }
    free, claimed, chosen = free.copy(), np.zeros_like(free), set()
    for job in in_time:
        if job.job_id in own:
            nodes, gpus = own[job.job_id]
            claimed[nodes] += gpus
    for job in [*in_time, *late]:
        if job.job_id in own:
            nodes, gpus = own[job.job_id]
            claimed[nodes] = np.maximum(claimed[nodes] - gpus, 0)
        else:
            shape = wanted[job.job_id].shape
            nodes = pick_nodes(free, claimed, shape)
            gpus = np.full(len(nodes), shape.gpus_per_node)
        if len(nodes) and (free[nodes] >= gpus).all():
            free[nodes] -= gpus
            chosen.add(job.job_id)
    return chosen
