"""No requeue of a job that could not start again: a reservation ahead, licences that Slurm would forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ones_db.reasons import SITE_LIMITS, Reason
from ones_db.shape import Shape
from slurm_ones.jobs.elastic import Observation
from slurm_ones.policy.contract import Allocation, Schedule
from slurm_ones.rules.gate import Round
from slurm_ones.rules.job_rules import loses_licenses, reserved_ahead
from slurm_ones.rules.plan import ResizePlan, plan
from slurm_ones.slurm.model import Reservation
from tests.act.make import history
from tests.rules.make import round_of
from tests.rules.test_views import FOUR, running, seen, waiting

NOW, HOUR_S = 10_000.0, 3600.0
TWO = Shape(1, 2)


def site(*reserved: Reservation, **changes: Any) -> Observation:
    """Job 1 of an hour runs on n1 since long ago, n4 is another's."""
    look = seen(running(1, TWO, "n1", start_time=NOW - 600.0, **changes), used={"n1": 2, "n4": 4})
    return replace(look, snapshot=replace(look.snapshot, time=NOW, reservations=reserved))


def maintenance(*names: str, in_s: float = 1800.0, name: str = "maint") -> Reservation:
    return Reservation(name, names, NOW + in_s, NOW + in_s + 600, frozenset({"MAINT"}))


ROWS: dict[str, tuple[Sequence[Reservation], dict[str, Any], bool]] = {
    "none": ((), {}, True),
    "all nodes, within its hour": ((maintenance(*FOUR),), {}, False),
    "all nodes, after it": ((maintenance(*FOUR, in_s=HOUR_S + 90),), {}, True),
    "just after it, too soon for a checkpoint": ((maintenance(*FOUR, in_s=HOUR_S + 30),), {}, False),
    "all nodes, and it is short": ((maintenance(*FOUR),), {"time_limit_s": 1200.0}, True),
    "all nodes, and it has no limit": ((maintenance(*FOUR, in_s=1e6),), {"time_limit_s": 0.0}, False),
    "its own node, and others are free": ((maintenance("n1"),), {}, True),
    "its own and the free ones": ((maintenance("n1", "n2", "n3"),), {}, False),
    "the free ones, and it keeps its own": ((maintenance("n2", "n3", "n4"),), {}, True),
    "one after the other": ((maintenance("n1", "n2"), maintenance("n3", name="class")), {}, False),
    "its own reservation": ((maintenance(*FOUR),), {"reservation": "maint"}, True),
    "one of its own reservations": ((maintenance(*FOUR),), {"reservation": "class,maint"}, True),
    "nodes of another partition": ((maintenance("x1", "x2"),), {}, True),
    "one that has begun": ((maintenance(*FOUR, in_s=-60.0),), {}, True),
}


@pytest.mark.parametrize("row", ROWS)
def test_who_could_start_again(row: str) -> None:
    """Else it keeps what it has, and its owner reads which reservation it is and when that begins."""
    reserved, changes, may = ROWS[row]
    rules = rules_at(site(*reserved, **changes))
    fixed = rules.partition("gpu").jobs[1].fixed
    assert (fixed is None) == may, fixed
    if fixed is not None:
        assert fixed.code == "reserved_ahead" and fixed == rules.partition("gpu").jobs[1].ahead.reason


def rules_at(look: Observation, **changes: Any) -> Round:
    return replace(
        round_of(look, histories={1: history(1), 2: history(2)}, now=NOW, limits={"near_limit_s": 0}), **changes
    )


def planned(look: Observation, shape: Shape, job_id: int = 1) -> ResizePlan:
    schedule = Schedule({job_id: Allocation(shape, 32)})
    return plan(schedule, rules_at(look).partition("gpu"))


@pytest.mark.parametrize(
    ("reserved", "shape", "code"),
    [
        (("n3",), Shape(1, 4), "begins"),
        (("n2", "n3"), Shape(1, 4), "begins"),
        (("n2", "n3"), Shape(2, 4), "reserved_ahead"),
        (("n1", "n2"), Shape(1, 4), "begins"),
        (("n1", "n2"), Shape(2, 4), "reserved_ahead"),
        (("n4",), Shape(4, 4), "gpus_not_free"),
    ],
)
def test_where_it_may_start_again_at_another_size(reserved: Sequence[str], shape: Shape, code: str) -> None:
    """On nodes that are not reserved before its limit, its own among them."""
    made = planned(site(maintenance(*reserved)), shape)
    assert made.outcomes[1].code == code
    assert (made.outcomes[1].code in SITE_LIMITS) == (code == "reserved_ahead")


def test_a_waiting_job_does_not_grow_into_a_reservation() -> None:
    """It would wait for it to end; smaller it may always be, and at its size it is Slurm's."""
    look = seen(waiting(2, Shape(2, 4), time_limit_s=HOUR_S), used={"n1": 4})
    look = replace(look, snapshot=replace(look.snapshot, time=NOW, reservations=(maintenance("n2", "n3"),)))
    assert planned(look, Shape(3, 4), 2).outcomes[2].code == "reserved_ahead"
    assert planned(look, Shape(1, 4), 2).outcomes[2].code == "begins"


@pytest.mark.parametrize("whole", [False, True])
def test_a_resize_under_way_sees_a_new_reservation(whole: bool) -> None:
    """Asked again right before the requeue, of what Slurm hands out whole too."""
    look = site()
    job, snapshot = look.snapshot.jobs[1], look.snapshot
    given = {"gpu": 4} if whole else {}

    def against(*names: str) -> Reason | None:
        made = replace(snapshot, reservations=(maintenance(*names),))
        return reserved_ahead(job, Shape(2, 2), made, given, NOW)

    assert against("n2") is None and against("n1") is None
    found = against("n2", "n3")
    assert found is not None and dict(found.arguments) == {"name": "maint", "begin": NOW + 1800.0}


@pytest.mark.parametrize("own", [{"excluded_nodes": ("n2",)}, {"features": "big|fast"}])
def test_nodes_on_which_its_user_does_not_let_it_start(own: dict[str, Any]) -> None:
    """They are free, and no room for it: it would wait for others, and then go back."""
    look = site(**own)
    nodes = {
        name: replace(node, features=frozenset({"fast"} if name != "n2" else ()))
        for name, node in look.snapshot.nodes.items()
    }
    look = replace(look, snapshot=replace(look.snapshot, nodes=nodes))
    assert [planned(look, shape).outcomes[1].code for shape in (Shape(2, 4), Shape(3, 4))] == [
        "begins",
        "gpus_not_free",
    ]
    assert planned(site(), Shape(3, 4)).outcomes[1].code == "begins"


@pytest.mark.parametrize("closed", [True, False])
def test_no_requeue_in_a_partition_that_starts_no_jobs(closed: bool) -> None:
    """Before maintenance, say: what runs there may run on, and would wait until it opens. One that drains takes no new
    jobs, and starts those of its queue."""
    shut = site()
    partitions = {"gpu": replace(shut.snapshot.partitions["gpu"], up=False, closed=closed)}
    shut = replace(shut, snapshot=replace(shut.snapshot, partitions=partitions))
    made = planned(shut, Shape(1, 1))
    assert (not made.begin and made.outcomes[1].code == "partition_closed") == closed
    assert "partition_closed" in SITE_LIMITS
    assert bool(reserved_ahead(shut.snapshot.jobs[1], TWO, shut.snapshot, {}, NOW)) == closed


@pytest.mark.parametrize(("state", "begins"), [("MIXED+DRAIN", False), ("MIXED+RESERVED", True)])
def test_no_requeue_onto_a_node_of_its_own_that_drains(state: str, begins: bool) -> None:
    """It could not go back there, and no other has room; a node that is reserved may be so for it."""
    look = seen(running(1, TWO, "n1", start_time=NOW - 600.0), used={"n1": 2, "n2": 4, "n3": 4, "n4": 4})
    nodes = {**look.snapshot.nodes, "n1": replace(look.snapshot.nodes["n1"], state=state, usable=False)}
    made = planned(replace(look, snapshot=replace(look.snapshot, time=NOW, nodes=nodes)), Shape(1, 1))
    assert bool(made.begin) == begins and made.outcomes[1].code == ("begins" if begins else "gpus_not_free")


@pytest.mark.parametrize(
    ("release", "loses"),
    [((22, 5, 8), False), ((24, 11, 5), False), ((25, 5, 0), True), ((25, 11, 6), True), ((25, 11, 7), False)],
)
def test_licences_that_a_requeue_would_lose(release: tuple[int, int, int], loses: bool) -> None:
    """A plain job that has some is left alone there; one that waits, or has none, is not."""
    assert loses_licenses(release) is loses
    look = site(licenses=(("matlab", 1),))
    fixed = rules_at(look, loses_licenses=loses).partition("gpu").jobs[1].fixed
    assert (fixed.code if fixed is not None else "") == ("licenses_lost" if loses else "")
    assert rules_at(site(), loses_licenses=True).partition("gpu").jobs[1].fixed is None
