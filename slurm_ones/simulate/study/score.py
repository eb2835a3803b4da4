"""What became of each job of a simulated world, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_ones.simulate.engines.world import World
from slurm_ones.simulate.slurm.timeline import EPOCH
from slurm_ones.simulate.study.fairness import fair_seconds
from slurm_ones.simulate.study.result import JobOutcome, Segment
from slurm_ones.simulate.workloads.workload import Submission
from slurm_ones.slurm.model import JobState


def outcome(world: World, submission: Submission, presence: Sequence[tuple[float, int]]) -> JobOutcome:
    """One submission's; `presence` is (seconds, jobs in the system) in order."""
    app = world.workload.applications[submission.application]
    job = world.cluster.jobs[world.job_ids[submission.name]]
    training = world.trainings[job.job_id]
    ended = job.end_time - EPOCH if job.state is JobState.COMPLETED else None
    held = sum((a.end - a.start) * sum(a.gpus.values()) for a in job.allocations)
    return JobOutcome(
        name=submission.name,
        application=submission.application,
        submitted=submission.time,
        started=job.allocations[0].start - EPOCH if job.allocations else None,
        ended=ended,
        running_s=sum(a.end - a.start for a in job.allocations),
        gpu_s=held,
        lost_gpu_s=held - training.trained_s,
        resizes=max(len(job.allocations) - 1, 0),
        fair_s=fair_seconds(
            app, submission.epochs, submission.time, ended, presence, world.spec.gpus, world.spec.gpus_per_node
        ),
        metric=app.metric_at(training.position.progress, training.batch),
        target=app.target,
        elastic=submission.elastic,
    )


def segments(world: World) -> Iterator[Segment]:
    """The runs of all jobs."""
    for job in world.cluster.jobs.values():
        for a in job.allocations:
            name = job.request.name
            yield Segment(name, a.start - EPOCH, a.end - EPOCH, sum(a.gpus.values()), len(a.gpus), a.batch)


def goodput(world: World) -> float:
    """Progress of all jobs now, in GPUs that would bring it at their best batch, each alone."""
    return sum(
        training.goodput / training.application.single_goodput(training.position.progress)
        for job_id, training in world.trainings.items()
        if not world.cluster.jobs[job_id].ended
    )
