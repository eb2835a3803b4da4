"""Policies on the assumptions of the published studies alone: no Slurm, no companion, no noise.

Decisions come at fixed intervals, a schedule takes effect at once, models are the truth, and a resize stops a job
for a fixed time. So our policies can be held against published figures, and tried quickly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_ones.decide.policy import (
    ClusterView,
    Floats,
    Ints,
    JobView,
    Limits,
    NodeView,
    Policy,
    Progress,
    Schedule,
)
from slurm_ones.decide.shapes import nodes_of, valid_counts
from slurm_ones.simulate.application import Application
from slurm_ones.simulate.fairness import fair_seconds
from slurm_ones.simulate.result import JobOutcome, Outcome, Segment
from slurm_ones.simulate.workload import Submission, Workload
from slurm_ones.slurm.model import Shape

EPSILON = 1e-9


@dataclass(frozen=True)
class Truth:
    """What a job truly does from here on, as both of a policy's models."""

    application: Application
    done: float
    """Progress in samples of the base batch."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """See `decide.policy.ThroughputModel`."""
        return self.application.throughput(nodes, gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """None."""
        return np.zeros(np.shape(gpus))

    def efficiency(self, batches: Ints) -> Floats:
        """See `decide.policy.EfficiencyModel`."""
        return self.application.efficiency(self.done, batches)


@dataclass
class _Job:
    """One job as it trains."""

    job_id: int
    submission: Submission
    application: Application
    done: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    shape: Shape | None = None
    batch: int = 0
    paused: float = 0.0
    """Seconds that it still stands still."""
    started: float | None = None
    ended: float | None = None
    running_s: float = 0.0
    gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    resizes: int = 0
    changed_at: float = 0.0
    changed_epoch: int = 0

    @property
    def rate(self) -> float:
        """Samples/s at its size and batch."""
        assert self.shape is not None
        batch = np.array([float(self.batch)])
        return self.batch / float(self.application.step_seconds(len(self.nodes), self.shape.gpus, batch)[0])

    @property
    def total(self) -> float:
        return self.application.total * self.submission.epochs

    def run(self, now: float, seconds: float) -> None:
        """Train for `seconds` from `now` on."""
        if self.shape is None:
            return
        gpus, left = self.shape.gpus, seconds
        wait = min(self.paused, left)
        self.paused -= wait
        left -= wait
        self.lost_gpu_s += wait * gpus
        rate = self.rate
        while left > EPSILON:
            row = self.application.epoch(self.done)
            worth = rate * float(self.application.efficiency(self.done, [self.batch])[0])
            end = min(float(self.application.ends[row]), self.total)
            needed = max(end - self.done, 0.0) / worth
            if needed > left:
                self.done += worth * left
                left = 0.0
                break
            left -= needed
            self.done = end * (1 + 1e-12)
            if end >= self.total * (1 - 1e-12):
                self.ended = now + seconds - left
                break
        self.running_s += seconds - left
        self.gpu_s += (seconds - left) * gpus


def run_plain(
    policy: Policy,
    workload: Workload,
    cluster: ClusterView,
    *,
    interval_s: float = 60.0,
    resize_s: float | None = 30.0,
    seed: int = 0,
    most_s: float = 30 * 86400.0,
    on_time: Callable[[float, int], None] = lambda now, ended: None,
) -> Outcome:
    """The workload to its end under a policy. `resize_s` of None takes each application's own.

    `on_time` hears the simulated time and how many jobs have ended. Jobs that have not ended after `most_s` are
    given up.
    """
    rng = np.random.default_rng(seed)
    began = time.perf_counter()
    jobs = [_Job(i, s, workload.applications[s.application]) for i, s in enumerate(workload.submissions, 1)]
    now, waiting, live = 0.0, list(jobs), list[_Job]()
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
            started = time.perf_counter()
            views = [_view(job, cluster, now, resize_s) for job in live]
            schedule = policy.decide(cluster, views, now, rng)
            decisions.append(time.perf_counter() - started)
            _apply(schedule, live, cluster, now, resize_s)
        presence.append((now, len(live)))
        goodput.append((now, sum(_worth(job) for job in live)))
        for job in live:
            held, batch = dict(job.nodes), job.batch
            job.run(now, interval_s)
            if held:
                _extend(segments, job.submission.name, now, job.ended or now + interval_s, held, batch)
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


def plain_cluster(nodes: int, gpus_per_node: int, *, uniform: bool = False) -> ClusterView:
    """A cluster of equal nodes; a public study's jobs may be spread over them in any way."""
    views = tuple(NodeView(f"n{i}", gpus_per_node) for i in range(1, nodes + 1))
    return ClusterView(views, node_gpus=gpus_per_node, uniform=uniform)


def _view(job: _Job, cluster: ClusterView, now: float, resize_s: float | None) -> JobView:
    app, asked = job.application, job.submission
    epochs = job.done / app.dataset
    to_come = max(job.total - job.done, 1.0) / app.dataset
    truth = Truth(app, job.done)
    asked_nodes = nodes_of(cluster, asked.gpus)
    batch = min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch)
    remaining = app.seconds(asked_nodes, min(asked.gpus, app.max_gpus), float(batch), job.done)
    if asked.epochs != 1.0:
        remaining *= max(job.total - job.done, 0.0) / max(app.total - job.done, EPSILON)
    counts = valid_counts(cluster, 1, min(app.max_gpus, cluster.gpus))
    if not asked.elastic:
        counts = (asked.gpus,)
    return JobView(
        job_id=job.job_id,
        submitted=asked.time,
        requested=asked.gpus,
        requested_batch=batch,
        shape=job.shape,
        nodes=dict(job.nodes),
        batch=job.batch or batch,
        base_batch=app.base_batch,
        limits=Limits(
            tuple(sorted({*counts, min(asked.gpus, cluster.gpus)})),
            app.min_batch or app.base_batch,
            app.max_batch,
            app.max_batch,
        ),
        model=truth,
        efficiency=truth,
        progress=Progress(max(epochs, 0.5), to_come),
        samples=job.done,
        dataset=app.dataset,
        epochs=int(epochs),
        epochs_since_change=int(epochs) - job.changed_epoch,
        running_s=job.running_s,
        resizes=job.resizes,
        resize_s=app.resize_s if resize_s is None else resize_s,
        true_remaining_s=remaining,
    )


def _apply(schedule: Schedule, live: Sequence[_Job], cluster: ClusterView, now: float, resize_s: float | None) -> None:
    """Put the schedule in force: unchanged jobs stay where they are, the others are packed."""
    moving: list[tuple[_Job, Shape]] = []
    free = {node.name: node.gpus for node in cluster.nodes}
    for job in live:
        got = schedule.allocations.get(job.job_id)
        if got is not None and job.shape is not None and got.shape.gpus == job.shape.gpus:
            job.batch = got.batch
        else:
            job.nodes = {}
            if got is not None:
                moving.append((job, got.shape))
            job.shape = None if got is None else job.shape
        for name, gpus in job.nodes.items():
            free[name] -= gpus
    for job, shape in sorted(moving, key=lambda pair: -pair[1].gpus):
        job.nodes = _place(shape, free, cluster)
        job.batch = schedule.allocations[job.job_id].batch
        if job.started is None:
            job.started = now
        else:
            job.resizes += 1
        job.shape = shape
        job.paused = job.application.resize_s if resize_s is None else resize_s
        job.changed_at, job.changed_epoch = now, int(job.done / job.application.dataset)


def _place(shape: Shape, free: dict[str, int], cluster: ClusterView) -> dict[str, int]:
    """GPUs on nodes for the shape, where least is left over; taken from `free`."""
    found: dict[str, int] = {}
    if cluster.uniform:
        fitting = sorted((gpus, name) for name, gpus in free.items() if gpus >= shape.gpus_per_node)
        found = {name: shape.gpus_per_node for _, name in fitting[: shape.nodes]}
        if len(found) < shape.nodes:
            raise ValueError(f"the schedule cannot be placed: {shape} does not fit")
    else:
        left = shape.gpus
        while left > 0:
            enough = [(gpus, name) for name, gpus in free.items() if gpus >= left and name not in found]
            most = [(-gpus, name) for name, gpus in free.items() if gpus > 0 and name not in found]
            if not enough and not most:
                raise ValueError(f"the schedule cannot be placed: {shape} does not fit")
            name = min(enough)[1] if enough else min(most)[1]
            found[name] = min(left, free[name])
            left -= found[name]
    for name, gpus in found.items():
        free[name] -= gpus
    return found


def _worth(job: _Job) -> float:
    """GPUs that the job puts to good use: its goodput over what one GPU brings at the base batch."""
    if job.shape is None:
        return 0.0
    worth = float(job.application.efficiency(job.done, [job.batch])[0])
    return job.rate * worth / job.application.single_goodput(job.done)


def _extend(segments: list[Segment], name: str, start: float, end: float, nodes: Mapping[str, int], batch: int) -> None:
    gpus = sum(nodes.values())
    for i in range(len(segments) - 1, max(len(segments) - 200, -1), -1):
        last = segments[i]
        if last.job == name:
            if last.end >= start - EPSILON and (last.gpus, last.nodes) == (gpus, len(nodes)):
                segments[i] = Segment(name, last.start, end, gpus, len(nodes), batch)
                return
            break
    segments.append(Segment(name, start, end, gpus, len(nodes), batch))


def _outcome(job: _Job, presence: Sequence[tuple[float, int]], gpus: int, per_node: int) -> JobOutcome:
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
    )
