"""A rule of the objective enters at each place of the protocol, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.ones import Ones, OnesOptions
from slurm_ones.ones.terms import Outlook, Penalty, Priced, Situation, Term
from slurm_ones.ones.worth import Choices
from slurm_ones.policy.contract import Bools, Floats, Ints, Schedule
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, cluster, job

SAID = reason("turn", first="a rule of this test")
QUEUE = [job(i, to_come=4.0, gpus=(1, 2, 4), requested=4, model=Power(exponent=0.3)) for i in (1, 2)]
VIEW = cluster(1)
WHOLE = Shape(1, 4)


def sizes(*terms: Term) -> tuple[dict[int, int], Schedule]:
    """GPUs of both jobs, which share four, with these rules beside our own."""
    policy = Ones(OnesOptions())
    policy.search.terms = (*policy.search.terms, *terms)
    schedule = policy.decide(VIEW, QUEUE, 100.0, seeded())
    check(VIEW, QUEUE, schedule)
    return {i: found.shape.gpus for i, found in schedule.allocations.items()}, schedule


class Small(Term):
    def mask(self, at: Situation, allowed: Bools) -> Bools:
        return allowed & (at.tables.sizes <= 1)

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        return {at.tables.jobs[1].job_id: SAID}


class Slow(Term):
    def speed(self, at: Situation, speed: Floats) -> Floats:
        return speed * np.where(at.tables.sizes > 1, 1e-3, 1.0)


class Heavy(Term):
    def weight(self, at: Outlook, weight: Floats) -> Floats:
        return weight * np.array([1e4, 1.0])


class Dear(Term):
    def worth(self, at: Priced, worth: Floats) -> Floats:
        return worth - 1e6 * at.tables.sizes * np.array([[0.0], [1.0]])


class First(Term):
    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty:
        return lambda candidates: choices.gpus * dear * (candidates[:, 0] <= candidates[:, 1])


def test_without_more_rules_they_share() -> None:
    assert sizes()[0] == sizes(Term())[0] == {1: 2, 2: 2}


@pytest.mark.parametrize("term", [Small(), Slow()])
def test_columns_that_are_masked_or_slow_are_not_taken(term: Term) -> None:
    assert sizes(term)[0] == {1: 1, 2: 1}


@pytest.mark.parametrize("term", [Heavy(), Dear(), First()])
def test_weights_worths_and_penalties_decide_who_gets_the_gpus(term: Term) -> None:
    found, _ = sizes(term)
    assert len(found) == 1 or found[1] > found[2]


def test_a_rule_says_why_for_the_jobs_that_it_decided() -> None:
    reasons = sizes(Small())[1].reasons
    assert reasons[2] == SAID
    assert reasons[1].code == "least_total_time"


def test_what_a_job_holds_stays_allowed_whatever_is_masked() -> None:
    held = replace(QUEUE[0], shape=WHOLE, nodes={"n1": 4}, running_s=1e4)
    policy = Ones()
    policy.search.terms = (*policy.search.terms, Nothing())
    assert policy.decide(VIEW, [held], 100.0, seeded()).allocations[1].shape == WHOLE


class Nothing(Term):
    def mask(self, at: Situation, allowed: Bools) -> Bools:
        return np.zeros_like(allowed)


def test_gpus_without_room_cost_whatever_worths_are() -> None:
    """Also where all sizes are worth less than nothing, no candidate gains by what finds no room."""
    found: list[float] = []

    class Negative(Term):
        def worth(self, at: Priced, worth: Floats) -> Floats:
            return worth - 1e6

        def penalty(self, at: Priced, choices: Choices, dear: float) -> None:
            found.append(dear)

    sizes(Negative())
    assert found[0] > 0


def test_a_decision_stands_while_nothing_has_changed() -> None:
    """For a minute, and until a job is slower, nearer its end, elsewhere or gone; it may be switched off."""
    policy, same = Ones(), QUEUE
    first = policy.decide(VIEW, same, 100.0, seeded())
    shape = first.allocations[1].shape
    nearly = [replace(j, progress=replace(j.progress, beta=j.progress.beta * 0.97), running_s=15.0) for j in same]
    assert policy.decide(VIEW, nearly, 115.0, seeded()) is first
    assert policy.decide(VIEW, nearly, 160.0, seeded()) is not first
    for other in (
        [replace(same[0], progress=replace(same[0].progress, beta=1.0)), same[1]],
        [replace(same[0], model=Power(exponent=0.3, per_gpu=90.0)), same[1]],
        [replace(same[0], shape=shape, nodes={"n1": shape.gpus}), same[1]],
        same[:1],
    ):
        fresh = Ones()
        before = fresh.decide(VIEW, same, 100.0, seeded())
        assert fresh.decide(VIEW, other, 115.0, seeded()) is not before
    resting = [[replace(same[0], fixed=reason("strategy_steps", strategy="ddp", steps=n)), same[1]] for n in (200, 185)]
    before, after = policy.decide(VIEW, resting[0], 300.0, seeded()), policy.decide(VIEW, resting[1], 315.0, seeded())
    assert after.allocations is before.allocations, "steps that pass are no change"
    said = [dict(one.reasons[1].arguments)["steps"] for one in (before, after)]
    assert said == [200, 185]
    kept = [replace(same[0], fixed=reason("held_by_owner")), same[1]]
    assert policy.decide(VIEW, kept, 330.0, seeded()).allocations is not before.allocations
    anew = Ones(OnesOptions(stand=False))
    assert anew.decide(VIEW, same, 100.0, seeded()) is not anew.decide(VIEW, same, 115.0, seeded())
