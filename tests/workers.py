"""Which of pytest's workers runs which file, and when: some wait for a Slurm while others compute.

Two workers begin with what needs a real Slurm, whose tests mostly wait, and have clusters; the others begin with the
wrapper's. So the machine is neither idle for the first third of the time nor crowded for the others.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from execnet import XSpec
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests import forks, loaded
from tests.cluster.paths import REPOSITORY

BY_FIXTURE = "tests/slurm/contract/"
"""A folder whose tests have the mark from a fixture's parameters."""
OF_RANKS = "tests/wrapper/"
SLURM_WORKERS = ("gw0", "gw1")
MOST_COMPUTE = 3
"""Workers that go on once no file that needs a Slurm is left: more get into each other's way on two cores."""


def file_of(item: str) -> str:
    return item.split("::", 1)[0]


@cache
def on_slurm(file: str) -> bool:
    """Tell by its text whether a file has tests that need a Slurm: who gives files out has seen no test."""
    return file.startswith(BY_FIXTURE) or "mark.cluster" in (REPOSITORY / file).read_text()


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files with a Slurm first, and of each kind those with slow tests before the others: short ones fill the end.
    Raises `pytest.UsageError` if `on_slurm` does not know a file with tests that need a Slurm."""
    marked = {
        mark: Counter(file_of(item.nodeid) for item in items if item.get_closest_marker(mark))
        for mark in ("cluster", "slow")
    }
    if unknown := [file for file in marked["cluster"] if not on_slurm(file)]:
        raise pytest.UsageError(f"{unknown[0]} has a test that needs a Slurm: name it in {__file__}")

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        file = file_of(item.nodeid)
        return not marked["cluster"][file], not marked["slow"][file], -marked["cluster"][file]

    return sorted(items, key=place)


class Mixed(LoadFileScheduling):
    """Gives files out."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        slurm = node.gateway.id in SLURM_WORKERS

        def suits_less(file: str) -> tuple[bool, bool]:
            return on_slurm(file) != slurm, file.startswith(OF_RANKS) == slurm

        self.workqueue.move_to_end(min(self.workqueue, key=suits_less), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node.gateway.id in SLURM_WORKERS and self._pending_of(self.assigned_work[node]) <= 2:
            working = [one for one in self.nodes if not one.shutting_down]
            if len(working) > MOST_COMPUTE and not any(map(on_slurm, self.workqueue)):
                node.shutdown()
        super()._reschedule(node)


def scheduler(config: pytest.Config, log: Producer) -> Mixed | None:
    """For `--dist loadfile`; None leaves it to xdist."""
    return Mixed(config, log) if config.getvalue("dist") == "loadfile" else None


def fork(config: pytest.Config, specs: Sequence[XSpec]) -> None:
    """Have workers be forks of a process that has imported the tests: each would do it for 10 s of the processor."""
    loaded.start(config.args)
    command = [sys.executable, forks.__file__, str(loaded.folder() / loaded.ALL)]
    command += [str(os.getuid()), str(os.getgid()), str(Path.cwd()), "--", loaded.WORKER]
    for spec in specs:
        spec.python = shlex.join(command)
