"""What of the search is put in force (ONES §3.2)."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21 import operators, score
from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Ints


def deploy(space: Space, limit: Ints, best: Ints, min_epochs: int) -> Ints:
    """The best candidate's counts (J,), when every job that they change has run long enough since its last change.

    Until then running jobs keep what they have, and those who wait start on what is idle, up to their limits (J,).
    """
    settled = np.array([job.epochs_since_change >= min_epochs for job in space.jobs], dtype=np.bool_)
    if (settled | ~space.running | (best == space.current)).all():
        return best
    rho = np.clip(space.alpha / (space.alpha + space.beta), score.LEAST_PROGRESS, 1.0)
    held = np.where(space.running, space.current, limit)
    kept: Ints = operators.settle(space, space.current[None], held, operators.fill_order(space, rho))[0]
    return kept
