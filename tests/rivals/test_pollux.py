"""Pollux: sparse matrices, what repair guarantees, fronts, fitness, and the search as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.policy.build import fixed_jobs
from slurm_ones.policy.contract import Ints
from slurm_ones.policy.tables import History, restart_factor
from slurm_ones.rivals.pollux import (
    LEAST_SPEEDUP,
    Pollux,
    PolluxOptions,
    Problem,
    Rows,
    breed,
    build,
    cap_groups,
    crowding,
    evolve,
    make_rows,
    ranks,
    repair,
)
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import HELD, Power, Round, cluster, job, rounds

seeds = st.integers(0, 2**16)


def dense(rows: Rows, nodes: int) -> Ints:
    """(R, N)"""
    matrix = np.zeros((len(rows.starts) - 1, nodes), dtype=np.int64)
    matrix[rows.row, rows.node] = rows.gpus
    return matrix


def sparse(matrix: Ints) -> Rows:
    row, node = np.nonzero(matrix)
    return make_rows(len(matrix), row, node, matrix[row, node])


def problem_of(drawn: Round, history: History | None = None) -> Problem:
    view, jobs = drawn
    remembered = history or History()
    remembered.update(jobs)
    return build(view, jobs, fixed_jobs(view, jobs), remembered, now=100.0, power=-1.0)


matrices = st.integers(1, 5).flatmap(
    lambda nodes: st.lists(st.lists(st.integers(0, 4), min_size=nodes, max_size=nodes), min_size=1, max_size=6)
)


@given(matrices)
def test_sparse_rows_are_the_matrix(values: list[list[int]]) -> None:
    matrix = np.array(values, dtype=np.int64)
    rows, nodes = sparse(matrix), matrix.shape[1]
    assert (dense(rows, nodes) == matrix).all()
    assert (rows.totals == matrix.sum(axis=1)).all()
    assert (rows.counts == (matrix > 0).sum(axis=1)).all()
    chosen = np.arange(len(matrix))[::-1].repeat(2)
    assert (dense(rows.take(chosen), nodes) == matrix[chosen]).all()
    assert (dense(rows.over(rows), nodes) == np.concatenate([matrix, matrix])).all()
    assert (dense(rows.holding(rows.gpus - 1), nodes) == np.maximum(matrix - 1, 0)).all()
    empty_row, empty_node = np.nonzero(matrix == 0)
    place = np.searchsorted(rows.row * nodes + rows.node, empty_row * nodes + empty_node)
    filled = rows.among(place, empty_row, empty_node, np.ones_like(empty_row))
    assert (dense(filled, nodes) == np.where(matrix == 0, 1, matrix)).all()
    same = (matrix[:, None] == matrix).all(axis=2)
    assert ((rows.digest[:, None] == rows.digest) == same).all()


def test_first_come_first_served_within_a_limit() -> None:
    """Groups share no limit, and what is over it is cut from the last."""
    left = cap_groups(np.array([0, 0, 0, 2, 2]), np.array([2, 3, 1, 4, 4]), np.array([4, 4, 4, 5, 5]))
    assert left.tolist() == [2, 2, 0, 4, 1]


@given(rounds(), seeds)
def test_repaired_candidates_are_possible(drawn: Round, seed: int) -> None:
    """Whatever crossover and mutation make: no node is overfull, every job has a size it may have, shapes are uniform
    where they must be, and at most one job of several nodes is on a node.
    """
    problem, rng = problem_of(drawn), seeded(seed)
    if not problem.jobs or not problem.capacity.any():
        return
    view, jobs, nodes = problem.cluster, len(problem.jobs), len(problem.capacity)
    rows = repair(problem, problem.home, rng)
    for _ in range(4):
        pairs = rng.integers(len(rows.totals) // jobs, size=(6, 2))
        rows = repair(problem, breed(problem, rows, pairs, rng), rng)
        candidates = dense(rows, nodes).reshape(-1, jobs, nodes)
        assert (candidates.sum(axis=1) <= problem.capacity).all()
        home = dense(problem.home, nodes)
        for candidate in candidates:
            several = (candidate > 0).sum(axis=1) > 1
            crossing = ((candidate > 0) & several[:, None]).sum(axis=0) + problem.crossed
            before = ((home > 0) & ((home > 0).sum(axis=1) > 1)[:, None]).sum(axis=0)
            assert (crossing <= np.maximum(before, 1)).all()
            for j, job_view in enumerate(problem.jobs):
                total = int(candidate[j].sum())
                if total == 0 or (candidate[j] == home[j]).all():
                    continue
                # What it holds it may keep, whatever its limits say now.
                assert total in {*job_view.limits.gpus, int(home[j].sum())}
                if view.uniform and several[j]:
                    assert set(candidate[j][candidate[j] > 0]) == {view.gpus_per_node}


def test_jobs_of_several_nodes_do_not_meet() -> None:
    """Of two that would share nodes the one with less service stays, and none goes where a fixed one is."""
    gpus = tuple(range(1, 9))
    history = History()
    fixed = job(3, {"n2": 1, "n3": 1}, fixed=HELD, gpus=gpus)
    jobs = [job(1, gpus=gpus), job(2, gpus=gpus), fixed]
    history.update([job(1, {"n1": 8}), job(2, {"n1": 8}, epochs=1)])
    view = cluster(3, 4, uniform=False)
    problem = build(view, jobs, fixed_jobs(view, jobs), history, now=100.0, power=-1.0)
    assert [j.job_id for j in problem.jobs] == [1, 2]
    rows = repair(problem, sparse(np.array([[2, 0, 0], [2, 2, 0]])), seeded())
    assert dense(rows, 3).tolist() == [[2, 0, 0], [2, 0, 0]]
    both = cluster(2, 4, uniform=False)
    problem = build(both, jobs[:2], {}, history, now=100.0, power=-1.0)
    rows = repair(problem, sparse(np.array([[2, 2], [1, 2]])), seeded())
    assert dense(rows, 2).tolist() == [[2, 2], [0, 0]]


@pytest.mark.slow
@given(rounds(), seeds)
def test_fitness_never_falls_over_generations(drawn: Round, seed: int) -> None:
    """The best candidate is never lost in a search, and what is in force is where it begins."""
    problem = problem_of(drawn)
    if not problem.jobs or not problem.capacity.any():
        return
    best = problem.evaluate(repair(problem, problem.home, seeded(seed)))[0].max()
    for generations in range(6):  # with one seed, each is the one before and one generation more
        found = evolve(problem, problem.home, PolluxOptions(population=10, generations=generations), seeded(seed))
        assert found.fitness.max() >= best * (1 - 1e-12)
        assert len(found.fitness) <= 10
        best = found.fitness.max()


def test_fitness_is_the_harmonic_mean_of_speedups() -> None:
    """By hand: two jobs on two nodes of 2 GPUs, the fair share 2 each; a job that changes pays its factor."""
    stays = job(1, {"n1": 2}, model=Power(exponent=0.5), submitted=0.0, resizes=1)
    moves = job(2, {"n2": 1}, model=Power(exponent=1.0), submitted=0.0)
    problem = problem_of((cluster(2, 2), [stays, moves]))
    wanted = {1: [2, 0], 2: [0, 2]}
    fitness, use = problem.evaluate(sparse(np.array([wanted[j.job_id] for j in problem.jobs])))
    share = 1 / 2  # of a node: what a speed-up of 1 counts as
    after = share * 100 / 130
    assert fitness[0] == pytest.approx(2 / (1 / (share + LEAST_SPEEDUP) + 1 / (after + LEAST_SPEEDUP)))
    assert use[0] == pytest.approx((share + share) / 4)


def test_a_restart_costs_the_more_the_younger_and_the_more_often_restarted() -> None:
    """(T - R·δ) / (T + δ), and never below 0."""
    made = job(1, submitted=0.0, resizes=2, resize_s=30.0)
    assert restart_factor(made, 300.0) == pytest.approx(240 / 330)
    assert restart_factor(made, 40.0) == 0.0
    assert restart_factor(job(1, submitted=0.0, resize_s=0.0), 0.0) == 1.0


def brute_fronts(points: list[tuple[int, int]]) -> list[int]:
    left, rank, result = set(range(len(points))), 0, [0] * len(points)
    while left:
        front = {
            i
            for i in left
            if not any(
                points[k][0] >= points[i][0] and points[k][1] >= points[i][1] and points[k] != points[i] for k in left
            )
        }
        for i in front:
            result[i] = rank
        left -= front
        rank += 1
    return result


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30))
def test_fronts_are_those_of_the_definition(points: list[tuple[int, int]]) -> None:
    """Peeling off undominated points one front after the other gives the same ranks; ends of fronts stand alone."""
    first, second = np.array(points, dtype=np.float64).T
    rank = ranks(first, second)
    assert rank.tolist() == brute_fronts(points)
    gap = crowding(rank, first, second)
    for front in range(int(rank.max()) + 1):
        assert np.isinf(gap[rank == front]).sum() >= 1


def test_a_job_explores_by_doubling() -> None:
    """Alone on 16 GPUs a job that scales well starts on one and at most doubles each time."""
    policy, alone, sizes = Pollux(PolluxOptions(population=20, generations=30)), job(1, submitted=-9000.0), []
    for _ in range(6):
        view = cluster(16, 1)
        got = policy.decide(view, [alone], 0.0, seeded()).allocations[1].shape.gpus
        sizes.append(got)
        held = {f"n{n + 1}": 1 for n in range(got)}
        alone = job(1, held, submitted=-9000.0, gpus=tuple(range(1, 17)))
    assert sizes == [1, 2, 4, 8, 16, 16]


@pytest.mark.parametrize("uniform", [True, False])
def test_the_search_finds_the_even_split(uniform: bool) -> None:
    """Four alike jobs that have had many GPUs share 16 evenly: the harmonic mean is largest there."""
    policy = Pollux()
    for held in ({1: ["n1", "n2"], 2: ["n3", "n4"]}, {3: ["n1", "n2"], 4: ["n3", "n4"]}):
        seen = [job(i, dict.fromkeys(nodes, 4), submitted=-9000.0) for i, nodes in held.items()]
        rest = [job(i, submitted=-9000.0) for i in range(1, 5) if i not in held]
        policy.decide(cluster(4, 4, uniform=uniform), seen + rest, 0.0, seeded())
    waiting = [job(i, submitted=-9000.0, model=Power(exponent=0.8)) for i in range(1, 5)]
    schedule = policy.decide(cluster(4, 4, uniform=uniform), waiting, 0.0, seeded())
    assert sorted(a.shape.gpus for a in schedule.allocations.values()) == [4, 4, 4, 4]


def test_the_population_is_carried_over() -> None:
    """Searching on from the last decision finds in a few generations what searching afresh does not."""
    view = cluster(4, 4, uniform=False)
    gpus = tuple(range(1, 17))
    jobs = [job(i, submitted=-9000.0, gpus=gpus, model=Power(exponent=0.1 * i)) for i in range(1, 10)]
    policy = Pollux(PolluxOptions(population=20, generations=3))
    scores = [policy.decide(view, jobs, 0.0, seeded(i)).score for i in range(12)]
    fresh = [Pollux(policy.options).decide(view, jobs, 0.0, seeded(i)).score for i in range(12)]
    assert scores == sorted(scores)
    assert scores[-1] > np.median(fresh)


def test_jobs_and_nodes_come_and_go() -> None:
    policy = Pollux(PolluxOptions(population=20, generations=3))
    jobs = [job(i, submitted=-9000.0) for i in range(6)]
    policy.decide(cluster(4, 4), jobs, 0.0, seeded())
    for view, now in ((cluster(3, 4), [*jobs[2:], job(9, submitted=-9000.0)]), (cluster(5, 4), jobs[::-1])):
        schedule = policy.decide(view, now, 0.0, seeded())
        check(view, now, schedule)
        assert len(schedule.allocations) == len(now)
