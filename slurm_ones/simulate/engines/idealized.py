"""Workloads run under the assumptions of the published studies: no Slurm, no companion, no noise.

A schedule takes effect at once, a job's models are the true_model, and a resize stops the job for a fixed time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_ones.schedule.policy import ClusterView, Floats, Ints, JobView, Limits, NodeView, Policy, Progress, Schedule
from slurm_ones.schedule.shapes import nodes_of, valid_counts
from slurm_ones.simulate.engines.outcome import JobOutcome, Outcome, Segment, fair_seconds
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.training.training_progress import EarlyStopping
from slurm_ones.simulate.workloads.workload import Workload
from slurm_ones.slurm.model import Shape

EPSILON = 1e-9


@dataclass(frozen=True)
class TrueModel:
    """What a job truly does from here on, as both of a policy's models."""

    application: Application
    done: float
    """Progress in samples of the base batch."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """See `schedule.policy.ThroughputModel`."""
        return self.application.throughput(nodes, gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """None."""
        return np.zeros(np.shape(gpus))

    def efficiency(self, batches: Ints) -> Floats:
        """See `schedule.policy.EfficiencyModel`."""
        return self.application.efficiency(self.done, batches)


@dataclass
class IdealizedJob:
    """One job as it trains."""

    job_id: int
    submission: Submission
    application: Application
    cluster: ClusterView
    resize_s: float
    """Seconds that each start of it takes."""
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
    changed_epoch: int = 0

    def __post_init__(self) -> None:
        app, asked = self.application, self.submission
        self._early_stopping = EarlyStopping(app)
        self.requested_batch = min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch)
        self.requested_nodes = nodes_of(self.cluster, asked.gpus)
        most = min(app.max_gpus, self.cluster.gpus)
        counts = valid_counts(self.cluster, 1, most) if asked.elastic else ()
        self.limits = Limits(
            tuple(sorted({*counts, min(asked.gpus, self.cluster.gpus)})),
            app.min_batch or app.base_batch,
            app.max_batch,
            app.max_batch,
        )

    @property
    def total(self) -> float:
        """Progress at which it is done."""
        return self.application.total * self.submission.epochs

    @property
    def goodput(self) -> float:
        """Progress/s at its size, placement and batch."""
        return self._speed * float(self.application.efficiencies(self.batch)[self.application.epoch(self.done)])

    @property
    def _speed(self) -> float:
        return self.application.placed_speed(tuple(self.nodes.values()), float(self.batch))

    def start(self, now: float, shape: Shape, nodes: dict[str, int], batch: int) -> None:
        """Hold these GPUs from now on."""
        if self.started is None:
            self.started = now
        else:
            self.resizes += 1
        self.shape, self.nodes, self.batch = shape, nodes, batch
        self.paused = self.resize_s
        self.changed_epoch = int(self.done / self.application.dataset)

    def stop(self) -> None:
        """Hold no GPUs any more."""
        self.shape, self.nodes = None, {}

    def run(self, now: float, seconds: float) -> None:
        """Train for `seconds` from `now` on, or to the end."""
        if self.shape is None:
            return
        wait = min(self.paused, seconds)
        self.paused -= wait
        left = seconds - wait
        self.lost_gpu_s += wait * self.shape.gpus
        speed, worth, ends = self._speed, self.application.efficiencies(self.batch), self.application.ends
        while left > EPSILON and self.ended is None:
            row = self.application.epoch(self.done)
            end = min(float(ends[row]), self.total)
            rate = speed * float(worth[row])
            needed = max(end - self.done, 0.0) / rate
            step = min(needed, self._early_stopping.room / speed, left)
            left -= step
            self.done = end * (1 + 1e-12) if step == needed else self.done + rate * step
            gives_up = self._early_stopping.use(step * speed, self.done)
            if gives_up or (step == needed and end >= self.total * (1 - 1e-12)):
                self.ended = now + seconds - left
        self.running_s += seconds - left
        self.gpu_s += (seconds - left) * self.shape.gpus

    def view(self) -> JobView:
        """What a policy is shown of it."""
        app, asked = self.application, self.submission
        epochs = self.done / app.dataset
        true_model = TrueModel(app, self.done)
        return JobView(
            job_id=self.job_id,
            submitted=asked.time,
            requested=asked.gpus,
            requested_batch=self.requested_batch,
            shape=self.shape,
            nodes=dict(self.nodes),
            batch=self.batch or self.requested_batch,
            base_batch=app.base_batch,
            limits=self.limits,
            model=true_model,
            efficiency=true_model,
            progress=Progress(max(epochs, 0.5), max(self.total - self.done, 1.0) / app.dataset),
            samples=self.done,
            dataset=app.dataset,
            epochs=int(epochs),
            epochs_since_change=int(epochs) - self.changed_epoch,
            running_s=self.running_s,
            resizes=self.resizes,
            resize_s=self.resize_s,
            true_remaining_s=app.seconds(
                self.requested_nodes, min(asked.gpus, app.max_gpus), float(self.requested_batch), self.done, self.total
            ),
        )


def run_idealized(
    policy: Policy,
    workload: Workload,
    cluster: ClusterView,
    *,
    interval_s: float = 60.0,
    resize_s: float | None = 30.0,
    spread: bool = False,
    seed: int = 0,
    most_s: float = 30 * 86400.0,
    on_time: Callable[[float, int], None] = lambda now, ended: None,
) -> Outcome:
    """The workload to its end under a policy. `resize_s` of None takes each application's own.

    Jobs are packed, the largest first, each where least is left over, as policies take for granted that weigh sizes.
    With `spread` each goes to the emptiest nodes, in the order of the schedule's allocations, which is how Pollux's
    study places the jobs of the rivals that say nothing of placement. Where a GPU count does not change nobody moves.

    `on_time` is called with the simulated time and how many jobs have ended. Jobs that have not ended after `most_s`
    are given up.
    """
    rng = np.random.default_rng(seed)
    began = time.perf_counter()
    jobs = []
    for i, submission in enumerate(workload.submissions, 1):
        app = workload.applications[submission.application]
        jobs.append(IdealizedJob(i, submission, app, cluster, app.resize_s if resize_s is None else resize_s))
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
            _apply(schedule, live, cluster, now, spread)
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


def idealized_cluster(nodes: int, gpus_per_node: int, *, uniform: bool = False) -> ClusterView:
    """A cluster of equal nodes; a public study's jobs may be spread over them in any way."""
    views = tuple(NodeView(f"n{i}", gpus_per_node) for i in range(1, nodes + 1))
    return ClusterView(views, node_gpus=gpus_per_node, uniform=uniform)


def _apply(schedule: Schedule, live: Sequence[IdealizedJob], cluster: ClusterView, now: float, spread: bool) -> None:
    """Put the schedule in force: unchanged jobs stay where they are, the others are placed anew."""
    by_id = {job.job_id: job for job in live}
    free = {node.name: node.gpus for node in cluster.nodes}
    for job in live:
        got = schedule.allocations.get(job.job_id)
        if got is None or job.shape is None or got.shape.gpus != job.shape.gpus:
            job.stop()
        else:
            job.batch = got.batch
        for name, gpus in job.nodes.items():
            free[name] -= gpus
    moving = [(by_id[i], got) for i, got in schedule.allocations.items() if by_id[i].shape is None]
    if not spread:
        moving.sort(key=lambda pair: -pair[1].shape.gpus)
    for job, got in moving:
        job.start(now, got.shape, _place(got.shape, free, cluster, spread), got.batch)


def _place(shape: Shape, free: dict[str, int], cluster: ClusterView, spread: bool) -> dict[str, int]:
    """GPUs on nodes for the shape; taken from `free`."""
    found: dict[str, int] = {}
    if cluster.uniform:
        fitting = sorted((gpus, name) for name, gpus in free.items() if gpus >= shape.gpus_per_node)
        found = {name: shape.gpus_per_node for _, name in fitting[: shape.nodes]}
    else:
        left = shape.gpus
        while left > 0 and (room := {name: gpus for name, gpus in free.items() if gpus > 0 and name not in found}):
            enough = {name: gpus for name, gpus in room.items() if gpus >= left and not spread}
            name = min(enough, key=enough.__getitem__) if enough else max(room, key=room.__getitem__)
            found[name] = min(left, free[name])
            left -= found[name]
    if sum(found.values()) < shape.gpus:
        raise ValueError(f"the schedule cannot be placed: {shape} does not fit")
    for name, gpus in found.items():
        free[name] -= gpus
    return found


def _worth(job: IdealizedJob) -> float:
    """GPUs that the job puts to good use: its goodput over what one GPU brings at its best batch."""
    return 0.0 if job.shape is None else job.goodput / job.application.single_goodput(job.done)


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
    )
