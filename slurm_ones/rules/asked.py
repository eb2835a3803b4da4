"""Sizes that owners ask for by hand: `size=8` in a job's comment.

Such a job is taken out of the policy's hands. It gets its size as soon as GPUs that nobody has make room for it, within
the limits of the site, and keeps it. Where GPUs are of several kinds, a running job stays on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, JobView
from slurm_ones.policy.kinds import accepts, kinds_held
from slurm_ones.policy.ledger import Ledger
from slurm_ones.policy.shapes import least_and_most, shape_of
from slurm_ones.rules.caps import Cap, entitled, hindering, sizes_of
from slurm_ones.text import counts


def with_sizes(
    cluster: ClusterView, jobs: Sequence[JobView], sizes: Mapping[int, int], caps: Sequence[Cap]
) -> Sequence[JobView]:
    """The jobs as a policy is shown them, `sizes` being the GPUs that owners ask for.

    A running one is fixed: at its size, on the nodes that it would get, or at what it has where there is no room or a
    cap. One that waits may start at its size alone. Of several, the one submitted first comes first.
    """
    found = {job.job_id: job for job in jobs}
    asking = sorted((found[id_] for id_ in sizes.keys() & found.keys()), key=lambda job: (job.submitted, job.job_id))
    for job in asking:
        found[job.job_id] = _with_size(cluster, job, sizes[job.job_id], found, caps)
    return [found[job.job_id] for job in jobs]


def _with_size(
    cluster: ClusterView, job: JobView, gpus: int, jobs: Mapping[int, JobView], caps: Sequence[Cap]
) -> JobView:
    if job.fixed:
        return job
    for kind in kinds_held(cluster, job) or [kind for kind in cluster.kinds if accepts(job, kind)]:
        part = cluster.of_kind(kind)
        shape, sizes = shape_of(part, gpus), sizes_of(cluster, job, kind)
        if shape is not None and gpus in sizes:
            break
    else:
        return replace(job, fixed=_not_possible(job, gpus))
    if job.shape is None:
        return replace(job, limits=replace(job.limits, gpus=(gpus,)))
    if job.shape.gpus == gpus:
        return replace(job, fixed=reason("size_kept", gpus=gpus))
    if gpus > entitled(job):
        cap = hindering(caps, job.job_id, gpus, lambda other: _has(jobs, other))
        if cap is not None:
            return replace(job, fixed=cap.reason)
    others = [other for other in jobs.values() if other.job_id != job.job_id]
    nodes = (job.smaller or {}).get(gpus) or _room(part, others, shape)
    if not nodes:
        return replace(job, fixed=reason("size_waits", gpus=gpus))
    least, most = least_and_most(job.limits, gpus)
    quantum = 1 if job.limits.batch_fixed else math.lcm(job.limits.quantum, job.limits.at(gpus).quantum)
    stays = least <= job.batch <= most and job.batch % quantum == 0
    batch = job.batch if stays else sizes[gpus]
    return replace(job, shape=shape, nodes=nodes, batch=batch, fixed=reason("size_asked", gpus=gpus))


def _not_possible(job: JobView, gpus: int) -> Reason:
    limits = job.limits
    if limits.rules and not limits.at(gpus).most:
        return reason("strategy_size", strategy=limits.strategy, counts=counts(limits.rules), gpus=gpus)
    return reason("size_not_possible", gpus=gpus)


def _has(jobs: Mapping[int, JobView], job_id: int) -> int:
    job = jobs.get(job_id)
    return job.shape.gpus if job is not None and job.shape is not None else 0


def _room(cluster: ClusterView, others: Sequence[JobView], shape: Shape) -> dict[str, int]:
    """The nodes that the shape would get beside the others, with its GPUs on each; empty where there is no room."""
    return dict.fromkeys(Ledger.of_cluster(cluster, others).nodes_for(shape) or (), shape.gpus_per_node)
