"""Protocol of the objective's rules (terms) in `ones`, and the small rules.

The search maximises Σ_j worth[j, column] less the losses of whole candidates. A rule enters the objective at any of
five places, and leaves the others unchanged:

1. `mask`: columns that a job may have;
2. `speed`: speed that a job counts with at a column (caution, a factor of a kind of GPU);
3. `weight`: weight of a second of a job's waiting;
4. `worth`: seconds of waiting saved per second, by job and column (costs of changes, a deadline);
5. `penalty`: loss of a whole candidate (GPUs without room, contention, packing). It chooses among candidates;
   greedy seeds and local search go by the worth of single jobs.

A rule is made from its own options once, may keep state between decisions, and gives reasons for the jobs that it
decided (`reasons`). A rule that is switched off is not in the list and costs nothing. J jobs, U columns, K candidates.
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
"""Function from candidates (K, J) of columns to their losses (K,), in seconds of waiting per second, 0 or more."""


@dataclass(frozen=True)
class Situation:
    """First input of the rules: the jobs and their cluster."""

    cluster: ClusterView
    running: Sequence[JobView]
    """Running jobs that may not change now."""
    tables: Tables
    """Tables of the jobs that may change or start."""
    nodes: NodeRoom
    """Room on the nodes for candidates."""
    most: Mapping[int, int]
    """Most GPUs that each job has had, by job id; 0 before its first run."""
    now: float
    quiet_s: float
    """Seconds since a job last came or went."""


@dataclass(frozen=True)
class Outlook(Situation):
    """Second input of the rules: predicted speed and remaining work of each job."""

    speed: Floats
    """(J, U) progress/s that counts, in samples of the base batch; 0 at sizes that the job may not have."""
    remaining: Floats
    """(J,) remaining progress."""
    done: Floats
    """(J,) progress made so far."""
    age_s: Floats
    """(J,) seconds since submission."""


@dataclass(frozen=True)
class Priced(Outlook):
    """Third input of the rules: the worth of each job's progress."""

    weight: Floats
    """(J,) weight of a second of each job's waiting."""
    unit: Floats
    """(J,) worth of a unit of each job's progress, in weighted seconds."""
    ends: Floats
    """(J,) predicted seconds to each job's end."""


class Term:
    """Base class of the objective's rules, which override the methods by which they enter the objective."""

    def mask(self, at: Situation, allowed: Bools) -> Bools:
        """Return which of the `allowed` columns (J, U) jobs may have; a job's present column stays allowed."""
        return allowed

    def speed(self, at: Situation, speed: Floats) -> Floats:
        """Return the speed (J, U) that jobs count with, given the `speed` (J, U) without this rule."""
        return speed

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        """Return the weight (J,) of a second of waiting, given the `weight` (J,) without this rule."""
        return weight

    def worth(self, at: Priced, worth: Floats) -> Floats:
        """Return the worth (J, U) of each column, given the `worth` (J, U) without this rule; column 0 is waiting."""
        return worth

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty | None:
        """Return the loss function of whole candidates, or None. A loss of `dear` for each GPU outweighs any gain."""
        return None

    def promises(self) -> Mapping[int, Promise]:
        """Return the promises that this decision gave or refused, by job id."""
        return {}

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        """Return the reasons for those of the jobs' `columns` (J,) that this rule decided, by job id."""
        return {}


@dataclass(frozen=True)
class Caution(Term):
    """Discount of uncertain speeds by `deviations` standard deviations."""

    deviations: float

    def speed(self, at: Situation, speed: Floats) -> Floats:
        return speed * np.clip(1.0 - self.deviations * at.tables.uncertainty, 0.05, 1.0)


@dataclass(frozen=True)
class Fairness(Term):
    """Higher weight of jobs whose predicted JCT exceeds `bound` times their JCT on a fair share of the cluster."""

    bound: float

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        return weight * fair_weights(
            at.speed, at.tables.sizes, at.done, at.remaining, at.age_s, at.nodes.gpus, self.bound
        )


class Unplaced(Term):
    """Loss of GPUs that find no room on the nodes, by more than they could bring."""

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty:
        return lambda candidates: dear * at.nodes.unplaced(candidates)
