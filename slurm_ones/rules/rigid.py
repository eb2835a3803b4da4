"""Jobs that wait for GPUs and cannot be resized, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Rank = tuple[int, int]
"""Place in Slurm's order, the smallest first: the negative priority, and the job id."""


@dataclass(frozen=True)
class Claim:
    """A rigid job that could start, were there room."""

    job_id: int
    nodes: int
    gpus_per_node: int
    rank: Rank
    limit_s: float = math.inf
    """How long it may run."""


@dataclass(frozen=True)
class Release:
    """GPUs that a running job gives back, and in how many seconds at the latest."""

    after_s: float
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class Waiting:
    """The rigid jobs that wait for a partition's GPUs."""

    claims: Sequence[Claim] = ()
    """By rank."""
    free: Mapping[str, int] = field(default_factory=dict)
    """GPUs that are free on each node that takes jobs, or are about to be through resizes under way."""
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    """Of the elastic jobs."""
    releases: Sequence[Release] = ()
    """Of the jobs that run."""
