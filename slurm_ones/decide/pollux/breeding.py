"""Crossover, mutation and repair of candidates (Pollux §4.2.1, figure 5, with the rates of its authors' code)."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.evolution import cross
from slurm_ones.decide.pollux.problem import Problem, Rows, cap_groups
from slurm_ones.schedule.policy import Ints

CROSSED = 0.9
"""Chance of a pair of parents to be crossed."""
RESET = 0.1
"""Chance of a row to go back to what the job holds now."""
THINNED = 0.1
"""Chance of a row to be thinned, and then of each of its elements to be removed."""


def breed(problem: Problem, rows: Rows, parents: Ints, rng: np.random.Generator) -> Rows:
    """Two children of each pair of candidates in `parents` (P, 2): one-point crossover over jobs, then mutation."""
    jobs = len(problem.jobs)
    point = np.where(rng.random(len(parents)) < CROSSED, rng.integers(jobs, size=len(parents)), 0)
    swapped = np.arange(jobs) < point[:, None]
    one, other = parents[:, :1], parents[:, 1:]
    source = cross(one, other, swapped)
    row = source * jobs + np.arange(jobs)
    home = len(rows.starts) - 1 + np.arange(jobs)
    row = np.where(rng.random(row.shape) < RESET, home, row)
    return _raise(problem, _thin(rows.over(problem.home).take(row.ravel()), rng), rng)


def _thin(rows: Rows, rng: np.random.Generator) -> Rows:
    chosen = rng.random(len(rows.starts) - 1) < THINNED
    gone = np.repeat(chosen, rows.counts) & (rng.random(len(rows.gpus)) < THINNED)
    return rows.holding(np.where(gone, 0, rows.gpus))


def _raise(problem: Problem, rows: Rows, rng: np.random.Generator) -> Rows:
    """Some elements on nodes with free GPUs are raised, to anything up to the whole node.

    Of each such node one job of all is expected to be, and one of those that are there already.
    """
    jobs, nodes = len(problem.jobs), len(problem.capacity)
    row = rows.row
    node = row // jobs * nodes + rows.node  # of all candidates, one after the other
    everywhere = (len(rows.starts) - 1) // jobs * nodes
    used = np.bincount(node, weights=rows.gpus, minlength=everywhere)
    free = used < np.tile(problem.capacity, everywhere // max(nodes, 1))
    chance = 1.0 / jobs + (1.0 - 1.0 / jobs) / np.maximum(np.bincount(node, minlength=everywhere), 1)
    here = free[node] & (rng.random(len(node)) < chance[node])
    capacity = problem.capacity[rows.node]
    grown = np.where(here, rng.integers(rows.gpus, np.maximum(capacity, rows.gpus) + 1), rows.gpus)

    roomy = np.flatnonzero(free)
    at = np.repeat(roomy, rng.binomial(jobs, 1.0 / jobs, size=len(roomy)))
    fresh = np.unique((at // nodes * jobs + rng.integers(jobs, size=len(at))) * nodes + at % nodes)
    there = row * nodes + rows.node
    place = np.searchsorted(there, fresh)
    new = np.append(there, -1)[place] != fresh
    fresh, place = fresh[new], place[new]
    gpus = rng.integers(0, problem.capacity[fresh % nodes] + 1)
    new = gpus > 0
    fresh = fresh[new]
    return Rows(rows.starts, rows.node, grown).among(place[new], fresh // nodes, fresh % nodes, gpus[new])


def repair(problem: Problem, rows: Rows, rng: np.random.Generator) -> Rows:
    """Candidates made possible: sizes that the jobs may have, no node overfull, one job of several nodes to a node.

    Jobs with less attained service go first. A job that keeps its size stays where it is: Slurm is not asked to
    move it.
    """
    jobs = len(problem.jobs)
    job = np.arange(len(rows.starts) - 1) % jobs
    unchanged = (rows.totals == problem.held[job]) & (problem.held[job] > 0)
    own = np.arange(len(job))
    rows = rows.over(problem.home).take(np.where(unchanged, len(job) + job, own))
    if problem.cluster.uniform:
        whole = np.repeat((rows.counts > 1) & ~unchanged, rows.counts)
        rows = Rows(rows.starts, rows.node, np.where(whole, problem.cluster.gpus_per_node, rows.gpus))
    order, node = _by_node(problem, rows)
    rows = Rows(rows.starts, rows.node, _uncross(problem, rows, order, node))
    rows = Rows(rows.starts, rows.node, _shrink(problem, rows, rng))
    rows = rows.holding(_fit(problem, rows, order, node))
    if problem.cluster.uniform:
        cut = (rows.totals < problem.held[job]) | ~unchanged
        broken = np.repeat((rows.counts > 1) & cut, rows.counts) & (rows.gpus < problem.cluster.gpus_per_node)
        rows = rows.holding(np.where(broken, 0, rows.gpus))
    return rows.holding(_shrink(problem, rows, rng))


def _by_node(problem: Problem, rows: Rows) -> tuple[Ints, Ints]:
    """An order of the elements by candidate, node and job, and the (candidate, node) of each in it."""
    jobs, nodes = len(problem.jobs), len(problem.capacity)
    node = rows.row // jobs * nodes + rows.node
    order = np.argsort(node * jobs + rows.row % jobs)
    return order, node[order]


def _uncross(problem: Problem, rows: Rows, order: Ints, node: Ints) -> Ints:
    """(E,) GPUs when of the jobs of several nodes that meet on a node the first unchanged (§4.2.2, interference)."""
    several = np.repeat(rows.counts > 1, rows.counts)[order]
    free = np.where(problem.crossed, 0, 1)[rows.node[order]]
    left = cap_groups(node, several.astype(np.int64), free)
    gpus: Ints = rows.gpus.copy()
    gpus[order[several & (left == 0)]] = 0
    return gpus


def _fit(problem: Problem, rows: Rows, order: Ints, node: Ints) -> Ints:
    """(E,) GPUs when no node gives more than it has."""
    gpus = np.empty_like(rows.gpus)
    gpus[order] = cap_groups(node, rows.gpus[order], problem.capacity[rows.node[order]])
    return gpus


def _shrink(problem: Problem, rows: Rows, rng: np.random.Generator) -> Ints:
    """(E,) GPUs when every row is brought down to a size that its job may have, on nodes drawn by chance."""
    totals = rows.totals
    job = np.arange(len(totals)) % len(problem.jobs)
    target = problem.snap[job, np.minimum(totals, problem.snap.shape[1] - 1)]
    over = np.flatnonzero(np.repeat(target < totals, rows.counts))
    if not len(over):
        return rows.gpus
    row = rows.row[over]
    order = np.argsort(row + rng.random(len(over)))
    gpus: Ints = rows.gpus.copy()
    gpus[over[order]] = cap_groups(row[order], rows.gpus[over[order]], target[row[order]])
    return gpus
