"""Jobs on a cluster, for tests: submitted, watched, and gone at the end of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurm_ones.slurm.client import SlurmClient, UnknownJob
from slurm_ones.slurm.model import Job
from tests.cluster import Cluster, sites
from tests.slurm.remote import Remote

WAIT_S = 20.0
SLEEP = "#!/bin/bash\nexec sleep 300\n"
OWNER, STRANGER, OPERATOR = "alice", "bob", "operator"
"""Who asks. The operator is a real one, unprivileged, where the site accounts, and SlurmUser where it does not."""


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.05)


@dataclass
class Site:
    """A cluster and one kind of client of it."""

    cluster: Cluster
    client_name: str
    _remotes: dict[str, Remote] = field(default_factory=dict)
    _jobs: list[int] = field(default_factory=list)
    _scripts: int = 0

    @property
    def is_old(self) -> bool:
        """Whether it is 22.05."""
        return self.cluster.site.name == "old"

    def as_(self, user: str) -> Remote:
        """The client as it works for that user."""
        if user == OPERATOR:
            user = sites.OPERATOR if self.cluster.accounting else "slurm"
        if user not in self._remotes:
            self._remotes[user] = Remote(self.cluster, self.client_name, user)
        return self._remotes[user]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until it holds."""
        until(holds, what)

    def now(self) -> float:
        """The time there."""
        return time.time()

    def pass_time(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def adopt_client(self, remote: Remote) -> None:
        """Use this client for its user."""
        self._remotes[remote.user] = remote

    @property
    def owner(self) -> Remote:
        return self.as_(OWNER)

    def script(self, text: str) -> Path:
        """A batch script that everybody in the cluster can read."""
        self._scripts += 1
        name = f"{self.client_name}-{self._scripts}.sh"
        (self.cluster.scratch / name).write_text(text)
        return Path("/scratch", name)

    def submit(self, *arguments: str, text: str = SLEEP, client: SlurmClient | None = None) -> int:
        """A job of the owner (or of the client's user), cancelled after the test."""
        options = ["--output=/dev/null", *arguments]
        return self.adopt((client or self.owner).submit(self.script(text), options, directory=Path("/scratch")))

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

    def wait(self, job_id: int, holds: Callable[[Job], bool], what: str) -> Job:
        """The job, once that holds."""
        client = self.owner
        self.until(lambda: holds(client.job(job_id)), f"job {job_id} {what}: {client.job(job_id)}")
        return client.job(job_id)

    def tell(self, *argv: str, user: str = OWNER) -> str:
        """What a command says in the cluster, be it a failure."""
        return self.as_(user).tell(*argv)

    def show(self, job_id: int) -> dict[str, str]:
        """The job as `scontrol show job` prints it."""
        words = self.tell("scontrol", "-o", "show", "job", str(job_id)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def clear(self) -> None:
        """Cancel the test's jobs and wait until their nodes are free."""
        if not self._jobs:
            return
        self.tell("scancel", *map(str, self._jobs), user="root")
        for job_id in self._jobs:
            self.until(partial(self._is_gone, job_id), f"the end of job {job_id}")
        self._jobs.clear()

    def _is_gone(self, job_id: int) -> bool:
        try:
            job = self.owner.job(job_id)
        except UnknownJob:
            return True
        return job.ended and not job.completing

    def close(self) -> None:
        """End the clients."""
        for remote in self._remotes.values():
            remote.close()
