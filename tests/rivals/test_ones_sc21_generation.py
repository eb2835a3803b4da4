"""The genetic operators of ONES as published: every candidate stays a schedule that Slurm can carry out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.ones.candidates import uniform_crossover
from slurm_ones.policy.contract import Ints, NodeView
from slurm_ones.policy.ledger import Ledger
from slurm_ones.policy.shapes import shape_of
from slurm_ones.rivals.ones_sc21 import (
    Space,
    build,
    fill,
    fill_and_place,
    fill_order,
    genes,
    gpus_of_jobs,
    mutate,
    place_counts,
    refresh,
    remaining_utilisation,
    sample_progress,
)
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import Power, cluster, job, rounds

K = 6


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """What a decision would search over in such a round."""
    view, jobs = draw(rounds(uniform=True))
    return build(view, jobs, {j.job_id: j.fixed for j in jobs if j.fixed})


def beside_unchanged(space: Space, of_job: Ints) -> Ints:
    """(N,) GPUs that jobs which keep their size leave."""
    free = space.free.copy()
    for j, node, gpus in space.held:
        free[node] -= gpus * (of_job[j] == space.current[j])
    return free


def sound(space: Space, counts: Ints) -> None:
    """Sizes that the jobs can have, and room for all of them with unchanged jobs in place."""
    assert (counts == space.largest(counts)).all(), "a size that the job cannot have"
    assert (counts.sum(axis=1) <= len(space.slots)).all(), "a GPU was given twice"
    for of_job in counts:
        free = beside_unchanged(space, of_job)
        assert (free >= 0).all()
        room = Ledger.of_cluster(replace(space.cluster, nodes=[NodeView(f"x{i}", int(n)) for i, n in enumerate(free)]))
        moving = [int(n) for j, n in enumerate(of_job) if n != space.current[j] and n]
        for gpus in sorted(moving, reverse=True):
            shape = shape_of(space.cluster, gpus)
            assert shape is not None
            assert room.take(shape), "not placeable"


def some_limit(space: Space, seed: int) -> Ints:
    """Limits as they may be: anything from nothing to the whole cluster."""
    return seeded(seed).integers(0, space.cluster.gpus + 1, len(space.jobs))


def some_order(space: Space, seed: int) -> Ints:
    order = fill_order(space, sample_progress(space, seeded(seed)))
    assert sorted(order) == list(range(len(space.jobs)))
    return order


def population(space: Space, limit: Ints, seed: int) -> Ints:
    """Candidates as a generation leaves them."""
    wanted = seeded(seed).integers(0, space.cluster.gpus + 1, (K, len(space.jobs)))
    wanted[0] = space.current
    return fill_and_place(space, refresh(space, wanted, limit), limit, some_order(space, seed))


@given(spaces(), st.integers(0, 99))
def test_refresh_and_settle(space: Space, seed: int) -> None:
    limit = some_limit(space, seed)
    wanted = refresh(space, seeded(seed).integers(0, 9, (K, len(space.jobs))), limit)
    assert (wanted <= limit).all()
    counts = population(space, limit, seed)
    sound(space, counts)
    assert (counts <= np.maximum(limit, space.current)).all()


@given(spaces(), st.integers(0, 99))
def test_placing(space: Space, seed: int) -> None:
    """What can be placed is placed as it is; nobody gets more than was wanted, but that those who run and cannot grow
    stay as they are; and the free nodes that are told add up."""
    drawn = seeded(seed).integers(0, space.cluster.gpus + 1, (K, len(space.jobs)))
    wanted = refresh(space, drawn, np.full(len(space.jobs), space.cluster.gpus))
    counts, free = place_counts(space, wanted)
    sound(space, counts)
    assert (counts <= wanted).all()
    assert ((counts >= space.current) | (wanted <= space.current)).all(), "a job lost GPUs by growing"
    assert (free >= 0).all()
    assert (free.sum(axis=1) == len(space.free)).all()
    assert (free @ np.arange(free.shape[1]) == len(space.slots) - counts.sum(axis=1)).all()


@given(spaces(), st.integers(0, 99))
def test_crossover_and_mutation_repair(space: Space, seed: int) -> None:
    """Children and mutants name only jobs that exist, and become sound again when they are settled."""
    limit, rng = some_limit(space, seed), seeded(seed)
    parents = genes(space, population(space, limit, seed))
    removable = rng.random(len(space.jobs)) < 0.5
    children = uniform_crossover(parents, rng)
    mutants = mutate(parents, removable, 0.5, rng)
    assert children.shape == mutants.shape == parents.shape
    young = np.concatenate([children, mutants])
    assert ((young >= 0) & (young <= len(space.jobs))).all()
    counts = fill_and_place(space, gpus_of_jobs(space, young), limit, some_order(space, seed))
    sound(space, counts)


@given(spaces(), st.integers(0, 99))
def test_filling(space: Space, seed: int) -> None:
    """Filling takes nothing from anybody, keeps the limits, and leaves no GPUs idle that a job may have."""
    limit, order = some_limit(space, seed), some_order(space, seed)
    drawn = seeded(seed).integers(0, space.cluster.gpus + 1, (K, len(space.jobs)))
    before = refresh(space, drawn, limit)
    after = fill(space, before, limit, order)
    assert (after >= before).all()
    assert (after <= limit).all()
    assert (after == space.largest(after)).all()
    idle = (len(space.slots) - after.sum(axis=1))[:, None]
    assert (idle >= 0).all()
    assert (space.largest(np.minimum(limit, after + idle)) <= after).all(), "somebody could have grown"


@given(spaces(), st.integers(0, 99))
def test_nobody_waits_beside_room(space: Space, seed: int) -> None:
    """Where a job that waits finds a place for its smallest size within its limit, it has got one."""
    limit = some_limit(space, seed)
    counts = population(space, limit, seed)
    for of_job in counts:
        free = beside_unchanged(space, of_job)
        room = Ledger.of_cluster(replace(space.cluster, nodes=[NodeView(f"x{i}", int(n)) for i, n in enumerate(free)]))
        for gpus in sorted((int(n) for j, n in enumerate(of_job) if n and n != space.current[j]), reverse=True):
            room.take(shape_of(space.cluster, gpus) or Shape(1, 1))
        for j in np.flatnonzero((of_job == 0) & (space.smallest > 0) & (space.smallest <= limit) & ~space.running):
            shape = shape_of(space.cluster, int(space.smallest[j]))
            assert shape is not None
            assert not room.fits(shape)


@given(spaces(), st.integers(0, 99))
def test_genes_and_counts_say_the_same(space: Space, seed: int) -> None:
    """A candidate's genes hold each job as often as it has GPUs, there are as many as GPUs, and a job keeps the ones it
    holds as far as it keeps its count."""
    counts = population(space, some_limit(space, seed), seed)
    made = genes(space, counts)
    assert made.shape == (K, space.free.sum())
    assert (gpus_of_jobs(space, made) == counts).all()
    kept = np.array([[(row[space.slots == j] == j).sum() for j in range(len(space.jobs))] for row in made])
    assert (kept.reshape(counts.shape) == np.minimum(counts, space.current)).all()


def test_mutation_removes_jobs_whole_and_only_those_it_may() -> None:
    """With chance 1 every removable job leaves all its slots, and no other job any."""
    parents = np.array([[0, 0, 1, 2, 3], [1, 1, 2, 2, 2]])  # 3 is idle
    mutants = mutate(parents, np.array([True, False, True]), 1.0, seeded())
    assert mutants.tolist() == [[3, 3, 1, 3, 3], [1, 1, 3, 3, 3]]


def test_fill_order_is_new_jobs_then_shortest() -> None:
    jobs = [
        job(1, {"n1": 1}, epochs=9, to_come=50.0),
        job(2, {"n1": 1}, epochs=9, to_come=2.0),
        job(4, submitted=9.0),
        job(3, submitted=5.0),
    ]
    space = build(cluster(), jobs, {})
    order = fill_order(space, space.alpha / (space.alpha + space.beta))
    assert [space.jobs[j].job_id for j in order] == [3, 4, 2, 1]


def test_placing_around_those_in_place() -> None:
    """An unchanged job keeps its node; a job that grows to two nodes finds two that the others can leave, or stays as
    it is."""
    jobs = [job(1, {"n1": 4}, epochs=3), job(2, {"n2": 1}, epochs=3), job(3, {"n3": 1}, epochs=3)]
    space = build(cluster(3), jobs, {})
    counts, free = place_counts(space, np.array([[8, 1, 2], [8, 1, 1]]))
    assert counts.tolist() == [[8, 1, 2], [4, 1, 1]]
    assert free.tolist() == [[2, 1, 0, 0, 0], [1, 0, 0, 2, 0]]


def test_score_is_the_published_one() -> None:
    """Σ n · Y · (1/ρ − 1) / X(n), and nothing for a job left out."""
    jobs = [job(1, {"n1": 2}, epochs=4), job(2, {"n2": 4}, epochs=1), job(3)]
    space = build(cluster(), [*jobs[:2], jobs[2]], {})
    rho = np.array([0.5, 0.25, 0.1])
    x = Power().throughput(np.array([1, 1]), np.array([2, 4]), np.array([1, 1]))
    expected = 2 * 4000 * (1 / 0.5 - 1) / x[0] + 4 * 1000 * (1 / 0.25 - 1) / x[1]
    found = remaining_utilisation(space, np.array([[2, 4, 1], [2, 0, 0]]), rho)
    assert np.allclose(found, [expected, 2 * 4000 / x[0]])
