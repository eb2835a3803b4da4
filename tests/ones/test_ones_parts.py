"""The parts of our policy by themselves: price, greedy, operators, placement, what repays, and who has waited."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.ones.candidates import (
    NodeRoom,
    best_of,
    clearing_price,
    dual_bound,
    fill,
    greedy,
    improve,
    mutate,
    repair,
    uniform_crossover,
)
from slurm_ones.ones.sizes import ChangeCosts, less_costs, seconds_of
from slurm_ones.ones.worth import HEAVIEST, Choices, fair_weights, worth_of_progress
from slurm_ones.policy.build import place
from slurm_ones.policy.contract import Allocation, Floats, Ints, JobView, Schedule
from slurm_ones.policy.tables import build_tables
from slurm_ones.testing.policies import placeable, seeded
from slurm_ones.testing.rounds import Round, rounds

SIZES = np.array([0, 1, 2, 4, 8, 16])
GPUS = 256
K = 6


def power(jobs: int, exponent: float) -> tuple[Floats, Ints]:
    """(goodput, sizes) of equal jobs with speed-ups n^exponent at every number of GPUs."""
    sizes = np.arange(GPUS + 1)
    return np.tile(sizes.astype(float) ** exponent, (jobs, 1)), sizes


def shares(worth: Floats, exponent: float) -> Floats:
    """Of the GPUs, where worth · n^exponent is at its highest: n ∝ worth^(1/(1-exponent))."""
    found: Floats = worth ** (1.0 / (1.0 - exponent))
    found /= found.sum()
    return found


def hesrpt(jobs: int, exponent: float) -> Floats:
    """Shares of the k-th largest of `jobs`, k = 1, 2, … (Berg et al. 2020, Theorem 1)."""
    edges: Floats = (np.arange(jobs + 1) / jobs) ** (1.0 / (1.0 - exponent))
    return edges[1:] - edges[:-1]


def gap(jobs: int, exponent: float) -> float:
    goodput, sizes = power(jobs, exponent)
    worth, _ = worth_of_progress(goodput, sizes, np.linspace(2000.0, 1000.0, jobs), np.ones(jobs), GPUS)
    return float(np.abs(shares(worth, exponent) - hesrpt(jobs, exponent)).max())


def test_worth_is_that_of_hesrpt() -> None:
    """Without arrivals the best policy is known; to a fiftieth of the cluster, which is what prices on a grid allow."""
    assert max(gap(jobs, exponent) for jobs in (2, 4, 16) for exponent in (0.5, 0.8)) < 0.02


def test_equal_jobs_are_worth_as_much_as_their_place_says() -> None:
    """What ends sooner is worth more, whatever its place in the list; what nobody can run is worth nothing; a job that
    counts double is worth more than its like."""
    goodput, sizes = power(4, 0.7)
    goodput[2] = 0.0
    remaining = np.array([500.0, 100.0, 1.0, 300.0])
    worth, ends = worth_of_progress(goodput, sizes, remaining, np.ones(4), GPUS)
    assert worth[1] > worth[3] > worth[0] > worth[2] == 0.0
    assert ends[1] < ends[3] < ends[0] < ends[2] == np.inf
    order = np.array([3, 0, 2, 1])
    again, _ = worth_of_progress(goodput[order], sizes, remaining[order], np.ones(4), GPUS)
    assert (again == worth[order]).all()
    heavy, _ = worth_of_progress(goodput, sizes, remaining, np.array([2.0, 1.0, 1.0, 1.0]), GPUS)
    assert heavy[0] > worth[0]


def test_equal_jobs_get_equal_worth_at_todays_price() -> None:
    """Without recursion one price holds for all: what is left to do says nothing, and the worth is the least cost of a
    unit at that price, the lowest at which the GPUs suffice."""
    goodput, sizes = power(5, 0.6)
    worth, _ = worth_of_progress(goodput, sizes, np.arange(1.0, 6.0), np.ones(5), GPUS, recursive=False)
    assert (worth == worth[0]).all()
    # An end on n GPUs costs most wisely at the price 0.6 / 0.4 / n, and five share the cluster.
    price = 0.6 / 0.4 / (GPUS / 5)
    assert worth[0] == pytest.approx(np.min((1 + price * sizes[1:]) / goodput[0, 1:]), rel=0.15)


def rising(rng: np.random.Generator, sizes: Ints) -> Choices:
    """Waiting jobs for which each GPU more brings less."""
    jobs = int(rng.integers(1, 8))
    worth = rng.lognormal(0.0, 1.0, (jobs, 1)) * sizes ** rng.uniform(0.2, 0.95, (jobs, 1))
    return Choices(sizes, worth, np.zeros(jobs, dtype=np.int64), int(rng.integers(8, 25)))


@st.composite
def tables(draw: st.DrawFn) -> Choices:
    """Some jobs run, within the GPUs, and may not wait; not every job may have every size."""
    rng = seeded(draw(st.integers(0, 10**6)))
    choices = rising(rng, SIZES)
    worth, current = choices.worth * rng.uniform(0.5, 1.0, choices.worth.shape), choices.current.copy()
    worth[rng.random(worth.shape) < 0.3] = -np.inf
    worth[:, 0] = 0.0
    for j, column in enumerate(rng.integers(0, len(SIZES), len(worth)).tolist()):
        if column and np.isfinite(worth[j, column]) and SIZES[current].sum() + SIZES[column] <= choices.gpus:
            current[j], worth[j, 0] = column, -np.inf
    return Choices(SIZES, worth, current, choices.gpus)


def drawn(choices: Choices, seed: int) -> Ints:
    """(K, J) columns that each job may have, whatever they sum up to."""
    dice = seeded(seed).random((K, *choices.worth.shape))
    found: Ints = np.where(np.isfinite(choices.worth), dice, -1.0).argmax(axis=2)
    return found


def gpus(choices: Choices, candidates: Ints) -> Ints:
    total: Ints = choices.sizes[candidates].sum(axis=-1)
    return total


def may_have(choices: Choices, candidates: Ints) -> bool:
    return bool(np.isfinite(choices.value(candidates)).all())


def best_value(choices: Choices) -> float:
    """By a dynamic program over GPUs."""
    best = np.zeros(choices.gpus + 1)
    for row in choices.worth:
        new = np.full_like(best, -np.inf)
        for size, worth in zip(choices.sizes, row, strict=True):
            if size <= choices.gpus:
                new[size:] = np.maximum(new[size:], best[: len(best) - size] + worth)
        best = new
    return float(best[-1])


def of_best(choices: Choices) -> float:
    """Value of the greedy solution over the best there is."""
    share = float(choices.value(greedy(choices)[None]).sum()) / best_value(choices)
    assert share <= 1 + 1e-9
    return share


@given(st.integers(0, 10**6))
def test_greedy_is_best_where_jobs_may_have_any_size(seed: int) -> None:
    """A price for GPUs then finds the best of all allocations, but for those few that are tied at it."""
    assert of_best(rising(seeded(seed), np.arange(25))) > 0.98


def test_greedy_is_nearly_best_where_sizes_are_powers_of_two() -> None:
    """GPUs may be left over then, more than a few percent on a small cluster now and then: a seed, not the answer."""
    found = [of_best(rising(seeded(seed), SIZES)) for seed in range(300)]
    assert np.mean(found) > 0.98
    assert min(found) > 0.5


@given(tables())
def test_greedy_and_fill_keep_the_cluster_and_the_jobs_sizes(choices: Choices) -> None:
    """Also where sizes are missing; filling lowers nobody, and nothing is left that some job would gain by."""
    kept = fill(choices, choices.current)
    for columns in (greedy(choices), kept):
        assert may_have(choices, columns[None])
        assert gpus(choices, columns) <= choices.gpus
        more = choices.sizes - choices.sizes[columns][:, None]
        gains = choices.worth > choices.value(columns[None])[0][:, None]
        assert not (gains & (more > 0) & (more <= choices.gpus - gpus(choices, columns))).any()
    assert (kept >= choices.current).all()


@given(tables(), st.integers(0, 99))
def test_generations_keep_the_cluster_and_the_jobs_sizes(choices: Choices, seed: int) -> None:
    """Whatever crossover and mutation make, repair makes it fit by going back to the feasible solution only, and leaves
    alone what fits; improvement stays within the GPUs and never lowers the value."""
    rng, parents, least = seeded(seed), drawn(choices, seed), fill(choices, choices.current)
    children = uniform_crossover(parents, rng)
    assert (np.sort(children, axis=0) == np.sort(parents[: len(children)], axis=0)).all(), "a gene was lost"
    mutants = mutate(choices, parents, 1.0, rng)
    rows = np.arange(parents.shape[1])
    assert (
        (mutants == parents) | (mutants == choices.up[rows, parents]) | (mutants == choices.down[rows, parents])
    ).all()
    young = np.concatenate([children, mutants])
    assert may_have(choices, young)
    fixed = repair(choices, young, least, rng)
    assert (gpus(choices, fixed) <= choices.gpus).all()
    assert ((fixed == young) | ((fixed == least) & (fixed < young))).all()
    fitted = gpus(choices, young) <= choices.gpus
    assert (fixed[fitted] == young[fitted]).all()
    better = improve(choices, fixed, 6)
    assert may_have(choices, better)
    assert (gpus(choices, better) <= choices.gpus).all()
    assert (choices.value(better).sum(axis=1) >= choices.value(fixed).sum(axis=1) - 1e-9).all()


def test_mutation_does_move_jobs_and_improvement_does_trade() -> None:
    """A chance of 1 is about four jobs of a candidate; where no GPU is left, who gains more takes from another."""
    choices = Choices(SIZES, np.tile(SIZES.astype(float), (40, 1)), np.full(40, 1), 80)
    moved = (mutate(choices, np.full((200, 40), 2), 1.0, seeded()) != 2).sum(axis=1)
    assert 3.0 < moved.mean() < 5.0
    two = Choices(np.array([0, 1, 2]), np.array([[0.0, 1.0, 1.1], [0.0, 1.0, 3.0]]), np.array([1, 1]), 3)
    assert improve(two, np.array([[2, 1]]), 6).tolist() == [[1, 2]]


def test_best_of_keeps_different_ones_best_first() -> None:
    """One good candidate must not fill the population with copies of itself."""
    candidates = np.array([[1, 0], [2, 0], [1, 0], [3, 0], [2, 0]])
    kept, scores = best_of(candidates, np.array([5.0, 7.0, 5.0, 1.0, 7.0]), 2)
    assert (kept.tolist(), scores.tolist()) == ([[2, 0], [1, 0]], [7.0, 5.0])
    assert len(best_of(candidates, np.arange(5.0), 9)[0]) == 3


def _fewer(job: JobView) -> dict[int, dict[str, int]]:
    """What a job of a block on each node keeps as the last ones leave."""
    names = list(job.nodes)
    kept = [{name: job.nodes[name] for name in names[:count]} for count in range(1, len(names))]
    return {sum(nodes.values()): nodes for nodes in kept}


@given(rounds(uniform=True), st.integers(0, 99), st.booleans())
def test_unplaced_is_zero_where_there_is_room_for_all(drawn_round: Round, seed: int, blocks: bool) -> None:
    """As `place`, which makes the schedule, finds it, also of jobs of blocks; of others as an exhaustive search over
    nodes does."""
    view, jobs = drawn_round
    if blocks:
        jobs = [replace(job, joins=True, smaller=_fewer(job)) if job.job_id % 3 else job for job in jobs]
    taken = [job for job in jobs if job.fixed and job.shape is not None]
    mobile = [job for job in jobs if not job.fixed]
    found = build_tables(view, mobile)
    nodes = NodeRoom(view, mobile, taken, found.sizes)
    dice = seeded(seed).random((K, *found.allowed.shape))
    may = found.allowed | (np.arange(len(found.sizes)) == 0)
    # Few sizes over all, so that some candidates find room and others do not.
    candidates = np.where(may, dice / (1 + found.sizes), -1.0).argmax(axis=2)
    missing = nodes.unplaced(candidates)
    for columns, gpus_missing in zip(candidates, missing, strict=True):
        wanted = {job.job_id: int(found.sizes[u]) for job, u in zip(mobile, columns, strict=True)}
        if sum(wanted.values()) > nodes.gpus:
            assert gpus_missing >= sum(wanted.values()) - nodes.gpus
            continue
        wanted |= {job.job_id: job.shape.gpus for job in taken if job.shape is not None}
        shapes = place(view, [*taken, *mobile], wanted)
        got = {job_id: shape.gpus for job_id, shape in shapes.items()}
        assert (gpus_missing == 0) == (got == {job_id: n for job_id, n in wanted.items() if n})
        if gpus_missing == 0 and not blocks:
            given_all = {job_id: Allocation(shape, 64) for job_id, shape in shapes.items()}
            assert placeable(view, jobs, Schedule(given_all))


def less(worth: Floats, current: Ints, grow: float, shrink: float, prepare: float, lasts: float) -> Floats:
    """`less_costs` where all jobs pay the same."""
    each = (np.full(len(worth), seconds) for seconds in (grow, shrink, prepare))
    return less_costs(
        worth, current, ChangeCosts(*seconds_of(worth.shape[1], current, *each), np.full(worth.shape, lasts))
    )


def test_what_a_change_costs() -> None:
    """A pause is training lost, each direction at its own price; nothing is where the size is kept or the job waits,
    and nothing is left where a change lasts no time."""
    worth = np.array([[0.0, 4.0, 8.0], [0.0, 4.0, 8.0]])
    current = np.array([1, 0])
    found = less(worth, current, 30.0, 10.0, 0.0, 100.0)
    assert found[0].tolist() == pytest.approx([0.0, 4.0, 8.0 * 0.7])
    assert found[1].tolist() == [0.0, 4.0, 8.0]
    found = less(worth, np.array([2, 2]), 30.0, 10.0, 50.0, 100.0)
    assert found[0].tolist() == pytest.approx([0.0, 4.0 * 0.9, 8.0]), "giving up prepares nothing"
    assert less(worth, current, 30.0, 30.0, 0.0, 0.0)[0].tolist() == [0.0, 4.0, 0.0]
    assert less(worth, current, 1.0, 0.0, 7.0, 5.0)[0, 2] < 4.0, "undone before it begins"


def test_preparing_costs_what_the_new_gpus_would_have_gained() -> None:
    """Meanwhile the job trains on at its old size: only what it gains is later, not all that it is worth."""
    (found,) = less(np.array([[0.0, 4.0, 8.0]]), np.array([1]), 0.0, 0.0, 50.0, 100.0)
    assert found[2] == pytest.approx(4.0 + 4.0 * 0.5)


def test_who_has_waited_weighs_more() -> None:
    """A young job counts 1; its weight rises with its age to a bound, and not at all where fairness is switched off."""
    goodput, sizes = np.tile(np.array([0.0, 1.0, 1.9]), (4, 1)), np.array([0, 1, 2])
    done, remaining, age = np.zeros(4), np.full(4, 1000.0), np.array([0.0, 1500.0, 4000.0, 1e9])
    found = fair_weights(goodput, sizes, done, remaining, age, 4, 1.5)
    # Alone on one GPU of the four it takes 1000 s; it will have taken its age and 1000 s.
    assert found.tolist() == pytest.approx([1.0, (2500 / 1500) ** 2, (5000 / 1500) ** 2, HEAVIEST])
    assert (fair_weights(goodput, sizes, done, remaining, age, 4, 0.0) == 1.0).all()


@given(tables())
def test_no_candidate_is_worth_more_than_the_dual_bound(choices: Choices) -> None:
    """At the clearing price, and at any other."""
    best = best_value(choices)
    for price in (clearing_price(choices), 0.0, 0.3, 5.0):
        assert dual_bound(choices, price) >= best - 1e-9 * abs(best)
