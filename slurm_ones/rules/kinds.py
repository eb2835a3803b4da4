"""Which kinds of GPU a job may be given, and what Slurm is asked for so that it gets one of them.

Slurm's types of GPU (`gres/gpu:a100`) are the kinds. A job whose comment names some (`kinds=a100,v100`, or `kinds=any`)
may have any of these, and change between them. Every other job keeps the kind that it asked sbatch for; where it named
none Slurm goes on choosing, and it is not moved from the kind that Slurm chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slurm_ones.jobs.eligibility import Elastic
from slurm_ones.jobs.optin import ANY
from slurm_ones.policy.contract import Allocation
from slurm_ones.slurm.model import kind_of


@dataclass(frozen=True)
class Kinds:
    """The kinds of GPU of a partition."""

    of: Mapping[str, str] = field(default_factory=dict)
    """The kind of each node that has GPUs; empty where nobody names them."""
    given: bool = True
    """Slurm lets jobs ask for another type than they were submitted with."""

    @cached_property
    def every(self) -> tuple[str, ...]:
        """Each of them once."""
        return tuple(dict.fromkeys(self.of.values()))

    def nodes(self, kind: str) -> frozenset[str] | None:
        """Nodes with GPUs of that kind; None for all, where any will do or no node is said to have it."""
        return frozenset(name for name, its in self.of.items() if its == kind) or None if kind else None

    def held(self, elastic: Elastic) -> str:
        """The kind of GPUs that the job has; empty where it has none, or that is unknown."""
        return kind_of(elastic.holdings, self.of)

    def may_change(self, elastic: Elastic) -> bool:
        """Whether the job's owner lets it change between kinds, and Slurm can be asked for them."""
        # Of blocks that together hold unequally many GPUs of their nodes each asks for its own.
        asks = any(job.gpus_per_node for job in elastic.blocks or (elastic.job,)) and not elastic.whole_nodes
        return elastic.optin is not None and bool(elastic.optin.kinds) and asks and self.given

    def leaves(self, elastic: Elastic, got: Allocation) -> bool:
        """Whether the job runs, and is to have GPUs of another kind than those that it is known to have."""
        held = self.held(elastic)
        return elastic.job.running and self.may_change(elastic) and bool(got.kind) and held not in ("", got.kind)

    def accepted(self, elastic: Elastic) -> tuple[str, ...]:
        """Kinds that the job may have GPUs of; none where nobody names them."""
        if elastic.optin is not None and self.may_change(elastic):
            named = elastic.optin.kinds
            return tuple(kind for kind in self.every if kind in named or ANY in named) or self.every
        own = elastic.job.kind or self.held(elastic)
        return (own,) if own in self.every else self.every

    def asked(self, elastic: Elastic, got: Allocation) -> str:
        """The kind that Slurm is to be asked for, so that the job gets what it was given; the one that it asks for
        where that does not matter, or is not for us to say."""
        asks, held = elastic.job.kind, self.held(elastic)
        if not got.kind or len(self.every) < 2:
            return asks
        if elastic.blocks and held in self.every and self.given:
            # Blocks that join are of the kind of those that train, or take the place of all of them.
            return got.kind if self.may_change(elastic) else held
        if not self.may_change(elastic) or (got.shape == elastic.shape and held == got.kind):
            return asks
        return got.kind
