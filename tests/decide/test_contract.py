"""The contract of all policies, on every policy there is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_ones.decide import POLICIES, make_policy
from slurm_ones.schedule.policy import NodeView
from tests.decide.contract import Power, check, cluster, job
from tests.decide.strategies import Round, rounds, seeded

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@every_policy
@quick
@given(st.lists(rounds(), min_size=1, max_size=2), st.integers(0, 3), st.sampled_from([0.0, 60.0, 3600.0, -60.0]))
def test_schedules_can_be_had(name: str, history: list[Round], seed: int, later: float) -> None:
    """Also with a memory of another round, no schedule breaks limits, shapes, fixed jobs, running jobs or
    nodes.
    """
    policy, rng = make_policy(name), seeded(seed)
    for number, (view, jobs) in enumerate(history):
        check(view, jobs, policy.decide(view, jobs, number * later, rng))


@every_policy
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rounds(), st.integers(0, 9))
def test_equal_seeds_give_equal_schedules(name: str, drawn: Round, seed: int) -> None:
    """Two policies fed alike agree on allocations, words and score, so that a decision can be replayed."""
    view, jobs = drawn
    found = []
    for _ in range(2):
        policy, rng = make_policy(name), seeded(seed)
        found.append([repr(policy.decide(view, jobs, 0.0, rng)) for _ in range(2)])
    assert found[0] == found[1]


@every_policy
def test_nothing_to_decide(name: str) -> None:
    """No jobs, no nodes, or neither, is an answer and no crash."""
    policy = make_policy(name)
    assert not policy.decide(cluster(), [], 0.0, seeded()).allocations
    assert not policy.decide(cluster(0), [], 0.0, seeded()).allocations
    waiting = policy.decide(cluster(0), [job(1)], 0.0, seeded())
    assert not waiting.allocations
    assert waiting.reasons[1].code in {"fits_nowhere", "no_room", "in_queue"}


@every_policy
@pytest.mark.parametrize("figure", [0.0, -1.0, math.nan, math.inf, 1e300, 1e-300])
def test_absurd_figures_never_crash(name: str, figure: float) -> None:
    """One job whose reports make no sense costs neither the tick nor the other jobs' schedule."""
    view = cluster(2)
    absurd = job(
        1,
        {"n1": 2},
        epochs=3,
        model=Power(table=dict.fromkeys((1, 2, 4, 8, 16), figure)),
        samples=figure,
        running_s=figure,
    )
    jobs = [absurd, job(2, {"n2": 1}, epochs=3), job(3, requested=1)]
    policy = make_policy(name)
    for _ in range(2):
        schedule = policy.decide(view, jobs, 0.0, seeded())
        check(view, jobs, schedule)
        assert 3 in schedule.allocations


@every_policy
def test_jobs_on_nodes_that_are_gone_stay_as_they_are(name: str) -> None:
    """A job on a drained node, or one Slurm's figures disagree about, keeps its shape and disturbs nobody."""
    view = replace(cluster(2), nodes=(NodeView("n1", 4), NodeView("n2", 1)))
    elsewhere, oversized = job(1, {"n9": 4}, epochs=5), job(2, {"n2": 4}, epochs=5)
    unsaid = replace(job(3, {"n1": 1}, epochs=5), nodes={})
    jobs = [elsewhere, oversized, unsaid, job(4)]
    schedule = make_policy(name).decide(view, jobs, 0.0, seeded())
    for kept in jobs[:3]:
        assert schedule.allocations[kept.job_id].shape == kept.shape
    assert schedule.allocations[4].shape.gpus >= 1


@every_policy
def test_policies_do_not_change_their_inputs(name: str) -> None:
    """A policy is pure: the same views can be given to another one afterwards."""
    view, jobs = cluster(2), [job(1, {"n1": 4}, epochs=4), job(2), job(3)]
    before = repr((view, jobs))
    make_policy(name).decide(view, jobs, 0.0, np.random.default_rng(0))
    assert repr((view, jobs)) == before


def test_wrong_names_are_told_the_right_ones() -> None:
    """A misspelt policy or option in a settings file gets the accepted values."""
    with pytest.raises(ValueError, match=r"policy: 'one' is none of .*ones"):
        make_policy("one")
    with pytest.raises(ValueError, match=r"no option 'generation'; it has population, generations"):
        make_policy("ones", generation=3)
    for option, value in (("population", 1), ("mutation", 1.5), ("resize_cost_s", -1), ("generations", "9")):
        with pytest.raises(ValueError, match=option):
            make_policy("ones", **{option: value})
