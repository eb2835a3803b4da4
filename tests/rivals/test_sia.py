"""Sia: its configurations, its costs, and that the integer program is the optimum of what it says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.policy.contract import Floats, Ints, Limits
from slurm_ones.policy.tables import Tables, build_tables
from slurm_ones.rivals.sia import BEST, LARGEST_COST, RoomOfKind, Sia, SiaOptions, _costs, _limited, solve
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, cluster, job


def brute(costs: Floats, sizes: Ints, free: int, whole: int, per_node: int, left_out: float) -> float:
    """Least cost over all choices."""
    best = math.inf
    columns = [[0, *np.flatnonzero(np.isfinite(row)).tolist()] for row in costs]
    for chosen in itertools.product(*columns):
        taken = [int(sizes[u]) for u in chosen]
        nodes = sum(n // per_node for n in taken if n % per_node == 0)
        if sum(taken) <= free and nodes <= whole:
            best = min(best, sum(costs[j, u] if u else left_out for j, u in enumerate(chosen)))
    return best


@given(
    st.lists(st.lists(st.floats(0.05, 3.0) | st.just(math.inf), min_size=5, max_size=5), min_size=1, max_size=5),
    st.integers(0, 20),
    st.integers(0, 5),
)
def test_the_program_equals_brute_force(values: list[list[float]], free: int, whole: int) -> None:
    """On small cases no choice of configurations that fits costs less, and the one found fits."""
    sizes = np.array([0, 1, 2, 4, 8, 12])
    costs = np.column_stack([np.full(len(values), math.inf), np.array(values)])
    tables = build_tables(cluster(), [job(j) for j in range(len(values))])
    wider = Tables(**{**vars(tables), "sizes": sizes})
    options = SiaOptions(gap=0.0)
    found = solve(wider, costs, [RoomOfKind(free, whole, 4)], options)
    assert found.reason == BEST
    assert found.cost == pytest.approx(brute(costs, sizes, free, whole, 4, options.left_out), abs=1e-5)
    taken = sizes[found.column]
    assert taken.sum() <= free
    assert (taken[taken % 4 == 0] // 4).sum() <= whole


def test_configurations_are_powers_of_two_and_whole_nodes() -> None:
    """Of any counts that a job takes, and all of its own where none is one."""
    view = cluster(4, 4, uniform=False)
    assert _limited(view, job(1, gpus=tuple(range(1, 17))), 99).limits.gpus == (1, 2, 4, 8, 12, 16)
    assert _limited(view, job(1, gpus=tuple(range(1, 17))), 4).limits.gpus == (1, 2, 4)
    assert _limited(view, job(1, gpus=(3,)), 1).limits.gpus == (3,)


def test_costs_are_powers_of_normalised_goodput() -> None:
    """By hand: linear speed costs n^-0.5; a change of a job that runs costs its factor; a new job is free to start."""
    waiting = job(1, submitted=0.0, model=Power(exponent=1.0), limits=Limits((1, 2, 4), 256, 256, 256))
    running = job(2, {"n1": 2}, submitted=0.0, model=Power(exponent=1.0), limits=Limits((1, 2, 4), 256, 256, 256))
    tables = build_tables(cluster(), [waiting, running])
    costs = _costs(tables, 90.0, -0.5)
    assert costs[0, 1:].tolist() == pytest.approx([1, 2**-0.5, 4**-0.5])
    factor = 90 / 120
    assert costs[1, 1:].tolist() == pytest.approx([factor**-0.5, 2**-0.5, (4 * factor) ** -0.5])
    assert _costs(tables, 20.0, -0.5)[1, 1:].tolist() == pytest.approx([1, 2**-0.5, 4**-0.5])


def test_a_job_restarted_all_its_life_is_left_alone() -> None:
    """Where nothing of its speed would remain every change costs the most there is, and the program stays bounded."""
    often = job(2, {"n1": 2}, submitted=0.0, resizes=9)
    costs = _costs(build_tables(cluster(), [often]), 90.0, -0.5)[0]
    assert sorted(costs[1:].tolist())[1:] == [LARGEST_COST] * 4


def test_a_job_at_most_doubles() -> None:
    """One that runs on 2 of 16 GPUs alone gets 4."""
    schedule = Sia().decide(cluster(4, 4), [job(1, {"n1": 2}, submitted=-9000.0)], 0.0, seeded())
    assert schedule.allocations[1].shape == Shape(1, 4)


def test_whole_nodes_that_rigid_jobs_share_are_not_planned_with() -> None:
    """Eight free GPUs on four halved nodes are no two nodes: a job that would grow to two stays."""
    view = cluster(5, 4, free=(4, 2, 2, 2, 2))
    jobs = [job(1, {"n1": 4}, submitted=-9000.0)]
    schedule = Sia().decide(view, jobs, 0.0, seeded())
    check(view, jobs, schedule)
    assert schedule.allocations[1].shape == Shape(1, 4)


def test_a_solver_that_finds_nothing_says_so() -> None:
    """A program too large for the time it is given leaves everything as it is, in so many words."""
    rng, jobs = seeded(), [job(j, {"n1": 4} if j == 7 else {}) for j in range(400)]
    tables = build_tables(cluster(), jobs)
    costs = np.where(tables.allowed, rng.random(tables.allowed.shape), np.inf)
    found = solve(tables, costs, [RoomOfKind(777, 150, 4)], SiaOptions(time_limit_s=0.0, gap=0.0))
    assert found.reason.code == "no_solution"
    assert found.column.tolist() == tables.current.tolist()
