"""Outcome of a simulated workload, as plain data from which all figures of a study are computed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import JobState


@dataclass(frozen=True)
class Segment:
    """Span of time in which a job held the same GPUs. Times are in seconds."""

    job: str
    start: float
    end: float
    gpus: int
    nodes: int
    batch: int


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of one job, from submission to end. Times are in seconds since the start of the simulation."""

    name: str
    application: str
    submitted: float
    started: float | None
    """Time of the job's first start; None if it never ran."""
    ended: float | None
    """Time of the job's end; None if the simulation stopped before."""
    running_s: float
    """Seconds for which the job held GPUs."""
    gpu_s: float
    """GPU-seconds that the job held."""
    lost_gpu_s: float
    """GPU-seconds held without training, such as for starts, stops and resizes."""
    resizes: int
    """Number of changes of the job's GPUs after its first start, requeues included."""
    fair_s: float
    """Seconds that the job would have taken on its fair share of the cluster without pauses (see `fair_seconds`)."""
    metric: float
    target: float
    """Validation metric that satisfies the job's user; NaN if unknown."""
    elastic: bool = True
    deadline: float | None = None
    """Time of the job's deadline; None if it has none."""
    promised: bool | None = None
    """True if the deadline was promised, False if it was refused, None without an answer or a deadline."""

    @property
    def in_time(self) -> bool | None:
        """True if the job met its deadline; None if it has none."""
        return None if self.deadline is None else self.ended is not None and self.ended <= self.deadline

    @property
    def jct_s(self) -> float:
        """Job completion time, from submission to end; NaN without an end."""
        return float("nan") if self.ended is None else self.ended - self.submitted

    @property
    def missed(self) -> bool:
        """True if the job did not end, or ended with its metric below the target."""
        return self.ended is None or self.metric < self.target - 1e-9


@dataclass(frozen=True)
class Outcome:
    """Outcome of one policy on one workload with one seed."""

    policy: str
    workload: str
    seed: int
    gpus: int
    """Number of GPUs of the cluster."""
    jobs: tuple[JobOutcome, ...]
    segments: tuple[Segment, ...] = ()
    decision_s: tuple[float, ...] = ()
    """Real seconds that each decision took."""
    goodput: tuple[tuple[float, float], ...] = ()
    """(time, total goodput) at each tick. A value of 1 means that all GPUs of the cluster train as efficiently as
    single GPUs with their best batches."""
    wall_s: float = 0.0
    """Real seconds that the whole simulation took."""
    notes: tuple[str, ...] = field(default=())


def fair_seconds(
    application: Application,
    epochs: float,
    submitted: float,
    ended: float | None,
    presence: Sequence[tuple[float, int]],
    gpus: int,
    per_node: int,
) -> float:
    """Return the seconds that a job would take on its fair share of the cluster.

    The share is `gpus` divided by the mean number of jobs between the job's submission and end, rounded down, and at
    least one GPU. On this share the job is assumed to have its best size, and the best batch in each epoch. `presence`
    lists pairs (time, number of jobs) in order of time.
    """
    end = presence[-1][0] if ended is None and presence else (ended or submitted)
    inside = [jobs for at, jobs in presence if submitted <= at <= end and jobs > 0]
    share = max(1, min(int(gpus / (sum(inside) / len(inside) if inside else 1)), application.max_gpus))
    return alone_seconds(application, epochs, share, per_node)


def alone_seconds(application: Application, epochs: float, gpus: int, per_node: int) -> float:
    """Return a job's training seconds at its best size of up to `gpus` GPUs, with the best batch in each epoch."""
    sizes = sorted({n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, gpus) if n <= gpus})
    return min(_seconds(application, epochs, n, per_node) for n in sizes)


def _seconds(application: Application, epochs: float, gpus: int, per_node: int) -> float:
    nodes = -(-gpus // per_node)
    low = max(application.min_batch or application.base_batch, gpus)
    batches = np.unique(np.round(np.geomspace(low, max(low, application.max_batch), 16)))
    speed = batches / application.step_seconds(nodes, gpus, batches)
    total = application.total * epochs
    seconds, done = 0.0, 0.0
    for end in application.ends:
        upto = min(float(end), total)
        if upto <= done:
            break
        rate = (speed * application.efficiency(done, batches)).max()
        seconds += (upto - done) / rate
        done = upto
    return float(seconds)


NO_PROMISES: Mapping[int, bool] = {}


class RunFigures:
    """Collector of a simulation's figures. At each tick, `on_time` is called with the simulated seconds and the number
    of ended jobs."""

    def __init__(self, world: World, on_time: Callable[[float, int], None] | None = None) -> None:
        self.decisions: list[float] = []
        """Real seconds of each decision so far."""
        self._world = world
        self._on_time = on_time
        self._goodput: list[tuple[float, float]] = []
        self._presence: list[tuple[float, int]] = []
        self._began = time.perf_counter()

    def tick(self) -> None:
        """Record the current goodput and the number of jobs in the cluster."""
        world = self._world
        live = [world.trainings[job_id] for job_id in world.cluster.records.live_ids()]
        # As the number of single GPUs at their best batches that would bring it.
        goodput = sum(one.goodput / one.application.single_goodput(one.position.progress) for one in live)
        self._goodput.append((world.seconds, goodput / world.spec.gpus))
        self._presence.append((world.seconds, world.cluster.live))
        if self._on_time is not None:
            self._on_time(world.seconds, world.ended)

    def outcome(
        self, policy: str, seed: int, promises: Mapping[int, bool] = NO_PROMISES, notes: Sequence[str] = ()
    ) -> Outcome:
        """Return the outcome of the simulation. `promises` has, by job id, True for a promised deadline and False for a
        refused one."""
        world, now = self._world, self._world.timeline.now
        segments = (a for job_id in world.job_ids.values() for a in _held(world.cluster.records.of(job_id), now))
        return Outcome(
            policy=policy,
            workload=world.workload.name,
            seed=seed,
            gpus=world.spec.gpus,
            jobs=tuple(self._job(submission, promises) for submission in world.workload.submissions),
            segments=tuple(replace(a, start=a.start - world.began, end=a.end - world.began) for a in segments),
            decision_s=tuple(self.decisions),
            goodput=tuple(self._goodput),
            wall_s=time.perf_counter() - self._began,
            notes=tuple(notes),
        )

    def _job(self, submission: Submission, promises: Mapping[int, bool]) -> JobOutcome:
        world, spec = self._world, self._world.spec
        app = world.workload.applications[submission.application]
        job_id = world.job_ids.get(submission.name, 0)
        training, records = world.trainings.get(job_id), world.cluster.records.of(job_id)
        ends = [record.end_time for record in records if record.state is JobState.COMPLETED]
        ended = max(ends) - world.began if ends and training is not None and training.finished else None
        stretches = list(_held(records, world.timeline.now))
        held = sum((a.end - a.start) * a.gpus for a in stretches)
        present, changes = self._presence, training.changes if training is not None else None
        return JobOutcome(
            name=submission.name,
            application=submission.application,
            submitted=submission.time,
            started=stretches[0].start - world.began if stretches else None,
            ended=ended,
            running_s=sum(a.end - a.start for a in stretches),
            gpu_s=held,
            lost_gpu_s=held - (training.trained_s if training is not None else 0.0),
            resizes=max(len(stretches) - 1, 0) if changes is None else changes,
            fair_s=fair_seconds(app, submission.epochs, submission.time, ended, present, spec.gpus, spec.gpus_per_node),
            metric=app.metric_at(*((training.position.progress, training.batch) if training is not None else (0.0, 0))),
            target=app.target,
            elastic=submission.elastic,
            deadline=None if submission.deadline_s is None else submission.time + round(submission.deadline_s),
            promised=promises.get(job_id),
        )


def _held(records: Sequence[SimulatedJob], now: float) -> Iterator[Segment]:
    """Yield the segments of a job. A plain job has a segment for each run, a job of blocks one for each set of GPUs
    that it held."""
    held = [a for record in records for a in record.held(now)]
    if not held:
        return
    name = records[0].request.name
    if records[0].array is None:
        yield from (Segment(name, a.start, a.end, sum(a.gpus.values()), len(a.gpus), a.batch) for a in held)
        return
    times = sorted({time for a in held for time in (a.start, a.end)})
    for start, end in itertools.pairwise(times):
        there = [a for a in held if a.start <= start and end <= a.end]
        if there:
            nodes = {node for a in there for node in a.gpus}
            gpus = sum(sum(a.gpus.values()) for a in there)
            yield Segment(name, start, end, gpus, len(nodes), there[-1].batch)
