"""What growth may cost: within a factor of what the same progress costs at the size that was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db import JobHistory, ThroughputPoint
from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import OptIn, parse_comment
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, whole_job
from slurm_ones.policy.contract import Allocation, JobView, Schedule
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.cost import charge_of, cost_caps
from slurm_ones.rules.gate import JobRules
from slurm_ones.rules.views import decide_within
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import Power, cluster, job
from tests.act.make import elastic, history

CHARGED = {"account": "lab", "qos": "normal"}
GUEST = {"guests": {"gpu": {"qos": "guest"}}}
SPEEDS = {2: 100.0, 4: 190.0, 8: 330.0, 16: 500.0}
"""GPU-seconds a sample rise by 1.05, 1.21 and 1.6 from 2 GPUs on."""
MEASURED = ThroughputPoint(Shape(1, 2), 64, 100.0, 1.0)


def asked_for_two(**changes: Any) -> JobView:
    """A job of ten epochs that asked for 2 GPUs and has them."""
    model = Power(table=SPEEDS)
    return job(1, {"n1": 2}, **{"gpus": (2, 4, 8, 16), "requested": 2, "model": model, "resize_s": 0.0} | changes)


def blocks(one: Elastic) -> Elastic:
    own = replace(one.job.first, array_id=1, array_tasks=(0,))
    return replace(one, job=whole_job(1, [own]), optin=OptIn((1, 16), None, None, blocks=True))


def caps(
    view: JobView, past: JobHistory | None = None, one: Elastic | None = None, *, factor: float = 1.1, **site: Any
) -> tuple[Cap, ...]:
    one = one or elastic(1, Shape(1, 2), "n1", **CHARGED)
    past = past or history(1, throughput=(MEASURED,))
    rules = {1: JobRules(one, past, None, None, None)}
    settings = Settings.model_validate({"limits": {"growth_cost": factor}} | site)
    factors = {"normal": 1.0, "guest": 0.0}
    return cost_caps(cluster(), [view], rules, settings, factors)


def most(*given: Any, **more: Any) -> int:
    found = caps(*given, **more)
    return found[0].gpus if found else 16


def ran(*spans: tuple[int, float]) -> JobHistory:
    """A job that has run with so many GPUs for so long."""
    return history(1, throughput=(MEASURED,), ran=tuple((Shape(1, gpus), seconds) for gpus, seconds in spans))


ROWS: dict[str, tuple[JobView, JobHistory | None, dict[str, Any], int]] = {
    "within 1.10": (asked_for_two(), None, {}, 4),
    "within 1.25": (asked_for_two(), None, {"factor": 1.25}, 8),
    "within 1": (asked_for_two(), None, {"factor": 1.0}, 2),
    "nobody knows how much is to come": (asked_for_two(dataset=0), None, {}, 4),
    # Of 20 epochs of 1000 samples half are done, at what was asked for: the rest may cost 1.2 times as much, or not
    # quite.
    "half of it done": (asked_for_two(epochs=10), ran((2, 101.0)), {}, 4),
    "half of it done, and a little over": (asked_for_two(epochs=10), ran((2, 98.0)), {}, 8),
    "nearly all of it done": (asked_for_two(epochs=90), ran((2, 900.0)), {}, 16),
    "half of it done, and the budget used up": (asked_for_two(epochs=10), ran((8, 60.0)), {}, 2),
    "it was never measured at what it asked for": (
        asked_for_two(model=Power(table=SPEEDS, doubt=0.2)),
        history(1),
        {},
        2,
    ),
    "a resize costs GPU hours too": (asked_for_two(resize_s=10.0), None, {}, 2),
}


@pytest.mark.parametrize("row", ROWS)
def test_how_far_growth_pays(row: str) -> None:
    """The job's owner reads how far it may grow, and the factor."""
    view, past, more, expected = ROWS[row]
    found = caps(view, past, **more)
    assert (found[0].gpus if found else 16) == expected
    for cap in found:
        assert f"{more.get('factor', 1.1):.2f} times" in str(cap.reason) and not cap.strict


class Gives:
    """A policy that gives the job a fixed number of nodes with 4 GPUs each."""

    name = "gives"

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def decide(self, *_: object) -> Schedule:
        return Schedule({1: Allocation(Shape(self.nodes, 4), 64)}, {1: reason("trains_faster", factor=2.4)})


@pytest.mark.parametrize(
    ("nodes", "view", "past", "times"),
    [
        (4, asked_for_two(epochs=90), ran((2, 900.0)), "1.60"),
        (2, asked_for_two(epochs=90), ran((2, 900.0)), "1.21"),
        (1, asked_for_two(epochs=90), ran((2, 900.0)), ""),
        (4, asked_for_two(), None, ""),
        (2, replace(asked_for_two(epochs=90), nodes={"n1": 4, "n2": 4}, shape=Shape(2, 4)), ran((2, 900.0)), ""),
    ],
    ids=["near its end", "half as far", "as ever", "not allowed", "it stays"],
)
def test_a_growth_says_that_it_costs_more_for_now(
    nodes: int, view: JobView, past: JobHistory | None, times: str
) -> None:
    """Protects owners from GPU hours that look like a broken bound: what the job has left may be spent near its end."""
    found = decide_within(Gives(nodes), cluster(), [view], caps(view, past), {}, 0.0, seeded())
    why = str(found.reasons[1])
    assert ("this size uses" in why) == bool(times)
    if times:
        assert "2.4 times as fast; this size" in why and f"{times} times the GPU hours" in why and "1.10 times" in why


def test_a_smaller_size_leaves_more_to_spend() -> None:
    """What a job saved while it had less than it asked for is its own."""
    view = asked_for_two(epochs=10, model=Power(table=SPEEDS | {1: 60.0}), gpus=(1, 2, 4, 8, 16))
    assert most(view, ran((2, 100.0))) < most(view, ran((1, 100.0)))


@pytest.mark.parametrize(
    ("job_changes", "site", "by_blocks", "expected"),
    [
        ({}, {}, False, 4),
        ({"account": ""}, {}, False, 16),
        ({"qos": "guest"}, {}, False, 16),
        ({}, GUEST, True, 16),
        ({}, GUEST, False, 4),
        ({}, {"guests": {"gpu": {"partition": "scavenge"}}}, True, 4),
        ({}, {"guests": {"gpu": {"partition": "scavenge", "charged": False}}}, True, 16),
    ],
    ids=str,
)
def test_what_is_free(job_changes: dict[str, str], site: dict[str, Any], by_blocks: bool, expected: int) -> None:
    """Guests of UsageFactor 0, or of a partition that its site calls free; a plain job has none; without accounting all
    is."""
    one = elastic(1, Shape(1, 2), "n1", **CHARGED | job_changes)
    assert most(asked_for_two(), None, blocks(one) if by_blocks else one, **site) == expected


def test_half_a_factor_charges_half() -> None:
    one = blocks(elastic(1, Shape(1, 2), "n1", **CHARGED))
    settings = Settings.model_validate(GUEST)
    assert charge_of(one, settings, {"normal": 1.0, "guest": 0.5}) == 0.5
    assert charge_of(one, settings, {"normal": 2.0, "guest": 0.5}) == 0.25
    assert charge_of(one, settings, {}) == 1.0, "what nobody knows is charged"
    off = replace(one, optin=OptIn((1, 16), None, None, blocks=True, guests=False))
    assert charge_of(off, settings, {"guest": 0.0}) == 1.0


def test_an_owner_says_what_it_may_cost() -> None:
    """More than the site does, or less."""
    one = elastic(1, Shape(1, 2), "n1", **CHARGED)
    for comment, expected in (("ones: gpus=1-16 cost=2", 16), ("ones: gpus=1-16 cost=1", 2), ("ones: gpus=1-16", 4)):
        assert most(asked_for_two(), None, replace(one, optin=parse_comment(comment))) == expected


def test_what_a_job_has_is_not_taken_from_it() -> None:
    """A cap bounds growth beyond the size that was asked for, and one that may not change has none."""
    (cap,) = caps(replace(asked_for_two(), nodes={"n1": 4, "n2": 4}, shape=Shape(2, 4)), ran((8, 500.0)))
    assert cap.gpus == 2 and not cap.strict
    assert caps(replace(asked_for_two(), fixed=cap.reason)) == ()
    assert caps(asked_for_two(requested=16)) == ()
