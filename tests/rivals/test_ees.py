"""Effective elastic scaling: the dynamic programme is the optimum, and who takes part in it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.policy.contract import Limits
from slurm_ones.policy.tables import build_tables
from slurm_ones.rivals.ees import Ees, EesOptions, allot, scaling_factors
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, cluster, job


@given(
    st.lists(st.lists(st.floats(0.1, 9.0) | st.just(-math.inf), min_size=4, max_size=4), min_size=0, max_size=5),
    st.integers(0, 24),
)
def test_the_dynamic_programme_equals_brute_force(values: list[list[float]], free: int) -> None:
    """On small cases no sizes of the admitted jobs have a larger sum, each has one, and they fit."""
    sizes = np.array([0, 1, 2, 4, 8])
    factors = np.column_stack([np.full(len(values), -math.inf), np.array(values).reshape(-1, 4)])
    columns, total = allot(sizes, factors, free)
    assert sizes[columns].sum() <= free
    admitted, needed = [], 0
    for j, row in enumerate(factors):
        possible = [u for u in range(5) if math.isfinite(row[u])]
        if possible and needed + sizes[possible[0]] <= free:
            admitted.append((j, possible))
            needed += sizes[possible[0]]
    assert np.flatnonzero(columns).tolist() == [j for j, _ in admitted]
    best = max(
        sum(factors[j, u] for (j, _), u in zip(admitted, chosen, strict=True))
        for chosen in itertools.product(*(possible for _, possible in admitted))
        if sum(sizes[u] for u in chosen) <= free
    )
    assert total == pytest.approx(best)
    assert sum(factors[j, columns[j]] for j, _ in admitted) == pytest.approx(best)


def test_factors_are_goodput_over_that_of_the_least_size() -> None:
    """By hand: speed n^0.5 at a fixed batch."""
    one = job(1, model=Power(exponent=0.5), limits=Limits((1, 4), 256, 256, 256))
    other = job(2, model=Power(exponent=0.5), limits=Limits((2, 4), 256, 256, 256))
    factors = scaling_factors(build_tables(cluster(), [one, other]))
    assert factors[0].tolist() == pytest.approx([-math.inf, 1.0, -math.inf, 2.0])
    assert factors[1].tolist() == pytest.approx([-math.inf, -math.inf, 1.0, 2**0.5])


def test_running_jobs_are_never_stopped_and_later_ones_wait() -> None:
    """Six jobs on four GPUs: those that run go on, the earliest of the others joins, the rest wait."""
    jobs = [job(1), job(2), job(3), *(job(i, {"n1": 1}) for i in (7, 8, 9))]
    schedule = Ees().decide(cluster(1, 4), jobs, 0.0, seeded())
    check(cluster(1, 4), jobs, schedule)
    assert schedule.allocations.keys() == {1, 7, 8, 9}
    assert schedule.parked == {2, 3}


def test_nothing_changes_where_it_brings_nothing() -> None:
    """Two alike jobs on 4 and 8 GPUs are not exchanged."""
    linear = Limits((4, 8), 256, 256, 256)
    jobs = [job(1, {"n1": 4}, limits=linear), job(2, {"n2": 4, "n3": 4}, limits=linear)]
    for swapped in (jobs, jobs[::-1]):
        schedule = Ees().decide(cluster(3, 4), swapped, 0.0, seeded())
        assert [schedule.allocations[i].shape.gpus for i in (1, 2)] == [4, 8]


def test_between_rescalings_only_waiting_jobs_change() -> None:
    """With an interval of 600 s a job of one GPU stays so for ten minutes, room or not, and a new one starts."""
    policy, view = Ees(EesOptions(interval_s=600.0)), cluster(2, 4)
    policy.decide(view, [], 0.0, seeded())
    jobs = [job(1, {"n1": 1}), job(2)]
    early = policy.decide(view, jobs, 540.0, seeded())
    check(view, jobs, early)
    assert early.allocations[1].shape.gpus == 1
    assert early.allocations[2].shape.gpus >= 1
    assert policy.decide(view, jobs, 600.0, seeded()).allocations[1].shape.gpus > 1
