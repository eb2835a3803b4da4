"""What a simulation came to: figures gathered as it runs, and what its world shows at the end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from slurm_ones.simulate.engines.outcome import JobOutcome, Outcome, Segment, fair_seconds
from slurm_ones.simulate.engines.world import World
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.training.training import Training
from slurm_ones.slurm.model import JobState

NO_PROMISES: Mapping[int, bool] = {}


class RunFigures:
    """The figures of one run, taken at each tick. `on_time` is called with seconds and jobs that have ended."""

    def __init__(self, world: World, on_time: Callable[[float, int], None] | None = None) -> None:
        self.decisions: list[float] = []
        """Real seconds of each decision."""
        self._world = world
        self._on_time = on_time
        self._goodput: list[tuple[float, float]] = []
        self._presence: list[tuple[float, int]] = []
        self._began = time.perf_counter()

    def tick(self) -> None:
        """Note how the cluster is doing now."""
        world = self._world
        self._goodput.append((world.seconds, total_goodput(world) / world.spec.gpus))
        self._presence.append((world.seconds, world.cluster.live))
        if self._on_time is not None:
            self._on_time(world.seconds, world.ended)

    def outcome(
        self, policy: str, seed: int, promises: Mapping[int, bool] = NO_PROMISES, notes: Sequence[str] = ()
    ) -> Outcome:
        """Everything that is known at the end; `promises` say of jobs whether their deadline was promised."""
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
        present = self._presence
        return JobOutcome(
            name=submission.name,
            application=submission.application,
            submitted=submission.time,
            started=stretches[0].start - world.began if stretches else None,
            ended=ended,
            running_s=sum(a.end - a.start for a in stretches),
            gpu_s=held,
            lost_gpu_s=held - (training.trained_s if training is not None else 0.0),
            resizes=_resizes(training, stretches),
            fair_s=fair_seconds(app, submission.epochs, submission.time, ended, present, spec.gpus, spec.gpus_per_node),
            metric=app.metric_at(*((training.position.progress, training.batch) if training is not None else (0.0, 0))),
            target=app.target,
            elastic=submission.elastic,
            deadline=None if submission.deadline_s is None else submission.time + round(submission.deadline_s),
            promised=promises.get(job_id),
        )


def _resizes(training: Training | None, stretches: Sequence[Segment]) -> int:
    if training is not None and training.changes is not None:
        return training.changes
    return max(len(stretches) - 1, 0)


def _held(records: Sequence[SimulatedJob], now: float) -> Iterator[Segment]:
    """When a job held which GPUs: a run each, or of a job of blocks the time between two changes."""
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


def total_goodput(world: World) -> float:
    """Progress of all jobs now, in GPUs that would bring it at their best batch, each alone."""
    live = [world.trainings[job_id] for job_id in world.cluster.live_ids()]
    return sum(one.goodput / one.application.single_goodput(one.position.progress) for one in live)
