"""Caps on growth: nobody gets more by our doing than all of a user's, an account's or a partition's may have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.policies import POLICIES, make_policy
from slurm_ones.policy.contract import Allocation, JobView, Schedule
from slurm_ones.rules.caps import Cap, capped, entitled, narrowed
from slurm_ones.rules.views import decide_within
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Round, cluster, job, rounds
from tests.rivals.test_contract import short
from tests.rules.make import rules_of
from tests.rules.test_views import running, seen

WHY = reason("least_total_time")


def keeps(schedule: Schedule, jobs: Sequence[JobView], caps: Sequence[Cap]) -> None:
    """Raise AssertionError where a job grows although a cap of its jobs is exceeded."""
    due = {one.job_id: entitled(one) for one in jobs}
    for cap in caps:
        got = {id_: schedule.allocations[id_].shape.gpus for id_ in cap.jobs & schedule.allocations.keys()}
        if any(gpus > due[id_] for id_, gpus in got.items()):
            assert sum(got.values()) <= cap.gpus, cap
    for one in jobs:
        if one.shape is not None and one.job_id in schedule.refused:
            after = schedule.allocations[one.job_id].shape.gpus
            assert after >= one.shape.gpus, "a cap never shrinks a job"


@st.composite
def capped_rounds(draw: st.DrawFn) -> tuple[Round, list[Cap]]:
    """A round, and up to three caps over some of its jobs."""
    view, jobs = draw(rounds(uniform=True))
    ids = [one.job_id for one in jobs]
    some = st.frozensets(st.sampled_from(ids)) if ids else st.just(frozenset[int]())
    caps = [
        Cap(draw(st.integers(-2, 20)), draw(some), reason("partition_share", gpus=number, partition="gpu"))
        for number in range(draw(st.integers(1, 3)))
    ]
    return (view, jobs), caps


@pytest.mark.slow
@given(st.sampled_from(sorted(POLICIES)), capped_rounds(), st.integers(0, 3))
def test_caps_hold_whatever_the_policy_wants(name: str, drawn: tuple[Round, list[Cap]], seed: int) -> None:
    """And the schedule is still one that can be had."""
    (view, jobs), caps = drawn
    schedule = decide_within(short(name), view, jobs, caps, {}, 0.0, seeded(seed))
    check(view, jobs, schedule)
    keeps(schedule, jobs, caps)


@pytest.mark.slow
@given(capped_rounds(), st.data())
def test_caps_hold_whatever_was_scheduled(drawn: tuple[Round, list[Cap]], data: st.DataObject) -> None:
    """Also where each job gets any size that it could have; who is refused is told why."""
    (view, jobs), caps = drawn
    # What it is worth does not matter here, so a short search does.
    policy = make_policy(data.draw(st.sampled_from(["ones-sc21", "pollux"])), population=10, generations=5)
    schedule = policy.decide(view, jobs, 0.0, seeded(data.draw(st.integers(0, 9))))
    made = capped(view, jobs, schedule, caps)
    check(view, jobs, made)
    keeps(made, jobs, caps)
    changed = {id_ for id_, got in schedule.allocations.items() if made.allocations.get(id_) != got}
    assert changed == made.refused.keys() and made.allocations.keys() <= schedule.allocations.keys()


def scheduled(
    jobs: Sequence[JobView], wanted: dict[int, Shape], *caps: Cap
) -> tuple[dict[int, int], dict[int, Reason]]:
    """GPUs of each job under the caps, and what those that are refused something are told."""
    schedule = Schedule({id_: Allocation(shape, 64) for id_, shape in wanted.items()}, dict.fromkeys(wanted, WHY))
    made = capped(cluster(4), jobs, schedule, caps)
    return {id_: got.shape.gpus for id_, got in made.allocations.items()}, dict(made.refused)


ALICE = reason("user_cap", user="alice", gpus=6, setting="limits.gpus_per_user")


def test_the_first_may_grow_the_next_as_far_as_is_left() -> None:
    """Two jobs of two GPUs that were to have four each, of six."""
    jobs = [job(1, {"n1": 2}, requested=2), job(2, {"n2": 2}, requested=2)]
    both = Cap(6, frozenset({1, 2}), ALICE)
    assert scheduled(jobs, {1: Shape(1, 4), 2: Shape(1, 4)}, both) == ({1: 4, 2: 2}, {2: ALICE})
    assert scheduled(jobs, {1: Shape(1, 4), 2: Shape(1, 1)}, both) == ({1: 4, 2: 1}, {})
    assert scheduled(jobs, {1: Shape(1, 4), 2: Shape(1, 4)}, Cap(8, frozenset({1, 2}), ALICE))[1] == {}
    assert scheduled(jobs, {1: Shape(1, 4), 2: Shape(1, 4)}, Cap(1, frozenset({1}), ALICE)) == (
        {1: 2, 2: 4},
        {1: ALICE},
    )


def test_what_a_job_asked_for_is_its_own() -> None:
    """Beyond every cap it starts as it asked, keeps what it has, and grows back to what it asked for; no further."""
    none = Cap(0, frozenset({1, 2, 3}), ALICE)
    jobs = [job(1, {"n1": 4}, requested=1), job(2, {"n2": 2}, requested=4), job(3, requested=4)]
    assert scheduled(jobs, {1: Shape(1, 4), 2: Shape(1, 4), 3: Shape(1, 4)}, none) == ({1: 4, 2: 4, 3: 4}, {})
    more = {1: Shape(2, 4), 2: Shape(2, 4), 3: Shape(2, 4)}
    got, refused = scheduled(jobs[1:], {id_: more[id_] for id_ in (2, 3)}, none)
    assert got == {2: 4, 3: 4} and refused.keys() == {2, 3}


def test_who_finds_no_room_any_more_keeps_what_it_has() -> None:
    """Job 1 was to leave its node to job 2; now that a cap keeps it there, job 2 stays as well, and is told."""
    jobs = [job(1, {"n1": 1}, requested=1), job(2, {"n2": 1}, requested=1), job(3, {"n2": 3}, requested=3)]
    schedule = Schedule(
        {1: Allocation(Shape(1, 2), 64), 2: Allocation(Shape(1, 2), 64), 3: Allocation(Shape(1, 3), 64)},
        dict.fromkeys((1, 2, 3), WHY),
    )
    made = capped(cluster(2, 4, free=(2, 4)), jobs, schedule, [Cap(0, frozenset({1}), ALICE)])
    assert {id_: got.shape.gpus for id_, got in made.allocations.items()} == {1: 1, 2: 1, 3: 3}
    assert made.refused == {1: ALICE, 2: reason("no_room_under_cap")} and made.reasons == {**made.refused, 3: WHY}


def test_a_schedule_within_its_caps_is_left_alone() -> None:
    """As it is, not only as good."""
    jobs = [job(1, {"n1": 2}, requested=2)]
    schedule = Schedule({1: Allocation(Shape(1, 4), 64)}, {1: WHY})
    assert capped(cluster(), jobs, schedule, [Cap(4, frozenset({1}), ALICE)]) is schedule
    assert capped(cluster(), jobs, schedule, []) is schedule


def test_policies_do_not_plan_with_what_would_be_refused() -> None:
    """A job does not see sizes that its cap never lets it have; one that another could make way for it does."""
    jobs = [job(1, {"n1": 2}, requested=2, gpus=(1, 2, 4, 8)), job(2, {"n2": 2}, requested=2, gpus=(2, 4))]
    seen = [one.limits.gpus for one in narrowed(jobs, [Cap(6, frozenset({1, 2}), ALICE)])]
    assert seen == [(1, 2, 4), (2, 4)]
    assert [one.limits.gpus for one in narrowed(jobs, [Cap(0, frozenset({1, 2}), ALICE)])] == [(1, 2), (2,)]
    assert narrowed(jobs, []) is jobs


def test_caps_of_users_accounts_and_partitions() -> None:
    """A name's own comes before the general one, and what it has in other partitions counts."""
    jobs = [
        running(1, Shape(1, 4), "n1", user="alice", account="a"),
        running(2, Shape(1, 2), "n2", user="bob", account="a"),
        running(3, Shape(1, 3), "n3", user="alice", account="b", partitions=("other",)),
    ]
    look = seen(*jobs, used={"n1": 4, "n2": 2, "n3": 3})
    site = {"gpus_per_user": 8, "gpus_of_user": {"bob": 3}, "gpus_of_account": {"a": 6}, "share": 0.5}
    found = {str(cap.reason).split(" may grow ")[0]: (cap.gpus, cap.jobs) for cap in rules_of(look, limits=site).caps}
    assert found == {
        "elastic jobs": (8, frozenset({1, 2})),
        "elastic jobs of user alice": (5, frozenset({1})),
        "elastic jobs of user bob": (3, frozenset({2})),
        "elastic jobs of account a": (6, frozenset({1, 2})),
    }
    growing = ResizeRecord(3, 0, Shape(1, 3), None, Shape(2, 4), None, "draining", 0.0, id=1)
    assert {cap.gpus for cap in rules_of(look, growing, limits=site).caps if "alice" in str(cap.reason)} == {0}
    assert rules_of(look).caps == ()
