"""Partitions that share nodes, limits, licenses, reservations and preemption, as real Slurms were seen to do them.

The rows were tried on a real 26.05 and 22.05; seconds are what the simulated scheduler takes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PartitionSpec, PreemptMode, Qos, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import JobState, Reservation, Task
from tests.simulate.harness import Harness

NODES = ("n1", "n2", "n3", "n4")
PARTITIONS = (
    PartitionSpec("gpu", NODES, 4, cpus_per_node=16, memory_mb=4000),
    PartitionSpec("other", NODES, 4, cpus_per_node=16, memory_mb=4000, default=False),
    PartitionSpec("high", NODES, 4, cpus_per_node=16, memory_mb=4000, default=False, tier=2),
    PartitionSpec("whole", NODES, 4, True, cpus_per_node=16, memory_mb=4000, default=False),
)
NORMAL, GUEST = Qos("normal", 10, ("guest",)), Qos("guest", 0, mode="cancel")
SERVED_S = 6.0
"""Two scheduling passes and the time that a guest takes to leave."""
GONE_S = 60.0
"""A guest's 15 s, and a round of backfill."""


class Taken(Faults):
    """When guests were first preempted for each job, on which nodes, and which jobs before it lacked a licence then."""

    def __init__(self) -> None:
        self.since: dict[int, float] = {}
        self._lacked: dict[int, set[int]] = {}
        self._freed: dict[int, set[str]] = {}

    def begin(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def preempted(self, job: SimulatedJob, mode: PreemptMode, winner: int) -> None:
        self.since.setdefault(winner, self._cluster.timeline.now)
        self._lacked.setdefault(winner, {other for other in self._lacking() if other < winner})
        self._freed.setdefault(winner, set()).update(job.gpus)

    def overtaken(self, winner: int) -> bool:
        """Whether a job before it got a licence or nodes freed for it, or a job for which no guest left has started."""
        started = [job for job in self._cluster.jobs.values() if job.start_time >= self.since[winner]]
        took = any(job.job_id < winner and self._freed[winner] & {*job.node_list} for job in started)
        at_once = any(job.job_id not in self.since for job in started)
        return took or at_once or bool(self._lacked[winner] - self._lacking())

    def _lacking(self) -> set[int]:
        """Jobs for which no licence is left: those before them wait for as many as are free."""
        asking = [entry.job_id for entry in self._cluster.queue() if entry.of.licenses]
        return set(asking[self._cluster.snapshot().licenses.get("matlab", 0) :])


def conf(**other: Any) -> SlurmConf:
    values = {"qos": (NORMAL, GUEST), "licenses": {"matlab": 3}, "kill_wait_s": 5.0, **other}
    return SlurmConf(**values)


def full(site: SlurmConf, **guest: Any) -> tuple[Harness, int, list[int]]:
    """All 16 GPUs in use: by a base block of one, and guests of three and thrice four."""
    harness = Harness(partitions=PARTITIONS, conf=site)
    base = harness.running(1, 1, cpus_per_node=4, memory_mb=500)
    guest = {"qos": "guest", "stop_s": 0.5, "memory_mb": 3500, **guest}
    guests = [harness.running(1, gpus, cpus_per_node=4 * gpus, **guest) for gpus in (3, 4, 4, 4)]
    assert harness.free() == [0, 0, 0, 0]
    return harness, base, guests


def preempted(harness: Harness, guests: list[int]) -> list[int]:
    return [i for i, job_id in enumerate(guests) if not harness.inside(job_id).running]


@pytest.mark.parametrize(
    ("asked", "site", "taken"),
    [
        ({"gpus": 1, "partition": "other"}, {}, 1),
        ({"gpus": 1, "partition": "high"}, {}, 1),
        ({"gpus": 1}, {}, 1),
        ({"gpus": 1, "partition": "gpu,other"}, {}, 1),
        ({"nodes": 3, "gpus": 4}, {}, 3),
        ({"cpus_per_node": 16}, {}, 1),
        ({"cpus_per_node": 2}, {}, 1),
        ({"gpus": 1, "node_names": ("n3",)}, {}, 1),
        ({"gpus": 3, "node_names": ("n1",)}, {}, 1),
        ({"memory_mb": 3000}, {}, 1),
        ({"partition": "whole", "nodes": 1}, {}, 1),
        ({"partition": "whole", "nodes": 3}, {}, 3),
        ({"gpus": 1, "exclusive": True}, {}, 1),
        ({"cpus_per_node": 0, "licenses": (("matlab", 1),)}, {"licenses": {"matlab": 4}, "reclaim_licenses": True}, 1),
    ],
    ids=str,
)
def test_a_job_is_served_by_preemption_alone(asked: dict[str, Any], site: dict[str, Any], taken: int) -> None:
    """Whatever it waits for; no more guests go than it takes, and no base block."""
    harness, base, guests = full(conf(**site), licenses=asked.get("licenses", ()))
    job_id = harness.submit(**asked)
    harness.wait(SERVED_S)
    assert harness.job(job_id).running
    assert len(preempted(harness, guests)) == taken
    assert harness.inside(base).running
    if "node_names" in asked:
        assert harness.job(job_id).node_list == asked["node_names"]


def test_licenses_are_waited_for_unless_slurm_reclaims_them() -> None:
    harness = Harness(partitions=PARTITIONS, conf=conf())
    guests = [harness.running(1, 1, qos="guest", licenses=(("matlab", 1),)) for _ in range(3)]
    job_id = harness.submit(1, licenses=(("matlab", 1),))
    other = harness.submit(1, 1)
    harness.wait(60)
    assert (harness.job(job_id).reason, preempted(harness, guests)) == ("Licenses", [])
    assert harness.job(other).running, "who waits for licenses holds nobody up"
    harness.cluster.cancel(guests[1])
    harness.wait(SERVED_S)
    assert harness.job(job_id).running


@pytest.mark.parametrize(
    ("site", "guest", "own", "reason"),
    [
        # What guests of the same account hold counts against its limit, though GPUs are idle.
        ({"account_gpus": {"lab": 5}}, {"account": "lab"}, {"account": "lab"}, "AssocGrpGRES"),
        # A limit of the guests' QOS takes the place of their account's, and not of the others'.
        ({"qos": (NORMAL, GUEST._replace(gpus=9)), "account_gpus": {"lab": 5}}, {"account": "lab"},
         {"account": "lab"}, "AssocGrpGRES"),
        # In an account of their own they touch it no more.
        ({"account_gpus": {"lab": 5}}, {"account": "guests"}, {"account": "lab"}, ""),
        ({"qos": (NORMAL._replace(user_gpus=4), GUEST)}, {}, {}, ""),
        ({"qos": (NORMAL._replace(user_gpus=2), GUEST)}, {}, {}, "QOSMaxGRESPerUser"),
        ({"qos": (NORMAL._replace(gpus=2), GUEST)}, {}, {}, "QOSGrpGRES"),
    ],
)  # fmt: skip
def test_limits(site: dict[str, Any], guest: dict[str, Any], own: dict[str, Any], reason: str) -> None:
    """One GPU is the base block's, four are a guest's, and two more are asked for."""
    harness = Harness(partitions=PARTITIONS, conf=conf(**site))
    harness.running(1, 1, **own)
    harness.running(1, 4, qos="guest", **guest)
    job_id = harness.submit(1, 2, **own)
    harness.wait(SERVED_S)
    assert (harness.job(job_id).running, harness.job(job_id).pending) == (not reason, bool(reason))
    assert reason == "" or harness.job(job_id).reason == reason


def test_nobody_is_preempted_in_vain() -> None:
    """A job that would not fit beside the base block waits, and a short one behind it takes one guest."""
    harness, base, guests = full(conf())
    impossible = harness.submit(4, 4, time_limit_s=3600.0)
    harness.wait(60)
    assert (harness.job(impossible).reason, preempted(harness, guests)) == ("Resources", [])
    short = harness.submit(1, 1, time_limit_s=300.0)
    harness.wait(60)
    assert harness.job(short).running and len(preempted(harness, guests)) == 1
    assert harness.inside(base).running


def test_nobody_is_preempted_on_nodes_that_wait_for_another_job() -> None:
    """The first job waits for a base block, and keeps three nodes: of those behind it who needs one is served, though
    he asks for another partition, and who needs two takes no guest."""
    harness, base, guests = full(conf())
    first, one = harness.submit(3, 4, node_names=("n1",)), harness.submit(1, 1, partition="other")
    harness.wait(60)
    assert (harness.job(one).running, preempted(harness, guests)) == (True, [3])
    two = harness.submit(2, 1)
    harness.wait(60)
    assert (harness.job(first).pending, harness.job(two).pending, preempted(harness, guests)) == (True, True, [3])
    harness.cluster.cancel(base)
    harness.wait(60)
    assert harness.job(first).running


WISH = st.fixed_dictionaries(
    {
        "nodes": st.integers(1, 4),
        "gpus": st.integers(0, 4),
        "partition": st.sampled_from(("gpu", "other")),
        "time_limit_s": st.sampled_from((86400.0, 600.0, 7200.0)),
        "node_names": st.sampled_from(((), (), ("n1",), ("n3",))),
        "licenses": st.sampled_from(((), (), (("matlab", 1),))),
    }
)
HOLDER = st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from((3600.0, 0.0)), st.booleans())


def wish(nodes: int, gpus: int, **other: Any) -> dict[str, Any]:
    plain = {"partition": "gpu", "time_limit_s": 86400.0, "node_names": (), "licenses": ()}
    return {"nodes": nodes, "gpus": gpus, **plain, **other}


@example(  # The second job keeps nodes until the others end, and none is taken for the third, which would delay it.
    [(1, True, 3600.0, False), (3, False, 3600.0, False), (4, False, 3600.0, False), (4, True, 3600.0, False)],
    [wish(2, 0), wish(2, 4), wish(2, 0)],
)
@example(  # The first job ends before the second may start, which has nodes kept for then.
    [(4, True, 0.0, False), (1, False, 3600.0, False), (4, True, 3600.0, False)],
    [
        wish(3, 2, partition="other", time_limit_s=600.0),
        wish(3, 3, time_limit_s=600.0, node_names=("n3",)),
        wish(3, 2, time_limit_s=7200.0, node_names=("n3",)),
    ],
)
@given(st.lists(HOLDER, min_size=1, max_size=10), st.lists(WISH, min_size=1, max_size=6))
def test_who_is_preempted_is_preempted_for_a_job_that_starts(
    holders: list[tuple[int, bool, float, bool]], wishes: list[dict[str, Any]]
) -> None:
    """Whoever waits before it: it runs by the next round of both schedulers, unless another takes its place.

    Slurm keeps no place for who waits for licenses, and plans each round from the start: who starts may choose nodes
    freed for another, and any start may move what is kept. A later job's limit is shorter by more than guests
    take, as a start that they delay moves what is planned behind it.
    """
    taken = Taken()
    site = conf(qos=(NORMAL, GUEST._replace(grace_s=20.0)), reclaim_licenses=True)
    harness = Harness(partitions=PARTITIONS[:2], conf=site, faults=taken)
    for gpus, guest, limit_s, licensed in holders:
        licenses = (("matlab", 1),) if licensed else ()
        qos = "guest" if guest else "normal"
        asked = {"qos": qos, "time_limit_s": limit_s, "licenses": licenses, "cpus_per_node": 4 * gpus}
        job_id = harness.submit(1, gpus, stop_s=15.0, **asked)
        harness.wait(2)
        if not harness.job(job_id).running:
            harness.cluster.cancel(job_id)
    for place, wished in enumerate(wishes):
        limit_s = wished["time_limit_s"] - GONE_S * place
        with suppress(Refused):
            harness.submit(**{**wished, "time_limit_s": limit_s, "cpus_per_node": 4 * wished["gpus"] or 4})
        harness.wait(3)
    for _ in range(12):
        harness.wait(10)
        for job_id, since in taken.since.items():
            late = harness.timeline.now - since > GONE_S and harness.job(job_id).pending
            assert not late or taken.overtaken(job_id), f"job {job_id} still waits"


def test_a_guest_that_waits_delays_nobody() -> None:
    harness, _, guests = full(conf())
    waiting = harness.submit(1, 4, qos="guest")
    harness.wait(5)
    ordinary = harness.submit(1, 1)
    harness.wait(SERVED_S)
    assert (harness.job(waiting).pending, harness.job(ordinary).running) == (True, True)
    assert len(preempted(harness, guests)) == 1


@pytest.mark.parametrize(
    ("site", "first", "taken"),
    [({}, "guest", 1), ({"youngest_first": True}, "guest", 2), ({"youngest_first": True}, "scrap", 0)],
)
def test_who_goes_first(site: dict[str, Any], first: str, taken: int) -> None:
    """The lowest QOS, then who is on the fewest nodes, then the youngest if asked: GPUs do not count."""
    three = (Qos("normal", 10, ("guest", "scrap")), GUEST, Qos("scrap", -1, mode="cancel"))
    harness = Harness(partitions=PARTITIONS, conf=conf(qos=three, **site))
    guests = [harness.running(nodes, 4, qos=qos) for nodes, qos in ((2, first), (1, "guest"), (1, "guest"))]
    harness.submit(1, 1)
    harness.wait(SERVED_S)
    assert preempted(harness, guests) == [taken]


@pytest.mark.parametrize(("stop_s", "grace_s", "served"), [(0.5, 30.0, 3), (60.0, 0.0, 8), (60.0, 30.0, 38)])
def test_grace_time(stop_s: float, grace_s: float, served: float) -> None:
    """Who leaves by himself is waited for no longer; who does not is killed after the grace time and KillWait."""
    harness, _, _ = full(conf(qos=(NORMAL, GUEST._replace(grace_s=grace_s))), stop_s=stop_s)
    job_id = harness.submit(1, 4)
    began = harness.timeline.now
    while not harness.job(job_id).running:
        harness.wait(0.5)
    assert harness.timeline.now - began == pytest.approx(served, abs=1.0)


def test_an_exempt_time_and_a_qos_that_does_not_list_the_guests() -> None:
    harness, _, guests = full(conf(qos=(NORMAL, GUEST._replace(exempt_s=40.0), Qos("rude", 10))))
    rude, job_id = harness.submit(1, 1, qos="rude", priority=0), harness.submit(1, 1)
    harness.wait(20)
    assert preempted(harness, guests) == []
    harness.cluster.hold(rude)
    harness.wait(60)
    assert harness.job(job_id).running and len(preempted(harness, guests)) == 1


def test_preemption_by_partition() -> None:
    """Of a higher tier, whatever the QOS, and without an array's other tasks."""
    scavenge = PartitionSpec("scavenge", NODES, 4, default=False, tier=0, preempt="cancel")
    harness = Harness(partitions=(PartitionSpec("gpu", NODES, 4), scavenge))
    array = harness.submit(1, 4, array_tasks=(0, 1, 2, 3), partition="scavenge", stop_s=0.5)
    harness.wait(3)
    job_id = harness.submit(2, 4)
    harness.wait(SERVED_S)
    states = [task.state for task in harness.owner.tasks(array)]
    assert harness.job(job_id).running
    assert sorted(states) == [JobState.PREEMPTED, JobState.PREEMPTED, JobState.RUNNING, JobState.RUNNING]
    lost = states.index(JobState.PREEMPTED)
    harness.owner.reuse(Task(array, lost))
    assert harness.owner.job(Task(array, lost)).held


def test_a_job_of_several_partitions_starts_in_the_first_with_room() -> None:
    parts = (PartitionSpec("gpu", NODES[:2], 4), PartitionSpec("more", NODES[2:], 4, default=False))
    harness = Harness(partitions=parts)
    harness.running(2, 4)
    job_id = harness.submit(2, 4, partition="gpu,more")
    assert harness.job(job_id).partitions == ("gpu", "more")
    harness.wait(2)
    assert (harness.job(job_id).partitions, harness.job(job_id).node_list) == (("more",), ("n3", "n4"))


def test_a_first_job_keeps_the_nodes_that_its_partition_shares() -> None:
    harness = Harness(partitions=PARTITIONS[:2])
    harness.running(4, 3)
    large, small = harness.submit(1, 4), harness.submit(1, 1, partition="other")
    harness.wait(2)
    assert (harness.job(large).reason, harness.job(small).pending) == ("Resources", True)


def test_reserved_nodes() -> None:
    """A job whose limit reaches into the reservation waits, and runs once it is short enough."""
    begins = 1000.0 + 1800
    site = conf(reservations=(Reservation("maintenance", NODES, begins, begins + 3600),))
    harness = Harness(partitions=PARTITIONS[:1], conf=site)
    long = harness.submit(1, 1, time_limit_s=3600.0)
    short = harness.submit(1, 1, time_limit_s=1200.0)
    named = harness.submit(1, 1, time_limit_s=3600.0, node_names=("n2",))
    inside = harness.submit(1, 1, time_limit_s=3600.0, reservation="maintenance")
    harness.wait(5)
    assert [harness.job(id_).running for id_ in (long, short, named, inside)] == [False, True, False, True]
    assert (harness.job(long).reason, harness.job(named).reason) == ("Resources", "ReqNodeNotAvail")
    harness.wait(1800)
    assert not any(node.usable for node in harness.owner.snapshot().nodes.values())
