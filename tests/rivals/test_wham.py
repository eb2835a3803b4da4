"""WHAM: its index is the price at which two sizes cost the same, and its order solves a program of its own."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.policy.tables import build_tables
from slurm_ones.rivals.wham import Wham, allocate, steps_of
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, cluster, job

SIZES = np.array([0, 1, 2, 4, 8, 16])


@given(st.lists(st.floats(0.01, 10.0), min_size=5, max_size=5), st.floats(1e-3, 1e3))
def test_at_every_price_the_steps_above_it_lead_to_the_cheapest_size(speeds: list[float], price: float) -> None:
    """Whittle's definition: least (1 + price · k) / s(k) is at the size that the steps of higher index lead to."""
    goodput = np.array([0.0, *speeds])
    taken = [step.column for step in steps_of(0, SIZES, goodput) if step.index > price]
    cost = (1.0 + price * SIZES[1:]) / goodput[1:]
    assert cost[taken[-1] - 1] == pytest.approx(cost.min(), rel=1e-6)


def test_the_index_of_small_steps_is_the_derivative_of_the_paper() -> None:
    """w s'(k) / (s(k) - k s'(k)), which for k^p is p / ((1 - p) k); and linear speeds have no other price."""
    sizes = np.arange(0, 2001)
    steps = steps_of(0, sizes, np.asarray(sizes**0.7, dtype=np.float64))
    assert math.isinf(steps[0].index)
    assert steps[999].index == pytest.approx(0.7 / (0.3 * 1000), rel=0.01)
    assert all(math.isinf(step.index) for step in steps_of(0, SIZES, SIZES * 3.0))
    assert [step.column for step in steps_of(0, SIZES, SIZES * 3.0)] == [1, 2, 3, 4, 5]


def test_equal_jobs_share_equally_whatever_is_left_of_them() -> None:
    alike = [job(1, to_come=1.0), job(2, to_come=500.0), job(3, to_come=30.0), job(4, to_come=9.0)]
    tables = build_tables(cluster(2, 4), alike)
    assert tables.sizes[allocate(tables, 8)].tolist() == [2, 2, 2, 2]
    tables = build_tables(cluster(3, 4), [job(1, model=Power(exponent=0.4)), job(2, model=Power(exponent=0.95))])
    assert tables.sizes[allocate(tables, 12)].tolist() == [4, 8]


@given(st.lists(st.floats(0.2, 0.9), min_size=2, max_size=3), st.integers(4, 16))
def test_no_other_sizes_are_sooner_done_for_the_gpu_seconds(exponents: list[float], gpus: int) -> None:
    """BOA's program: of all sizes whose Σ k / s(k) is no more, none has less Σ 1 / s(k)."""
    jobs = [job(i, model=Power(exponent=p), gpus=tuple(range(1, 17))) for i, p in enumerate(exponents)]
    tables = build_tables(cluster(4, 4, uniform=False), jobs)
    columns = allocate(tables, gpus)
    assert tables.sizes[columns].sum() == gpus
    slow = 1.0 / tables.goodput[:, 1:]
    bill = tables.sizes[1:] * slow
    rows = np.arange(len(jobs))
    every = np.array(list(itertools.product(range(16), repeat=len(jobs))))
    within = bill[rows, every].sum(axis=1) <= bill[rows, columns - 1].sum() * (1 + 1e-9)
    assert slow[rows, columns - 1].sum() <= slow[rows, every[within]].sum(axis=1).min() * (1 + 1e-9)


def test_too_many_jobs_go_by_what_they_still_need() -> None:
    """The first step of each has no price: least GPU-seconds first, and the others wait."""
    view = cluster(1, 2)
    jobs = [job(1, to_come=50.0), job(2, to_come=1.0), job(3, to_come=5.0), job(4, to_come=70.0, gpus=(4,))]
    schedule = Wham().decide(view, jobs, 0.0, seeded())
    check(view, jobs, schedule)
    assert schedule.allocations.keys() == {2, 3}
