"""What of the search is put in force: the paper's rule, and ours, which weighs what a resize costs on Slurm.

As published: the best candidate, when every job it changes has run long enough since its last change; else
the current allocation. A requeue costs much more than the in-place scaling the paper has, so with a
`resize_cost_s` above 0

- a running job may only grow where that saves it more than one resize (`repaying`), and
- the best candidate's changes are deployed together if they gain in sum (`score.net_delay`), or else those
  that do, one by one, the most gainful first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.ones_sc21 import operators, score
from slurm_ones.decide.ones_sc21.space import Bools, Space
from slurm_ones.decide.policy import Ints


@dataclass(frozen=True)
class Deployment:
    """Counts (J,) to be in force, and why the best candidate's are not, where they are not."""

    counts: Ints
    note: str


def deploy(space: Space, limit: Ints, best: Ints, resize_cost_s: float, min_epochs: int) -> Deployment:
    """The counts in force from now on, given the best candidate's (J,) and the limits (J,) it was found
    under."""
    rho = np.clip(space.alpha / (space.alpha + space.beta), score.LEAST_PROGRESS, 1.0)
    order = operators.fill_order(space, rho)
    settled = np.array([job.epochs_since_change >= min_epochs for job in space.jobs], dtype=np.bool_)
    keep = _with_waiting(space, space.current[None], limit, order)[0]
    epochs = "an epoch" if min_epochs == 1 else f"{min_epochs} epochs"
    unsettled = f"a job that would change with it changed less than {epochs} ago"
    if resize_cost_s <= 0:
        return Deployment(best, "") if _changes_only(space, best, settled) else Deployment(keep, unsettled)

    grid = operators.reorder(space, space.snap(space.current[None], limit))
    refreshed = operators.fill(space, grid, limit, order)[0].sum(axis=1)
    chosen, gain = _one_by_one(space, limit, order, keep, (refreshed, best), settled, resize_cost_s)
    for candidate in (refreshed, best):
        if _changes_only(space, candidate, settled):
            delay = float(score.net_delay(space, keep, candidate[None], resize_cost_s)[0])
            if delay < gain:
                chosen, gain = candidate, delay
    repaid = _changes_only(space, best, settled)
    return Deployment(chosen, "it would not repay what resizes cost" if repaid else unsettled)


def repaying(space: Space, limit: Ints, resize_cost_s: float) -> Ints:
    """Limits (J,) within which a running job grows only where that repays a resize, to the size that ends it
    soonest."""
    if resize_cost_s <= 0:
        return limit
    larger = space.allowed & (space.sizes > space.current[:, None]) & (space.sizes <= limit[:, None])
    with np.errstate(divide="ignore"):
        ends = np.where(larger, space.to_come[:, None] / space.goodput, np.inf)
    fastest = space.sizes[ends.argmin(axis=1)]
    grows = space.running & (limit > space.current)
    now = np.where(grows, space.seconds(space.current), 0.0)
    repays = now - ends.min(axis=1) > resize_cost_s
    return np.where(grows, np.where(repays, fastest, space.current), limit)


def _with_waiting(space: Space, wanted: Ints, limit: Ints, order: Ints) -> Ints:
    """(K, J) counts: running jobs as in `wanted` (K, J), waiting jobs started on what is idle then."""
    grid = operators.reorder(space, np.where(space.running, wanted, 0))
    counts: Ints = operators.fill(space, grid, np.where(space.running, 0, limit), order).sum(axis=2)
    return counts


def _changes_only(space: Space, counts: Ints, settled: Bools) -> bool:
    return bool((settled | ~space.running | (counts == space.current)).all())


def _one_by_one(
    space: Space,
    limit: Ints,
    order: Ints,
    keep: Ints,
    candidates: tuple[Ints, ...],
    settled: Bools,
    resize_cost_s: float,
) -> tuple[Ints, float]:
    """Counts (J,) and net delay after taking the candidates' changes of running jobs singly while that
    gains."""
    found = {
        (int(j), int(candidate[j]))
        for candidate in candidates
        for j in np.flatnonzero(space.running & settled & (candidate != space.current))
    }
    changes = sorted(found)
    chosen, gain = keep, 0.0
    while changes:
        wanted = np.tile(chosen, (len(changes), 1))
        wanted[np.arange(len(changes)), [j for j, _ in changes]] = [size for _, size in changes]
        results = _with_waiting(space, wanted, limit, order)
        delays = score.net_delay(space, keep, results, resize_cost_s)
        first = int(np.argmin(delays))
        if delays[first] >= gain:
            break
        chosen, gain = results[first], float(delays[first])
        changes = [(j, size) for j, size in changes if j != changes[first][0]]
    return chosen, gain
