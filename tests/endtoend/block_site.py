"""Where a companion of jobs of blocks works, and for whom."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from slurm_ones.slurm.model import JobState
from tests.cluster import Cluster
from tests.endtoend.harness import Harness
from tests.endtoend.light_blocks import END

QUICK = "max_wait_s = 30\nadvance_s = 0.1"
SITES = ("gres owner", "gres operator whole", "old owner whole", "old operator")
"""Half of all sites: any two of their words are together in one."""


def sites(whole: bool = False) -> list[Any]:
    """Parameters of a test: the sites, of which all but the first are for the night; or only those of whole nodes."""
    kept = [words for words in SITES if not whole or words.endswith("whole")]
    return [pytest.param(words, marks=pytest.mark.nightly if words != SITES[0] else ()) for words in kept]


@dataclass
class Site:
    """Where a companion works, and for whom."""

    harness: Harness
    owner: bool
    whole: int = 0
    """GPUs of a node, where nodes are handed out whole; else 0."""

    def __post_init__(self) -> None:
        self.user = "alice" if self.owner else self.harness.operator
        self.inside = f"/scratch/{self.harness.spool(self.user).name}"

    @classmethod
    def of(cls, request: pytest.FixtureRequest, words: str, gpus: int) -> Site:
        """The site of words such as "old operator" or "gres owner whole"; whole nodes have so many GPUs."""
        name, who, *whole = words.split()
        cluster: Cluster = request.getfixturevalue(name)
        return cls(Harness(cluster), who == "owner", gpus if whole else 0)

    @property
    def unit(self) -> int:
        """The fewest GPUs of a job."""
        return self.whole or 1

    def submit(self, *options: str, **env: str) -> int:
        """A job of blocks that trains nothing."""
        # Its batch script asks for GPUs of nodes that Slurm knows them of.
        options, env = self.asked((*options, "--gres=none") if self.whole else options, env)
        job_id = self.harness.blocks(*options, **env)
        self.harness.membership(job_id, lambda m: m.why == "first", "first membership")
        return job_id

    def asked(self, options: tuple[str, ...], env: dict[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Options and environment with which a job is submitted here."""
        env = env if self.owner else {"ONES_SPOOL": self.inside, **env}
        if not self.whole:
            return options, env
        whole = ("--partition=whole", "--comment=ones: nodes=1-4 batch=16-64 array=blocks")
        return (*options, *whole), {"ONES_GPUS_PER_NODE": str(self.whole), **env}

    def settings(self, resize: str = QUICK, **top: str) -> str:
        scope = {"scope": '"own"'} if self.owner else {"scope": '"all"', "spool": f'"{self.inside}"'}
        whole = {"whole_node_gpus": f"{{whole = {self.whole}}}"} if self.whole else {}
        return self.harness.settings(self.user, resize=resize, **scope, **whole, **top)

    def start(self, settings: str, steps: dict[int, Any]) -> subprocess.Popen[str]:
        """A companion whose policy wants these sizes."""
        return self.harness.scripted(settings, steps, user=self.user)

    def resize(self, settings: str, steps: dict[int, Any], timeout_s: float = 120.0) -> None:
        """Have the companion reach these sizes, and end."""
        process = self.start(settings, steps)
        try:
            assert process.wait(timeout_s) == 0, self.harness.companion_log(settings)[-6000:]
        except subprocess.TimeoutExpired:
            tasks = [self.harness.tasks(job_id) for job_id in steps]
            log = self.harness.companion_log(settings)[-6000:]
            raise AssertionError(f"not within {timeout_s:.0f} s: {steps}, {tasks}\n{log}") from None

    def ends(self, job_id: int, settings: str) -> None:
        """Let a job that trains nothing end. It ends well, whatever of it waits is cancelled, and the next companion
        finds so."""
        (self.harness.directory(job_id) / END).touch()
        self.harness.ended(job_id)
        assert {task.state for task in self.harness.tasks(job_id).values()} <= {"COMPLETED", "CANCELLED"}
        self.resize(settings, {})
        with self.harness.store(settings) as store:
            assert store.jobs([job_id])[job_id].state == JobState.COMPLETED.value
