"""Expected arrivals in the prices of `ones`: between today's jobs alone and a price that lasts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slurm_ones.decide import make_policy
from slurm_ones.decide.ones.arriving import Arriving, present
from slurm_ones.decide.ones.candidates import Nodes
from slurm_ones.decide.ones.terms import Priced
from slurm_ones.decide.ones.worth import worth_of_progress
from slurm_ones.schedule.policy import Arrivals, ClusterView
from slurm_ones.schedule.tables import build_tables
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import cluster, job

NONE = Arrivals((0.0,) * 24, 1e4, 3600.0)
SOME = Arrivals((1 / 300.0,) * 24, 1e4, 3600.0)
MANY = Arrivals((1e3,) * 24, 1e4, 3600.0)


def priced(arrivals: Arrivals | None) -> tuple[Priced, np.ndarray]:
    """Three waiting jobs, of which one has much more to do; and what progress is worth at a price that lasts."""
    view = replace(cluster(2, 4), arrivals=arrivals)
    jobs = [job(1, to_come=2.0), job(2, to_come=20.0), job(3, to_come=400.0)]
    tables = build_tables(view, jobs)
    work = np.array([2e3, 2e4, 4e5])
    ones = np.ones(3)
    unit, ends = worth_of_progress(tables.goodput, tables.sizes, work, ones, 8)
    lasting, _ = worth_of_progress(tables.goodput, tables.sizes, work, ones, 8, recursive=False)
    nodes = Nodes(view, jobs, [], tables.sizes)
    most = {1: 0, 2: 0, 3: 0}
    at = Priced(view, (), tables, nodes, most, 0.0, 0.0, tables.goodput, work, 0 * work, ones, ones, unit, ends)
    return at, np.asarray(lasting / unit)


def test_fewer_or_more_jobs_to_come_lie_between_the_two_prices() -> None:
    """None change nothing, without end they make today's price last, and between the effect grows with their number."""
    at, most = priced(NONE)
    assert Arriving(1.0).factors(at) == pytest.approx(np.ones(3))
    assert Arriving(1.0).factors(priced(None)[0]) == pytest.approx(np.ones(3))
    some = Arriving(1.0).factors(priced(SOME)[0])
    less = Arriving(0.2).factors(priced(SOME)[0])
    many = Arriving(1.0).factors(priced(MANY)[0])
    assert many / many[0] == pytest.approx(most / most[0], rel=1e-2)
    assert (np.abs(np.log(less)) <= np.abs(np.log(some))).all() and (np.abs(np.log(some)) <= np.abs(np.log(many))).all()
    assert np.abs(np.log(less[2])) < np.abs(np.log(some[2])) < np.abs(np.log(many[2]))
    assert many[0] < 1 < many[2], "a job with much to do is worth more where GPUs will not become cheaper"


def test_jobs_to_come_are_there_after_a_while() -> None:
    """None at once, and as many as Little's law says in the long run."""
    assert present(SOME, np.array([0.0, 300.0, np.inf])) == pytest.approx([0.0, 1.0, 12.0], rel=0.05)


def test_why_names_expected_arrivals_only_where_they_decided() -> None:
    """And schedules keep the contract."""
    jobs = [job(1, to_come=2.0), job(2, to_come=20.0), job(3, to_come=4000.0)]
    told: dict[str, set[str]] = {}
    for name, arrivals in (("none", None), ("many", MANY)):
        view: ClusterView = replace(cluster(2, 4), arrivals=arrivals)
        schedule = make_policy("ones", arrivals=1.0).decide(view, jobs, 0.0, seeded())
        check(view, jobs, schedule)
        told[name] = {why.code for why in schedule.reasons.values()}
        if arrivals is not None:
            named = [str(why) for why in schedule.reasons.values() if why.code == "expects_arrivals"]
            assert named and "jobs are expected to be submitted" in named[0]
    assert "expects_arrivals" not in told["none"]
    off = make_policy("ones").decide(replace(cluster(2, 4), arrivals=MANY), jobs, 0.0, seeded())
    assert "expects_arrivals" not in {why.code for why in off.reasons.values()}
