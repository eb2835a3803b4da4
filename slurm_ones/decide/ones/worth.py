"""What each size is worth to each job in this decision: the separable part of what the search maximises."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slurm_ones.decide.ones.price import Bools
from slurm_ones.schedule.policy import Floats, Ints


@dataclass(frozen=True)
class Choices:
    """The sizes that each job may be given, what they are worth, and the GPUs for all. Column 0 is waiting."""

    sizes: Ints
    """(U,) GPUs, ascending from 0."""
    worth: Floats
    """(J, U) seconds of waiting saved per second; -inf where the job may not be."""
    current: Ints
    """(J,) column held now, 0 for a waiting job."""
    gpus: int
    """GPUs for all of them."""
    up: Ints = field(init=False)
    down: Ints = field(init=False)
    """(J, U) the next larger and smaller column that the job may have; itself where there is none."""
    more: Ints = field(init=False)
    less: Ints = field(init=False)
    """(J, U) GPUs that a step up takes, and that a step down frees."""
    gain: Floats = field(init=False)
    loss: Floats = field(init=False)
    """(J, U) worth that a step up brings (-inf where there is none), and that a step down costs (inf)."""

    def __post_init__(self) -> None:
        may = np.isfinite(self.worth)
        columns = np.arange(len(self.sizes))
        beyond = np.where(may, columns, len(self.sizes))
        above = np.minimum.accumulate(beyond[:, ::-1], axis=1)[:, ::-1]
        up = np.concatenate([above[:, 1:], np.full((len(may), 1), len(self.sizes))], axis=1)
        object.__setattr__(self, "up", np.where(up < len(self.sizes), up, columns))
        below = np.maximum.accumulate(np.where(may, columns, -1), axis=1)
        down = np.concatenate([np.full((len(may), 1), -1), below[:, :-1]], axis=1)
        object.__setattr__(self, "down", np.where(down >= 0, down, columns))
        rows = np.arange(len(may))[:, None]
        more, less = self.sizes[self.up] - self.sizes, self.sizes - self.sizes[self.down]
        with np.errstate(invalid="ignore"):
            gain = np.where(more > 0, self.worth[rows, self.up] - self.worth, -np.inf)
            loss = np.where(less > 0, self.worth - self.worth[rows, self.down], np.inf)
        for name, table in (("more", more), ("less", less), ("gain", gain), ("loss", loss)):
            object.__setattr__(self, name, table)

    def value(self, candidates: Ints) -> Floats:
        """(K, J) worth of what each candidate (K, J) of columns gives each job."""
        rows: Floats = self.worth[np.arange(candidates.shape[-1]), candidates]
        return rows


def repaid(current: Ints, columns: int, running: Bools, pause_s: Floats, lasts_s: Floats) -> Floats:
    """(J, U) share of a size's worth that is left of the time it lasts, after the interruption that a change costs.

    1 at a running job's current size and for waiting jobs, which are not interrupted.
    """
    left = np.clip(1.0 - pause_s / np.maximum(lasts_s, 1e-9), 0.0, 1.0)
    changes = np.arange(columns) != current[:, None]
    result: Floats = np.where(changes & running[:, None], left[:, None], 1.0)
    return result
