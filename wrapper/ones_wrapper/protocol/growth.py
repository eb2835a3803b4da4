"""Growth of a global batch at no cost in samples, and the worth of samples beyond, for job and companion.

Up to the bound a step of k base batches, made by the optimizer's rule (`ones_wrapper.gradients.learning_rate`), brings
as much as k steps. Beyond it the efficiency of Pollux holds (OSDI 2021, §3.1). Needs only the standard library.
"""

from __future__ import annotations

OTHER, SILENT = "other", "none"
"""Rules of an optimizer without one of its own, and of a script that sees to it itself."""
MOST = 8
"""Base batches of the largest batch that costs nothing."""
PARTS = {"sgd": 4.0, "adam": 2.0}
"""Divisors of the gradient noise scale that give the bound, by rule. At 0.3 and 0.75 of it the result was seen to get
worse, and soon after to diverge (docs/benchmarks/training.md)."""


def bound(rule: str, base: float, noise: float) -> float:
    """The largest batch at no cost; the base batch for an optimizer without a rule, and before a noise is measured."""
    part = PARTS.get(rule)
    return base if part is None else max(base, min(MOST * base, noise / part))


def doubled(rule: str, base: int, noise: float) -> int:
    """The base batch, doubled as often as it stays within the bound."""
    most, batch = bound(rule, base, noise), base
    while 2 * batch <= most:
        batch *= 2
    return batch


def efficiency(batch: float, base: float, noise: float | None, free: float = 0.0) -> float:
    """Progress that a sample at this global batch brings, over one at the base batch; 1 up to the batch `free`."""
    if noise is None or batch <= max(base, free):
        return 1.0
    return (noise + base) / (noise + batch)
