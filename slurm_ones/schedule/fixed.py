"""Which jobs no policy may touch in a round, and why."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_ones.reasons import Reason, reason
from slurm_ones.schedule.policy import ClusterView, JobView


def pinned(cluster: ClusterView, jobs: Sequence[JobView]) -> dict[int, Reason]:
    """Why each such job keeps its place or its wait, by job id: those that are `fixed`, and running jobs whose GPUs do
    not add up on the cluster's nodes (drained nodes, a snapshot taken in mid-change)."""
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
