"""What settings mean for blocks: a wrong guess costs a job its NVLink, or a submission that Slurm refuses."""

from __future__ import annotations

import pytest

from slurm_ones.slurm.parse import allows_arrays, hides_gpus
from tests.slurm.sites import Site


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        ({"TaskPlugin": "task/cgroup,task/affinity", "ConstrainDevices": "yes"}, True),
        ({"TaskPlugin": "task/cgroup", "ConstrainDevices": "no"}, False),
        ({"taskplugin": "cgroup,affinity", "constraindevices": "YES"}, True),
        # cgroup.conf may say so for nothing.
        ({"TaskPlugin": "task/affinity", "ConstrainDevices": "yes"}, False),
        ({"TaskPlugin": "(null)"}, False),
        ({"TaskPlugin": "task/none"}, False),
        ({"TaskPlugin": "task/cgroup"}, None),
        ({"TaskPlugin": "task/cgroup", "ConstrainDevices": "?"}, None),
        ({"ConstrainDevices": "yes"}, True),
        ({}, None),
    ],
)
def test_whether_gpus_of_others_are_hidden(config: dict[str, str], hidden: bool | None) -> None:
    """What is not shown is not guessed."""
    assert hides_gpus(config) is hidden


@pytest.mark.parametrize(
    ("size", "allowed"), [("1001", True), ("2", True), ("1", False), ("0", False), ("", True), ("UNLIMITED", True)]
)
def test_whether_arrays_are_allowed(size: str, allowed: bool) -> None:
    """A site bans them by MaxArraySize."""
    assert allows_arrays({"MaxArraySize": size} if size else {}) is allowed


@pytest.mark.cluster
def test_as_a_real_controller_shows_it(slurm: Site) -> None:
    """26.05 writes (null) and 22.05 task/none where there is no task plugin."""
    config = slurm.owner.config()
    assert (hides_gpus(config), allows_arrays(config)) == (False, True)
