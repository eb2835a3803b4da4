"""Which of a schedule's resizes begin now, and what the others' owners are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ones_db import JobHistory, JobRecord, ResizeRecord
from ones_db.reasons import reason
from ones_db.shape import PARKED, Shape
from slurm_ones.act.transitions import State
from slurm_ones.config import Settings
from slurm_ones.jobs.eligibility import Elastic, Observation
from slurm_ones.policy.contract import Allocation, Schedule
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.gate import PartitionRules, Round, under_way
from slurm_ones.rules.plan import ResizePlan, plan
from slurm_ones.slurm.model import JobState, Node, Partition, Snapshot
from tests.act.make import FULL, NOW, elastic, history

CAPPED = reason("user_cap", user="alice", gpus=9, setting="limits.gpus_per_user")


def resize(job_id: int, old: Shape, new: Shape, state: State = State.DRAINING) -> ResizeRecord:
    return ResizeRecord(job_id, 0, old, 32, new, 64, state.value, 1.0)


def rules_for(
    jobs: list[Elastic],
    free: dict[str, int],
    histories: dict[int, JobHistory],
    resizes: list[ResizeRecord],
    site: dict[str, Any],
    settings: dict[str, Any],
    caps: Sequence[Cap] = (),
) -> PartitionRules:
    """The rules of a partition whose nodes have these free GPUs, before resizes under way take theirs."""
    by_id = {e.job.job_id: e for e in jobs}
    nodes = {name: Node(name, "", True, gpus, 0, ("gpu",), False) for name, gpus in free.items()}
    partition = Partition("gpu", True, tuple(free), 0.0, 0, False)
    seen = Observation(Snapshot(NOW, {id_: e.job for id_, e in by_id.items()}, nodes, {"gpu": partition}), by_id)
    whole = Settings.model_validate({"resize": {"dwell_s": 300} | settings, "limits": site})
    rules = Round(seen, histories, whole, under_way(resizes), NOW).partition("gpu")
    return replace(rules, caps=(*rules.caps, *caps))


def planned(
    wanted: dict[int, Shape | Allocation],
    jobs: list[Elastic],
    free: dict[str, int],
    *,
    histories: dict[int, JobHistory] | None = None,
    resizes: list[ResizeRecord] | None = None,
    site: dict[str, Any] | None = None,
    caps: Sequence[Cap] = (),
    **settings: Any,
) -> ResizePlan:
    """The plan for a schedule in which a bare shape has the batch in force."""
    allocations = {id_: a if isinstance(a, Allocation) else Allocation(a, 32) for id_, a in wanted.items()}
    known = {e.job.job_id: history(e.job.job_id) for e in jobs} | (histories or {})
    return plan(Schedule(allocations), rules_for(jobs, free, known, resizes or [], site or {}, settings, caps))


def said(made: ResizePlan) -> dict[int, str]:
    """What became of each job, as its owner reads it."""
    return {id_: str(outcome) for id_, outcome in made.outcomes.items()}


def begun(made: ResizePlan) -> list[int]:
    return [change.job_id for change in made.begin]


def test_a_job_that_fits_begins() -> None:
    """It may use its own GPUs and the free ones."""
    made = planned({1: Shape(1, 4)}, [elastic(1, Shape(1, 2), "n1")], {"n1": 2, "n2": 0})
    (change,) = made.begin
    assert (change.old, change.new, change.old_batch, change.new_batch) == (Shape(1, 2), Shape(1, 4), 32, 32)
    assert said(made) == {1: "begins"}


def test_a_job_that_does_not_fit_waits_for_gpus() -> None:
    """Enough GPUs in all, but on no single node."""
    made = planned({1: Shape(1, 4)}, [elastic(1, Shape(1, 1), "n1")], {"n1": 2, "n2": 3})
    assert made.begin == () and said(made) == {1: "waits until 1x4 GPUs are free"}


def test_free_gpus_are_given_once() -> None:
    """Two jobs that each would fit, but not together: the first begins."""
    jobs = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 1), "n2")]
    made = planned({1: Shape(2, 2), 2: Shape(2, 2)}, jobs, {"n1": 1, "n2": 1, "n3": 2})
    assert begun(made) == [1] and said(made)[2] == "waits until 2x2 GPUs are free"


def test_shrinks_come_first_but_what_they_free_is_not_free_yet() -> None:
    """Who grows into GPUs that another gives up begins once they are given up."""
    jobs = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 3), "n1")]
    made = planned({1: Shape(1, 3), 2: Shape(1, 1)}, jobs, {"n1": 0})
    assert begun(made) == [2] and said(made) == {1: "waits until 1x3 GPUs are free", 2: "begins"}


def test_a_moving_job_may_leave_its_node() -> None:
    """Its own node is full of others; a shape on other nodes fits all the same."""
    made = planned({1: Shape(2, 4)}, [elastic(1, Shape(1, 1), "n1")], {"n1": 0, "n2": 4, "n3": 4})
    assert begun(made) == [1]


def test_gpus_for_waiting_jobs_are_not_taken_by_growing_ones() -> None:
    """A job that the schedule lets start has its GPUs set aside, though Slurm has not started it yet."""
    jobs = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 2))]
    assert begun(planned({1: Shape(1, 3), 2: Shape(1, 2)}, jobs, {"n1": 2})) == []
    assert begun(planned({1: Shape(1, 3)}, jobs, {"n1": 2})) == [1]


def test_gpus_for_resizes_under_way_are_not_taken() -> None:
    """A job between its shapes holds nothing in Slurm's eyes."""
    jobs = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 4))]
    under_way = [resize(2, Shape(1, 1), Shape(1, 4), State.WAITING)]
    assert begun(planned({1: Shape(1, 4)}, jobs, {"n1": 0, "n2": 4}, resizes=under_way)) == []
    back = [resize(2, Shape(1, 1), Shape(1, 4), State.WAITING_BACK)]
    assert begun(planned({1: Shape(1, 3)}, jobs, {"n1": 0, "n2": 4}, resizes=back)) == [1]


def test_a_waiting_job_is_reshaped_without_dwell_or_reports() -> None:
    """Nothing is interrupted by it."""
    made = planned({1: Shape(1, 2)}, [elastic(1, Shape(1, 1))], {"n1": 2}, histories={1: history(1, spec=None)})
    assert begun(made) == [1]


def test_whole_nodes_count_as_the_shape_that_the_job_has() -> None:
    """Slurm knows of no GPUs there; the job's shape is its nodes times what the settings say."""
    jobs = [elastic(1, Shape(1, FULL), "n1", whole=True)]
    assert planned({1: Shape(1, FULL)}, jobs, {"n2": 4}).begin == ()
    made = planned({1: Shape(2, FULL)}, jobs, {"n1": 0, "n2": 4})
    assert made.begin[0].old == Shape(1, FULL) and made.begin[0].new == Shape(2, FULL)


@pytest.mark.parametrize(
    ("job", "told", "words"),
    [
        (elastic(1, Shape(1, 1), "n1", start_time=NOW - 100), history(1), "in 200 s (dwell time 300 s)"),
        (elastic(1, Shape(1, 1), "n1"), history(1, last_resize_end=NOW - 50), "in 250 s (dwell time 300 s)"),
        (
            elastic(1, Shape(1, 1), "n1"),
            history(1, spec=None),
            "is it started by ones-run, and does its script call ones.init?",
        ),
        (elastic(1, Shape(1, 1), "n1", time_limit_s=NOW + 100), history(1), "near its time limit"),
        (elastic(1, Shape(1, 1), "n1", refusal=reason("interactive")), history(1), "it is interactive"),
        (elastic(1, Shape(1, 1), held=True), history(1), "held by its owner"),
        (
            elastic(1, Shape(1, 1), flags=frozenset({"COMPLETING"}), state=JobState.RUNNING),
            history(1),
            "it is completing",
        ),
        (elastic(1, Shape(1, 1), state=JobState.SUSPENDED), history(1), "it is suspended"),
    ],
)
def test_what_stands_against_a_resize(job: Elastic, told: JobHistory, words: str) -> None:
    """Each hindrance has its words, and the job is not touched."""
    made = planned({1: Shape(1, 2)}, [job], {"n1": 4}, histories={1: told})
    assert made.begin == () and words in said(made)[1]


def test_a_resize_under_way_is_not_begun_again() -> None:
    """One resize a job."""
    under_way = [resize(1, Shape(1, 1), Shape(1, 2))]
    made = planned({1: Shape(1, 2)}, [elastic(1, Shape(1, 1), "n1")], {"n1": 3}, resizes=under_way)
    assert made.begin == () and said(made) == {1: "a resize is under way"}


def test_no_more_than_max_open_at_once() -> None:
    """Those under way count, changes of batch alone do not."""
    jobs = [elastic(n, Shape(1, 1), f"n{n}") for n in range(1, 6)]
    wanted: dict[int, Shape | Allocation] = {n: Shape(1, 2) for n in range(1, 5)} | {5: Allocation(Shape(1, 1), 64)}
    free = {f"n{n}": 3 for n in range(1, 6)}
    made = planned(wanted, jobs, free, resizes=[resize(1, Shape(1, 1), Shape(1, 2))], max_open=3)
    assert sorted(begun(made)) == [2, 3, 5]
    assert said(made)[4] == "waits its turn: 3 resizes are under way"


def test_shrinking_can_be_switched_off() -> None:
    """Then running jobs keep what they have; waiting ones may still be made smaller."""
    running = planned({1: Shape(1, 1)}, [elastic(1, Shape(1, 2), "n1")], {"n1": 2}, shrink=False)
    assert running.begin == () and said(running) == {1: "shrinking is switched off"}
    assert begun(planned({1: Shape(1, 1)}, [elastic(1, Shape(1, 2))], {"n1": 2}, shrink=False)) == [1]


def test_a_batch_alone_changes_without_a_resize() -> None:
    """At the same shape another batch is ordered; the same one, or one that is not known yet, is not."""
    jobs = [elastic(1, Shape(1, 1), "n1")]
    made = planned({1: Allocation(Shape(1, 1), 64)}, jobs, {})
    assert made.begin[0].old == made.begin[0].new and said(made) == {1: "its batch changes"}
    assert planned({1: Allocation(Shape(1, 1), 32)}, jobs, {}).begin == ()
    unknown = {1: history(1, batch=None)}
    assert planned({1: Allocation(Shape(1, 1), 64)}, jobs, {}, histories=unknown).begin == ()


def test_no_batch_is_ordered_where_it_would_do_harm() -> None:
    """Not to a job that is left alone, nor in the middle of a resize, where it would call the drain off."""
    wanted: dict[int, Shape | Allocation] = {1: Allocation(Shape(1, 1), 64)}
    assert planned(wanted, [elastic(1, Shape(1, 1), "n1", refusal=reason("resize_off"))], {}).begin == ()
    under_way = [resize(1, Shape(1, 1), Shape(1, 2))]
    assert planned(wanted, [elastic(1, Shape(1, 1), "n1")], {}, resizes=under_way).begin == ()
    assert planned(wanted, [elastic(1, Shape(1, 1))], {}).begin == ()


def test_jobs_outside_the_schedule_or_the_cluster_are_left_alone() -> None:
    """A policy that names a job that is gone, or leaves one out, changes nothing."""
    made = planned({7: Shape(1, 2)}, [elastic(1, Shape(1, 1), "n1")], {"n1": 3})
    assert made == ResizePlan((), {})


def parking(jobs: list[Elastic], *parked: int, wanted: dict[int, Shape] | None = None, **options: Any) -> ResizePlan:
    """The plan for a schedule that parks these jobs."""
    allocations = {id_: Allocation(shape, 32) for id_, shape in (wanted or {}).items()}
    histories = options.pop("histories", None) or {e.job.job_id: history(e.job.job_id) for e in jobs}
    schedule = Schedule(allocations, parked=frozenset(parked))
    resizes, settings = options.pop("resizes", []), options.pop("settings", {})
    return plan(schedule, rules_for(jobs, options.pop("free", {}), histories, resizes, {}, settings))


def test_running_jobs_are_parked_first_and_waiting_ones_deferred() -> None:
    """What a parked job gives up is not free until it is gone."""
    jobs = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 3), "n1"), elastic(3, Shape(1, 2))]
    made = parking(jobs, 2, 3, wanted={1: Shape(1, 4)}, free={"n1": 0})
    (change,) = made.begin
    assert (change.job_id, change.old, change.new, change.new_batch, change.parks) == (
        2,
        Shape(1, 3),
        PARKED,
        None,
        True,
    )
    assert str(change) == "1x3 → parked"
    assert made.deferred == {3}
    assert said(made) == {1: "waits until 1x4 GPUs are free", 2: "begins", 3: "it is kept from starting"}


@pytest.mark.parametrize(
    ("job", "told", "settings", "words"),
    [
        (elastic(1, Shape(1, 1), "n1", start_time=NOW - 100), history(1), {}, "in 200 s (dwell time 300 s)"),
        (elastic(1, Shape(1, 1), "n1", refusal=reason("interactive")), history(1), {}, "it is interactive"),
        (elastic(1, Shape(1, 1), "n1", time_limit_s=NOW + 100), history(1), {}, "near its time limit"),
        (
            elastic(1, Shape(1, 1), "n1"),
            history(1, spec=None),
            {},
            "is it started by ones-run, and does its script call ones.init?",
        ),
        (elastic(1, Shape(1, 1), "n1"), history(1), {"preempt": False}, "it runs on: pre-empting is switched off"),
        (elastic(1, Shape(1, 1), "n1"), history(1), {"shrink": False}, "shrinking is switched off"),
        (elastic(1, Shape(1, 1), held=True), history(1), {}, "held by its owner"),
        (elastic(1, Shape(1, 1), refusal=reason("resize_off")), history(1), {}, "resize=off"),
        (elastic(1, Shape(1, 1), flags=frozenset({"COMPLETING"})), history(1), {}, "it is completing"),
    ],
)
def test_what_stands_against_parking(job: Elastic, told: JobHistory, settings: dict[str, Any], words: str) -> None:
    """What protects a job from a resize protects it from being parked or deferred."""
    made = parking([job], 1, histories={1: told}, settings=settings)
    assert made.begin == () and not made.deferred and words in said(made)[1]


def test_parking_waits_its_turn_and_is_not_begun_twice() -> None:
    """It is a resize like any other."""
    jobs = [elastic(n, Shape(1, 1), f"n{n}") for n in (1, 2, 3)]
    under_way = [resize(1, Shape(1, 1), PARKED)]
    made = parking(jobs, 1, 2, 3, resizes=under_way, settings={"max_open": 2})
    assert begun(made) == [2]
    assert said(made)[1] == "a resize is under way" and said(made)[3].startswith("waits its turn")
    assert (
        parking([elastic(1, Shape(1, 1))], 1, resizes=[resize(1, Shape(1, 1), PARKED, State.PARKING)]).deferred == set()
    )


def test_a_resize_to_nothing_takes_no_gpus() -> None:
    """Nor does it give any back before Slurm says so."""
    jobs = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 2), "n2")]
    under_way = [resize(2, Shape(1, 2), PARKED)]
    assert begun(parking(jobs, 2, wanted={1: Shape(1, 4)}, resizes=under_way, free={"n1": 3})) == [1]
    assert begun(parking(jobs, 2, wanted={1: Shape(1, 4)}, resizes=under_way, free={"n1": 2, "n2": 2})) == []


def test_a_waiting_resize_that_waits_its_turn_is_named() -> None:
    """Its job, where it was deferred, must not start at its old shape meanwhile; running ones run on."""
    jobs = [elastic(1, Shape(1, 1)), elastic(2, Shape(1, 1), "n2"), elastic(3, Shape(1, 1), "n3")]
    under_way = [resize(3, Shape(1, 1), Shape(1, 2))]
    wanted = {1: Shape(1, 2), 2: Shape(1, 2)}
    made = parking(jobs, wanted=wanted, resizes=under_way, free={"n1": 4, "n2": 3}, settings={"max_open": 1})
    assert made.begin == () and made.queued == {1}


def test_caps_hold_at_every_moment() -> None:
    """Who grows counts with what it will have, who shrinks with what it still has, and resizes under way with both."""
    jobs = [elastic(1, Shape(1, 2), "n1"), elastic(2, Shape(1, 2), "n2"), elastic(3, Shape(1, 3), "n3")]
    wanted: dict[int, Shape | Allocation] = {1: Shape(1, 4), 2: Shape(1, 4), 3: Shape(1, 1)}
    free = {"n1": 2, "n2": 2, "n4": 1}
    told = {id_: history(id_, job=JobRecord(id_, "job", "alice", 1.0, Shape(1, 2))) for id_ in (1, 2, 3)}
    cap = Cap(9, frozenset({1, 2, 3}), CAPPED)
    made = planned(wanted, jobs, free, histories=told, caps=[cap])
    assert begun(made) == [3, 1] and made.outcomes[2] == made.refused[2] == CAPPED
    under_way = [resize(1, Shape(1, 2), Shape(1, 4))]
    assert 2 in planned(wanted, jobs, free, histories=told, caps=[cap], resizes=under_way).refused
    assert 2 not in planned(wanted, jobs, free, histories=told, caps=[replace(cap, jobs=frozenset({1}))]).refused


def test_no_cap_keeps_a_job_from_what_it_asked_for() -> None:
    """It was shrunk, and grows back; a waiting one starts as it asked."""
    cap = Cap(0, frozenset({1, 2}), CAPPED)
    told = {1: history(1, job=JobRecord(1, "job", "alice", 1.0, Shape(1, 4)))}
    jobs = [elastic(1, Shape(1, 2), "n1"), elastic(2, Shape(1, 2))]
    made = planned({1: Shape(1, 4), 2: Shape(1, 2)}, jobs, {"n1": 2, "n2": 4}, histories=told, caps=[cap])
    assert begun(made) == [1] and not made.refused
    assert planned({2: Shape(1, 4)}, jobs, {"n1": 2, "n2": 4}, caps=[cap]).refused == {2: CAPPED}


def test_a_job_that_was_resized_enough_is_left_alone() -> None:
    """Whatever the schedule says; one that waits is interrupted by nothing."""
    jobs, site = [elastic(1, Shape(1, 1), "n1"), elastic(2, Shape(1, 1))], {"resizes_per_job": 1}
    told = {id_: history(id_, interrupted=(1.0,)) for id_ in (1, 2)}
    made = planned({1: Shape(1, 2), 2: Shape(1, 2)}, jobs, {"n1": 3, "n2": 4}, histories=told, site=site)
    assert begun(made) == [2] and made.refused[1].code == "resizes_per_job"
