"""Protocol of the rules (terms) of the objective of `ones`, and the small rules.

The search maximises Σ_j worth[j, column] less what whole candidates lose together. A rule enters this at any of five
places, and leaves the others as they are:

1. `mask`: columns that a job may have;
2. `speed`: how fast a job counts as there (caution, a factor of a kind of GPU);
3. `weight`: what a second of a job's waiting counts;
4. `worth`: seconds of waiting saved per second, by job and column (costs of changes, a deadline);
5. `penalty`: what a whole candidate loses (GPUs without room, contention, packing). It chooses among the candidates;
   greedy seeds and local search go by the worth of single jobs.

A rule is made from its own options once, may remember from decision to decision, and names the jobs for which it
decided (`reasons`). One that is switched off is not in the list and costs nothing. J jobs, U columns, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import Reason
from slurm_ones.ones.candidates import NodeRoom
from slurm_ones.ones.worth import Choices, fair_weights
from slurm_ones.policy.contract import Bools, ClusterView, Floats, Ints, JobView, Promise
from slurm_ones.policy.tables import Tables

Penalty = Callable[[Ints], Floats]
"""Loss of candidates (K, J) of columns, (K,) in seconds of waiting per second, 0 or more."""


@dataclass(frozen=True)
class Situation:
    """First input of the rules: the jobs and their cluster."""

    cluster: ClusterView
    running: Sequence[JobView]
    """Jobs that run and may not change."""
    tables: Tables
    """Tables of the jobs that may change or start."""
    nodes: NodeRoom
    """Room for their candidates."""
    most: Mapping[int, int]
    """The most GPUs that each job has had, by job id; 0 before its first run."""
    now: float
    quiet_s: float
    """Seconds since a job came or went."""


@dataclass(frozen=True)
class Outlook(Situation):
    """Second input of the rules: predicted speed and work of each job."""

    speed: Floats
    """(J, U) progress/s in samples of the base batch, as it counts here; 0 at sizes that the job may not have."""
    remaining: Floats
    """(J,) progress to come."""
    done: Floats
    """(J,) progress made."""
    age_s: Floats
    """(J,) since its submission."""


@dataclass(frozen=True)
class Priced(Outlook):
    """Third input of the rules: the worth of each job's progress."""

    weight: Floats
    """(J,) weight of a second of the job's waiting."""
    unit: Floats
    """(J,) worth of a unit of its progress in weighted seconds."""
    ends: Floats
    """(J,) predicted seconds to its end."""


class Term:
    """Base of the rules of the objective; changes nothing itself. A rule overrides the methods at which it enters."""

    def mask(self, at: Situation, allowed: Bools) -> Bools:
        """Return which of the `allowed` columns (J, U) jobs may have: (J, U). A job's present size stays allowed."""
        return allowed

    def speed(self, at: Situation, speed: Floats) -> Floats:
        """Return the speed (J, U) that jobs count with, from the `speed` (J, U) without this rule."""
        return speed

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        """Return the weight of a second of waiting (J,), from the `weight` (J,) without this rule."""
        return weight

    def worth(self, at: Priced, worth: Floats) -> Floats:
        """Return the worth of each column (J, U), from the `worth` (J, U) without this rule; column 0 is waiting."""
        return worth

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty | None:
        """Return the loss function of whole candidates; None for none. A loss of `dear` for each GPU outweighs any
        gain."""
        return None

    def promises(self) -> Mapping[int, Promise]:
        """Return the promises and refusals of deadlines that this decision made, by job id."""
        return {}

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        """Reasons for the jobs' `columns` (J,) that this rule decided, by job id."""
        return {}


@dataclass(frozen=True)
class Caution(Term):
    """Uncertain sizes count as slower by `deviations` standard deviations of their predicted speed."""

    deviations: float

    def speed(self, at: Situation, speed: Floats) -> Floats:
        return speed * np.clip(1.0 - self.deviations * at.tables.uncertainty, 0.05, 1.0)


@dataclass(frozen=True)
class Fairness(Term):
    """More weight for a job whose predicted JCT exceeds `bound` times its JCT on a fair share of the cluster."""

    bound: float

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        return weight * fair_weights(
            at.speed, at.tables.sizes, at.done, at.remaining, at.age_s, at.nodes.gpus, self.bound
        )


class Unplaced(Term):
    """GPUs that find no room on the nodes count as lost, and more than they could bring."""

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty:
        return lambda candidates: dear * at.nodes.unplaced(candidates)
