"""Workloads run under the assumptions of the published studies: no Slurm, no companion, no noise.

A schedule takes effect at once, a job's models are the true_model, and a requeue stops the job for a fixed time. A hot
job trains on while the GPUs that it gains prepare; it holds them from the decision on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from slurm_ones.schedule.policy import Allocation, ClusterView, NodeView, Policy, Schedule
from slurm_ones.simulate.engines.idealized_job import EPSILON, IdealizedJob, Stretch, Variants
from slurm_ones.simulate.engines.idealized_placement import Asked, Holding, place_freely, plan_hot
from slurm_ones.simulate.engines.outcome import JobOutcome, Outcome, Segment, fair_seconds
from slurm_ones.simulate.training.mechanism import Hot, Mechanism, Requeue
from slurm_ones.simulate.training.network import slowdowns
from slurm_ones.simulate.workloads.workload import Workload


class Part(NamedTuple):
    """Equal nodes of a cluster."""

    nodes: int
    gpus_per_node: int
    kind: str = ""


REQUEUE = Requeue()
"""What the published studies assume."""


def run_idealized(
    policy: Policy,
    workload: Workload,
    cluster: ClusterView,
    *,
    interval_s: float = 60.0,
    mechanism: Mechanism = REQUEUE,
    spread: bool = False,
    seed: int = 0,
    most_s: float = 30 * 86400.0,
    on_time: Callable[[float, int], None] = lambda now, ended: None,
) -> Outcome:
    """The workload to its end under a policy.

    Jobs are packed, the largest first, each where least is left over, as policies take for granted that weigh sizes.
    With `spread` each goes to the emptiest nodes, in the order of the schedule's allocations, which is how Pollux's
    study places the jobs of the rivals that say nothing of placement. Where a GPU count does not change nobody moves.
    A hot job keeps some of its GPUs as it shrinks; as it grows it adds to them or moves, see `plan_hot`.

    `on_time` is called with the simulated time and how many jobs have ended. Jobs that have not ended after `most_s`
    are given up.
    """
    rng = np.random.default_rng(seed)
    began = time.perf_counter()
    jobs = []
    variants = Variants()
    for i, submission in enumerate(workload.submissions, 1):
        app = workload.applications[submission.application]
        jobs.append(IdealizedJob(i, submission, app, cluster, mechanism, variants=variants))
    now, waiting, live = 0.0, list(jobs), list[IdealizedJob]()
    segments: list[Segment] = []
    decisions: list[float] = []
    goodput: list[tuple[float, float]] = []
    presence: list[tuple[float, int]] = []
    while (waiting or live) and now < most_s:
        if not live and waiting and waiting[0].submission.time > now:
            now = math.floor(waiting[0].submission.time / interval_s) * interval_s
        while waiting and waiting[0].submission.time <= now:
            live.append(waiting.pop(0))
        if live:
            views = [job.view() for job in live]
            started = time.perf_counter()
            schedule = policy.decide(cluster, views, now, rng)
            decisions.append(time.perf_counter() - started)
            apply = _apply_hot if isinstance(mechanism, Hot) else _apply
            apply(schedule, live, cluster, now, spread)
            for job in live:
                if job.job_id in schedule.promises:
                    job.promised = schedule.promises[job.job_id].given
        for job, slowdown in zip(live, slowdowns(cluster, [job.nodes for job in live]), strict=True):
            job.slowdown = slowdown
        presence.append((now, len(live)))
        goodput.append((now, sum(_worth(job) for job in live)))
        for job in live:
            for stretch in job.run(now, interval_s):
                _extend(segments, job.submission.name, stretch)
        live = [job for job in live if job.ended is None]
        now += interval_s
        on_time(now, len(jobs) - len(live) - len(waiting))
    gpus = cluster.gpus
    return Outcome(
        policy=policy.name,
        workload=workload.name,
        seed=seed,
        gpus=gpus,
        jobs=tuple(_outcome(job, presence, gpus, cluster.gpus_per_node) for job in jobs),
        segments=tuple(segments),
        decision_s=tuple(decisions),
        goodput=tuple((at, value / gpus) for at, value in goodput),
        wall_s=time.perf_counter() - began,
    )


def idealized_cluster(
    nodes: int, gpus_per_node: int, *, uniform: bool = False, parts: Sequence[Part] = ()
) -> ClusterView:
    """A cluster of equal nodes, or of `parts` with GPUs of a kind each; a public study's jobs may be spread over them
    in any way."""
    parts = parts or (Part(nodes, gpus_per_node),)
    each = [part for part in parts for _ in range(part.nodes)]
    views = tuple(NodeView(f"n{i}", part.gpus_per_node, kind=part.kind) for i, part in enumerate(each, 1))
    full = {part.kind: part.gpus_per_node for part in parts} if len(parts) > 1 else {}
    most = max(part.gpus_per_node for part in parts)
    return ClusterView(views, node_gpus=most, uniform=uniform, gpus_of_kind=full)


def _apply(schedule: Schedule, live: Sequence[IdealizedJob], cluster: ClusterView, now: float, spread: bool) -> None:
    """Put the schedule in force: unchanged jobs stay where they are, the others are placed anew."""
    by_id = {job.job_id: job for job in live}
    free = {node.name: node.gpus for node in cluster.nodes}
    for job in live:
        got = schedule.allocations.get(job.job_id)
        if got is None or job.shape is None or _differs(job, got):
            job.stop()
        else:
            job.batch = got.batch
        for name, gpus in job.nodes.items():
            free[name] -= gpus
    moving = [(by_id[i], got) for i, got in schedule.allocations.items() if by_id[i].shape is None]
    if not spread:
        moving.sort(key=lambda pair: -pair[1].shape.gpus)
    for job, got in moving:
        place = place_freely(got.shape, free, cluster, spread, got.kind)
        job.start(now, got.shape, place, got.batch)


def _differs(job: IdealizedJob, got: Allocation) -> bool:
    """Whether that are other GPUs than it has."""
    return job.shape is None or got.shape.gpus != job.shape.gpus or got.kind not in ("", job.kind)


def _apply_hot(
    schedule: Schedule, live: Sequence[IdealizedJob], cluster: ClusterView, now: float, spread: bool
) -> None:
    """Put the schedule in force as far as nothing else is under way: see `plan_hot`."""
    changes: list[tuple[IdealizedJob, Allocation]] = []
    same: list[IdealizedJob] = []
    for job in live:
        got = schedule.allocations.get(job.job_id)
        if job.change is not None or job.starting:
            continue
        if got is None:
            job.stop()
        elif _differs(job, got):
            changes.append((job, got))
        else:
            job.batch = got.batch
            same.append(job)
    if not spread:
        changes.sort(key=lambda pair: -pair[1].shape.gpus)
    asked = [
        Asked(job.job_id, got.shape, job.nodes, job.mechanism.prepare_s(job.application), got.kind)
        for job, got in changes
    ]
    apart = [] if spread or not changes else [(job, job.shape) for job in same if job.shape and job.scattered(now)]
    scattered = [
        Asked(job.job_id, shape, job.nodes, job.mechanism.prepare_s(job.application), job.kind) for job, shape in apart
    ]
    plans = plan_hot(cluster, [_holding(job) for job in live], asked, spread, scattered)
    for job, got in [*changes, *((job, Allocation(shape, job.batch)) for job, shape in apart)]:
        plan = plans.get(job.job_id)
        if plan is not None:
            job.go(now, got.shape, plan, got.batch)


def _holding(job: IdealizedJob) -> Holding:
    change = job.change
    return Holding(job.held) if change is None else Holding(job.held, change.nodes, change.begins_s, change.left_s)


def _worth(job: IdealizedJob) -> float:
    """GPUs that the job puts to good use: its goodput over what one GPU brings at its best batch."""
    return 0.0 if job.shape is None else job.goodput / job.application.single_goodput(job.done)


def _extend(segments: list[Segment], name: str, stretch: Stretch) -> None:
    start, end, nodes, batch = stretch.start, stretch.end, stretch.nodes, stretch.batch
    gpus = sum(nodes.values())
    for i in range(len(segments) - 1, max(len(segments) - 200, -1), -1):
        last = segments[i]
        if last.job == name:
            if last.end >= start - EPSILON and (last.gpus, last.nodes) == (gpus, len(nodes)):
                segments[i] = Segment(name, last.start, end, gpus, len(nodes), batch)
                return
            break
    segments.append(Segment(name, start, end, gpus, len(nodes), batch))


def _outcome(job: IdealizedJob, presence: Sequence[tuple[float, int]], gpus: int, per_node: int) -> JobOutcome:
    return JobOutcome(
        name=job.submission.name,
        application=job.submission.application,
        submitted=job.submission.time,
        started=job.started,
        ended=job.ended,
        running_s=job.running_s,
        gpu_s=job.gpu_s,
        lost_gpu_s=job.lost_gpu_s,
        resizes=job.resizes,
        fair_s=fair_seconds(
            job.application, job.submission.epochs, job.submission.time, job.ended, presence, gpus, per_node
        ),
        metric=job.application.metric_at(job.done, job.batch),
        target=job.application.target,
        elastic=job.submission.elastic,
        deadline=job.deadline,
        promised=job.promised,
    )
