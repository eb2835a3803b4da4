"""The contract of a policy: plain data in, a schedule out.

A policy is pure: no clock, no I/O, no database, all randomness from the generator it is given. So any policy runs in
the daemon, in the simulator, and in somebody else's. It may remember its own search (the population of ONES) from one
call to the next. That is an answer to improve, not a fact about the world.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

# It imports its parts when they are first used: all of them would take half a second of each command.
import scipy

from ones_db.reasons import Reason
from ones_db.shape import Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NodeView:
    """A node that jobs under the policy may use."""

    name: str
    gpus: int
    """GPUs that elastic jobs hold or may take: those of rigid jobs are already subtracted."""
    kind: str = ""
    """Kind of its GPUs; empty if unknown, or all are alike."""
    leaf: str = ""
    """Its leaf switch, or its block of a network of blocks; "" if the network is unknown."""
    speed: float = 1.0
    """Speed of compute on the node, relative to other nodes; below 1 for a slow one."""


@dataclass(frozen=True)
class Reserved:
    """GPUs reserved for others: by a reservation, or a rigid job due to start."""

    start: float
    end: float
    """End of the reservation on the caller's clock, in seconds."""
    gpus: int


@dataclass(frozen=True)
class ClusterView:
    """The nodes that the policy decides on: those of one partition, in Slurm's order."""

    nodes: Sequence[NodeView]
    whole_nodes: bool = False
    """Slurm hands out whole nodes: every shape takes all GPUs of its nodes."""
    node_gpus: int = 0
    """GPUs of a whole node, those held by others included; 0 for the most that a node here has."""
    uniform: bool = True
    """Each node of a job gives equally many GPUs, as Slurm must be asked for them. If this is False, as in published
    simulators, a job may have any number of GPUs, spread in any way. It is written as the shape 1 × n."""
    reserved: Sequence[Reserved] = ()
    """GPUs reserved for others from some time on; jobs that hold them then must leave."""
    gpus_of_kind: Mapping[str, int] = field(default_factory=dict)
    """GPUs of a whole node of each kind, if there are several; 0 or left out as in `node_gpus`."""
    taper: float = 1.0
    """Factor by which gradient exchange is slower between leaf switches than below one."""

    @cached_property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def gpus_per_node(self) -> int:
        """GPUs of a whole node, which shapes of several nodes are made of."""
        return self.node_gpus or max((node.gpus for node in self.nodes), default=0)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of GPUs here, in the order of their first nodes."""
        return tuple(dict.fromkeys(node.kind for node in self.nodes))

    def of_kind(self, kind: str) -> ClusterView:
        """Return the nodes with GPUs of this kind as a cluster."""
        if self.kinds == (kind,):
            return self
        nodes = tuple(node for node in self.nodes if node.kind == kind)
        full = self.gpus_of_kind.get(kind, 0) or self.node_gpus or max((node.gpus for node in nodes), default=0)
        return replace(self, nodes=nodes, node_gpus=full, gpus_of_kind={})

    def without(self, holders: Sequence[JobView]) -> ClusterView:
        """Return the cluster without the GPUs that the `holders` have."""
        taken: Counter[str] = Counter()
        for job in holders:
            taken.update(job.nodes)
        nodes = tuple(replace(node, gpus=max(node.gpus - taken[node.name], 0)) for node in self.nodes)
        return replace(self, nodes=nodes, node_gpus=self.gpus_per_node)

    def kinds_held(self, job: JobView) -> tuple[str, ...]:
        """Kinds of the GPUs that the job has, in the order of `kinds`; none if it waits.

        One that Slurm started on several, as it may where no kind was asked for, trains at the pace of the slowest.
        """
        mine = {self._kind_of_node.get(name) for name, gpus in job.nodes.items() if gpus}
        return tuple(kind for kind in self.kinds if kind in mine)

    @cached_property
    def _kind_of_node(self) -> dict[str, str]:
        return {node.name: node.kind for node in self.nodes}

    def views_on(self, kind: str, jobs: Sequence[JobView]) -> list[JobView]:
        """Return each job's view on this kind of GPU (`JobView.on_kind`)."""
        return [job.on_kind(kind, runs=self.kinds_held(job) == (kind,)) for job in jobs]


class SizeRule(NamedTuple):
    """Constraints of a job's training strategy at one GPU count."""

    gpus: int
    replicas: int
    """Replicas that share a step's samples: one a GPU if the job is purely data parallel."""
    most: int
    """Largest global batch, over all passes of a step; 0 if unknown."""
    quantum: int = 1
    """Global batches at this size, fixed ones too, are multiples of this, in samples."""
    together: int = 1
    """Number of consecutive ranks that share a node."""

    def fits(self, shape: Shape) -> bool:
        """Tell whether the ranks that must share a node do so at this shape: all of them on one node, or groups of them
        that fill nodes."""
        return shape.nodes == 1 or shape.gpus_per_node % self.together == 0


@dataclass(frozen=True)
class Limits:
    """Limits of a job: what its owner allows, as far as its script and its training strategy can."""

    gpus: tuple[int, ...]
    """Valid GPU counts, ascending."""
    min_batch: int
    max_batch: int
    max_local_batch: int
    """Most samples per GPU per step, over all its forward passes."""
    quantum: int = 1
    """Global batches that are not fixed are multiples of this, in samples."""
    rules: tuple[SizeRule, ...] = ()
    """Rule at each GPU count that the job's training strategy knows. Empty for a data-parallel job, which takes
    `max_local_batch` on each GPU."""
    strategy: str = ""
    """Name of the strategy, for reasons."""

    def at(self, gpus: int) -> SizeRule:
        """Rule of the job on this number of GPUs."""
        if not self.rules:
            return SizeRule(gpus, gpus, self.max_local_batch * gpus)
        return self._by_gpus.get(gpus) or SizeRule(gpus, gpus, 0)

    @cached_property
    def _by_gpus(self) -> Mapping[int, SizeRule]:
        return {rule.gpus: rule for rule in self.rules}

    @property
    def batch_fixed(self) -> bool:
        """True if the job's global batch never changes, whatever its size."""
        return self.min_batch == self.max_batch


class ThroughputModel(Protocol):
    """Model of a job's throughput.

    A class whose models can be asked at once has a classmethod `together(models)`. Its result answers the same two
    questions for arrays with a row for each model: fifty jobs cost little more than one.
    """

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Samples/s on `gpus` GPUs in all of `nodes` nodes at each global batch; all arrays have one shape."""

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Relative standard deviation of `throughput`: 0 if certain; shapes as there."""


class EfficiencyModel(Protocol):
    """Model of a job's progress per sample."""

    def efficiency(self, batches: Ints) -> Floats:
        """Progress per sample relative to the base batch, in (0, 1]; same shape as `batches`."""


@dataclass(frozen=True)
class Progress:
    """Distribution of ρ, the completed fraction, as Beta(alpha, beta) (ONES §3.2): α epochs done, β epochs remaining.

    Epochs count progress: a sample used at a batch of efficiency e brings e samples' worth.
    """

    alpha: float
    beta: float
    concentration: float = 1.0
    """Factor on α and β that calibrates the width of ρ's distribution; the mean stays."""
    most: float = math.inf
    """Most remaining epochs, as the job declared; infinite without a declaration."""

    @property
    def mean(self) -> float:
        return self.alpha / (self.alpha + self.beta)

    def to_come(self, level: float) -> float:
        """Return the `level` quantile of the remaining epochs α · (1/ρ - 1)."""
        rho = float(
            scipy.special.betaincinv(self.concentration * self.alpha, self.concentration * self.beta, 1.0 - level)
        )
        return min(self.alpha * (1.0 / max(rho, 1e-12) - 1.0), self.most)


class Borrows(NamedTuple):
    """Expected preemptions of a job's guests, which hold its GPUs beyond its own."""

    own: int
    """GPUs of its base blocks, which are not preempted."""
    each: int
    """GPUs of a guest."""
    rate: float
    """Preemptions per second that are expected of each guest; its expected life is 1 / rate."""
    loss_s: float
    """Seconds of training that each preemption costs the job."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One opted-in job as a policy sees it. Times in seconds of the caller's clock.

    A policy that chooses sizes needs the first two groups of fields; each of the others is for those that weigh what it
    names.
    """

    # What it asks for, has, and may have.
    job_id: int
    submitted: float
    requested: int
    """GPUs asked for at submission."""
    requested_batch: int
    """Global batch that its first run began with, or its base batch."""
    shape: Shape | None
    """Its shape while it runs, None while it waits."""
    nodes: Mapping[str, int]
    """GPUs it holds on each node; empty if it waits."""
    batch: int
    """Global batch in force (of its last run, or its base batch)."""
    base_batch: int
    limits: Limits
    fixed: Reason | None = None
    """Reason why its shape, or its wait, must not change in this round; None if it may."""

    # How fast it trains, and how much is to come.
    model: ThroughputModel
    """Its model. With several kinds of GPUs, on the kind that it has, or is most likely to get."""
    on: Mapping[str, ThroughputModel] = field(default_factory=dict)
    """Its model on each kind of GPU that it may use; empty if `model` is that of any kind."""
    efficiency: EfficiencyModel
    progress: Progress
    dataset: int

    # What it has had so far.
    samples: float
    """Progress since the job's first run in samples of the base batch: samples used times their efficiency."""
    running_s: float
    """Seconds it has run in all."""
    resizes: int = 0
    epochs: int
    """Epochs done."""
    epochs_since_change: int
    """Epochs done since its last resize ended, or since its start."""
    losses: tuple[tuple[float, float], ...] = ()
    """(epochs done, loss) at the ends of its epochs, as far as it reports them."""

    # What a resize costs.
    resize_s: float = 30.0
    """Seconds that a resize is expected to interrupt its training: one that grows, where those that shrink differ."""
    shrink_s: float | None = None
    """Seconds that giving up GPUs is expected to pause its training; None if the same as `resize_s`."""
    prepare_s: float = 0.0
    """Seconds for which gained GPUs are held before they train; the job trains on at its old size meanwhile. 0 if a
    resize is a requeue, whose start is part of the pause."""

    borrows: Borrows | None = None
    """Expected preemptions of the guests that it grows by; None if it grows by none."""

    # How a running job of blocks changes in place.
    smaller: Mapping[int, Mapping[str, int]] | None = None
    """GPUs that it keeps on each node, for each size that it can shrink to in place; None if it can have any size."""
    joins: bool = False
    """True if it grows by GPUs on any nodes next to those it holds; False if a larger size must be placed again."""
    nodes_at: Mapping[int, int] | None = None
    """Nodes that it is on at each size, if they may be more than it needs. None for a job that is placed on as few as
    it needs."""

    # Its deadline.
    deadline: float | None = None
    """Time by which its owner wants it to have ended, on the caller's clock; None without one."""
    promised: bool | None = None
    """Promise of that deadline by an earlier schedule (`Schedule.promises`); None before one decided."""

    # Known only in simulations.
    true_remaining_s: float = math.nan
    """Seconds still needed at its requested GPUs and batch."""

    @property
    def held_nodes(self) -> int:
        """Number of nodes it runs on; 0 if it waits."""
        if self.shape is None:
            return 0
        return (self.nodes_at or {}).get(self.shape.gpus, self.shape.nodes)

    def accepts(self, kind: str) -> bool:
        """Tell whether it may use GPUs of that kind."""
        return not self.on or kind in self.on

    def on_kind(self, kind: str, *, runs: bool) -> JobView:
        """The job as it is on one kind of GPU: with its model there, waiting unless it `runs` there, and without sizes
        on a kind that it does not accept."""
        limits = self.limits if self.accepts(kind) else replace(self.limits, gpus=())
        found = replace(self, model=self.on.get(kind, self.model), on={}, limits=limits)
        return found if runs else replace(found, shape=None, nodes={}, smaller=None, joins=False, nodes_at=None)


@dataclass(frozen=True)
class Allocation:
    """Shape and batch that a schedule gives one job."""

    shape: Shape
    batch: int
    """Global batch in samples."""
    kind: str = ""
    """Kind of its GPUs; empty if any will do."""


class Weighed(NamedTuple):
    """A size that the policy considered for a job, and its worth."""

    allocation: Allocation | None
    """None for waiting."""
    worth: float
    """Worth regardless of what others get, in the policy's own unit; more is better."""


class Promise(NamedTuple):
    """Promise of a job's deadline or its refusal, with the reason."""

    given: bool
    reason: Reason


@dataclass(frozen=True)
class Schedule:
    """Shape and batch of every job that is to run.

    A job left out waits for GPUs: it starts at the shape it has asked for whenever Slurm finds room. A running job
    may be left out only if it is named in `parked`.
    """

    allocations: Mapping[int, Allocation]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Reason for what each job gets, or for its wait."""
    score: float = float("nan")
    parked: frozenset[int] = frozenset()
    """Jobs that must not run now: a running one is checkpointed and requeued, a waiting one kept from starting, until a
    later schedule no longer names it here."""
    weighed: Mapping[int, tuple[Weighed, ...]] = field(default_factory=dict)
    """Sizes of most worth of each job that could have changed, best first; empty for policies that do not weigh
    sizes."""
    gains: Mapping[int, float] = field(default_factory=dict)
    """Worth of each GPU beyond the job's own, of jobs that grow and borrow; of policies that can tell."""
    refused: Mapping[int, Reason] = field(default_factory=dict)
    """Limit of the site that restrained a job, by job id. Filled in by `rules`, not by policies."""
    promises: Mapping[int, Promise] = field(default_factory=dict)
    """Promises given or refused now, of jobs with deadlines; of policies that give any. The caller shows a job as
    `promised` from then on. One that was given is not taken back; one that was refused may be given later."""


class Policy(Protocol):
    """Contract of all policies, held by one test suite.

    A schedule never gives a GPU to two jobs, keeps every job's limits, and leaves `fixed` jobs as they are. It
    allocates or parks every other running job. It is placeable on the nodes with unchanged jobs in place, and is equal
    for equal inputs, memory and seeds.
    """

    name: str

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """The schedule to be in force from now on. `jobs` are all opted-in jobs, waiting and running."""


def check_options(options: Any, least: Mapping[str, float]) -> None:
    """Raise ValueError, naming the option, if it has another type than its default or is below its `least` value (else
    0)."""
    for one in fields(options):
        value, low = getattr(options, one.name), least.get(one.name, 0)
        if isinstance(one.default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{one.name}: {value!r} must be true or false")
            continue
        if isinstance(one.default, str):
            if not isinstance(value, str):
                raise ValueError(f"{one.name}: {value!r} must be a text")
            continue
        whole = isinstance(one.default, int)
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not low <= value < math.inf:
            raise ValueError(f"{one.name}: {value!r} must be {'a whole' if whole else 'a'} number of at least {low}")
    if options.mutation > 1:
        raise ValueError(f"mutation: {options.mutation!r} must be a chance between 0 and 1")
