"""Growth of a global batch at no cost in samples, and the worth of samples beyond that, for job and companion.

Up to the bound, one step on k base batches makes as much progress as k steps, by the optimizer's rule
(`ones_wrapper.gradients.learning_rate`). Beyond the bound the efficiency of Pollux holds (OSDI 2021, §3.1). Needs only
the standard library.
"""

from __future__ import annotations

OTHER, SILENT = "other", "none"
"""Rules of an optimizer that has no rule of its own, and of a script that adapts its learning rate itself."""
MOST = 8
"""Largest batch at no cost in samples, in base batches."""
PARTS = {"sgd": 4.0, "adam": 2.0}
"""Divisors of the gradient noise scale that give the bound, by rule. Measured results got worse at 0.3 and 0.75 of the
noise scale, and soon after diverged (docs/benchmarks/training.md)."""


def bound(rule: str, base: float, noise: float) -> float:
    """Return the largest global batch at no cost in samples; the base batch without a divisor or a noise scale."""
    part = PARTS.get(rule)
    return base if part is None else max(base, min(MOST * base, noise / part))


def doubled(rule: str, base: int, noise: float) -> int:
    """Return the largest product of the base batch and a power of two that is within `bound`."""
    most, batch = bound(rule, base, noise), base
    while 2 * batch <= most:
        batch *= 2
    return batch


def efficiency(batch: float, base: float, noise: float | None, free: float = 0.0) -> float:
    """Return the progress of a sample at this global batch, relative to the base batch; 1 up to the batch `free`."""
    if noise is None or batch <= max(base, free):
        return 1.0
    return (noise + base) / (noise + batch)
