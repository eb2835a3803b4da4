"""The time of one optimizer step, in seven figures of a job (Pollux, OSDI 2021, §3.2).

A step computes for a fixed overhead and a time per sample, and exchanges gradients for a time that depends on where
its GPUs are: nothing on one GPU, c1 + d1 · (n - 2) inside a node, c2 + d2 · (n - 2) across nodes. The two overlap in
part: T = (compute^γ + sync^γ)^(1/γ), from one after the other (γ = 1) to side by side (γ large). All figures are kept
as logarithms of ratios, c1 to the job's own step, c2 to c1 and d to c, so that jobs of any size can be compared, and
learned from each other: a job that exchanges much inside a node does so across nodes, and d / c is small wherever
gradients go around in a ring, as each GPU then sends 2 · (n - 1) / n of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_ones.schedule.policy import Floats

SPEED, OVERHEAD, INSIDE, INSIDE_EACH, ACROSS, ACROSS_EACH, OVERLAP = range(7)
"""Places of the figures: log samples/s of one GPU at the reference local batch; logit of the overhead's share of a step
there; logs of c1 relative to that step, of d1 relative to c1, of c2 relative to c1, and of d2 relative to c2; log of
γ - 1."""
FIGURES = 7
LOWEST = np.array([-60.0, -8.0, -16.0, -12.0, -6.0, -12.0, -3.0])
HIGHEST = np.array([60.0, 4.0, 12.0, 3.0, 6.0, 3.0, np.log(9.0)])
"""No figure is believed beyond these."""
NO_SYNC = -60.0


@dataclass(frozen=True)
class Sizes:
    """Sizes and batches to time a step at; every array has one shape."""

    local: Floats
    """Log of the samples per GPU and step over the reference local batch."""
    passes: Floats
    """Forward passes a step takes: above 1 where the samples of a GPU do not fit at once."""
    gpus: Floats
    across: Floats
    """1 where the GPUs are in several nodes, else 0."""


def sizes(nodes: Floats, gpus: Floats, batches: Floats, reference: float, max_local: float) -> Sizes:
    """The sizes of `gpus` GPUs in all of `nodes` nodes at each global batch, for a job whose reference is `reference`
    samples per GPU and which takes `max_local` at once."""
    gpus = np.maximum(gpus, 1.0)
    local = np.maximum(batches, 1.0) / gpus
    passes = np.maximum(np.ceil(local / max_local), 1.0)
    return Sizes(np.log(local / reference), passes, gpus, ((nodes > 1) & (gpus > 1)).astype(np.float64))


def log_step(figures: Floats, at: Sizes, reference: Floats) -> Floats:
    """Log seconds of a step. `figures` (…, 7) and `reference` (…) broadcast with the arrays of `at` (…, P)."""
    compute, sync, gamma, _, _ = _parts(figures, at)
    total = np.maximum(compute, sync) + np.log1p(np.exp(-gamma * np.abs(compute - sync))) / gamma
    result: Floats = np.log(reference) - figures[..., SPEED, None] + total
    return result


def log_compute(figures: Floats, at: Sizes) -> Floats:
    """Log of what a step computes, relative to the reference step: no step is shorter, however fast the network."""
    return _parts(figures, at)[0]


def log_step_and_slopes(figures: Floats, at: Sizes, reference: Floats) -> tuple[Floats, Floats]:
    """`log_step` (…, P) and its derivatives by each figure (…, P, 7)."""
    compute, sync, gamma, share, beyond = _parts(figures, at)
    total = np.maximum(compute, sync) + np.log1p(np.exp(-gamma * np.abs(compute - sync))) / gamma
    of_compute = 1.0 / (1.0 + np.exp(np.minimum(np.maximum(gamma * (sync - compute), -50.0), 50.0)))
    of_sync = np.where(at.gpus > 1, 1.0 - of_compute, 0.0)
    each = beyond / (1.0 + beyond)
    slopes = np.empty((*total.shape, FIGURES))
    slopes[..., SPEED] = -1.0
    slopes[..., OVERHEAD] = of_compute * share * (1.0 - share) * (at.passes - np.exp(at.local)) / np.exp(compute)
    slopes[..., INSIDE] = of_sync
    slopes[..., INSIDE_EACH] = of_sync * each * (1.0 - at.across)
    slopes[..., ACROSS] = of_sync * at.across
    slopes[..., ACROSS_EACH] = of_sync * each * at.across
    slopes[..., OVERLAP] = (of_compute * compute + of_sync * sync - total) * (gamma - 1.0) / gamma * (at.gpus > 1)
    return np.log(reference) - figures[..., SPEED, None] + total, slopes


def _parts(figures: Floats, at: Sizes) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Logs of compute and sync, relative to the reference step; γ; the overhead's share of a step; and what the GPUs
    beyond the second add to sync, relative to its first part."""
    share = 1.0 / (1.0 + np.exp(-figures[..., OVERHEAD, None]))
    compute = np.log(share * at.passes + (1.0 - share) * np.exp(at.local))
    first = figures[..., INSIDE, None] + at.across * figures[..., ACROSS, None]
    each = np.where(at.across > 0, np.exp(figures[..., ACROSS_EACH, None]), np.exp(figures[..., INSIDE_EACH, None]))
    beyond = each * np.maximum(at.gpus - 2.0, 0.0)
    sync = np.where(at.gpus > 1, first + np.log1p(beyond), NO_SYNC)
    return compute, sync, 1.0 + np.exp(figures[..., OVERLAP, None]), share, beyond
