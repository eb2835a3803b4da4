"""A job of blocks as Slurm has it: the tasks of its array, and which of them live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ones_db import ResizeRecord
from slurm_ones.rules.blocks import task_of
from slurm_ones.slurm.client import SlurmClient, UnknownJob
from slurm_ones.slurm.model import Job, Task


@dataclass(frozen=True)
class Array:
    """A job of blocks as Slurm has it now."""

    job: Job
    """By which its orders and reports are found: one of its tasks, under the id of the array."""
    tasks: Mapping[int, Job]

    @property
    def alive(self) -> bool:
        """Whether a block runs, or may start without us."""
        return any(is_alive(job) for job in self.tasks.values())

    def key(self, task: int) -> Task:
        return Task(self.job.job_id, task)


def is_alive(job: Job) -> bool:
    """Whether the block runs, is about to end, or may start without us."""
    return job.completing or not (job.ended or (job.pending and job.held))


def look_at(client: SlurmClient, job_id: int) -> Array:
    """A job of blocks as Slurm has it now; raises `UnknownJob`."""
    tasks = {task_of(job): job for job in client.tasks(job_id)}
    if not tasks:
        raise UnknownJob(f"job {job_id}: Slurm knows none of its tasks")
    one = min(tasks.values(), key=lambda job: (not job.running, job.ended, task_of(job)))
    return Array(replace(one, job_id=job_id), tasks)


def job_of(client: SlurmClient, resize: ResizeRecord) -> Job:
    """The job as it is now; of a job of blocks that waits the task that it is to start with, or all of them where they
    change together. Raises `UnknownJob`."""
    if not resize.added:
        job = client.job(resize.job_id)
        if resize.restart >= 0 or job.array_id != job.job_id or len(job.array_tasks) < 2:
            return job
        # One of them may run by now.
        array = look_at(client, resize.job_id)
        return replace(array.job, array_tasks=tuple(sorted(array.tasks)))
    return replace(client.job(Task(resize.job_id, resize.added[0][0])), job_id=resize.job_id)


def held_in_part(client: SlurmClient, resize: ResizeRecord, job: Job) -> bool:
    """Whether somebody holds tasks of a waiting array that is about to be held, and later released, as a whole."""
    if resize.added or job.array_id != job.job_id:
        return False
    return any(one.pending and one.held for one in client.tasks(job.job_id))
