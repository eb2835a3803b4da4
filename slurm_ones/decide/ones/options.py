"""What can be set of the search, each part of it separately for ablations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

LEAST = {"population": 2, "leap": 1.0, "horizon_s": 1.0, "horizon_share": 0.01, "fair_bound": 0.0}


@dataclass(frozen=True)
class Options:
    """The defaults are what we found best on generated workloads; see docs/benchmarks.md for the ablation."""

    population: int = 16
    """Candidates kept (K of ONES)."""
    generations: int = 6
    """Per decision; the population lives on."""
    mutation: float = 0.3
    """Chance of a candidate's job to be tried at another size, for a few jobs of each candidate."""
    goodput: bool = True
    """Weigh progress; False weighs samples, as published."""
    completion_prices: bool = True
    """Worth of progress from the price of a GPU when the job will end; False takes today's price for all jobs."""
    expect: bool = True
    """Remaining work is the mean over the progress model; False draws it anew in each decision, as published."""
    placement: bool = True
    """Predict speed on the nodes that a size takes; False as if all were one node."""
    own_batch: bool = True
    """The batch of highest goodput at each size; False in proportion to the GPUs, as published."""
    resize_cost: bool = True
    """Changes must repay their interruption."""
    greedy: bool = True
    """Seed the population with greedy solutions."""
    local_search: bool = True
    """Improve candidates by small moves after crossover and mutation."""
    caution: float = 0.3
    """A doubtful size counts as slower by this many standard deviations of its predicted speed."""
    leap: float = 16.0
    """A job gets at most this multiple of the most GPUs it has had, and what it asked for if it has not run."""
    horizon_s: float = 200.0
    """Seconds that a change is expected to last, or else as long as no job has come or gone, where that is longer: what
    it gains in them must exceed what its interruption costs."""
    horizon_share: float = 0.5
    """It must repay within this share of the job's predicted remaining time as well."""
    tenure: float = 1.0
    """And within this multiple of the time that the job has kept its sizes on average: who was changed often is soon
    changed again."""
    fair_bound: float = 1.5
    """A job whose predicted JCT exceeds this multiple of that alone on its share weighs more; 0 switches it off."""
    preempt: bool = False
    """Running jobs may be taken to zero GPUs for a while."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), LEAST.get(field.name, 0)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name}: {value!r} must be true or false")
                continue
            whole = isinstance(field.default, int)
            right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not right or not least <= value < math.inf:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{field.name}: {value!r} must be {kind} of at least {least}")
        if self.mutation > 1:
            raise ValueError(f"mutation: {self.mutation!r} must be a chance between 0 and 1")
