"""Sizes that owners ask for by hand: they come before the policy's choice, and after every limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.learn.learner import Learner
from slurm_ones.policies import POLICIES
from slurm_ones.policy.contract import NodeView
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.plan import plan
from slurm_ones.rules.views import bounds_of, cluster_view, decide_within, job_models, job_views, with_sizes
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, Round, cluster, job, rounds
from tests.act.make import history
from tests.marks import examples
from tests.rivals.test_contract import short
from tests.rules.make import round_of
from tests.rules.test_views import running, seen

VIEW = cluster(2)
RUNS = job(1, {"n1": 2}, gpus=(1, 2, 4, 8))


def code(gpus: int, *others: object, caps: tuple[Cap, ...] = ()) -> str:
    """Why job 1 gets what it gets, where its owner asks for so many GPUs."""
    found = with_sizes(VIEW, [RUNS, *others], {1: gpus}, caps)  # type: ignore[list-item]
    assert found[0].fixed is not None
    return found[0].fixed.code


def test_a_size_is_given_where_there_is_room() -> None:
    """On nodes that others leave; the batch stays within what that size takes."""
    (found,) = with_sizes(VIEW, [RUNS], {1: 8}, ())
    assert found.shape == Shape(2, 4) and dict(found.nodes) == {"n1": 4, "n2": 4}
    assert code(8) == "size_asked" and code(2) == "size_kept" and code(1) == "size_asked"
    assert code(8, job(2, {"n2": 1})) == "size_waits"
    assert code(3) == "size_not_possible"


def test_a_running_job_stays_on_its_kind_of_gpu() -> None:
    """Room on GPUs of another kind is none for it, and no shape has GPUs of both."""
    kinds = ("v100", "a100", "a100", "v100")
    view = replace(
        VIEW,
        nodes=tuple(NodeView(f"n{i}", 4 if kind == "a100" else 8, kind=kind) for i, kind in enumerate(kinds)),
        node_gpus=8,
        gpus_of_kind={"a100": 4, "v100": 8},
    )
    runs = job(1, {"n1": 2}, gpus=(1, 2, 4, 8), on={"a100": Power(), "v100": Power()})
    (found,) = with_sizes(view, [runs], {1: 8}, ())
    assert found.shape == Shape(2, 4) and dict(found.nodes) == {"n1": 4, "n2": 4}
    found, _ = with_sizes(view, [runs, job(2, {"n2": 1})], {1: 8}, ())
    assert found.fixed is not None and found.fixed.code == "size_waits"


def test_a_cap_comes_first() -> None:
    assert code(8, caps=(Cap(4, frozenset({1}), reason("user_cap", user="alice", gpus=4, setting="x")),)) == "user_cap"


def test_a_job_that_waits_starts_at_its_size_alone() -> None:
    (found,) = with_sizes(VIEW, [job(1, gpus=(1, 2, 4, 8))], {1: 4}, ())
    assert (found.limits.gpus, found.fixed) == ((4,), None)


@pytest.mark.parametrize("old", [Shape(1, 2), Shape(2, 4)])
@pytest.mark.parametrize(
    ("gpus", "begins", "code"),
    [
        (3, [Shape(1, 3)], "size_asked"),
        (4, [Shape(1, 4)], "size_asked"),
        (5, [], "size_not_possible"),
        (None, [], "size_kept"),
    ],
)
def test_a_size_by_hand_does_not_wait_for_the_dwell_time(
    gpus: int | None, begins: list[Shape], code: str, old: Shape
) -> None:
    """Any number of one node's GPUs; five have no shape here, which is said. A job that has its size (None) says so."""
    gpus = gpus or old.gpus
    names = ("n1", "n2")[: old.nodes]
    runs = running(1, old, *names, comment=f"ones: gpus=1-16 size={gpus}", start_time=9_999.0, time_limit_s=0.0)
    look = seen(runs, used=dict.fromkeys(names, old.gpus_per_node))
    round_ = round_of(look, histories={1: history(1)}, now=10_000.0, resize={"dwell_s": 300})
    rules = round_.partition("gpu")
    shown = cluster_view(round_, rules)
    views = job_views(round_, rules, shown, job_models(round_, Learner()))
    policy = short("ones")
    schedule = decide_within(policy, shown, views, *bounds_of(round_, rules, shown, views), round_.now, seeded())
    assert [change.new for change in plan(schedule, rules).begin] == begins
    assert schedule.reasons[1].code == code


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
@examples(8)
@given(rounds(uniform=True), st.data())
def test_every_policy_decides_around_it(name: str, drawn: Round, data: st.DataObject) -> None:
    """Whatever it is: the schedule can be had, and who asks for a size gets it or stays."""
    view, jobs = drawn
    sizes = {one.job_id: data.draw(st.sampled_from((1, 2, 3, 4, 8))) for one in jobs if data.draw(st.booleans())}
    schedule = decide_within(short(name), view, jobs, (), sizes, 0.0, seeded())
    check(view, jobs, schedule)
    for one in jobs:
        if one.job_id in sizes and one.shape is not None and one.job_id in schedule.allocations:
            got = schedule.allocations[one.job_id].shape
            assert got == one.shape or got.gpus == sizes[one.job_id]
