"""A cluster for the contract of Slurm clients: jobs are submitted, watched, and gone at the end of a test."""

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
UNTIL_TOLD = "#!/bin/bash\ntrap 'exit 0' USR1\nsleep 300 &\nwait\n"
"""A script that ends with status 0 when `Site.finish` says so."""
OWNER, STRANGER, OPERATOR = "alice", "bob", "operator"
"""Clients: the owner of the jobs, another user, and somebody who may change everybody's jobs."""


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
"""Changes of a job, or of a task, by its key."""


def shape(job: SlurmJob) -> Shape:
    return Shape(job.nodes, job.gpus_per_node)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.05)


class Site(ABC):
    """A cluster and one kind of client of it.

    It has two partitions. `gpu`, the default, has the nodes n1 to n4 with 4 GPUs each that Slurm counts (GRES), and a
    time limit of one day. `whole` has the nodes w1 to w4, which Slurm hands out whole and knows no GPUs of. Nothing
    else runs there. If time is simulated, `until`, `now` and `pass_time` are overridden.
    """

    is_old = False
    """True for Slurm 22.05, which does not see task counts that stand only in a script."""

    def __init__(self) -> None:
        self._jobs: list[int] = []

    @abstractmethod
    def as_(self, user: str) -> SlurmClient:
        """The client as it works for `OWNER`, `STRANGER` or `OPERATOR`."""

    @abstractmethod
    def script(self, text: str) -> Path:
        """A batch script that everybody in the cluster can read."""

    @abstractmethod
    def cancel(self, *job_ids: int) -> None:
        """End the jobs, as an administrator."""

    @abstractmethod
    def close(self) -> None:
        """End the clients, and the cluster if it was started for the test."""

    @property
    def directory(self) -> Path:
        """Directory that jobs are submitted from."""
        return Path("/scratch")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until it holds; AssertionError naming `what` where it does not within `WAIT_S`."""
        until(holds, what)

    def now(self) -> float:
        """The time there."""
        return time.time()

    def pass_time(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    @property
    def owner(self) -> SlurmClient:
        """The client of the jobs' owner."""
        return self.as_(OWNER)

    def submit(self, *arguments: str, text: str = SLEEP, client: SlurmClient | None = None) -> int:
        """A job of the owner (or of the client's user), cancelled after the test."""
        options = ["--output=/dev/null", *arguments]
        return self.adopt((client or self.owner).submit(self.script(text), options, directory=self.directory))

    def adopt(self, job_id: int) -> int:
        """Let the job end with the test, too."""
        self._jobs.append(job_id)
        return job_id

    def running(self, *arguments: str, text: str = SLEEP) -> int:
        """A job of the owner that runs."""
        job_id = self.submit(*arguments, text=text)
        self.wait(job_id, lambda job: job.running, "RUNNING")
        return job_id

    def held(self, *arguments: str, text: str = SLEEP) -> int:
        """A job of the owner that its owner holds and that has never run."""
        return self.submit("--hold", *arguments, text=text)

    def requeued(self, *arguments: str, text: str = SLEEP) -> int:
        """A job of the owner that ran and was requeued into a hold."""
        job_id = self.running(*arguments, text=text)
        self.owner.requeue_hold(job_id)
        self.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        return job_id

    def blocks(self, *arguments: str) -> int:
        """A job array of the owner. Task 0 runs and ends on request; `arguments` say how many others wait."""
        array_id = self.submit(*arguments, text=UNTIL_TOLD)
        self.wait(Task(array_id, 0), lambda job: job.running, "RUNNING")
        return array_id

    def started(self, job_id: JobKey) -> None:
        """Wait until the script of a running job has set its signal trap, a moment after Slurm shows it as running.

        Override it if that can be seen."""
        self.pass_time(0.5)

    def finish(self, job_id: JobKey) -> SlurmJob:
        """Have a running job of the script `UNTIL_TOLD` end; the job as it is then."""
        self.started(job_id)
        self.owner.signal(job_id, "USR1", batch=True)
        return self.wait(job_id, lambda job: job.ended and not job.completing, "ended")

    def wait(self, job_id: JobKey, holds: Callable[[SlurmJob], bool], what: str) -> SlurmJob:
        """The job, once that holds."""
        client = self.owner
        self.until(lambda: holds(client.job(job_id)), f"job {job_id} {what}: {client.job(job_id)}")
        return client.job(job_id)

    def clear(self) -> None:
        """Cancel the test's jobs and wait until their nodes are free."""
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
