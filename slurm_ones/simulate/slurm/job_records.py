"""What a simulated Slurm keeps of jobs: a record each, and of an array one for all tasks that nothing sets apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slurm_ones.simulate.slurm.simulated_job import SimulatedJob, TaskArray
from slurm_ones.slurm.client import NotResizable, UnknownJob
from slurm_ones.slurm.model import Job, JobKey, Task


class JobRecords:
    """Job ids start at 1. A task that is set apart gets a new one; the last that is not has its array's."""

    def __init__(self, wait: Callable[[SimulatedJob], None]) -> None:
        """`wait` is called for a task that is set apart while it waits for its earliest start."""
        self.jobs: dict[int, SimulatedJob] = {}
        """All jobs ever submitted."""
        self.arrays: dict[int, TaskArray] = {}
        """All job arrays ever submitted, by their ids."""
        self.known: dict[int, SimulatedJob] = {}
        """Those that Slurm has not forgotten."""
        self._wait = wait

    def add(self, job: SimulatedJob) -> None:
        """A job was submitted."""
        self.jobs[job.job_id] = self.known[job.job_id] = job
        if job.array is not None:
            self.arrays[job.job_id] = job.array
            job.array.records.append(job)
            _give_program(job)

    def get(self, job_id: JobKey) -> SimulatedJob:
        """The job, or what Slurm keeps of that task; raises `UnknownJob` also for one that Slurm no longer knows."""
        if isinstance(job_id, Task):
            for record in self.known_of(job_id.array):
                if job_id.task in record.array_tasks:
                    return record
        elif job_id in self.known:
            return self.known[job_id]
        raise UnknownJob(f"job {job_id}: Invalid job id specified")

    def look(self, job_id: JobKey) -> Job:
        """As Slurm shows it; a task that waits with others as one of its own. Raises `UnknownJob`."""
        seen = self.get(job_id).to_model()
        return replace(seen, array_tasks=(job_id.task,)) if isinstance(job_id, Task) else seen

    def tasks(self, array_id: int) -> tuple[Job, ...]:
        """The tasks of an array that Slurm still knows, each as a job of its own, without those that were cancelled
        while they waited together; raises `UnknownJob` where it knows of no such job."""
        records = self.known_of(array_id)
        if not records:
            self.get(array_id)
        shown = [record for record in records if len(record.array_tasks) == 1 or not record.ended]
        numbers = sorted(task for record in shown for task in record.array_tasks)
        return tuple(self.look(Task(array_id, task)) for task in numbers)

    def of(self, job_id: int) -> list[SimulatedJob]:
        """All that a job ever was: itself, or the records of an array by their tasks; nothing if there is none."""
        array = self.arrays.get(job_id)
        if array is not None:
            return sorted(array.records, key=lambda r: r.array_tasks)
        return [self.jobs[job_id]] if job_id in self.jobs else []

    def known_of(self, array_id: int) -> list[SimulatedJob]:
        """What Slurm still knows of an array, by the tasks; nothing of what is none."""
        known = self.of(array_id) if array_id in self.arrays else []
        return [record for record in known if record.job_id in self.known]

    def named(self, job_id: JobKey) -> list[SimulatedJob]:
        """The jobs that a command for it means: one, a task that is now set apart, or all of an array."""
        if isinstance(job_id, Task):
            return [self.set_apart(self.get(job_id), job_id.task)]
        return self.known_of(job_id) or [self.get(job_id)]

    def waiting(self, job_id: JobKey) -> list[SimulatedJob]:
        """The jobs of that name that wait; raises `NotResizable` where none does."""
        waiting = [job for job in self.named(job_id) if job.pending]
        if not waiting:
            raise NotResizable(f"job {job_id}: Job is no longer pending execution")
        return waiting

    def set_apart(self, job: SimulatedJob, task: int) -> SimulatedJob:
        """That task of it as a record of its own: with a new id, or the array's for the last of its tasks."""
        array = job.array
        if array is None or len(job.array_tasks) < 2:
            return job
        apart = replace(
            job, job_id=len(self.jobs) + 1, array_tasks=(task,), gpus={}, events=[], allocations=[], _model=None
        )
        job.array_tasks = tuple(other for other in job.array_tasks if other != task)
        self.jobs[apart.job_id] = self.known[apart.job_id] = apart
        array.records.append(apart)
        if apart.begin:
            self._wait(apart)
        _give_program(apart)
        _give_program(job)
        return apart

    def live_ids(self) -> dict[int, None]:
        """What sbatch answered for the jobs that have not ended, in the order of submission."""
        return dict.fromkeys(job.main_id for job in self.known.values() if not job.ended)


def _give_program(job: SimulatedJob) -> None:
    """One task alone has its program."""
    if job.array is not None and len(job.array_tasks) == 1:
        job.program = job.array.program(Task(job.array.array_id, job.array_tasks[0]))
