"""A real cluster as a site of the contract of clients."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_ones.slurm.model import JobKey
from slurm_ones.testing import site
from slurm_ones.testing.site import OPERATOR, OWNER, STRANGER, WAIT_S, until
from tests.cluster import Cluster, sites
from tests.slurm.remote import Remote

STARTED = "/scratch/started-{}-{}"
"""A file, by job and restart."""

__all__ = ["OPERATOR", "OWNER", "STRANGER", "WAIT_S", "Site", "until"]


class Site(site.Site):
    """A cluster and one kind of client of it. The operator is a real one, unprivileged, where the site accounts, and
    SlurmUser where it does not."""

    def __init__(self, cluster: Cluster, client_name: str) -> None:
        super().__init__()
        self.cluster, self.client_name = cluster, client_name
        self._remotes: dict[str, Remote] = {}
        self._scripts = 0

    @property
    def is_old(self) -> bool:
        """Whether it is 22.05."""
        return self.cluster.site.name.startswith("old")

    def as_(self, user: str) -> Remote:
        """The client as it works for that user."""
        if user == OPERATOR:
            user = sites.OPERATOR if self.cluster.accounting else "slurm"
        if user not in self._remotes:
            self._remotes[user] = Remote(self.cluster, self.client_name, user)
        return self._remotes[user]

    def adopt_client(self, remote: Remote) -> None:
        """Use this client for its user."""
        self._remotes[remote.user] = remote

    @property
    def owner(self) -> Remote:
        return self.as_(OWNER)

    def script(self, text: str) -> Path:
        """A batch script that everybody in the cluster can read. It says when it has set its trap, if it has one."""
        text = re.sub(
            r"^(trap .*)$",
            rf"\1\ntouch {STARTED.format('$SLURM_JOB_ID', '${SLURM_RESTART_COUNT:-0}')}",
            text,
            count=1,
            flags=re.MULTILINE,
        )
        self._scripts += 1
        name = f"{self.client_name}-{self._scripts}.sh"
        (self.cluster.scratch / name).write_text(text)
        return Path("/scratch", name)

    def started(self, job_id: JobKey) -> None:
        job = self.owner.job(job_id)
        path = self.cluster.scratch / Path(STARTED.format(job.job_id, job.restart)).name
        until(path.exists, f"the script of job {job_id}")

    def tell(self, *argv: str, user: str = OWNER) -> str:
        """What a command says in the cluster, be it a failure."""
        return self.as_(user).tell(*argv)

    def show(self, job_id: int) -> dict[str, str]:
        words = self.tell("scontrol", "-o", "show", "job", str(job_id)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def cancel(self, *job_ids: int) -> None:
        """End the jobs."""
        self.tell("scancel", *map(str, job_ids), user="root")

    def close(self) -> None:
        for remote in self._remotes.values():
            remote.close()
