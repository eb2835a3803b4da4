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

DEAR = frozenset(
    (
        "test_each_task_is_a_job_of_its_own",
        "test_how_a_job_ended",
        "test_a_deferred_job_waits_for_its_time_though_there_is_room",
        "test_blocks_come_and_go_beside_what_runs",
        "test_up_and_down_across_nodes",
        "test_a_signal_reaches_the_steps_and_the_script_on_demand",
        "test_task_counts_are_shown",
        "test_a_stranger_changes_nothing_of_an_array",
        "test_what_slurm_takes_in_part_is_rolled_back",
        "test_a_block_that_runs_is_requeued_alone",
        "test_tasks_that_wait_together_are_reshaped_at_once",
        "test_what_waits_is_cancelled_and_what_runs_goes_on",
        "test_a_requeued_job_is_seen_until_its_processes_are_gone",
        "test_start_now_skips_the_delay",
        "test_a_throttle_keeps_the_others_waiting_until_it_is_raised",
        "test_a_deferral_outlives_a_hold_and_a_reshape",
        "test_a_stranger_changes_nothing_of_a_waiting_job",
        "test_whole_nodes",
        "test_a_running_job_is_refused",
        "test_a_requeued_job_is_held_for_its_owner",
        "test_few_switches_are_a_wish",
    )
)
"""Clauses that take more than 3 s on 22.05: by day on 26.05 and the simulated Slurm, by night on all."""
OF_OLD = frozenset(
    ("test_several_times_while_held", "test_fewer_gpus_come_with_fewer_cpus", "test_more_gpus_come_with_more_cpus")
)
"""Such clauses that are hardest on 22.05: by day they run there and on the simulated Slurm."""


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
    """Of a contract for owner and operator each client is held to one by day, and by night to both. Dear clauses have
    one real Slurm by day."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        door = params.get("door", "")
        users = (door, params.get("user")) in (("gres-pyslurm", OWNER), ("old-command", OPERATOR))
        dear = getattr(item, "originalname", "") in {"old-command": DEAR, "gres-pyslurm": OF_OLD}.get(door, ())
        again = door == "simulated" and item.parent.name == "TestClients"  # as in TestBySite
        if users or dear or again:
            item.add_marker(pytest.mark.nightly)
