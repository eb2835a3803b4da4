"""From what was seen to what a policy weighs: plain data about one partition and its elastic jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from ones_db import JobHistory, ResizeRecord
from ones_wrapper.protocol import Spec
from slurm_ones.config import LimitSettings, Settings
from slurm_ones.learn.knowledge import Known, Learner
from slurm_ones.observe.eligibility import Elastic, Observation
from slurm_ones.rules.bounds import Bounds
from slurm_ones.rules.dwell import near_end, near_limit, resized_enough, rested_at
from slurm_ones.rules.reserved import holdings, set_aside
from slurm_ones.rules.rigid import Waiting
from slurm_ones.rules.rigid_jobs import rigid_jobs, waiting
from slurm_ones.rules.site_caps import caps_of
from slurm_ones.schedule.policy import ClusterView, JobView, Limits, NodeView
from slurm_ones.schedule.shapes import valid_counts
from slurm_ones.slurm.gpus import free_gpus, partition_gpus
from slurm_ones.slurm.model import Job

ANY_BATCH = 2**31
"""Largest batch of a GPU, of a job that has not said; and none that says more is believed."""


def cluster_view(
    seen: Observation, partition: str, whole_node_gpus: Mapping[str, int], resizes: Iterable[ResizeRecord] = ()
) -> ClusterView:
    """The nodes of a partition with the GPUs that its elastic jobs hold or may take.

    A node that is drained or down keeps what elastic jobs hold on it and offers no more; while rigid jobs wait, so
    does every node. What resizes under way are about to need is offered to nobody.
    """
    snapshot = seen.snapshot
    part = snapshot.partitions.get(partition)
    if part is None:
        return ClusterView(())
    full, whole = partition_gpus(part, snapshot, whole_node_gpus)
    held: Counter[str] = Counter()
    for elastic in seen.elastic.values():
        if elastic.weighed:
            held.update(holdings(elastic))
    free = free_gpus(snapshot, partition, whole_node_gpus)
    set_aside(resizes, seen.elastic, free)
    if rigid_jobs(snapshot, partition, seen.elastic):
        free = dict.fromkeys(free, 0)
    nodes = tuple(NodeView(name, gpus + held[name]) for name, gpus in free.items())
    return ClusterView(nodes, whole, full)


def bounds(seen: Observation, partition: str, settings: Settings, resizes: Sequence[ResizeRecord] = ()) -> Bounds:
    """What a policy must decide within in this partition: the needs of rigid jobs, and the site's caps."""
    yields = settings.limits.yield_to_rigid and settings.resize.shrink
    return Bounds(
        waiting(seen, partition, settings.whole_node_gpus, resizes) if yields else Waiting(),
        caps_of(seen, partition, settings.limits, settings.whole_node_gpus, resizes),
    )


def limits(elastic: Elastic, cluster: ClusterView, spec: Spec | None) -> Limits:
    """What the job can take: what its owner allows, as far as its script can."""
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
    return Limits(counts, least, most, _most_per_gpu(spec))


def _most_per_gpu(spec: Spec | None) -> int:
    """Most samples per GPU and step, which accumulates gradients over as many passes as its wrapper is allowed."""
    if spec is None:
        return ANY_BATCH
    return max(1, min(spec.max_local_batch * spec.max_passes, ANY_BATCH))


def _fixed(job: Job, elastic: Elastic, history: JobHistory | None, dwell_s: float, now: float) -> str:
    """Why this round may not change the job, so that the schedule is one that can be had; empty where it may."""
    if elastic.refusal:
        return elastic.refusal
    if job.held:
        return "it is held"
    if job.completing or not (job.running or job.pending):
        return f"it is {'completing' if job.completing else job.state.value.lower()}"
    if now < rested_at(job, history, dwell_s):
        return f"its dwell time is not over for {rested_at(job, history, dwell_s) - now:.0f} s"
    if job.running and (history is None or history.spec is None):
        return "it has not reported what it can do; was it started by ones-run?"
    return ""


def job_views(
    seen: Observation,
    partition: str,
    cluster: ClusterView,
    histories: Mapping[int, JobHistory],
    learner: Learner,
    open_jobs: Set[int],
    dwell_s: float,
    now: float,
    site: LimitSettings = LimitSettings(),
) -> list[JobView]:
    """The elastic jobs of a partition as its policy sees them."""
    mine = [
        elastic
        for _, elastic in sorted(seen.elastic.items())
        if elastic.weighed and elastic.job.partition.split(",")[0] == partition
    ]
    learner.look([history for e in mine if (history := histories.get(e.job.job_id)) is not None])
    views = []
    for elastic in mine:
        history = histories.get(elastic.job.job_id)
        fixed = _fixed(elastic.job, elastic, history, dwell_s, now)
        if elastic.job.job_id in open_jobs:
            fixed = "a resize is under way"
        known = learner.about(history, now)
        view = _view(elastic, limits(elastic, cluster, known.spec), history, known, fixed, now)
        if not fixed and (limit := _limit(elastic.job, history, view, site, now)):
            view = replace(view, fixed=limit, limited=True)
        views.append(view)
    return views


def _limit(job: Job, history: JobHistory | None, view: JobView, site: LimitSettings, now: float) -> str:
    """Which limit of the site keeps the job as it is, in words; empty where none does."""
    return near_limit(job, site, now) or resized_enough(job, history, site, now) or near_end(view, site)


def _view(
    elastic: Elastic, bounds: Limits, history: JobHistory | None, known: Known, fixed: str, now: float
) -> JobView:
    job, spec = elastic.job, known.spec
    base = spec.base_batch if spec is not None else bounds.min_batch
    view = JobView(
        job_id=job.job_id,
        submitted=job.submit_time,
        requested=elastic.shape.gpus,
        requested_batch=base,
        shape=elastic.shape if job.running else None,
        nodes=holdings(elastic),
        batch=base,
        base_batch=base,
        limits=bounds,
        model=known.throughput,
        efficiency=known.efficiency,
        progress=known.progress,
        samples=known.samples,
        # Of an epoch whose length nobody knows, as much as was seen of it.
        dataset=known.dataset or (int(history.samples) if history is not None else 0),
        epochs=0,
        epochs_since_change=0,
        running_s=0.0,
        resize_s=known.resize_s,
        losses=known.losses,
        fixed=fixed,
    )
    if history is None:
        return view
    return replace(
        view,
        submitted=history.job.submit_time,
        requested=history.job.requested_nodes * history.job.requested_gpus_per_node,
        requested_batch=history.first_batch or base,
        batch=history.batch or base,
        epochs=len(history.epochs),
        epochs_since_change=history.epochs_since_change,
        running_s=history.running_s(now),
        resizes=history.resizes,
    )
