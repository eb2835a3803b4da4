"""A workload on a simulated cluster, the waiting in which its time passes, and what became of its jobs."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ones_db import PromiseRecord
from ones_db.shape import Shape
from slurm_ones.simulate.engines.outcome import JobOutcome, Segment, fair_seconds
from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.scheduler import PartitionSpec
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Program, Request, SimulatedJob
from slurm_ones.simulate.slurm.timeline import EPOCH, ClusterSettings, Timeline
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.training.block_training import BlockTraining
from slurm_ones.simulate.training.job_reports import JobFiles
from slurm_ones.simulate.training.network import slow_speeds
from slurm_ones.simulate.training.training import Training
from slurm_ones.simulate.workloads.workload import Workload
from slurm_ones.slurm.model import JobKey, JobState, Task

PARTITION = "gpu"
USER = "researcher"
REQUEUE, HOT = "requeue", "hot"
"""How elastic jobs change their size: from a checkpoint, or as jobs of blocks while they train."""
BLOCKS = 8
"""Tasks of the array of a job of blocks, as the templates have it."""


@dataclass(frozen=True)
class ClusterSpec:
    """Equal nodes in one partition."""

    nodes: int
    gpus_per_node: int
    whole_nodes: bool = False
    """Slurm hands out whole nodes, and knows of no GPUs."""
    slow_nodes: tuple[float, ...] = ()
    """Speeds of the nodes that are slower than others."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    def partition(self) -> PartitionSpec:
        return PartitionSpec(PARTITION, self.names, self.gpus_per_node, self.whole_nodes)


def asked_shape(gpus: int, spec: ClusterSpec) -> Shape:
    """The smallest uniform shape of so many GPUs at least, on the fewest nodes; no more than the cluster has."""
    gpus = min(gpus, spec.gpus)
    nodes = -(-gpus // spec.gpus_per_node)
    return Shape(nodes, spec.gpus_per_node if spec.whole_nodes else -(-gpus // nodes))


def least_gpus(app: Application) -> int:
    """Fewest GPUs that its owner allows, and the step between sizes: before its first run nobody else knows what its
    strategy can use."""
    return app.by.degree if app.by is not None else 1


class World:
    """Everything that the companion does not see: the cluster, its jobs' truth, and what is still to be submitted."""

    def __init__(
        self,
        workload: Workload,
        spec: ClusterSpec,
        directory: Path,
        settings: ClusterSettings,
        *,
        resize_s: float | None = 30.0,
        resize: str = REQUEUE,
        seed: int = 0,
        timeline: Timeline | None = None,
        beside: Sequence[PartitionSpec] = (),
    ) -> None:
        """Jobs keep their files in `directory`. `resize_s` of None takes each application's own.

        `resize` is how elastic jobs change their size: `requeue`, or `hot`, which makes them jobs of blocks. Times of
        submissions count from `timeline`'s now. `beside` are partitions that the workload does not use.
        """
        self.spec = spec
        self.workload = workload
        self.directory = directory
        self.settings = settings
        self.timeline = timeline or Timeline()
        self.began = self.timeline.now
        self.cluster = SimulatedCluster([spec.partition(), *beside], settings, self.timeline, seed=seed)
        self.client = SimulatedClient(self.cluster, user=USER)
        self.trainings: dict[int, Training] = {}
        self.job_ids: dict[str, int] = {}
        """Of the submissions by their names."""
        self._speeds = slow_speeds(spec.names, spec.slow_nodes)
        self._resize_s = resize_s
        self._resize = resize
        self._seed = seed
        self._upcoming = sorted((s.time for s in workload.submissions), reverse=True)
        for submission in workload.submissions:
            self.timeline.at(self.began + submission.time, lambda s=submission: self._submit(s))  # type: ignore[misc]
        self.pass_time(0.0)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self.timeline.now - self.began

    @property
    def done(self) -> bool:
        """Every job has been submitted and has ended."""
        return not self._upcoming and not self.cluster.live

    @property
    def ended(self) -> int:
        """Jobs that have ended."""
        return len(self.trainings) - self.cluster.live

    def pass_time(self, seconds: float, *, until_change: bool = False) -> None:
        """Let jobs read their orders, let time pass, and write their reports."""
        live = [self.trainings[job_id] for job_id in self.cluster.live_ids() if job_id in self.trainings]
        for training in live:
            training.check_orders()
        self.timeline.changed = False
        self.timeline.run(self.timeline.now + seconds, until_change=until_change)
        for training in live:
            if training.files is not None:
                training.files.flush()

    def idle_s(self) -> float:
        """Seconds until something can happen, where Slurm knows of no job; 0 otherwise."""
        if not self.cluster.empty or not self._upcoming:
            return 0.0
        return max(self.began + self._upcoming[-1] - self.timeline.now, 0.0)

    def _submit(self, submission: Submission) -> None:
        self._upcoming.pop()
        app = self.workload.applications[submission.application]
        request = self._request(submission, app)

        blocks = bool(request.array_tasks)

        def program(key: JobKey) -> Program:
            job_id = key if isinstance(key, int) else key.array
            if job_id not in self.trainings:
                make = self._block_training if blocks else self._training
                self.trainings[job_id] = make(submission, app, job_id)
                self.trainings[job_id].speeds = self._speeds
            training = self.trainings[job_id]
            if isinstance(training, BlockTraining) and isinstance(key, Task):
                return training.program(key.task)
            return training

        job_id = self.job_ids[submission.name] = self.cluster.submit(request, program)
        if blocks:
            program(Task(job_id, 0))

    def _training(self, submission: Submission, app: Application, job_id: int) -> Training:
        training = Training(
            submission,
            app,
            self._files(submission, job_id) if submission.elastic else None,
            self.timeline,
            self.settings,
            self._cost(app),
            self._rng(job_id),
        )
        training.exited = lambda code: self.cluster.exited(job_id, code)
        return training

    def _block_training(self, submission: Submission, app: Application, job_id: int) -> BlockTraining:
        training = BlockTraining(
            submission,
            app,
            self._files(submission, job_id),
            self.timeline,
            self.settings,
            self._cost(app),
            self._rng(job_id),
        )
        training.exit_block = lambda task, code: self.cluster.exited(Task(job_id, task), code)
        training.over = lambda: self.cluster.cancel_waiting(job_id)
        return training

    def _cost(self, app: Application) -> float:
        """Seconds that a resize by requeue costs it."""
        return app.resize_s if self._resize_s is None else self._resize_s

    def _rng(self, job_id: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, 2, job_id])

    def _request(self, submission: Submission, app: Application) -> Request:
        """What its user asks of sbatch."""
        shape = asked_shape(submission.gpus, self.spec)
        most = max(min(app.max_gpus, self.spec.gpus), shape.gpus)
        batch = f"{app.min_batch or app.base_batch}-{app.max_batch}"
        blocks = submission.elastic and self._of_blocks(submission)
        least = least_gpus(app)
        step = f":{least}" if 1 < least <= most - least else ""
        comment = f"ones: gpus={least}-{most}{step} batch={batch}{' array=blocks' if blocks else ''}"
        if submission.deadline_s is not None:
            comment += f" deadline={round(submission.deadline_s)}s"
        return Request(
            nodes=shape.nodes,
            gpus_per_node=0 if self.spec.whole_nodes else shape.gpus_per_node,
            name=submission.name,
            comment=comment if submission.elastic else "",
            array_tasks=tuple(range(BLOCKS)) if blocks else (),
            throttle=int(blocks),
            work_dir=str(self.directory),
            priority=submission.priority,
            time_limit_s=submission.limit_s,
            user=USER,
            uid=os.geteuid(),
        )

    def _of_blocks(self, submission: Submission) -> bool:
        """Whether an elastic job is one of blocks."""
        return self._resize == HOT

    def _files(self, submission: Submission, job_id: int) -> JobFiles:
        """Its directory."""
        return JobFiles(self.directory, job_id)


class VirtualStop:
    """How the companion waits in a simulation: `daemon.Stop`, in whose `wait` the world goes on.

    Between two ticks the companion looks again and again at the resizes under way. Nothing changes between two
    things that happen to jobs, so the wait then ends with the first look after the next one: what a resize has given
    up waiting for it finds out at the next tick.
    """

    def __init__(self, world: World, interval_s: float, advance_s: float, check: Callable[[], None]) -> None:
        """`check` is called before time passes, and may raise."""
        self._world = world
        self._interval_s = interval_s
        self._advance_s = advance_s
        self._check = check
        self._next_tick = 0.0
        self._set = False

    def set(self) -> None:
        """Let the companion stop."""
        self._set = True

    def ticked(self) -> None:
        """A tick has ended: the next one is an interval away."""
        self._next_tick = self._world.timeline.now + self._interval_s

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        self._check()
        world, begun = self._world, self._world.timeline.now
        left = self._next_tick - begun
        if timeout <= self._advance_s < left:
            world.pass_time(left, until_change=True)
            looks = math.ceil((world.timeline.now - begun) / self._advance_s - 1e-9)
            rest = begun + min(max(looks, 1) * self._advance_s, left) - world.timeline.now
            world.pass_time(max(rest, 0.0))
        else:
            world.pass_time(timeout)
            world.pass_time(math.floor(world.idle_s() / self._interval_s) * self._interval_s)
        return self._set


def job_outcome(
    world: World,
    submission: Submission,
    presence: Sequence[tuple[float, int]],
    promises: Mapping[int, PromiseRecord],
) -> JobOutcome:
    """One submission's; `presence` is (seconds, jobs in the system) in order, `promises` what the companion stored of
    deadlines."""
    app = world.workload.applications[submission.application]
    job_id = world.job_ids[submission.name]
    training = world.trainings[job_id]
    records = world.cluster.records.of(job_id)
    ends = [record.end_time for record in records if record.state is JobState.COMPLETED]
    ended = max(ends) - EPOCH if ends and training.finished else None
    stretches = list(_stretches(records))
    held = sum((a.end - a.start) * a.gpus for a in stretches)
    return JobOutcome(
        name=submission.name,
        application=submission.application,
        submitted=submission.time,
        started=stretches[0].start - EPOCH if stretches else None,
        ended=ended,
        running_s=sum(a.end - a.start for a in stretches),
        gpu_s=held,
        lost_gpu_s=held - training.trained_s,
        resizes=max(len(stretches) - 1, 0),
        fair_s=fair_seconds(
            app, submission.epochs, submission.time, ended, presence, world.spec.gpus, world.spec.gpus_per_node
        ),
        metric=app.metric_at(training.position.progress, training.batch),
        target=app.target,
        elastic=submission.elastic,
        deadline=None if submission.deadline_s is None else submission.time + round(submission.deadline_s),
        promised=promises[job_id].given if job_id in promises else None,
    )


def run_segments(world: World) -> Iterator[Segment]:
    """The runs of all jobs."""
    for job_id in world.job_ids.values():
        for a in _stretches(world.cluster.records.of(job_id)):
            yield replace(a, start=a.start - EPOCH, end=a.end - EPOCH)


def _stretches(records: Sequence[SimulatedJob]) -> Iterator[Segment]:
    """When a job held which GPUs: a run each, or of a job of blocks the time between two changes."""
    held = [a for record in records for a in record.allocations]
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


def total_goodput(world: World) -> float:
    """Progress of all jobs now, in GPUs that would bring it at their best batch, each alone."""
    return sum(
        training.goodput / training.application.single_goodput(training.position.progress)
        for job_id, training in ((job_id, world.trainings[job_id]) for job_id in world.cluster.live_ids())
    )
