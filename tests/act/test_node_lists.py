"""Nodes that jobs are kept off: asked for of Slurm, taken back, and never in place of what an owner asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import slurm_ones.companion
from ones_db import ReasonRecord, Store
from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.act.node_lists import NodeLists
from slurm_ones.companion import Companion
from slurm_ones.config import Settings
from slurm_ones.learn.nodes import SlowNode
from slurm_ones.simulate.engines.companion_engine import AT_ONCE
from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.scheduler import PartitionSpec
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Idle, Request
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import JobState
from tests.observe.test_observer import store as store  # a fixture
from tests.simulate.test_engine import with_changing_policy, workload


class Site:
    """A simulated Slurm of four nodes, and the lists of a companion there."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        nodes = PartitionSpec("gpu", ("n1", "n2", "n3", "n4"), 4)
        self.cluster = SimulatedCluster([nodes], ClusterSettings(), self.timeline)
        self.client = SimulatedClient(self.cluster)
        self.said: dict[int, ReasonRecord] = {}
        self.lists = self.companion()

    def companion(self) -> NodeLists:
        return NodeLists(self.client, self, 30.0, lambda: self.timeline.now)

    def said_in_steps(self, code: str) -> Mapping[int, ReasonRecord]:
        assert code == "avoids_slow_nodes"
        return self.said

    def job(self, *, nodes: int = 1, hold: bool = True) -> int:
        request = Request(nodes=nodes, max_nodes=nodes, gpus_per_node=4, partition="gpu", hold=hold)
        return self.cluster.submit(request, lambda job_id: Idle())

    def ask(self, job_id: int, *names: str) -> None:
        """As a resize does: written down first."""
        self.lists.choose = lambda job, shape: names
        if wanted := self.lists.wanted(self.client.job(job_id), Shape(1, 4)):
            self.said[job_id] = ReasonRecord.of(reason("avoids_slow_nodes", nodes=",".join(wanted)))
            self.lists.note(self.client.job(job_id), wanted)
        self.lists.ask(self.client.job(job_id))

    def excluded(self, job_id: int) -> tuple[str, ...]:
        return self.client.details([job_id])[job_id].excluded

    def look(self, after: float) -> None:
        """A tick of the companion."""
        self.timeline.run(self.timeline.now + after)
        self.lists.reconcile(self.client.snapshot().jobs)


def test_a_job_starts_elsewhere() -> None:
    """And keeps the list while it runs, which it is rid of once it waits again, whoever lets it."""
    site = Site()
    job_id = site.job()
    site.ask(job_id, "n1", "n2")
    site.client.release(job_id)
    site.look(40.0)
    assert site.client.job(job_id).node_list == ("n3",) and site.excluded(job_id) == ("n1", "n2")
    site.client.requeue_hold(job_id)
    site.look(40.0)
    assert site.excluded(job_id) == ()


@pytest.mark.parametrize("restarted", [False, True])
def test_no_job_waits_for_other_nodes(restarted: bool) -> None:
    """Longer than until the next tick or the one after: also where the companion that asked is no more."""
    site = Site()
    job_id = site.job(nodes=3)
    site.ask(job_id, "n1", "n2")
    site.client.release(job_id)
    site.look(10.0)
    assert site.client.job(job_id).pending and site.excluded(job_id) == ("n1", "n2")
    if restarted:
        site.lists = site.companion()
    site.look(10.0 if restarted else 30.0)
    site.timeline.run(site.timeline.now + 10.0)
    assert site.client.job(job_id).running and site.excluded(job_id) == ()


def test_a_companion_that_leaves_takes_lists_back() -> None:
    """Those of jobs that wait; of one that runs Slurm lets none change."""
    site = Site()
    waits, runs = site.job(), site.job()
    site.ask(waits, "n1")
    site.ask(runs, "n2")
    site.client.release(runs)
    site.timeline.run(site.timeline.now + 5.0)
    site.lists.clear_all()
    assert (site.excluded(waits), site.excluded(runs)) == ((), ("n2",))


def test_what_the_owner_asked_for_stays() -> None:
    """A list that was there before, and one that took the place of ours."""
    site = Site()
    before, after = site.job(), site.job()
    site.client.exclude_nodes(before, ["n4"])
    site.ask(before, "n1")
    site.ask(after, "n1")
    site.client.exclude_nodes(after, ["n1", "n3"])
    site.look(60.0)
    site.lists.clear_all()
    assert (site.excluded(before), site.excluded(after)) == (("n4",), ("n1", "n3"))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_same_list_of_an_owner_stays(restarted: bool) -> None:
    """Protects an owner who knows the slow node, too, and left it out by hand."""
    site = Site()
    job_id = site.job()
    site.client.exclude_nodes(job_id, ["n1"])
    site.ask(job_id, "n1")
    if restarted:
        site.lists = site.companion()
    site.look(60.0)
    site.lists.clear_all()
    assert site.excluded(job_id) == ("n1",)


def test_a_list_outlives_the_end_of_its_job() -> None:
    """Its owner may requeue a job that ended, which would then wait for other nodes for good."""
    site = Site()
    job_id = site.job()
    site.ask(job_id, "n1")
    waits = site.client.job(job_id)
    site.lists.reconcile({job_id: replace(waits, state=JobState.FAILED)})
    site.look(60.0)
    assert site.excluded(job_id) == ()


def test_a_list_that_slurm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job starts where Slurm likes; what cannot be taken back now is tried again."""
    site = Site()
    odd, fine = site.job(), site.job()
    site.ask(odd, "no-such-node")
    site.ask(fine, "n1")

    def refuse(*given: Any) -> None:
        raise Refused("not now")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedClient, "exclude_nodes", refuse)
        site.look(60.0)
    assert (site.excluded(odd), site.excluded(fine)) == ((), ("n1",))
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedClient, "details", refuse)
        site.lists.clear_all()
        assert site.lists.wanted(site.client.job(fine), Shape(1, 4)) == ()
    site.look(1.0)
    assert site.excluded(fine) == ()


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_job_gave_up_is_room(whole: bool, store: Store) -> None:
    """Protects the wish for other nodes of a job that ran when Slurm was looked at: its own nodes count as free by now,
    as full ones where Slurm hands out whole nodes; those that take no more jobs do not."""
    timeline = Timeline()
    nodes = PartitionSpec("gpu", ("n1", "n2", "n3"), 4, whole_nodes=whole)
    cluster = SimulatedCluster([nodes], ClusterSettings(), timeline)
    client = SimulatedClient(cluster)
    known = {"whole_node_gpus": {"gpu": 4}} if whole else {}
    settings = Settings.model_validate({"resize": {"avoid_slow_nodes": True}, **known})
    companion = Companion(settings, client, store, clock=lambda: timeline.now)
    request = Request(nodes=2, max_nodes=2, gpus_per_node=0 if whole else 4, partition="gpu")
    job_id = cluster.submit(request, lambda job_id: Idle())
    timeline.run(timeline.now + 60.0)
    job, shape = client.job(job_id), Shape(2, 4)
    assert job.node_list == ("n1", "n2")
    companion._seen, companion._slow = client.snapshot(), {"n1": SlowNode("n1", 0.5, 0.1, 4, 2)}
    assert companion._slow_nodes(job, shape) == ("n1",)
    cluster.drain("n2")
    companion._seen = client.snapshot()
    assert companion._slow_nodes(job, shape) == ()


@pytest.mark.parametrize(
    "settings",
    [ClusterSettings(), ClusterSettings(unreachable=0.1, refused=0.05, partial=0.05), ClusterSettings(node_mtbf_s=2e3)],
    ids=["quiet", "odd Slurm", "failing nodes"],
)
def test_every_job_ends_whatever_is_called_slow(monkeypatch: pytest.MonkeyPatch, settings: ClusterSettings) -> None:
    """Every job resized at every tick, half of the nodes called slow: none is lost, held or left waiting."""
    asked: list[tuple[str, ...]] = []
    before = SimulatedClient.exclude_nodes

    def exclude(client: SimulatedClient, job_id: Any, names: Any) -> None:
        asked.append(tuple(names))
        before(client, job_id, names)

    monkeypatch.setattr(SimulatedClient, "exclude_nodes", exclude)
    monkeypatch.setattr(
        slurm_ones.companion,
        "slow_nodes",
        lambda histories, now: {"n1": SlowNode("n1", 0.5, 0.1, 4, 2)},
    )
    outcome = with_changing_policy(workload(4), settings, settings={**AT_ONCE, "resize.avoid_slow_nodes": True})
    assert all(job.ended is not None for job in outcome.jobs)
    assert ("n1",) in asked and (settings != ClusterSettings() or () in asked)
