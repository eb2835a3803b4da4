"""Which of pytest's workers runs which file, and when: some wait for a Slurm while others compute.

Two workers begin with what needs a real Slurm, whose tests mostly wait, and have clusters; the others begin with the
rest. So the machine is neither idle for the first third of the time nor crowded for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ON_SLURM = (
    "tests/endtoend/",
    "tests/plugin/test_plugin.py",
    "tests/slurm/contract/",
    "tests/slurm/test_configured.py",
    "tests/slurm/test_limits.py",
    "tests/slurm/test_traps.py",
    "tests/slurm/test_types.py",
    "tests/templates/",
    "tests/test_cli.py",
    "tests/test_cluster_tool.py",
)
"""Files with tests that need a Slurm, by the beginnings of their names: who gives files out has seen no test."""
SLURM_WORKERS = ("gw0", "gw1")
MOST_COMPUTE = 3
"""So many workers go on once no file of `ON_SLURM` is left: more get into each other's way on two cores."""


def file_of(item: str) -> str:
    return item.split("::", 1)[0]


def in_order(items: Sequence[pytest.Item], long: tuple[str, ...]) -> list[pytest.Item]:
    """What needs a Slurm first, and of each kind the files that take long before the others: short ones fill the end.
    `long` is how the names of the longest tests begin. Raises `pytest.UsageError` for a file that `ON_SLURM` lacks.
    """
    slurm: dict[str, int] = {}
    """How many tests of each file need a Slurm."""
    heavy = {file_of(item.nodeid) for item in items if item.get_closest_marker("slow") or item.nodeid.startswith(long)}
    for item in items:
        if item.get_closest_marker("cluster"):
            file = file_of(item.nodeid)
            slurm[file] = slurm.get(file, 0) + (item.get_closest_marker("skip") is None)
            if not file.startswith(ON_SLURM):
                raise pytest.UsageError(f"{file} has a test that needs a Slurm: name it in ON_SLURM of {__file__}")

    def place(item: pytest.Item) -> tuple[bool, int, bool]:
        file = file_of(item.nodeid)
        return file not in slurm, -slurm.get(file, 0), file not in heavy

    return sorted(items, key=place)


class Mixed(LoadFileScheduling):
    """Gives files out."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        slurm = node.gateway.id in SLURM_WORKERS
        suits = next((file for file in self.workqueue if file.startswith(ON_SLURM) == slurm), None)
        if suits is not None:
            self.workqueue.move_to_end(suits, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node.gateway.id in SLURM_WORKERS and self._pending_of(self.assigned_work[node]) <= 2:
            working = [one for one in self.nodes if not one.shutting_down]
            if len(working) > MOST_COMPUTE and not any(file.startswith(ON_SLURM) for file in self.workqueue):
                node.shutdown()
        super()._reschedule(node)


def scheduler(config: pytest.Config, log: Producer) -> Mixed | None:
    """For `--dist loadfile`; None leaves it to xdist."""
    return Mixed(config, log) if config.getvalue("dist") == "loadfile" else None
