"""Cluster for tests of Slurm clients. Jobs that a test submits are cancelled after the test."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import SlurmClient, UnknownJob
from slurm_ones.slurm.model import JobKey, SlurmJob, Task

WAIT_S = 60.0
SLEEP = "#!/bin/bash\nexec sleep 300\n"
UNTIL_FINISHED = "#!/bin/bash\ntrap 'exit 0' USR1\nsleep 300 &\nwait\n"
"""Batch script that exits with code 0 at SIGUSR1, which `Site.finish` sends."""
OWNER, STRANGER, OPERATOR = "alice", "bob", "operator"
"""Users: the owner of the jobs, another user, and an operator, who may change all jobs."""


both = pytest.mark.parametrize("user", [OWNER, OPERATOR])
ELASTIC = ("--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1")

Call = Callable[[SlurmClient, Any], None]

CHANGING: Mapping[str, Call] = {
    "requeue_hold": lambda client, job: client.requeue_hold(job),
    "hold": lambda client, job: client.hold(job),
    "reshape": lambda client, job: client.reshape(job, Shape(2, 2)),
    "release": lambda client, job: client.release(job),
    "release later": lambda client, job: client.release(job, start_now=False),
    "signal": lambda client, job: client.signal(job, "KILL"),
}
"""Changes of a job or task, by name. Each is a function that takes a client and the job's key."""


def shape(job: SlurmJob) -> Shape:
    return Shape(job.nodes, job.gpus_per_node)


def until(holds: Callable[[], bool], what: str) -> None:
    """Check every 50 ms until `holds()` is true. After `WAIT_S` seconds, raise AssertionError with `what`, the state
    waited for."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.05)


class Site(ABC):
    """Cluster for tests, and its clients. Subclass it for a cluster of your own.

    The cluster must have two partitions and no other jobs. Partition `gpu` is the default: nodes n1 to n4 with 4 GPUs
    each (GRES), and a time limit of one day. Partition `whole` has nodes w1 to w4 without GRES, which are allocated
    whole. For a cluster in simulated time, override `until`, `now` and `pass_time`.
    """

    is_old = False
    """True for Slurm 22.05, which does not show `#SBATCH --ntasks=1` in a script."""

    def __init__(self) -> None:
        self._jobs: list[int] = []

    @abstractmethod
    def as_(self, user: str) -> SlurmClient:
        """Return the client of a user: `OWNER`, `STRANGER` or `OPERATOR`."""

    @abstractmethod
    def script(self, text: str) -> Path:
        """Write a batch script that all users of the cluster can read, and return its path."""

    @abstractmethod
    def cancel(self, *job_ids: int) -> None:
        """Cancel these jobs as an admin."""

    @abstractmethod
    def close(self) -> None:
        """Close the clients, and stop the cluster if this site has started it."""

    @property
    def directory(self) -> Path:
        """Directory from which jobs are submitted."""
        return Path("/scratch")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until `holds()` is true. After `WAIT_S` seconds, raise AssertionError with `what`, the state waited
        for."""
        until(holds, what)

    def now(self) -> float:
        """Return the cluster's time in Unix seconds."""
        return time.time()

    def pass_time(self, seconds: float) -> None:
        """Wait until this many seconds of the cluster's time have passed."""
        time.sleep(seconds)

    @property
    def owner(self) -> SlurmClient:
        """Client of the jobs' owner."""
        return self.as_(OWNER)

    def submit(self, *arguments: str, text: str = SLEEP, client: SlurmClient | None = None) -> int:
        """Submit a job as its owner, or as the user of `client`, and return its id. The job is cancelled after the
        test."""
        options = ["--output=/dev/null", *arguments]
        return self.adopt((client or self.owner).submit(self.script(text), options, directory=self.directory))

    def adopt(self, job_id: int) -> int:
        """Have this job cancelled after the test, and return its id."""
        self._jobs.append(job_id)
        return job_id

    def running(self, *arguments: str, text: str = SLEEP) -> int:
        """Submit a job, and return its id once it runs."""
        job_id = self.submit(*arguments, text=text)
        self.wait(job_id, lambda job: job.running, "RUNNING")
        return job_id

    def held(self, *arguments: str, text: str = SLEEP) -> int:
        """Submit a job with a user hold, and return its id. It has never run."""
        return self.submit("--hold", *arguments, text=text)

    def requeued(self, *arguments: str, text: str = SLEEP) -> int:
        """Submit a job, requeue it with a hold once it runs, and return its id."""
        job_id = self.running(*arguments, text=text)
        self.owner.requeue_hold(job_id)
        self.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        return job_id

    def blocks(self, *arguments: str) -> int:
        """Submit a job array, and return its id once task 0 runs. Each task runs until `finish` is called for it."""
        array_id = self.submit(*arguments, text=UNTIL_FINISHED)
        self.wait(Task(array_id, 0), lambda job: job.running, "RUNNING")
        return array_id

    def started(self, job_id: JobKey) -> None:
        """Wait until the script of a running job can receive a signal. Slurm shows a job as running shortly before its
        script starts.

        Override this if the cluster can show that the script has started.
        """
        self.pass_time(0.5)

    def finish(self, job_id: JobKey) -> SlurmJob:
        """End a running job that has the script `UNTIL_FINISHED`, and return the ended job."""
        self.started(job_id)
        self.owner.signal(job_id, "USR1", batch=True)
        return self.wait(job_id, lambda job: job.ended and not job.completing, "ended")

    def wait(self, job_id: JobKey, holds: Callable[[SlurmJob], bool], what: str) -> SlurmJob:
        """Wait until `holds(job)` is true, and return the job. `what` is the state waited for, for the error
        message."""
        client = self.owner
        self.until(lambda: holds(client.job(job_id)), f"job {job_id} {what}: {client.job(job_id)}")
        return client.job(job_id)

    def clear(self) -> None:
        """Cancel the test's jobs, and wait until their nodes are free."""
        if not self._jobs:
            return
        self.cancel(*self._jobs)
        for job_id in self._jobs:
            self.until(partial(self._is_gone, job_id), f"the end of job {job_id}")
        self._jobs.clear()

    def _is_gone(self, job_id: int) -> bool:
        try:
            job = self.owner.job(job_id)
            jobs = [job, *(self.owner.tasks(job_id) if job.array else ())]
        except UnknownJob:
            return True
        return all(job.ended and not job.completing for job in jobs)
