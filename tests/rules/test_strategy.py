"""What a training strategy lets its job have: no rule gives another size or batch, and a reason says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec, decode_spec, encode
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from slurm_ones.learn.learner import Learner
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import Allocation, ClusterView, Limits, NodeView, Schedule, SizeRule
from slurm_ones.policy.shapes import least_and_most
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.job_rules import breaks, parts, size_rules
from slurm_ones.rules.plan import plan
from slurm_ones.rules.views import cluster_view, decide_within, job_models, job_views, limits_of
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Round, job, rounds
from slurm_ones.text import described
from tests.act.make import history
from tests.rules.make import round_of
from tests.rules.test_views import running, seen, waiting

NOW = 10_000.0
CLUSTER = ClusterView(tuple(NodeView(name, 4) for name in ("n1", "n2", "n3", "n4")), node_gpus=4)


def strategy(*rows: SizeLimits, **other: Any) -> Spec:
    return Spec(32, 4096, 16, 1000, 5, max_passes=4, limits=StrategyLimits("ring", rows, **other))


RING = strategy(*(SizeLimits(n, n // 2, n, 2) for n in (2, 4, 6, 8, 16)))
"""Pairs of GPUs, a replica each, which take batches in multiples of the GPUs."""


def allowed(spec: Spec, comment: str = "ones: gpus=1-16 batch=32-4096", shape: Shape = Shape(1, 2)) -> Limits:
    return limits_of(seen(waiting(1, shape, comment=comment)).elastic[1], CLUSTER, spec)


def test_sizes_are_those_of_owner_cluster_and_strategy() -> None:
    """6 GPUs have no shape on nodes of four, 1 is not the strategy's, and 16 not the owner's."""
    found = allowed(RING, "ones: gpus=1-12 batch=32-4096")
    assert found.gpus == (2, 4, 8)
    assert least_and_most(found, 8) == (32, 4 * 16 * 4)
    assert found.strategy == "ring"


def test_ranks_that_share_a_node_do_so() -> None:
    """A ring of eight fills two nodes of four; what is on one node is together."""
    found = allowed(strategy(SizeLimits(4, 1, 1, 4), SizeLimits(8, 1, 1, 8), SizeLimits(16, 4, 1, 4)))
    assert found.gpus == (4, 8, 16)
    assert [found.at(n).fits(Shape(n // 2, 2)) for n in found.gpus] == [False, False, False]


def test_an_owner_names_steps_before_the_strategy_is_known() -> None:
    """No policy is shown a size that the strategy cannot use; what is known later holds as well."""
    waits = seen(waiting(1, Shape(1, 4), comment="ones: gpus=4-16:4")).elastic[1]
    assert limits_of(waits, CLUSTER, None).gpus == (4, 8, 12, 16)
    pairs = seen(waiting(1, Shape(1, 2), comment="ones: gpus=2-16:2")).elastic[1]
    assert limits_of(pairs, CLUSTER, None).gpus == (2, 4, 8, 12, 16)
    assert allowed(RING, "ones: gpus=4-16:6 batch=32-4096").gpus == (4, 16)


def test_a_size_without_memory_for_a_sample_is_none() -> None:
    """8 GB of 16 are taken, and a sample takes 10 on one GPU: it takes two at least."""
    rows = (SizeLimits(n, 1, fixed_bytes=8 * 10**9, sample_bytes=10**10 // n) for n in (1, 2, 4))
    found = allowed(strategy(*rows, memory_bytes=16 * 10**9))
    assert found.gpus == ()
    rows = (SizeLimits(n, 1, fixed_bytes=8 * 10**9, sample_bytes=10**10 // n) for n in (1, 2, 4))
    found = allowed(strategy(*rows, memory_bytes=16 * 10**9), "ones: gpus=1-16 batch=1-64")
    assert found.gpus == (2, 4)
    assert [found.at(n).most for n in (1, 2, 4)] == [0, 4, 8]


def test_a_batch_that_is_fixed_is_the_one_in_force() -> None:
    """Whatever the owner allows; a size whose batches are multiples of something else is none."""
    spec = strategy(SizeLimits(2, 2), SizeLimits(4, 4, 48), batch_fixed=True)
    found = limits_of(
        seen(waiting(1, Shape(1, 2), comment="ones: gpus=1-16 batch=32-4096")).elastic[1],
        CLUSTER,
        spec,
        history(1, batch=64),
    )
    assert (found.min_batch, found.max_batch, found.gpus) == (64, 64, (2,))


def test_a_strategy_that_says_nothing_of_sizes_leaves_them_alone() -> None:
    """Any number of GPUs, as plain data parallel."""
    plain = replace(RING, limits=None)
    assert replace(allowed(strategy()), strategy="") == allowed(plain)


NOT = {"strategy_size": (Shape(1, 3), 64), "strategy_together": (Shape(2, 1), 64), "strategy_takes": (Shape(1, 4), 62)}


@pytest.mark.parametrize("code", NOT)
def test_a_plan_begins_nothing_that_breaks_the_limits(code: str) -> None:
    """Whatever a policy has said: they are looked at once more before a resize begins."""
    shape, batch = NOT[code]
    rules = _round(RING).partition("gpu")
    made = plan(Schedule({1: Allocation(shape, batch)}), rules)
    assert made.outcomes[1].code == code and not made.begin
    assert "ring" in str(made.outcomes[1])


def test_a_plan_changes_no_batch_that_is_fixed() -> None:
    """Not at the same size either."""
    rules = _round(replace(RING, limits=replace(RING.limits, batch_fixed=True))).partition("gpu")  # type: ignore[type-var]
    for shape in (Shape(1, 2), Shape(1, 4)):
        made = plan(Schedule({1: Allocation(shape, 128)}), rules)
        assert made.outcomes[1].code == "strategy_batch" and not made.begin
    assert plan(Schedule({1: Allocation(Shape(1, 4), 64)}), rules).begin


def test_the_next_resize_waits_for_its_steps() -> None:
    """With a reason that counts them; also what its owner asks for by hand waits."""
    slow = replace(RING, limits=replace(RING.limits, min_steps=100))  # type: ignore[type-var]
    for comment in ("ones: gpus=1-16", "ones: gpus=1-16 size=4"):
        (fixed,) = _views(_round(slow, comment, steps_since_change=40))
        assert fixed.fixed == reason("strategy_steps", strategy="ring", steps=60)
        assert str(fixed.fixed) == "ring: its next resize may come after 60 more steps"
    for steps in (None, 100):
        (free,) = _views(_round(slow, steps_since_change=steps))
        assert free.fixed is None


def test_a_job_whose_strategy_has_no_place_here_keeps_its_size() -> None:
    """It is never parked for that."""
    (view,) = _views(_round(strategy(SizeLimits(9, 1))))
    assert view.fixed is not None and view.fixed.code == "strategy_nowhere"
    assert str(view.fixed).startswith("ring runs on 9 GPUs, and none of these is possible here")


def test_an_owner_who_asks_for_another_size_is_told() -> None:
    """By hand too, a strategy's sizes hold."""
    (view,) = _views(_round(RING, "ones: gpus=1-16 size=3"))
    found = decide_within(make_policy("ees"), CLUSTER, [view], (), {1: 3}, NOW, np.random.default_rng(0))
    assert str(found.reasons[1]) == "ring runs on 2, 4, 6, 8 or 16 GPUs: 3 cannot be used"


def _round(spec: Spec, comment: str = "ones: gpus=1-16 batch=32-4096", **known: Any) -> Any:
    runs = running(1, Shape(1, 2), "n1", comment=comment, start_time=1.0, time_limit_s=0.0)
    histories = {1: history(1, spec=spec, batch=64, **known)}
    return round_of(seen(runs, used={"n1": 2}), histories=histories, now=NOW)


def _views(round_: Any) -> Any:
    rules = round_.partition("gpu")
    return job_views(round_, rules, cluster_view(round_, rules), job_models(round_, Learner()))


def test_blocks_hold_whole_groups() -> None:
    """Ranks follow the order of the blocks, which nobody knows before."""
    pairs = SizeRule(4, 2, 64, together=2)
    assert not parts(pairs, [Shape(1, 2), Shape(1, 2)])
    assert parts(pairs, [Shape(1, 3), Shape(1, 1)])
    assert not parts(pairs, [Shape(1, 4)])
    assert parts(pairs, [Shape(4, 1)])


def test_the_nodes_say_which_ranks_share_one() -> None:
    """What the job wrote on whatever it started on is judged by the nodes that it may run on: groups that fill them,
    as many of a group as divide both where they do not, and all where one node holds the job."""
    rows = (SizeLimits(n, 1, together=n) for n in (1, 2, 3, 4, 8, 9))
    spec = strategy(*rows, SizeLimits(12, 4, together=3))
    assert [rule.together for rule in size_rules(spec, 4)] == [1, 2, 3, 4, 4, 1, 1]
    assert [rule.together for rule in size_rules(spec, 6)] == [1, 2, 3, 4, 2, 3, 3]
    assert [rule.together for rule in size_rules(spec, 16)] == [1, 2, 3, 4, 8, 9, 3]
    spread = breaks(spec, Shape(2, 2), 64, 64, 4)
    assert spread is not None and spread.code == "strategy_together"
    assert breaks(spec, Shape(2, 4), 64, 64, 4) is None and breaks(spec, Shape(3, 4), 64, 64) is None
    assert allowed(spec).gpus == (1, 2, 3, 4, 8, 12)


@given(rounds(max_jobs=6, uniform=True), st.data())
def test_rules_keep_strategies_too(drawn: Round, data: st.DataObject) -> None:
    """Sizes asked for by hand and caps: none of them gives a job what its strategy cannot use."""
    view, jobs = drawn
    ids = [one.job_id for one in jobs]
    asked = {id_: data.draw(st.integers(1, 8)) for id_ in ids if data.draw(st.booleans())}
    caps = (Cap(data.draw(st.integers(0, 16)), frozenset(ids), reason("user_cap", user="a", gpus=4, setting="x")),)
    found = decide_within(make_policy("ees"), view, jobs, caps, asked, 0.0, seeded())
    for one in jobs:
        got = found.allocations.get(one.job_id)
        if got is None or not one.limits.rules or (got.shape, got.batch) == (one.shape, one.batch):
            continue
        rule = one.limits.at(got.shape.gpus)
        if got.shape != one.shape:
            assert got.shape.gpus in one.limits.gpus and rule.fits(got.shape)
        assert rule.replicas <= got.batch <= rule.most and got.batch % rule.quantum == 0


huge = st.integers(1, 2**53)


@given(st.lists(st.tuples(huge, huge, huge, huge, huge, huge), max_size=6), huge, huge, huge, st.booleans())
def test_absurd_limits_cost_nobody_a_decision(
    rows: list[tuple[int, ...]], memory: int, local: int, multiple: int, fixed: bool
) -> None:
    """What a job wrote as its limits decides on itself alone."""
    sizes = {n % 40 + 1 if n % 3 else n: (n, *rest) for n, *rest in rows}
    told = tuple(
        SizeLimits(n, n if q % 2 else 1, q, n if q % 5 else 1, f, s, r, r)
        for n, (_, q, f, s, r, _) in sorted(sizes.items())
    )
    spec = Spec(
        32,
        2**53,
        local,
        1000,
        5,
        local,
        multiple_of=multiple,
        limits=StrategyLimits("x", told, memory, batch_fixed=fixed),
    )
    assert decode_spec(encode(spec)) == spec
    views = [job(2, {"n2": 2}), *_views(_round(spec))]
    for policy in ("ones", "ees", "ones-sc21"):
        check(CLUSTER, views, make_policy(policy).decide(CLUSTER, views, NOW, seeded()))


def test_what_a_strategy_holds_its_job_to_is_said() -> None:
    """`why` shows these sentences."""
    told = replace(RING.limits, batch_fixed=True, min_steps=5, exact=False, carries=("the residual",))  # type: ignore[type-var]
    assert [str(one) for one in described(told)] == [
        "ring runs on 2, 4, 6, 8 or 16 GPUs",
        "ring keeps its present batch at every size",
        "ring needs at least 5 steps between two resizes",
        "ring keeps at a resize, besides model and optimizer: the residual; it resets: nothing",
        "ring trains a little differently on another number of GPUs",
    ]


def test_nothing_breaks_a_plain_job() -> None:
    assert breaks(replace(RING, limits=None), Shape(3, 3), 7, 11) is None
    assert size_rules(None, 4) == ()
