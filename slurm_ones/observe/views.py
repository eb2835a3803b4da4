"""From what was seen to what a policy weighs: plain data about one partition and its elastic jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from ones_db import JobHistory

from slurm_ones.decide.policy import ClusterView, JobView, Limits, NodeView
from slurm_ones.decide.shapes import valid_counts
from slurm_ones.learn.knowledge import Learner
from slurm_ones.observe.eligible import Elastic, partition_gpus
from slurm_ones.observe.observer import Seen
from slurm_ones.slurm.model import Job, Snapshot

ANY_BATCH = 2**31
"""Largest local batch of a job that has not said."""


def holdings(elastic: Elastic) -> dict[str, int]:
    """GPUs that the job holds on each of its nodes; none unless it runs."""
    return dict.fromkeys(elastic.job.node_list, elastic.shape.gpus_per_node) if elastic.job.running else {}


def _rigid_waiting(snapshot: Snapshot, partition: str, elastic: Mapping[int, Elastic]) -> bool:
    """Whether jobs that never opted in wait for this partition's nodes: growing would be at their cost."""
    return any(
        job.pending and not job.held and job.job_id not in elastic and partition in job.partition.split(",")
        for job in snapshot.jobs.values()
        if job.reason in ("Resources", "Priority", "None", "")
    )


def cluster_view(seen: Seen, partition: str, whole_node_gpus: Mapping[str, int]) -> ClusterView:
    """The nodes of a partition with the GPUs that its elastic jobs hold or may take.

    A node that is drained or down keeps what elastic jobs hold on it and offers no more; while rigid jobs wait, so
    does every node.
    """
    snapshot = seen.snapshot
    part = snapshot.partitions.get(partition)
    if part is None:
        return ClusterView(())
    full, whole = partition_gpus(part, dict(snapshot.nodes), dict(whole_node_gpus))
    held: Counter[str] = Counter()
    for elastic in seen.elastic.values():
        held.update(holdings(elastic))
    closed = not part.up or _rigid_waiting(snapshot, partition, seen.elastic)
    nodes = []
    for name in part.node_names:
        node = snapshot.nodes.get(name)
        if node is None:
            continue
        if closed or not node.usable:
            free = 0
        elif whole:
            free = full if node.idle else 0
        else:
            free = node.gpus - node.gpus_used
        if free + held[name] > 0:
            nodes.append(NodeView(name, free + held[name]))
    return ClusterView(tuple(nodes), whole)


def limits(elastic: Elastic, cluster: ClusterView, history: JobHistory | None) -> Limits:
    """What the job can take: what its owner allows, as far as its script can."""
    spec = history.spec if history is not None else None
    low, high = elastic.gpu_range
    counts = valid_counts(cluster, low, high)
    if elastic.shape.gpus and elastic.shape.gpus not in counts:
        # An odd size that its owner asked for is valid: it runs there.
        counts = tuple(sorted({*counts, elastic.shape.gpus}))
    base = spec.base_batch if spec is not None else 1
    if elastic.optin is not None and elastic.optin.batch is not None:
        least, most = elastic.optin.batch
        if spec is not None and least < most:
            most = max(least, min(most, spec.max_batch))
    else:
        least = most = base
    return Limits(counts, least, most, spec.max_local_batch if spec is not None else ANY_BATCH)


def _fixed(job: Job, elastic: Elastic, history: JobHistory | None, dwell_s: float, now: float) -> bool:
    """Whether this round may not change the job, so that the schedule is one that can be had."""
    if elastic.refusal or job.completing or job.held or not (job.running or job.pending):
        return True
    if job.running:
        last = max(job.start_time, (history.last_resize_end if history is not None else None) or 0.0)
        return now < last + dwell_s or history is None or history.spec is None
    return False


def job_views(
    seen: Seen,
    partition: str,
    cluster: ClusterView,
    histories: Mapping[int, JobHistory],
    learner: Learner,
    open_jobs: Set[int],
    dwell_s: float,
    now: float,
) -> list[JobView]:
    """The elastic jobs of a partition as its policy sees them."""
    views = []
    for job_id, elastic in sorted(seen.elastic.items()):
        job = elastic.job
        if job.partition.split(",")[0] != partition or elastic.optin is None:
            continue
        history = histories.get(job_id)
        bounds = limits(elastic, cluster, history)
        known = learner.about(history)
        base = history.spec.base_batch if history is not None and history.spec is not None else bounds.min_batch
        requested = history.job if history is not None else None
        views.append(
            JobView(
                job_id=job_id,
                submitted=requested.submit_time if requested else job.submit_time,
                requested=(
                    requested.requested_nodes * requested.requested_gpus_per_node if requested else elastic.shape.gpus
                ),
                shape=elastic.shape if job.running else None,
                nodes=holdings(elastic),
                batch=(history.batch if history is not None else None) or base,
                base_batch=base,
                limits=bounds,
                model=known.throughput,
                efficiency=known.efficiency,
                progress=known.progress,
                samples=history.samples if history is not None else 0.0,
                dataset=history.spec.dataset if history is not None and history.spec is not None else 0,
                epochs=len(history.epochs) if history is not None else 0,
                epochs_since_change=history.epochs_since_change if history is not None else 0,
                running_s=history.running_s(now) if history is not None else 0.0,
                resizes=history.resizes if history is not None else 0,
                fixed=job_id in open_jobs or _fixed(job, elastic, history, dwell_s, now),
            )
        )
    return views
