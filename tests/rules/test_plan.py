"""Which of a schedule's resizes begin now, and what the others' owners are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ones_db import JobHistory, JobRecord, ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from slurm_ones.act.transitions import State
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, Observation
from slurm_ones.policy.contract import Allocation, Schedule
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.gate import Round, under_way
from slurm_ones.rules.plan import ResizePlan, plan
from slurm_ones.slurm.model import JobState, Node, Partition, Snapshot
from tests.act.make import FULL, NOW, elastic, history

CAPPED = reason("user_cap", user="alice", gpus=9, setting="limits.gpus_per_user")
ONE, TWO, FOUR = Shape(1, 1), Shape(1, 2), Shape(1, 4)


def resize(job_id: int, old: Shape, new: Shape, state: State = State.DRAINING) -> ResizeRecord:
    return ResizeRecord(job_id, 0, old, 32, new, 64, state.value, 1.0)


def planned(
    wanted: Mapping[int, Shape | Allocation],
    jobs: list[Elastic],
    free: dict[str, int],
    *,
    histories: dict[int, JobHistory] | None = None,
    resizes: Sequence[ResizeRecord] = (),
    site: dict[str, Any] | None = None,
    caps: Sequence[Cap] = (),
    **settings: Any,
) -> ResizePlan:
    """The plan for a schedule in which a bare shape has the batch in force and `PARKED` parks; `free` are the GPUs of
    each node before resizes under way take theirs."""
    parked = frozenset(id_ for id_, a in wanted.items() if a == PARKED)
    allocations = {
        id_: a if isinstance(a, Allocation) else Allocation(a, 32) for id_, a in wanted.items() if a != PARKED
    }
    known = {e.job.job_id: history(e.job.job_id) for e in jobs} | (histories or {})
    by_id = {e.job.job_id: e for e in jobs}
    nodes = {name: Node(name, "", True, gpus, 0, ("gpu",), False) for name, gpus in free.items()}
    partition = Partition("gpu", True, tuple(free), 0.0, 0, False)
    seen = Observation(Snapshot(NOW, {id_: e.job.first for id_, e in by_id.items()}, nodes, {"gpu": partition}), by_id)
    whole = Settings.model_validate({"resize": {"dwell_s": 300} | settings, "limits": site or {}})
    rules = Round(seen, known, whole, under_way(resizes), NOW).partition("gpu")
    return plan(Schedule(allocations, parked=parked), replace(rules, caps=(*rules.caps, *caps)))


def said(made: ResizePlan) -> dict[int, str]:
    return {id_: outcome.code for id_, outcome in made.outcomes.items()}


def begun(made: ResizePlan) -> list[int]:
    return [change.job_id for change in made.begin]


BATCH = Allocation(ONE, 64)
UNKNOWN = {1: history(1, spec=None)}
FULL_NODE = elastic(1, Shape(1, FULL), "n1", whole=True)


@pytest.mark.parametrize(
    ("jobs", "wanted", "free", "other", "outcomes"),
    [
        # It may use its own GPUs and the free ones.
        ([elastic(1, TWO, "n1")], {1: FOUR}, {"n1": 2, "n2": 0}, {}, {1: "begins"}),
        # Enough GPUs in all, but on no single node.
        ([elastic(1, ONE, "n1")], {1: FOUR}, {"n1": 2, "n2": 3}, {}, {1: "gpus_not_free"}),
        # Two that each would fit, but not together.
        (
            [elastic(1, ONE, "n1"), elastic(2, ONE, "n2")],
            {1: Shape(2, 2), 2: Shape(2, 2)},
            {"n1": 1, "n2": 1, "n3": 2},
            {},
            {1: "begins", 2: "gpus_not_free"},
        ),
        # Shrinks come first, but what they free is not free yet.
        (
            [elastic(1, ONE, "n1"), elastic(2, Shape(1, 3), "n1")],
            {1: Shape(1, 3), 2: ONE},
            {"n1": 0},
            {},
            {1: "gpus_not_free", 2: "begins"},
        ),
        # Its own node is full of others; a shape on other nodes fits all the same.
        ([elastic(1, ONE, "n1")], {1: Shape(2, 4)}, {"n1": 0, "n2": 4, "n3": 4}, {}, {1: "begins"}),
        # A job that the schedule lets start has its GPUs set aside, though Slurm has not started it yet.
        ([elastic(1, ONE, "n1"), elastic(2, TWO)], {1: Shape(1, 3), 2: TWO}, {"n1": 2}, {}, {1: "gpus_not_free"}),
        ([elastic(1, ONE, "n1"), elastic(2, TWO)], {1: Shape(1, 3)}, {"n1": 2}, {}, {1: "begins"}),
        # A job between its shapes holds nothing in Slurm's eyes.
        (
            [elastic(1, ONE, "n1"), elastic(2, FOUR)],
            {1: FOUR},
            {"n1": 0, "n2": 4},
            {"resizes": [resize(2, ONE, FOUR, State.WAITING)]},
            {1: "gpus_not_free"},
        ),
        (
            [elastic(1, ONE, "n1"), elastic(2, FOUR)],
            {1: Shape(1, 3)},
            {"n1": 0, "n2": 4},
            {"resizes": [replace(resize(2, ONE, FOUR, State.WAITING), back=True)]},
            {1: "begins"},
        ),
        # Nothing of a waiting job is interrupted: it needs no dwell time and no reports.
        ([elastic(1, ONE)], {1: TWO}, {"n1": 2}, {"histories": UNKNOWN}, {1: "begins"}),
        # Slurm knows of no GPUs of whole nodes: a job's shape is its nodes times what the settings say.
        ([FULL_NODE], {1: Shape(1, FULL)}, {"n2": 4}, {}, {}),
        ([FULL_NODE], {1: Shape(2, FULL)}, {"n1": 0, "n2": 4}, {}, {1: "begins"}),
        ([elastic(1, ONE, "n1")], {1: TWO}, {"n1": 3}, {"resizes": [resize(1, ONE, TWO)]}, {1: "resize_under_way"}),
        # Resizes under way count, and changes of batch alone do not.
        (
            [elastic(n, ONE, f"n{n}") for n in range(1, 6)],
            {1: TWO, 2: TWO, 3: TWO, 4: TWO, 5: BATCH},
            {f"n{n}": 3 for n in range(1, 6)},
            {"resizes": [resize(1, ONE, TWO)], "max_open": 3},
            {1: "resize_under_way", 2: "begins", 3: "begins", 4: "max_open", 5: "batch_changes"},
        ),
        # Where shrinking is switched off, waiting jobs may still be made smaller.
        ([elastic(1, TWO, "n1")], {1: ONE}, {"n1": 2}, {"shrink": False}, {1: "shrinking_off"}),
        ([elastic(1, TWO)], {1: ONE}, {"n1": 2}, {"shrink": False}, {1: "begins"}),
        # A batch that is the same, or not known yet, is not ordered.
        ([elastic(1, ONE, "n1")], {1: BATCH}, {}, {}, {1: "batch_changes"}),
        ([elastic(1, ONE, "n1")], {1: Allocation(ONE, 32)}, {}, {}, {}),
        ([elastic(1, ONE, "n1")], {1: BATCH}, {}, {"histories": {1: history(1, batch=None)}}, {}),
        # Nor where it would do harm: to a job that is left alone, or in the middle of a resize.
        ([elastic(1, ONE, "n1", refusal=reason("resize_off"))], {1: BATCH}, {}, {}, {}),
        ([elastic(1, ONE, "n1")], {1: BATCH}, {}, {"resizes": [resize(1, ONE, TWO)]}, {}),
        ([elastic(1, ONE)], {1: BATCH}, {}, {}, {}),
        # A policy that names a job that is gone, or leaves one out, changes nothing.
        ([elastic(1, ONE, "n1")], {7: TWO}, {"n1": 3}, {}, {}),
        # A resize to nothing takes no GPUs, nor gives any back before Slurm says so.
        *(
            (
                [elastic(1, ONE, "n1"), elastic(2, TWO, "n2")],
                {1: FOUR, 2: PARKED},
                free,
                {"resizes": [resize(2, TWO, PARKED)]},
                {1: code, 2: "resize_under_way"},
            )
            for free, code in (({"n1": 3}, "begins"), ({"n1": 2, "n2": 2}, "gpus_not_free"))
        ),
        # Parking is a resize like any other.
        (
            [elastic(n, ONE, f"n{n}") for n in (1, 2, 3)],
            dict.fromkeys((1, 2, 3), PARKED),
            {},
            {"resizes": [resize(1, ONE, PARKED)], "max_open": 2},
            {1: "resize_under_way", 2: "begins", 3: "max_open"},
        ),
    ],
)
def test_what_begins(
    jobs: list[Elastic],
    wanted: dict[int, Shape | Allocation],
    free: dict[str, int],
    other: dict[str, Any],
    outcomes: dict[int, str],
) -> None:
    made = planned(wanted, jobs, free, **other)
    assert {id_: code for id_, code in said(made).items() if id_ in outcomes} == outcomes
    assert sorted(begun(made)) == [id_ for id_, code in outcomes.items() if code in ("begins", "batch_changes")]
    for change in made.begin:
        got = wanted[change.job_id]
        assert change.new == (got.shape if isinstance(got, Allocation) else got)


YOUNG = elastic(1, ONE, "n1", start_time=NOW - 100)


@pytest.mark.parametrize("new", [TWO, PARKED])
@pytest.mark.parametrize(
    ("job", "told", "why"),
    [
        (YOUNG, {}, reason("dwell_time", until=NOW + 200.0, dwell_s=300.0)),
        (elastic(1, ONE, "n1"), {"last_resize_end": NOW - 50}, reason("dwell_time", until=NOW + 250.0, dwell_s=300.0)),
        (elastic(1, ONE, "n1"), {"spec": None}, reason("nothing_reported")),
        (elastic(1, ONE, "n1", time_limit_s=NOW + 100), {}, reason("near_time_limit", seconds=300)),
        (elastic(1, ONE, "n1", refusal=reason("interactive")), {}, reason("interactive")),
        (elastic(1, ONE, refusal=reason("resize_off")), {}, reason("resize_off")),
        (elastic(1, ONE, held=True), {}, reason("held_by_owner")),
        (elastic(1, ONE, flags=frozenset({"COMPLETING"})), {}, reason("completing")),
        (elastic(1, ONE, state=JobState.SUSPENDED), {}, reason("not_running", state="suspended")),
    ],
)
def test_what_stands_against_a_change(job: Elastic, told: dict[str, Any], why: Reason, new: Shape) -> None:
    """What protects a job from a resize protects it from being parked or deferred."""
    made = planned({1: new}, [job], {"n1": 4}, histories={1: history(1, **told)})
    assert made.begin == () and not made.deferred and made.outcomes == {1: why}


@pytest.mark.parametrize(("switch", "code"), [("preempt", "preempting_off"), ("shrink", "shrinking_off")])
def test_parking_can_be_switched_off(switch: str, code: str) -> None:
    made = planned({1: PARKED}, [elastic(1, ONE, "n1")], {"n1": 4}, **{switch: False})
    assert made.begin == () and said(made) == {1: code}


def test_running_jobs_are_parked_first_and_waiting_ones_deferred() -> None:
    """What a parked job gives up is not free until it is gone."""
    jobs = [elastic(1, ONE, "n1"), elastic(2, Shape(1, 3), "n1"), elastic(3, TWO)]
    made = planned({1: FOUR, 2: PARKED, 3: PARKED}, jobs, {"n1": 0})
    (change,) = made.begin
    assert (change.job_id, change.old, change.new_batch, change.parks) == (2, Shape(1, 3), None, True)
    assert str(change) == "1x3 → parked" and made.deferred == {3}
    assert said(made) == {1: "gpus_not_free", 2: "begins", 3: "kept_waiting"}
    parking = [resize(1, ONE, PARKED, State.PARKING)]
    assert planned({1: PARKED}, [elastic(1, ONE)], {}, resizes=parking).deferred == set()


def test_a_waiting_resize_that_waits_its_turn_is_named() -> None:
    """Its job, where it was deferred, must not start at its old shape meanwhile; running ones run on."""
    jobs = [elastic(1, ONE), elastic(2, ONE, "n2"), elastic(3, ONE, "n3")]
    made = planned({1: TWO, 2: TWO}, jobs, {"n1": 4, "n2": 3}, resizes=[resize(3, ONE, TWO)], max_open=1)
    assert made.begin == () and made.queued == {1}


def test_caps_hold_at_every_moment() -> None:
    """Who grows counts with what it will have, who shrinks with what it still has, and resizes under way with both."""
    jobs = [elastic(1, TWO, "n1"), elastic(2, TWO, "n2"), elastic(3, Shape(1, 3), "n3")]
    told = {id_: history(id_, job=JobRecord(id_, "job", "alice", 1.0, TWO)) for id_ in (1, 2, 3)}
    cap = Cap(9, frozenset({1, 2, 3}), CAPPED)

    def made(cap: Cap, *resizes: ResizeRecord) -> ResizePlan:
        free = {"n1": 2, "n2": 2, "n4": 1}
        return planned({1: FOUR, 2: FOUR, 3: ONE}, jobs, free, histories=told, caps=[cap], resizes=resizes)

    assert begun(made(cap)) == [3, 1] and made(cap).outcomes[2] == CAPPED
    assert made(cap, resize(1, TWO, FOUR)).outcomes[2] == CAPPED
    assert made(replace(cap, jobs=frozenset({1}))).outcomes[2] != CAPPED


def test_no_cap_keeps_a_job_from_what_it_asked_for() -> None:
    """It was shrunk, and grows back; a waiting one starts as it asked."""
    cap = Cap(0, frozenset({1, 2}), CAPPED)
    told = {1: history(1, job=JobRecord(1, "job", "alice", 1.0, FOUR))}
    jobs = [elastic(1, TWO, "n1"), elastic(2, TWO)]
    made = planned({1: FOUR, 2: TWO}, jobs, {"n1": 2, "n2": 4}, histories=told, caps=[cap])
    assert begun(made) == [1]
    assert planned({2: FOUR}, jobs, {"n1": 2, "n2": 4}, caps=[cap]).outcomes[2] == CAPPED
