"""GPUs given out in an order of precedence, each job at the shape it asked for, those that come too late interrupted.

What SRTF, SRSF and Tiresias share; they differ in the order alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.policy.build import fits_nowhere, free_after_fixed
from slurm_ones.policy.contract import Allocation, ClusterView, Ints, JobView, Schedule
from slurm_ones.policy.ledger import pick_nodes
from slurm_ones.policy.placement import fixed_jobs
from slurm_ones.policy.tables import asked


def allocate_in_order(cluster: ClusterView, jobs: Sequence[JobView], order: Sequence[JobView], first: str) -> Schedule:
    """The schedule that gives GPUs in `order` (of all `jobs`, fixed ones are skipped) until none are left.

    A job that does not fit is passed over and later ones may start. A running job keeps its shape, batch and nodes
    while its turn comes in time, else it is parked. Where only whole shapes can be placed, a job whose turn comes
    earlier may take the node of one whose turn comes later; no running job is moved for any other reason. `first` says
    which jobs go first. Allocations are in the order given.
    """
    fixed = fixed_jobs(cluster, jobs)
    wanted: dict[int, Allocation] = {}
    for job in order:
        got = asked(cluster, job) if job.shape is None else Allocation(job.shape, job.batch)
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
            allocations[job.job_id] = wanted[job.job_id]
        else:
            parked.add(job.job_id)
        reasons[job.job_id] = _reason(job, wanted.get(job.job_id), job.job_id in chosen, first)
    return Schedule(allocations, reasons, parked=frozenset(parked))


def _by_count(
    queue: Sequence[JobView], wanted: Mapping[int, Allocation], gpus: int
) -> tuple[list[JobView], list[JobView]]:
    """Those for whom there are GPUs when their turn comes, wherever these are, and the others."""
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
    """Those who find GPUs among the `free` (N,), their own where they run. One that starts avoids, as far as it can,
    the GPUs of running jobs that are `in_time` too."""
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


def _reason(job: JobView, got: Allocation | None, runs: bool, first: str) -> Reason:
    if got is None:
        return fits_nowhere(job)
    if runs:
        return reason("turn", first=first)
    return reason("no_room", gpus=got.shape.gpus) if job.shape is None else reason("interrupted", first=first)
