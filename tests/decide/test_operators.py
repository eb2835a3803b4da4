"""The genetic operators: whatever they do, every candidate stays a schedule that Slurm can carry out."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_ones.decide.ones_sc21 import genome, operators
from slurm_ones.decide.ones_sc21.placement import pack
from slurm_ones.decide.ones_sc21.score import remaining_utilisation, sample_progress
from slurm_ones.decide.ones_sc21.space import Space, build
from slurm_ones.decide.policy import Ints
from tests.decide.contract import Power, cluster, job
from tests.decide.strategies import seeded, spaces

some = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
K = 6


def sound(space: Space, grid: Ints) -> None:
    """No GPU given twice, allowed shapes only, no running job lost, unchanged jobs in place."""
    assert (grid >= 0).all()
    assert (grid.sum(axis=1) <= space.capacity).all(), "a node's GPUs were given twice"
    per_node = space.cluster.gpus_per_node
    for candidate in grid:
        for j, row in enumerate(candidate):
            count, held = int(row.sum()), row[row > 0]
            assert count >= space.floor[j], "a running job was lost"
            if count == space.current[j]:
                assert (row == space.home[j]).all(), "Slurm does not move an unchanged job"
            elif count:
                assert space.allowed[j, space.column[count]]
                assert len(held) == 1 or (held == per_node).all(), "several nodes must be whole"


def some_limit(space: Space, seed: int) -> Ints:
    """Limits as they may be: anything from below the current size to the whole cluster."""
    drawn = seeded(seed).integers(0, space.cluster.gpus + 1, len(space.jobs))
    return np.maximum(drawn, space.floor)


def population(space: Space, limit: Ints, seed: int) -> Ints:
    wanted = seeded(seed).integers(0, space.cluster.gpus + 1, (K, len(space.jobs)))
    return operators.reorder(space, operators.refresh(space, wanted, limit))


@some
@given(spaces(), st.integers(0, 99))
def test_refresh_and_reorder(space: Space, seed: int) -> None:
    """Any wanted counts become placeable candidates within the limits."""
    limit = some_limit(space, seed)
    wanted = operators.refresh(space, seeded(seed).integers(0, 5, (K, len(space.jobs))), limit)
    assert (wanted >= space.floor).all()
    grid = operators.reorder(space, wanted)
    sound(space, grid)
    assert (grid.sum(axis=2) <= limit).all()


@some
@given(spaces(), st.integers(0, 99))
def test_packing_with_shelter_loses_nobody(space: Space, seed: int) -> None:
    """The second attempt keeps every running job, so that reordering need not fall back to the current
    allocation.
    """
    wanted = seeded(seed).integers(0, space.cluster.gpus + 1, (K, len(space.jobs)))
    wanted = space.snap(wanted, np.maximum(some_limit(space, seed), space.floor))
    sound(space, pack(space, wanted, shelter=True))


@some
@given(spaces(), st.integers(0, 99))
def test_crossover_and_mutation_repair(space: Space, seed: int) -> None:
    """Children and mutants name only jobs that exist, and become sound again by snap and reorder."""
    limit, rng = some_limit(space, seed), seeded(seed)
    parents = genome.genes(space, population(space, limit, seed))
    removable = rng.random(len(space.jobs)) < 0.5
    children = operators.crossover(parents, rng)
    mutants = operators.mutate(parents, removable, 0.5, rng)
    assert children.shape == mutants.shape == parents.shape
    young = np.concatenate([children, mutants])
    assert ((young >= genome.IDLE) & (young < len(space.jobs))).all()
    grid = operators.reorder(space, space.snap(genome.counts(space, young), limit))
    sound(space, grid)
    assert (grid.sum(axis=2) <= limit).all()


@some
@given(spaces(), st.integers(0, 99))
def test_fill(space: Space, seed: int) -> None:
    """Filling takes nothing from anybody, keeps the limits, and leaves no GPU idle that a job may have."""
    limit = some_limit(space, seed)
    grid = population(space, limit, seed)
    order = operators.fill_order(space, sample_progress(space, seeded(seed)))
    assert sorted(order) == list(range(len(space.jobs)))
    filled = operators.fill(space, grid, limit, order)
    sound(space, filled)
    before, after = grid.sum(axis=2), filled.sum(axis=2)
    assert (after >= before).all()
    assert (after <= limit).all()
    free = space.capacity - filled.sum(axis=1)
    for k, j in np.argwhere(after == 0):
        assert not (0 < space.start[j] <= min(limit[j], free[k].max(initial=0))), "it could have started"


@some
@given(spaces(), st.integers(0, 99))
def test_genes_and_counts_say_the_same(space: Space, seed: int) -> None:
    """A candidate's genes hold each job as often as its grid has GPUs for it, and there are as many as
    GPUs.
    """
    grid = population(space, some_limit(space, seed), seed)
    genes = genome.genes(space, grid)
    assert genes.shape == (K, space.capacity.sum())
    assert (genome.counts(space, genes) == grid.sum(axis=2)).all()


def test_crossover_swaps_genes() -> None:
    """Each gene of a pair goes to one child or the other: none is lost, and both parents' genes are in
    both.
    """
    parents = np.repeat(np.arange(4)[:, None], 200, axis=1)
    children = operators.crossover(parents, seeded())
    assert (np.sort(children, axis=0) == np.sort(parents, axis=0)).all()
    assert all(60 < (child == child[0]).sum() < 140 for child in children)


def test_mutation_removes_jobs_whole_and_only_those_it_may() -> None:
    """With chance 1 every removable job leaves all its slots, and no other job any."""
    parents = np.array([[0, 0, 1, 2, -1], [1, 1, 2, 2, 2]])
    mutants = operators.mutate(parents, np.array([True, False, True]), 1.0, seeded())
    assert mutants.tolist() == [[-1, -1, 1, -1, -1], [1, 1, -1, -1, -1]]


def test_fill_order_is_new_jobs_then_shortest() -> None:
    """New jobs first come first served, then started ones by remaining time."""
    jobs = [
        job(1, {"n1": 1}, epochs=9, to_come=50.0),
        job(2, {"n1": 1}, epochs=9, to_come=2.0),
        job(4, submitted=9.0),
        job(3, submitted=5.0),
    ]
    space = build(cluster(), jobs, {})
    order = operators.fill_order(space, space.alpha / (space.alpha + space.beta))
    assert [space.jobs[j].job_id for j in order] == [3, 4, 2, 1]


def test_reorder_packs_large_jobs_around_those_in_place() -> None:
    """An unchanged job keeps its node; a job that grows to two nodes finds the two that the others can
    leave.
    """
    jobs = [job(1, {"n1": 4}, epochs=3), job(2, {"n2": 1}, epochs=3), job(3, {"n3": 1}, epochs=3)]
    space = build(cluster(3), jobs, {})
    grid = operators.reorder(space, np.array([[8, 1, 2], [8, 1, 1]]))
    assert grid[0].sum(axis=1).tolist() == [8, 1, 2], "job 3 makes room by changing"
    assert grid[1].sum(axis=1).tolist() == [4, 1, 1], "unchanged jobs do not"


def test_score_is_the_published_one() -> None:
    """Σ n · Y · (1/ρ − 1) / X(n), and nothing for a job left out."""
    jobs = [job(1, {"n1": 2}, epochs=4), job(2, {"n2": 4}, epochs=1), job(3)]
    space = build(cluster(), [*jobs[:2], jobs[2]], {})
    rho = np.array([0.5, 0.25, 0.1])
    x = Power().throughput(np.array([1, 1]), np.array([2, 4]), np.array([1, 1]))
    expected = 2 * 4000 * (1 / 0.5 - 1) / x[0] + 4 * 1000 * (1 / 0.25 - 1) / x[1]
    found = remaining_utilisation(space, np.array([[2, 4, 1], [2, 0, 0]]), rho)
    assert np.allclose(found, [expected, 2 * 4000 / x[0]])
