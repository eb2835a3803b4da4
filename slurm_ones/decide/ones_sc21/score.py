"""What a candidate costs: the score of ONES, and, ours, whether a schedule repays its resizes."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.decide.policy import Floats, Ints

LEAST_PROGRESS = 1e-3
"""ρ is not believed to be smaller: a draw near 0 would decide a whole generation."""


def sample_progress(space: Space, rng: np.random.Generator) -> Floats:
    """(J,) one draw of ρ for each job."""
    return np.clip(np.nan_to_num(rng.beta(space.alpha, space.beta), nan=0.5), LEAST_PROGRESS, 1.0)


def remaining_utilisation(space: Space, counts: Ints, rho: Floats) -> Floats:
    """(K,) GPU-seconds to come of each candidate (K, J): Σ_j n_j · Y_j · (1/ρ_j − 1) / X_j(n_j) (ONES §3.2).

    Y are the samples used, X the goodput. A job left out costs nothing, nor does one that has not begun: the
    score prefers empty schedules, and only filling hides that.
    """
    known = space.goodput > 0
    per_sample = np.divide(space.sizes, space.goodput, out=np.zeros_like(space.goodput), where=known)
    work = space.samples * (1.0 / rho - 1.0)
    result: Floats = (work * per_sample[np.arange(len(work)), space.column[counts]]).sum(axis=1)
    return result


def net_delay(space: Space, base: Ints, others: Ints, resize_cost_s: float) -> Floats:
    """(K,) job-seconds by which `others` (K, J) delay the jobs in sum against `base` (J,).

    Negative is a gain. Ours, not of ONES. `base` changes no running job. Seconds to the end are those
    expected at the predicted goodput. A job that grows saves the difference and loses one pause of
    `resize_cost_s`. A job that shrinks loses two, since it will want its GPUs back, and runs slower until
    those who gained are done, or to its end. A job that starts is spared its wait: the k-th of them would get
    its GPUs when the k-th running job ends. Of a job that has never run nothing is known: it is taken to need
    as long as the median running job. Infinite where a job is kept waiting that `base` starts: idle GPUs go
    to waiting jobs first.
    """
    running = space.running
    before, after = space.seconds(space.current), space.seconds(others)
    grown, shrunk = running & (others > space.current), running & (others < space.current)
    started, dropped = ~running & (base == 0) & (others > 0), ~running & (base > 0) & (others == 0)
    ends = np.sort(np.concatenate([before[running], space.pinned_ends]))
    typical = float(np.median(ends)) if len(ends) else 0.0

    lasting = np.where(running | (space.samples > 0), after, typical)
    shared = np.where(grown | started, lasting, 0.0).max(axis=1, initial=0.0)[:, None]
    longer = np.where(grown | shrunk, after, 0.0) - np.where(grown | shrunk, before, 0.0)
    share = longer / np.where(shrunk, after, 1.0)
    delay = np.where(grown, longer + resize_cost_s, 0.0)
    delay += np.where(shrunk, np.minimum(longer, share * shared) + 2.0 * resize_cost_s, 0.0)

    waits = np.concatenate([[0.0], np.cumsum(ends)])
    spared = waits[np.minimum(started.sum(axis=1), len(ends))]
    result: Floats = np.where(dropped.any(axis=1), np.inf, delay.sum(axis=1) - spared)
    return result
