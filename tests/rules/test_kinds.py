"""Which kinds of GPU a job may have, and what Slurm is asked for so that it gets one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ones_db import ResizeRecord
from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import OptIn
from slurm_ones.act.actor import commands
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, Observation, WholeJob, elastic_job
from slurm_ones.jobs.observer import run_record
from slurm_ones.policy.contract import Allocation, ClusterView, NodeView, Schedule
from slurm_ones.rules.caps import Cap, capped
from slurm_ones.rules.gate import PartitionRules, UnderWay
from slurm_ones.rules.job_rules import Kinds
from slurm_ones.rules.plan import PlannedChange, plan
from slurm_ones.rules.views import cluster_view
from slurm_ones.slurm.model import JobState, Node, Partition, Snapshot
from slurm_ones.testing.rounds import job as view_of
from tests.act.make import NOW, changed, elastic, history
from tests.rules.make import round_of
from tests.rules.test_blocks import job_of_blocks, rules_for, task
from tests.rules.test_blocks import told as known

ONE = Shape(1, 1)
NODES = {"n1": "slow", "n2": "fast"}
KINDS = Kinds(NODES)


def job(job_id: int, *nodes: str, kind: str = "slow", kinds: tuple[str, ...] = (), shape: Shape = ONE) -> Elastic:
    one = elastic(job_id, shape, *nodes, kind=kind)
    return replace(one, optin=OptIn((1, 4), None, None, kinds=kinds))


def seen(*jobs: Elastic, free: dict[str, int] | None = None) -> Observation:
    """Two nodes of four GPUs each, with so many free."""
    left = free or {}
    nodes = {n: Node(n, "", True, 4, 4 - left.get(n, 4), ("gpu",), False, kind=kind) for n, kind in NODES.items()}
    nodes["login"] = Node("login", "", True, 0, 0, ("gpu",), True)
    partition = Partition("gpu", True, tuple(nodes), 0.0, 0, False)
    by_id = {one.job.job_id: one for one in jobs}
    return Observation(
        Snapshot(NOW, {block.job_id: block for one in jobs for block in one.job.blocks}, nodes, {"gpu": partition}),
        by_id,
    )


def rules(*jobs: Elastic, resizes: tuple[ResizeRecord, ...] = (), **free: int) -> PartitionRules:
    histories = {one.job.job_id: history(one.job.job_id) for one in jobs}
    return round_of(seen(*jobs, free=free), *resizes, histories=histories, now=NOW).partition("gpu")


@pytest.mark.parametrize(
    ("kind", "kinds", "nodes", "accepted"),
    [
        ("slow", (), ("n1",), ("slow",)),
        ("", (), ("n1",), ("slow",)),
        ("", (), (), ("slow", "fast")),
        ("slow", ("any",), ("n1",), ("slow", "fast")),
        ("slow", ("fast", "h100"), ("n1",), ("fast",)),
        ("slow", ("slow", "fast"), (), ("slow", "fast")),
    ],
)
def test_kinds_that_a_job_may_have(
    kind: str, kinds: tuple[str, ...], nodes: tuple[str, ...], accepted: tuple[str, ...]
) -> None:
    """Those that its owner names; without that what it asked for, else what it has, else any."""
    assert KINDS.accepted(job(1, *nodes, kind=kind, kinds=kinds)) == accepted


def test_slurm_is_asked_for_a_kind_only_where_that_is_ours_to_say() -> None:
    """An owner who names none keeps what was asked for, whatever a policy says; so does everybody where Slurm would not
    start a job of another type, and where all GPUs are alike."""
    fast, slow = Allocation(ONE, 32, "fast"), Allocation(Shape(1, 2), 32, "slow")
    assert KINDS.asked(job(1, "n1", kinds=("any",)), fast) == "fast"
    assert KINDS.asked(job(1, "n1", kind="", kinds=("any",)), fast) == "fast"
    assert KINDS.asked(job(1, "n1", kind="", kinds=("any",)), slow) == "slow"
    assert KINDS.asked(job(1, "n1", kind="", kinds=("any",)), replace(slow, shape=ONE)) == ""
    assert KINDS.asked(job(1, "n1"), fast) == "slow"
    assert KINDS.asked(job(1, "n1", kind=""), fast) == ""
    old = Kinds(NODES, given=False)
    assert old.asked(job(1, "n1", kinds=("any",)), fast) == "slow" and old.accepted(job(1, kinds=("any",))) == ("slow",)
    assert old.asked(job(1, "n1", kind="", kinds=("any",)), fast) == ""
    assert Kinds({"n1": "slow", "n2": "slow"}).asked(job(1, "n1", kind="", kinds=("any",)), fast) == ""


def planned(wanted: Allocation, one: Elastic, **free: int) -> PlannedChange | str:
    """The job's change, or why it has none."""
    found = plan(Schedule({one.job.job_id: wanted}), rules(one, **free))
    return found.begin[0] if found.begin else str(found.outcomes[one.job.job_id])


def test_a_move_to_another_kind_needs_room_there() -> None:
    """GPUs that are free on nodes of the kind that it has do not count."""
    one = job(1, "n1", kinds=("any",))
    change = planned(Allocation(ONE, 32, "fast"), one, n1=3, n2=1)
    assert isinstance(change, PlannedChange) and change.resizes
    assert (change.old_kind, change.new_kind, str(change).endswith("→ 1x1 fast")) == ("slow", "fast", True)
    assert not isinstance(planned(Allocation(ONE, 32, "fast"), one, n1=3, n2=0), PlannedChange)
    assert not isinstance(planned(Allocation(Shape(1, 2), 32, "slow"), job(2, "n1"), n1=0, n2=4), PlannedChange)


def test_a_resize_under_way_takes_gpus_of_its_kind() -> None:
    """Those of the other kind stay free for others."""
    one = job(1, "n1", kinds=("any",))
    record = ResizeRecord(1, 0, Shape(1, 1), 32, Shape(1, 2), 32, "draining", 1.0, old_kind="slow", new_kind="fast")
    assert rules(one, resizes=(record,), n1=3, n2=4).free == {"n1": 3, "n2": 2, "login": 0}
    back = replace(record, state="waiting", back=True)
    assert rules(one, resizes=(back,), n1=3, n2=4).free == {"n1": 3, "n2": 4, "login": 0}
    alike = replace(record, new_shape=Shape(1, 1))
    assert rules(one, resizes=(alike,), n1=3, n2=4).free == {"n1": 3, "n2": 3, "login": 0}
    arrived = job(1, "n2", kind="fast", kinds=("any",))
    assert rules(arrived, resizes=(replace(alike, state="starting"),), n1=4, n2=3).free["n2"] == 3


def test_what_is_begun_counts_with_its_kind() -> None:
    """For a partition that has the same nodes and is planned later, and for one that has but some of them."""
    look = seen(replace(job(1, "n1", kinds=("any",))), free={"n1": 3, "n2": 4})
    nodes = {"other": ("n1", "n2"), "part": ("n1",)}
    more = {name: Partition(name, True, names, 0.0, 0, False) for name, names in nodes.items()}
    snapshot = replace(look.snapshot, partitions={**look.snapshot.partitions, **more})
    after = round_of(replace(look, snapshot=snapshot)).begun({1: UnderWay(Shape(1, 1), "fast")})
    assert (after.partition("other").free, after.partition("part").free) == ({"n1": 3, "n2": 3}, {"n1": 3})


def test_policies_see_the_kind_of_each_node() -> None:
    """Nodes without GPUs are none of them."""
    round_ = round_of(seen(job(1, "n1"), free={"n1": 3}))
    view = cluster_view(round_, round_.partition("gpu"))
    assert [(node.name, node.gpus, node.kind) for node in view.nodes] == [("n1", 4, "slow"), ("n2", 4, "fast")]
    assert view.gpus_of_kind == {"slow": 4, "fast": 4}


def test_nodes_that_have_gpus_by_the_settings_alone_are_shown() -> None:
    """In a partition of which Slurm knows some nodes' GPUs and their types: of the others nobody knows the kind."""
    sites = Settings.model_validate({"whole_node_gpus": {"gpu": 4}})
    here = replace(round_of(seen(job(1))), settings=sites)
    view = cluster_view(here, here.partition("gpu"))
    assert [(node.name, node.gpus, node.kind) for node in view.nodes] == [
        ("n1", 0, ""),
        ("n2", 0, ""),
        ("login", 4, ""),
    ]


def test_kinds_that_its_partition_does_not_have() -> None:
    """The owner is told, and the job left alone; where the partition names no types, nothing is wrong."""
    waits = WholeJob.of(replace(job(1).job.first, state=JobState.PENDING, comment="ones: gpus=1-2 kinds=h100,b200"))
    snapshot = seen().snapshot
    refused = elastic_job(waits, snapshot, {}, None)
    assert refused is not None and refused.refusal is not None
    assert str(refused.refusal) == "its comment allows GPUs of type h100, b200, and partition gpu has fast, slow"
    untyped = {name: replace(node, kind="") for name, node in snapshot.nodes.items()}
    taken = elastic_job(waits, replace(snapshot, nodes=untyped), {}, None)
    assert taken is not None and taken.refusal is None


@pytest.mark.parametrize(("room", "kind", "gpus"), [(4, "fast", 4), (3, "fast", 4), (4, "slow", 5)])
def test_blocks_change_their_kind_together_or_not_at_all(room: int, kind: str, gpus: int) -> None:
    """New blocks take the place of all, where there is room for them beside these; what is free on another kind is no
    room for a block that joins."""
    tasks = [task(0, Shape(1, 2), "n1", kind="slow"), task(1, Shape(1, 2), "n1", kind="slow")]
    one = job_of_blocks(*tasks, *(task(n, ONE, kind="slow") for n in (2, 3, 4)))
    one = replace(one, optin=OptIn((1, 8), None, None, blocks=True, kinds=("any",)))
    site = replace(rules_for([one], {"n1": 0, "n2": room}, {1: known(1, 0, 1)})[1], kinds=KINDS)
    found = plan(Schedule({1: Allocation(Shape(1, gpus), 32, kind)}), site)
    if (room, kind) != (4, "fast"):
        assert not found.begin and found.outcomes[1].code == "no_moves"
        return
    change, moves = found.begin[0], found.begin[0].moves
    assert moves is not None and moves.dropped == (0, 1) and moves.gained == 4
    assert (change.new_kind, found.outcomes[1].code) == ("fast", "begins")
    lines = commands(change, 7, None, 900.0)
    assert sum("Gres=gpu:fast:" in line for line in lines) == len(moves.added)


def test_blocks_stay_where_their_kind_is_not_known() -> None:
    """A partition in which a node has GPUs of no type tells no kinds, and one that runs may be on a node of none."""
    one = job_of_blocks(task(0, Shape(1, 2), "n1", kind="slow"), *(task(n, ONE, kind="slow") for n in (1, 2)))
    for kinds in (Kinds(), Kinds({"n2": "slow"}), Kinds({"n2": "slow", "n3": "fast"})):
        site = replace(rules_for([one], {"n1": 0, "n2": 4}, {1: known(1, 0)})[1], kinds=kinds)
        for kind in ("", "slow"):
            found = plan(Schedule({1: Allocation(Shape(1, 2), 32, kind)}), site)
            assert (found.begin, found.outcomes) == ((), {}), (kinds, kind)
            (change,) = plan(Schedule({1: Allocation(Shape(1, 3), 32, kind)}), site).begin
            assert change.moves is not None and change.moves.dropped == () and change.new_kind == "slow"


def test_blocks_on_several_kinds_keep_them_until_that_is_decided_otherwise() -> None:
    """Slurm may start blocks on several kinds where none was asked for; unequal blocks change theirs as others do."""
    tasks = [task(0, Shape(1, 1), "n1", kind="slow"), task(1, Shape(1, 1), "n2", kind="fast")]
    one = job_of_blocks(*tasks, *(task(n, ONE, kind="slow") for n in (2, 3)))
    one = replace(one, optin=OptIn((1, 8), None, None, blocks=True, kinds=("any",)))
    assert not KINDS.leaves(one, Allocation(Shape(2, 1), 32)) and KINDS.leaves(one, Allocation(ONE, 32, "fast"))
    assert KINDS.may_change(one) and not KINDS.may_change(changed(job(1, "n1", kinds=("any",)), gpus_per_node=0))


def test_a_cap_leaves_the_kind_that_was_decided() -> None:
    """A job that waits, and whose owner accepts one kind alone, would else start on any."""
    view = ClusterView((NodeView("n1", 4, "slow"), NodeView("n2", 4, "fast")), node_gpus=4)
    cap = Cap(2, frozenset({1}), reason("partition_share", gpus=2, partition="gpu"))
    schedule = Schedule({1: Allocation(Shape(1, 4), 64, "fast")}, {1: reason("least_total_time")})
    got = capped(view, [view_of(1, requested=1)], schedule, [cap]).allocations[1]
    assert (got.shape, got.kind) == (Shape(1, 2), "fast")


def test_a_cap_cuts_to_a_size_of_the_kind_that_was_decided() -> None:
    """And who was to take GPUs that a capped job keeps finds no room on GPUs of another kind."""
    slow, fast = NodeView("n0", 8, "slow"), [NodeView(f"n{n}", 4, "fast") for n in (1, 2, 3)]
    view = ClusterView((slow, *fast), gpus_of_kind={"slow": 8, "fast": 4})
    waits = view_of(1, requested=2, gpus=(1, 2, 4, 8, 12))
    schedule = Schedule({1: Allocation(Shape(3, 4), 512, "fast")}, {1: reason("least_total_time")})
    cap = Cap(8, frozenset({1}), reason("user_cap", user="me", gpus=8, setting="limits.gpus_per_user"))
    got = capped(view, [waits], schedule, [cap]).allocations[1]
    assert (got.shape, got.kind) == (Shape(2, 4), "fast")
    stays, other = view_of(1, {"n0": 4}, requested=1), view_of(2, requested=8)
    wanted = {1: Allocation(Shape(2, 4), 512, "fast"), 2: Allocation(Shape(1, 8), 512, "slow")}
    schedule = Schedule(wanted, dict.fromkeys(wanted, reason("least_total_time")))
    made = capped(
        ClusterView((slow, replace(fast[0], gpus=8)), gpus_of_kind={"slow": 8, "fast": 8}),
        [stays, other],
        schedule,
        [replace(cap, gpus=0)],
    )
    assert made.allocations[1].shape == Shape(1, 4) and 2 not in made.allocations
    assert made.refused[2].code == "no_room_under_cap"


def test_the_kind_of_a_run_of_blocks() -> None:
    """That of the blocks which train: not of those that join, nor of those that lead the next term, which may be read
    later than Slurm's queue."""
    tasks = [task(0, ONE, "n1"), task(1, ONE, "n2")]
    old, both, new = (job_of_blocks(*some) for some in (tasks[:1], tasks, tasks[1:]))
    runs = [run_record(old, None, NODES)]
    for one in (both, new):
        runs.append(run_record(one, runs[-1], NODES))
    assert [run.kind for run in runs] == ["slow"] * 3
    unclear = run_record(both, None, NODES)
    after = replace(new, job=replace(new.job, restart=1))
    assert [unclear.kind, run_record(old, unclear, NODES).kind] == ["fast,slow", "slow"]
    assert run_record(after, runs[0], NODES).kind == "fast"
