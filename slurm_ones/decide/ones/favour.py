"""What a site favours beside the mean JCT: an early end of all work, few GPU hours, or fairness.

One option says it, such as `favour = "makespan:0.5"`; the weight is from 0, which is mean JCT alone, to 1, as it is
where none is given.

- makespan: Σ C_j^p in place of Σ C_j, C_j being the ends of jobs on their fair share, whose largest term is the
  makespan for p → ∞. A second of waiting then counts p C^(p-1): longer jobs weigh more.
- gpu_hours: each GPU-second counts as `weight` seconds of waiting, on top of what others would make of the GPU. So a
  job takes the GPUs that it uses well, and others stay idle.
- fairness: a second of waiting counts by how far the predicted JCT exceeds that on the fair share (ρ of Themis, NSDI
  2020 §3), for all jobs and not only beyond a bound.

What is held now does not enter the weights, or they would fall as soon as a job is served (see `fair_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.ones.terms import Outlook, Priced, Term
from slurm_ones.decide.ones.worth import fair_ends
from slurm_ones.schedule.policy import Floats

AIMS = ("", "makespan", "gpu_hours", "fairness")
STEEPNESS = 2.0
"""Power of the weights where the aim counts fully."""
WIDEST = 16.0
"""Most that a second of one job counts over that of the middle one, and least under it."""


def favour_of(said: str) -> tuple[str, float]:
    """The aim and its weight, from `aim` or `aim:weight`. Raises ValueError for what neither is."""
    aim, _, weight = said.partition(":")
    try:
        share = float(weight) if weight else 1.0
    except ValueError:
        share = -1.0
    if aim not in AIMS or not 0.0 <= share <= 1.0:
        known = ", ".join(name for name in AIMS if name)
        raise ValueError(
            f"favour: {said!r} must be empty or one of {known}, with a weight from 0 to 1 as in makespan:0.5"
        )
    return aim, share if aim else 0.0


@dataclass(frozen=True)
class Favour(Term):
    """Weighs `aim` beside the mean JCT, from 0 to 1."""

    aim: str
    share: float

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        if self.aim not in ("makespan", "fairness") or not len(weight):
            return weight
        left, fair = fair_ends(at.speed, at.tables.sizes, at.done, at.remaining, at.nodes.gpus)
        found = left if self.aim == "makespan" else (at.age_s + left) / fair
        relative = np.maximum(found, 1.0 if self.aim == "makespan" else 1e-3)
        relative = np.clip(relative / np.median(relative), 1.0 / WIDEST, WIDEST)
        result: Floats = weight * relative ** (STEEPNESS * self.share)
        return result

    def price(self, at: Outlook, price: float) -> float:
        return price + (self.share if self.aim == "gpu_hours" else 0.0)

    def worth(self, at: Priced, worth: Floats) -> Floats:
        return worth - self.share * at.tables.sizes if self.aim == "gpu_hours" else worth
