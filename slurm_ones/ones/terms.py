"""Protocol of the rules that make up the objective of `ones` (`Term`), and the small rules.

The search maximises Σ_j worth[j, column of j], less the losses of the whole candidate. A rule may change any of five
things:

1. `mask`: the columns that a job may have;
2. `speed`: the speed of a job at a column, for example lowered if it is uncertain;
3. `weight`: the weight of a second of a job's waiting;
4. `worth`: the worth of a column to a job, in seconds of waiting saved per second (costs of changes, a deadline);
5. `penalty`: the loss of a whole candidate (GPUs that do not fit on the nodes, shared links). It only affects the
   choice among candidates; greedy seeds and local search ignore it.

A rule may keep state between decisions, and gives the reasons for jobs that it decided (`reasons`). Arrays: J jobs, U
columns, K candidates.
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
"""Function that returns the loss (K,) of each candidate (K, J): weighted seconds of waiting per second, 0 or more."""


@dataclass(frozen=True)
class Situation:
    """First input of the rules: the jobs and the cluster."""

    cluster: ClusterView
    running: Sequence[JobView]
    """Running jobs that may not change now."""
    tables: Tables
    """Tables of the jobs that may change or start."""
    nodes: NodeRoom
    """Check of candidates for room on the nodes."""
    most: Mapping[int, int]
    """Largest number of GPUs that each job has had, by job id; 0 before its first run."""
    now: float
    quiet_s: float
    """Seconds since a job last arrived or ended."""


@dataclass(frozen=True)
class Outlook(Situation):
    """Second input of the rules: `Situation`, with each job's predicted speed and remaining work."""

    speed: Floats
    """(J, U) progress/s after all rules, in samples at the base batch; 0 at a size that the job may not have."""
    remaining: Floats
    """(J,) remaining progress, in samples at the base batch."""
    done: Floats
    """(J,) progress made so far, in samples at the base batch."""
    age_s: Floats
    """(J,) seconds since submission."""


@dataclass(frozen=True)
class Priced(Outlook):
    """Third input of the rules: `Outlook`, with what each job's progress is worth."""

    weight: Floats
    """(J,) weight of a second of each job's waiting."""
    unit: Floats
    """(J,) worth of a unit of each job's progress, in weighted seconds of waiting."""
    ends: Floats
    """(J,) predicted time to each job's end, in seconds."""


class Term:
    """Base class of the objective's rules. A rule overrides the methods for the things that it changes."""

    def mask(self, at: Situation, allowed: Bools) -> Bools:
        """Return which of the `allowed` columns (J, U) jobs may have. A job's present column stays allowed anyway."""
        return allowed

    def speed(self, at: Situation, speed: Floats) -> Floats:
        """Return the speed (J, U) at each column, given the `speed` (J, U) without this rule."""
        return speed

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        """Return the weight (J,) of a second of waiting, given the `weight` (J,) without this rule."""
        return weight

    def worth(self, at: Priced, worth: Floats) -> Floats:
        """Return the worth (J, U) of each column, given the `worth` (J, U) without this rule; column 0 is waiting."""
        return worth

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty | None:
        """Return a function that computes the losses of whole candidates; None if this rule has none. `dear` is a loss
        per GPU that exceeds all that a GPU can gain."""
        return None

    def promises(self) -> Mapping[int, Promise]:
        """Return the deadlines that this decision promised or refused, by job id."""
        return {}

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        """Return the reason for each job whose column this rule decided, by job id. `columns` (J,) are all jobs'
        columns."""
        return {}


@dataclass(frozen=True)
class Caution(Term):
    """Rule that lowers each uncertain speed by `deviations` standard deviations."""

    deviations: float

    def speed(self, at: Situation, speed: Floats) -> Floats:
        return speed * np.clip(1.0 - self.deviations * at.tables.uncertainty, 0.05, 1.0)


@dataclass(frozen=True)
class Fairness(Term):
    """Rule that raises the weight of a job if its predicted JCT exceeds `bound` times its JCT on a fair share of the
    cluster."""

    bound: float

    def weight(self, at: Outlook, weight: Floats) -> Floats:
        return weight * fair_weights(
            at.speed, at.tables.sizes, at.done, at.remaining, at.age_s, at.nodes.gpus, self.bound
        )


class Unplaced(Term):
    """Rule against GPUs that do not fit on the nodes: each costs more than it could bring."""

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty:
        return lambda candidates: dear * at.nodes.unplaced(candidates)
