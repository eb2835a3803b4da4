"""Largest global batch that needs no more samples than the base batch, and the efficiency of samples at larger batches.

Up to this batch, one step on k base batches makes as much progress as k steps on the base batch. For this the learning
rate must follow the optimizer's rule (`ones_wrapper.gradients.learning_rate`). For larger batches the efficiency is
Pollux's (OSDI 2021, §3.1). Job and companion use this module. Needs only the standard library.
"""

from __future__ import annotations

OTHER, SILENT = "other", "none"
"""Rule of an optimizer class without its own rule, and rule of a script that adapts its learning rate itself."""
MOST = 8
"""Upper limit of `bound` in base batches, whatever the noise scale."""
PARTS = {"sgd": 4.0, "adam": 2.0}
"""Gradient noise scale divided by `bound`, for each rule. In benchmarks, batches of 0.3 and 0.75 of the noise scale
gave worse results, and slightly larger ones diverged (docs/benchmarks/training.md)."""


def bound(rule: str, base: float, noise: float) -> float:
    """Return the largest global batch that needs no more samples than the base batch. This is the base batch if `rule`
    is not in `PARTS`, or if `noise` is 0 (unknown)."""
    part = PARTS.get(rule)
    return base if part is None else max(base, min(MOST * base, noise / part))


def doubled(rule: str, base: int, noise: float) -> int:
    """Return the largest batch, among the base batch × 2^n, that is at most `bound`."""
    most, batch = bound(rule, base, noise), base
    while 2 * batch <= most:
        batch *= 2
    return batch


def efficiency(batch: float, base: float, noise: float | None, free: float = 0.0) -> float:
    """Return the progress of a sample at global batch `batch`, relative to a sample at the base batch; 1 up to batch
    `free`."""
    if noise is None or batch <= max(base, free):
        return 1.0
    return (noise + base) / (noise + batch)
