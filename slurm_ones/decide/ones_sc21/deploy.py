"""What of the search is put in force (ONES §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.ones_sc21 import operators, score
from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Ints


@dataclass(frozen=True)
class Deployment:
    """Counts (J,) to be in force, and why the best candidate's are not, where they are not."""

    counts: Ints
    note: str


def deploy(space: Space, limit: Ints, best: Ints, min_epochs: int) -> Deployment:
    """The best candidate's counts (J,), when every job that they change has run long enough since its last change.

    Until then running jobs keep what they have, and those who wait start on what is idle, up to their limits (J,).
    """
    settled = np.array([job.epochs_since_change >= min_epochs for job in space.jobs], dtype=np.bool_)
    if (settled | ~space.running | (best == space.current)).all():
        return Deployment(best, "")
    rho = np.clip(space.alpha / (space.alpha + space.beta), score.LEAST_PROGRESS, 1.0)
    held = np.where(space.running, space.current, limit)
    kept = operators.settle(space, space.current[None], held, operators.fill_order(space, rho))[0]
    epochs = "an epoch" if min_epochs == 1 else f"{min_epochs} epochs"
    return Deployment(kept, f"a job that would change with it changed less than {epochs} ago")
