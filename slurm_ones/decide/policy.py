"""What a policy is: plain data in, a schedule out.

A policy is pure: no clock, no I/O, no database, all randomness from the generator it is given. So any policy
runs in the daemon, in the simulator, and in somebody else's. It may remember its own search (the population
of ONES) from one call to the next, since that is an answer improved upon and not a fact about the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurm_ones.slurm.model import Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NodeView:
    """A node that jobs under the policy may use."""

    name: str
    gpus: int
    """GPUs that elastic jobs hold or may take: those of rigid jobs are already subtracted."""


@dataclass(frozen=True)
class ClusterView:
    """The part of the cluster that the policy disposes of: one partition, nodes in Slurm's order."""

    nodes: Sequence[NodeView]
    whole_nodes: bool = False
    """Slurm hands out whole nodes: every shape takes all GPUs of its nodes."""
    node_gpus: int = 0
    """GPUs of a whole node, also of one that others hold in part; 0 where it is as many as the largest view
    has."""

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a whole node, which shapes of several nodes are made of."""
        return self.node_gpus or max((node.gpus for node in self.nodes), default=0)


@dataclass(frozen=True)
class Limits:
    """What a job can take: the object through which a training layout tells the scheduler its limits."""

    gpus: tuple[int, ...]
    """Valid GPU counts, ascending."""
    min_batch: int
    max_batch: int
    max_local_batch: int
    """Most samples per GPU per step (accumulation comes later)."""
    quantum: int = 1
    """Global batches are multiples of this."""


class ThroughputModel(Protocol):
    """What is known of a job's speed."""

    def throughput(self, gpus: Ints, batches: Ints) -> Floats:
        """Samples/s at each (GPUs, global batch) pair; both arrays and the result have the same shape."""


class EfficiencyModel(Protocol):
    """What is known of a job's progress per sample."""

    def efficiency(self, batches: Ints) -> Floats:
        """Progress per sample relative to the base batch, in (0, 1]; same shape as `batches`."""


@dataclass(frozen=True)
class Progress:
    """ρ, the fraction complete, as Beta(alpha, beta) (ONES §3.2)."""

    alpha: float
    beta: float

    @property
    def mean(self) -> float:
        return self.alpha / (self.alpha + self.beta)


@dataclass(frozen=True)
class JobView:
    """One opted-in job as a policy sees it. Times in seconds of the caller's clock."""

    job_id: int
    submitted: float
    requested: int
    """GPUs asked for at submission."""
    shape: Shape | None
    """Its shape where it runs, None where it waits."""
    nodes: Mapping[str, int]
    """GPUs it holds on each node; empty where it waits."""
    batch: int
    """Global batch in force (of its last run, or its base batch)."""
    base_batch: int
    limits: Limits
    model: ThroughputModel
    efficiency: EfficiencyModel
    progress: Progress
    samples: float
    """Samples used since the job's first run."""
    dataset: int
    epochs: int
    """Epochs done."""
    epochs_since_change: int
    """Epochs done since its last resize ended, or since its start."""
    running_s: float
    """Seconds it has run in all."""
    resizes: int = 0
    fixed: str = ""
    """Why it must keep its shape in this round, in words for its owner; a waiting job then stays waiting. Empty where
    it may change."""


@dataclass(frozen=True)
class Allocation:
    """What a schedule gives one job."""

    shape: Shape
    batch: int
    """Global batch in samples."""


@dataclass(frozen=True)
class Schedule:
    """Shape and batch of every job that is to run; a job left out waits."""

    allocations: Mapping[int, Allocation]
    reasons: Mapping[int, str] = field(default_factory=dict)
    """For each job, in words a user understands, why it gets what it gets (or waits)."""
    score: float = float("nan")


class Policy(Protocol):
    """Contract of all policies, held by one test suite.

    A schedule never gives a GPU to two jobs, keeps every job's limits, leaves `fixed` jobs as they are, is
    placeable on the nodes, and is equal for equal inputs, memory and seeds.
    """

    name: str

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """The schedule to be in force from now on. `jobs` are all opted-in jobs, waiting and running."""
