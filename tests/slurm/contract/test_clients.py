"""What others hold their clients to, held by every client of ours; and what takes an administrator's commands, a broken
environment, or a Slurm that takes an update in part."""

from __future__ import annotations

import re

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import NotPermitted, NotResizable, SlurmMissing
from slurm_ones.slurm.model import Snapshot
from slurm_ones.testing import client_contract
from tests.cluster.topology import leaf_switches
from tests.slurm.simulated import SimulatedSite
from tests.slurm.sites import OPERATOR, Site, until

TestClients = client_contract()
TestBySite = client_contract(SimulatedSite)


def test_version_and_config(site: Site) -> None:
    """The release decides what is asked of Slurm, and ClusterName what the database is about."""
    version = site.owner.version()
    assert version == (22, 5) if site.is_old else version >= (25, 11)
    config = site.owner.config()
    assert config["ClusterName"] == site.cluster.name
    assert config["SlurmUser"].startswith("slurm(")


def _seen_beside(site: Site, start: str, nodes: str) -> Snapshot:
    """What a client sees while these nodes are reserved from then on."""
    create = ("scontrol", "create", "reservation", "ReservationName=maint", f"StartTime={start}", "Duration=10")
    site.cluster.run([*create, "Users=root", f"Nodes={nodes}"], user="root")
    try:
        return site.owner.snapshot()
    finally:
        site.cluster.run(["scontrol", "delete", "ReservationName=maint"], user="root")


def test_nodes_in_a_reservation_are_unusable(site: Site) -> None:
    """A job that is resized onto reserved nodes would wait for ever."""
    seen = _seen_beside(site, "now", "n3,n4")
    (found,) = seen.reservations
    assert (found.name, found.node_names) == ("maint", ("n3", "n4"))
    assert found.end_time - found.start_time == 600
    assert _unusable(seen) == {"n3", "n4"}
    assert _unusable(site.owner.snapshot()) == set()


def test_a_reservation_of_tomorrow_closes_nothing_today(site: Site) -> None:
    """Only an active reservation takes nodes away."""
    seen = _seen_beside(site, "now+1day", "n3")
    assert [r.name for r in seen.reservations] == ["maint"] and _unusable(seen) == set()


def test_leaf_switches_of_nodes(site: Site) -> None:
    """As topology.conf says; of none where there is none. 22.05 reads that file as it starts alone."""
    site.cluster.run(["scontrol", "show", "topology"], user="root")
    if site.is_old:
        assert {node.leaf for node in site.owner.snapshot().nodes.values()} == {""}
        return
    with leaf_switches(site.cluster):
        leaves = {name: node.leaf for name, node in site.owner.snapshot().nodes.items()}
    assert leaves == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2", **dict.fromkeys(("w1", "w2", "w3", "w4"), "w")}


def test_drained_and_down_nodes_are_unusable(site: Site) -> None:
    """No schedule may count on a node that takes no jobs."""
    update = ("scontrol", "update", "NodeName=n4", "Reason=test")
    until(lambda: _unusable(site.owner.snapshot()) == set(), "all nodes to be usable")
    site.cluster.run([*update, "State=DRAIN"], user="root")
    try:
        assert _unusable(site.owner.snapshot()) == {"n4"}
        site.cluster.run([*update, "State=DOWN"], user="root")
        assert _unusable(site.owner.snapshot()) == {"n4"}
    finally:
        site.cluster.run(["scontrol", "update", "NodeName=n4", "State=RESUME"], user="root")
    until(lambda: _unusable(site.owner.snapshot()) == set(), "n4 to be back")


def _unusable(seen: Snapshot) -> set[str]:
    return {node.name for node in seen.nodes.values() if not node.usable}


def test_what_a_job_asks_for_besides_gpus(site: Site) -> None:
    """What it waits for may be held by growth: CPUs, memory, a node, a licence."""
    asks = ("--nodes=1", "--ntasks=2", "--mem=100", "--nodelist=n1", "--exclude=n3,n4", "--licenses=matlab:2")
    job_id = site.held(*asks, "--exclusive")
    client = site.owner
    seen = client.snapshot()
    for job in (client.job(job_id), seen.jobs[job_id]):
        assert (job.cpus, job.memory_mb, job.licenses, job.requested_nodes) == (2, 100, (("matlab", 2),), ("n1",))
        assert (job.exclusive, job.reservation, job.preempt_time) == (True, "", 0.0)
        account = "" if site.client_name == "simulated" else "lab"
        assert (job.qos, job.account) == (("", "") if site.is_old else ("normal", account))
    assert client.details([job_id])[job_id].excluded_nodes == ("n3", "n4")
    assert seen.licenses == {"matlab": 3}
    running = site.running("--nodes=1", "--ntasks=2", "--nodelist=n2", "--licenses=matlab")
    seen = client.snapshot()
    node = seen.nodes["n2"]
    assert (node.cpus, node.cpus_used, node.memory_mb, seen.licenses) == (16, 2, 4000, {"matlab": 2})
    assert seen.jobs[running].cpus == client.job(running).cpus == 2
    assert not seen.jobs[running].exclusive


def test_arrays_interactive_and_unrequeueable_jobs_are_told(site: Site) -> None:
    """They are refused with words, so they must be recognised."""
    array = site.owner.job(site.held("--array=1-2"))
    assert array.array
    assert not site.owner.job(site.held("--no-requeue")).requeue
    said = site.tell("salloc", "--no-shell", "--nodes=1")
    granted = re.search(r"allocation (\d+)", said)
    assert granted is not None, said
    assert not site.owner.job(site.adopt(int(granted[1]))).batch


def test_an_admins_hold_is_told_and_not_the_owners_to_release(site: Site) -> None:
    """The companion must leave such a job alone."""
    job_id = site.submit("--nodes=1", "--begin=now+1hour")
    site.cluster.run(["scontrol", "hold", str(job_id)], user="root")
    job = site.owner.job(job_id)
    assert (job.held, job.admin_held) == (True, True)
    with pytest.raises(NotPermitted):
        site.owner.release(job_id)
    assert site.owner.job(job_id).admin_held
    site.as_(OPERATOR).release(job_id, start_now=False)
    assert not site.owner.job(job_id).held


def test_an_admins_hold_on_a_requeued_job_is_told(site: Site) -> None:
    """In the middle of a resize: Slurm has other words for such a job, and it must not pass for the companion's own."""
    job_id = site.running("--nodes=1")
    site.owner.requeue_hold(job_id)
    site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
    assert not site.owner.job(job_id).admin_held
    site.cluster.run(["scontrol", "hold", str(job_id)], user="root")
    assert site.owner.job(job_id).admin_held


def test_a_signal_reaches_the_steps_and_the_script_on_demand(site: Site) -> None:
    """Ranks are steps; their batch script hears only what is meant for it. Owner and operator may send it."""
    heard = site.cluster.scratch / f"heard-{site.client_name}"
    name = f"/scratch/{heard.name}"
    step = f"trap 'echo step >> {name}' USR1; echo ready >> {name}; while :; do sleep 0.1; done"
    text = f'#!/bin/bash\ntrap "echo script >> {name}" USR1\nsrun -n1 bash -c "{step}" &\nwhile :; do wait; done\n'
    job_id = site.running("--nodes=1", text=text)
    until(lambda: heard.exists() and "ready" in heard.read_text(), "the step")
    site.owner.signal(job_id, "USR1")
    until(lambda: heard.read_text().count("step") == 1, "the owner's signal in the step")
    site.as_(OPERATOR).signal(job_id, "USR1")
    until(lambda: heard.read_text().count("step") == 2, "the operator's signal in the step")
    assert "script" not in heard.read_text()
    site.owner.signal(job_id, "USR1", batch=True)
    until(lambda: "script" in heard.read_text(), "the signal in the script")


def test_what_slurm_takes_in_part_is_rolled_back(site: Site) -> None:
    """An update is not atomic: nodes without their GPUs are not left in force."""
    client = site.owner
    job_id = site.requeued("--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1")
    client.partial = True
    try:
        with pytest.raises(NotResizable, match="has 1x1 again"):
            client.reshape(job_id, Shape(3, 2))
    finally:
        client.partial = False
    assert (site.owner.job(job_id).nodes, site.owner.job(job_id).gpus_per_node) == (1, 1)
    site.owner.release(job_id)
    job = site.wait(job_id, lambda job: job.running, "RUNNING at its old shape")
    assert len(job.node_list) == 1


@pytest.mark.parametrize("call", ["version", "config", "snapshot"])
def test_without_slurm_on_the_path(site: Site, call: str) -> None:
    """A login shell without the site's module: said at once, in a type of its own."""
    client = site.owner
    client.environment = {"PATH": "/nowhere"}
    try:
        with pytest.raises(SlurmMissing, match="on the PATH"):
            getattr(client, call)()
    finally:
        client.environment = {}
