"""Candidates of the search: greedy seeds, the steps of a generation, and room on the nodes.

A candidate is an array (J,) with the size of each job, as a column of the tables. A population is (K, J). In ONES
(§3.2) a gene is the job of one GPU; here it is the size of one job. No step uses more GPUs than there are, or gives a
job a size that it may not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_ones.ones.worth import Choices
from slurm_ones.policy.contract import Bools, ClusterView, Floats, Ints, JobView
from slurm_ones.policy.ledger import count_nodes, free_by_node, take_parts
from slurm_ones.policy.shapes import shape_of

HALVINGS = 40
STEPS = 12
"""Largest number of steps that shrink a candidate until it fits on the nodes, and of steps that then let it grow."""
FILLS = 64
"""Largest number of growth steps that assign a candidate's free GPUs."""


def greedy(choices: Choices) -> Ints:
    """Return the columns (J,) of a good candidate that fits. Each job gets its best size at the clearing price; then
    free GPUs go to the jobs that gain most."""
    return fill(choices, _at_price(choices, clearing_price(choices)))


def dual_bound(choices: Choices, price: float) -> float:
    """Return an upper bound on the total worth of any candidate: Σ over jobs of max (worth − `price` × GPUs), plus
    `price` × all GPUs. It is lowest at the clearing price (weak duality)."""
    return float((choices.worth - price * choices.sizes).max(axis=1).sum()) + price * choices.gpus


def clearing_price(choices: Choices) -> float:
    """Return the price of a GPU, in worth, at which the sizes that jobs choose just fit all GPUs. It is 0 if they fit
    even without a price."""
    low, high = 0.0, 1.0
    if _gpus(choices, _at_price(choices, low)) <= choices.gpus:
        return low
    while _gpus(choices, _at_price(choices, high)) > choices.gpus and high < 1e12:
        low, high = high, high * 16.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _gpus(choices, _at_price(choices, middle)) > choices.gpus:
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return high


def _at_price(choices: Choices, price: float) -> Ints:
    best: Ints = (choices.worth - price * choices.sizes).argmax(axis=1)
    return best


def _gpus(choices: Choices, columns: Ints) -> int:
    return int(choices.sizes[columns].sum())


def fill(choices: Choices, columns: Ints) -> Ints:
    """Return the columns (J,) with the free GPUs assigned, each time to the job with the largest gain per GPU."""
    columns = columns.copy()
    rows = np.arange(len(columns))
    left = choices.gpus - _gpus(choices, columns)
    if left <= 0 or not len(columns):
        return columns
    more, rate = _growth(choices, rows, columns)
    for _ in range(FILLS):
        rate[more > left] = -np.inf
        best = int(rate.argmax())
        if not np.isfinite(rate.flat[best]):
            break
        j, columns[j] = divmod(best, len(choices.sizes))
        left -= int(more[j, columns[j]])
        more[j : j + 1], rate[j : j + 1] = _growth(choices, rows[j : j + 1], columns[j : j + 1])
    return columns


def _growth(choices: Choices, rows: Ints, columns: Ints) -> tuple[Ints, Floats]:
    """Return two (R, U) arrays for the jobs `rows` (R,): additional GPUs at each column, and gain in worth per
    additional GPU. `columns` (R,) are the columns from which they grow. The gain is -inf at a column with no more GPUs
    or no more worth."""
    more = choices.sizes - choices.sizes[columns][:, None]
    held = choices.worth[rows, columns]
    gain = choices.worth[rows] - np.where(np.isfinite(held), held, 0.0)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return more, np.where((more > 0) & (gain > 0), gain / more, -np.inf)


def best_of(candidates: Ints, score: Floats, count: int) -> tuple[Ints, Floats]:
    """Return the `count` candidates (K, J) of highest score, best first, and their scores. Equal candidates count
    once."""
    kept: dict[bytes, int] = {}
    for k in np.argsort(-score, kind="stable"):
        if len(kept) < count:
            kept.setdefault(candidates[k].tobytes(), int(k))
    chosen = list(kept.values())
    return candidates[chosen], score[chosen]


def uniform_crossover(parents: Ints, rng: np.random.Generator) -> Ints:
    """Return two children for each of K/2 random pairs of parents (K, G). Each gene is swapped within the pair with
    probability 0.5 (ONES §3.2)."""
    half = len(parents) // 2
    order = rng.permutation(len(parents))
    mothers, fathers = parents[order[:half]], parents[order[half : 2 * half]]
    swapped = rng.random(mothers.shape) < 0.5
    return np.concatenate([np.where(swapped, fathers, mothers), np.where(swapped, mothers, fathers)])


def mutate(choices: Choices, parents: Ints, chance: float, rng: np.random.Generator) -> Ints:
    """Return the candidates (K, J) with some jobs one size larger or smaller. Each job changes with probability
    `chance`, less if more than four jobs of a candidate would change on average."""
    count, jobs = parents.shape
    rate = min(chance, 4.0 / max(jobs, 1))
    rows = np.arange(jobs)
    moved = np.where(rng.random((count, jobs)) < 0.5, choices.up[rows, parents], choices.down[rows, parents])
    return np.where(rng.random((count, jobs)) < rate, moved, parents)


def repair(choices: Choices, candidates: Ints, least: Ints, rng: np.random.Generator) -> Ints:
    """Return the candidates (K, J), changed so that they fit the GPUs. Jobs in random order take their column in
    `least` (J,), a solution that fits, until the GPUs suffice."""
    excess = choices.sizes[candidates] - choices.sizes[least]
    over = choices.sizes[candidates].sum(axis=1) - choices.gpus
    if not (over > 0).any():
        return candidates
    order = rng.permuted(np.tile(np.arange(candidates.shape[1]), (len(candidates), 1)), axis=1)
    give = np.take_along_axis(np.maximum(excess, 0), order, axis=1)
    given = np.cumsum(give, axis=1)
    needed = (given - give < over[:, None]) & (give > 0)
    back = np.zeros(candidates.shape, dtype=np.bool_)
    np.put_along_axis(back, order, needed, axis=1)
    return np.where(back, least, candidates)


def improve(choices: Choices, candidates: Ints, rounds: int) -> Ints:
    """Return the candidates (K, J) after local search. In each round one job grows by one size, on free GPUs or on GPUs
    that another job gives up, if both together gain."""
    candidates = candidates.copy()
    if not candidates.size:
        return candidates
    rows, every = np.arange(candidates.shape[1]), np.arange(len(candidates))
    tables = choices.more, choices.less, choices.gain, choices.loss
    more, less, gain, loss = now = [table[rows, candidates] for table in tables]
    left = choices.gpus - choices.sizes[candidates].sum(axis=1)
    for _ in range(rounds):
        with np.errstate(invalid="ignore", divide="ignore"):
            growth = np.where((more <= left[:, None]) & (gain > 0), gain / more, -np.inf)
        grows = growth.argmax(axis=1)
        free = np.isfinite(growth[every, grows])
        giver = (loss / np.maximum(less, 1)).argmin(axis=1)
        freed = left + less[every, giver]
        traded = np.where(more <= freed[:, None], gain, -np.inf)
        traded[every, giver] = -np.inf
        taker = traded.argmax(axis=1)
        trade = ~free & (traded[every, taker] > loss[every, giver] + 1e-12)
        if not (free | trade).any():
            break
        up = np.where(free, grows, taker)
        at = [(every[free | trade], up[free | trade], choices.up), (every[trade], giver[trade], choices.down)]
        for k, j, step in at:
            candidates[k, j] = step[j, candidates[k, j]]
            for table, shown in zip(tables, now, strict=True):
                shown[k, j] = table[j, candidates[k, j]]
        left = choices.gpus - choices.sizes[candidates].sum(axis=1)
    return candidates


class NodeRoom:
    """Check of candidates for room on the nodes.

    A job that keeps its size, or changes it without new nodes, keeps its nodes. All other jobs are placed by best fit,
    the largest first. Blocks that join a job may be on any free GPUs.
    """

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], fixed: Sequence[JobView], sizes: Ints) -> None:
        """Create the check for the `jobs` (J) that may change and the `fixed` ones. `sizes` (U,) are the GPUs of each
        column."""
        self._free = free_by_node(cluster, fixed)
        self._per_node, self._uniform = cluster.gpus_per_node, cluster.uniform
        self.gpus = int(self._free.sum())
        """Total GPUs for the jobs that may change."""
        self._parts = np.zeros((len(sizes), self._per_node + 1), dtype=np.int64)
        for u, shape in enumerate(shape_of(cluster, int(n)) for n in sizes):
            if shape is not None and shape.gpus_per_node <= self._per_node:
                self._parts[u, shape.gpus_per_node] = shape.nodes
        self._again, self._joining, self._held = _stays(cluster, jobs, sizes)

    def unplaced(self, candidates: Ints) -> Floats:
        """Return, for each candidate (K, J), the number of its GPUs that do not fit on the nodes (K,)."""
        again, joining = self.missing(candidates)
        return again + joining

    def missing(self, candidates: Ints) -> tuple[Floats, Floats]:
        """Return the GPUs of each candidate that do not fit on the nodes. The two arrays (K,) are for jobs that are
        placed again, and for joining blocks."""
        count, columns = len(candidates), len(self._parts)
        if not self._uniform or not candidates.size:
            return np.zeros(count), np.zeros(count)
        rows = np.arange(candidates.shape[1])
        job, node, gpus, low, high = self._held.T
        held = candidates[:, job]
        nodes = count_nodes(self._free, node, gpus, (held >= low) & (held <= high), self._per_node)
        moving = np.where(self._again[rows, candidates], candidates, 0)
        moving = (np.arange(count)[:, None] * columns + moving).ravel()
        parts = np.bincount(moving, minlength=count * columns).reshape(count, columns) @ self._parts
        missing = np.zeros(count)
        for size in range(self._per_node, 0, -1):
            missing += take_parts(nodes, size, parts[:, size]) * size
        left = nodes @ np.arange(self._per_node + 1)
        joining = self._joining[rows, candidates].sum(axis=1)
        return missing, np.maximum(joining - left, 0).astype(np.float64)

    def fitted(self, choices: Choices, candidates: Ints) -> Ints:
        """Return the candidates (K, J), changed so that all their GPUs fit on the nodes, or at least more of them.

        In each round, one job that gains or changes GPUs takes a step back towards its present size. It is the job that
        loses least worth per GPU. Afterwards jobs grow into the GPUs that are left.
        """
        candidates = candidates.copy()
        rows = np.arange(candidates.shape[1])
        lowered = np.zeros(len(candidates), dtype=np.bool_)
        for _ in range(STEPS):
            again, joining = self.missing(candidates)
            short = np.flatnonzero(again + joining > 0)
            if not len(short):
                break
            some = candidates[short]
            to = np.where(some > choices.current, choices.down[rows, some], choices.current)
            freed = choices.sizes[some] - choices.sizes[to]
            movable = np.where(again[short, None] > 0, self._again[rows, some], self._joining[rows, some] > 0)
            movable &= (some != choices.current) & (choices.sizes[some].sum(axis=1)[:, None] - freed <= self.gpus)
            with np.errstate(invalid="ignore"):
                lost = (choices.worth[rows, some] - choices.worth[rows, to]) / np.maximum(np.abs(freed), 1)
            lost = np.where(movable, lost, np.inf)
            job = lost.argmin(axis=1)
            can = np.isfinite(lost[np.arange(len(short)), job])
            candidates[short[can], job[can]] = to[np.arange(len(short)), job][can]
            lowered[short[can]] = True
        candidates[lowered] = self._filled(choices, candidates[lowered])
        return candidates

    def _filled(self, choices: Choices, candidates: Ints) -> Ints:
        """Return the candidates (K, J) after jobs have grown as long as there is room, the job with the largest gain
        per GPU first."""
        candidates, rows, every = candidates.copy(), np.arange(candidates.shape[1]), np.arange(len(candidates))
        without = self.unplaced(candidates)
        tried = np.zeros(candidates.shape, dtype=np.bool_)
        for _ in range(STEPS if candidates.size else 0):
            more, gain = choices.more[rows, candidates], choices.gain[rows, candidates]
            left = self.gpus - choices.sizes[candidates].sum(axis=1)
            with np.errstate(invalid="ignore", divide="ignore"):
                rate = np.where((more <= left[:, None]) & (gain > 0) & ~tried, gain / more, -np.inf)
            job = rate.argmax(axis=1)
            can = np.isfinite(rate[every, job])
            if not can.any():
                break
            larger = candidates.copy()
            larger[every[can], job[can]] = choices.up[job, candidates[every, job]][can]
            fits = can & (self.unplaced(larger) <= without)
            candidates[fits] = larger[fits]
            tried[every, job] |= ~fits
        return candidates


def _stays(cluster: ClusterView, jobs: Sequence[JobView], sizes: Ints) -> tuple[Bools, Ints, Ints]:
    """Return what jobs keep at each size: two arrays (J, U) and rows (E, 5).

    The first array is True at sizes at which the job is placed again. The second has the GPUs of blocks that join on
    any nodes. A row is (job, node, GPUs, first column, last column): from the first to the last column, the job keeps
    these GPUs of the node.
    """
    again = np.ones((len(jobs), len(sizes)), dtype=np.bool_)
    joining = np.zeros((len(jobs), len(sizes)), dtype=np.int64)
    index = {node.name: n for n, node in enumerate(cluster.nodes)}
    held = []
    for j, job in enumerate(jobs):
        own = job.shape.gpus if job.shape is not None else 0
        at = int(np.searchsorted(sizes, own))
        if not own or at >= len(sizes) or sizes[at] != own:
            continue
        last = len(sizes) - 1 if job.joins else at
        again[j, at : last + 1] = False
        joining[j, at : last + 1] = sizes[at : last + 1] - own
        kept = [(at, last, job.nodes)]
        for u in range(1, at):
            if (nodes := (job.smaller or {}).get(int(sizes[u]))) is not None:
                again[j, u] = False
                kept.append((u, u, nodes))
        held += [(j, index[name], gpus, *columns) for *columns, on in kept for name, gpus in on.items() if gpus]
    return again, joining, np.array(held, dtype=np.int64).reshape(-1, 5)
