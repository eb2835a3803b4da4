"""The door to Slurm as every client opens it: the simulated one, PySlurm and the command line on 26.05, the command
line on 22.05."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.simulated import SimulatedSite
from tests.slurm.sites import OPERATOR, OWNER, Site

OTHERS = [f"gres-{name}" for name in os.environ.get("ONES_CLIENT", "").split(",") if name]
"""Clients of others, each as `package.module:Class`, that the contract shall run on as well."""
BY_DAY = ["gres-pyslurm", "old-command", *OTHERS]
REAL = [pytest.param(name, marks=pytest.mark.cluster) for name in BY_DAY]
REAL.append(pytest.param("gres-command", marks=[pytest.mark.cluster, pytest.mark.nightly]))


def _site(request: pytest.FixtureRequest, name: str) -> Site:
    if name == "simulated":
        return SimulatedSite()
    cluster_name, _, client = name.partition("-")
    cluster = request.getfixturevalue(cluster_name)
    if client == "pyslurm" and not cluster.pyslurm:
        pytest.skip(f"PySlurm: {cluster.pyslurm_why}")
    return Site(cluster, client)


@pytest.fixture(scope="session", params=["simulated", *REAL])
def door(request: pytest.FixtureRequest) -> Iterator[Site]:
    """One cluster and one kind of client, for the session."""
    site = _site(request, request.param)
    yield site
    site.close()


@pytest.fixture
def site(door: Site) -> Iterator[Site]:
    """What a contract test works with; its jobs end with it."""
    yield door
    door.clear()


@pytest.fixture(scope="session", params=["gres-command", "old-command"])
def slurm_door(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Each Slurm once, whatever the client."""
    site = _site(request, request.param)
    yield site
    site.close()


@pytest.fixture
def slurm(slurm_door: Site) -> Iterator[Site]:
    """A Slurm to try facts on; its jobs end with the test."""
    yield slurm_door
    slurm_door.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a contract for owner and operator each client is held to one by day, and by night to both; each client meets
    an outage on one of the sites."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        users = (params.get("door"), params.get("user")) in (("gres-pyslurm", OWNER), ("old-command", OPERATOR))
        if users or (params.get("outage"), params.get("site")) == ("gres", "command"):
            item.add_marker(pytest.mark.nightly)
