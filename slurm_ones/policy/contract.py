"""Contract of a policy: plain data in, a schedule out.

A policy is pure: it has no clock, I/O or database, and takes all its random numbers from the generator that it is
given. So the same policy runs in the daemon, in our simulator and in other simulators. Between calls a policy may only
keep the state of its search, such as the population of ONES.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

# scipy imports its parts when they are first used: all of them would take half a second in each command.
import scipy

from ones_db.reasons import Reason
from ones_db.shape import Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NodeView:
    """A node on which the policy may place jobs."""

    name: str
    gpus: int
    """GPUs that elastic jobs hold or may take; GPUs of rigid jobs are already subtracted."""
    kind: str = ""
    """Kind of the node's GPUs; empty if unknown, or if all nodes have the same kind."""
    leaf: str = ""
    """Leaf switch of the node, or its block in a block topology; "" if the topology is unknown."""
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
    """Nodes of one partition on which the policy places jobs, in Slurm's order."""

    nodes: Sequence[NodeView]
    whole_nodes: bool = False
    """True if Slurm allocates only whole nodes: every shape takes all GPUs of its nodes."""
    node_gpus: int = 0
    """GPUs of a whole node, including GPUs that other jobs hold; 0 means the GPUs of the largest node here."""
    uniform: bool = True
    """True if a job must have equally many GPUs on each of its nodes, as Slurm requires. If False, a job may have any
    GPUs, and its shape is written as 1 × n (as in published simulators)."""
    reserved: Sequence[Reserved] = ()
    """GPUs that are reserved for others at a later time. A job that holds them then must give them up."""
    gpus_of_kind: Mapping[str, int] = field(default_factory=dict)
    """GPUs of a whole node of each kind, if there are several kinds; `node_gpus` for a kind that is missing or 0."""
    taper: float = 1.0
    """Time of a gradient exchange across leaf switches, as a multiple of its time below one switch."""

    @cached_property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def gpus_per_node(self) -> int:
        """GPUs of a whole node."""
        return self.node_gpus or max((node.gpus for node in self.nodes), default=0)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of GPUs here, in the order of their first nodes."""
        return tuple(dict.fromkeys(node.kind for node in self.nodes))

    def of_kind(self, kind: str) -> ClusterView:
        """Return the cluster of only those nodes that have GPUs of this kind."""
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
        """Return the kinds of the GPUs that the job holds, in the order of `kinds`; empty for a waiting job. A job with
        several kinds trains at the pace of the slowest."""
        mine = {self._kind_of_node.get(name) for name, gpus in job.nodes.items() if gpus}
        return tuple(kind for kind in self.kinds if kind in mine)

    @cached_property
    def _kind_of_node(self) -> dict[str, str]:
        return {node.name: node.kind for node in self.nodes}

    def views_on(self, kind: str, jobs: Sequence[JobView]) -> list[JobView]:
        """Return the view of each job on this kind of GPU (see `JobView.on_kind`)."""
        return [job.on_kind(kind, runs=self.kinds_held(job) == (kind,)) for job in jobs]


class SizeRule(NamedTuple):
    """Requirements of a job's training strategy at one GPU count."""

    gpus: int
    replicas: int
    """Number of replicas of the model that share a step's samples; in plain data parallel, one per GPU."""
    most: int
    """Largest global batch, all accumulation steps together; 0 if unknown."""
    quantum: int = 1
    """Every global batch at this size, even a fixed one, is a multiple of this number of samples."""
    together: int = 1
    """Number of consecutive ranks that must share a node."""

    def fits(self, shape: Shape) -> bool:
        """Tell whether this shape keeps together the ranks that must share a node: all ranks are on one node, or each
        node has whole groups."""
        return shape.nodes == 1 or shape.gpus_per_node % self.together == 0


@dataclass(frozen=True)
class Limits:
    """Limits that a job's owner, script and training strategy set."""

    gpus: tuple[int, ...]
    """Valid GPU counts, ascending."""
    min_batch: int
    max_batch: int
    max_local_batch: int
    """Largest number of samples per GPU and step, all accumulation steps together."""
    quantum: int = 1
    """Every global batch is a multiple of this number of samples, unless the batch is fixed."""
    rules: tuple[SizeRule, ...] = ()
    """Rule for each GPU count that the job's training strategy supports; empty for a data-parallel job."""
    strategy: str = ""
    """Name of the job's training strategy, for use in reasons."""

    def at(self, gpus: int) -> SizeRule:
        """Return the job's rule at this number of GPUs."""
        if not self.rules:
            return SizeRule(gpus, gpus, self.max_local_batch * gpus)
        return self._by_gpus.get(gpus) or SizeRule(gpus, gpus, 0)

    @cached_property
    def _by_gpus(self) -> Mapping[int, SizeRule]:
        return {rule.gpus: rule for rule in self.rules}

    @property
    def batch_fixed(self) -> bool:
        """True if the job's global batch is the same at every size."""
        return self.min_batch == self.max_batch


class ThroughputModel(Protocol):
    """Model of a job's throughput.

    A class may have a classmethod `together(models)` that combines many models into one. The combined model has the
    same two methods, with arrays of one row for each model. It predicts for fifty jobs in about the time for one.
    """

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return samples/s for each element of three arrays of equal shape: number of nodes, total number of GPUs,
        global batch."""

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return the relative standard deviation of `throughput` for the same arguments; 0 means certain."""


class EfficiencyModel(Protocol):
    """Model of a job's statistical efficiency."""

    def efficiency(self, batches: Ints) -> Floats:
        """Return the progress per sample at each global batch, relative to the base batch, in (0, 1]."""


@dataclass(frozen=True)
class Progress:
    """Beta(alpha, beta) distribution of ρ, the completed fraction of a job (ONES §3.2). α is the number of epochs done,
    β the expected number of epochs remaining.

    Epochs here count progress: with a batch of efficiency e, a sample counts as e samples.
    """

    alpha: float
    beta: float
    concentration: float = 1.0
    """Factor on α and β. It calibrates the width of ρ's distribution, and does not change its mean."""
    most: float = math.inf
    """Upper bound on the remaining epochs, from the number of epochs that the job declared; infinite if it declared
    none."""

    @property
    def mean(self) -> float:
        return self.alpha / (self.alpha + self.beta)

    def to_come(self, level: float) -> float:
        """Return the `level` quantile of the number of remaining epochs, α · (1/ρ - 1)."""
        rho = float(
            scipy.special.betaincinv(self.concentration * self.alpha, self.concentration * self.beta, 1.0 - level)
        )
        return min(self.alpha * (1.0 / max(rho, 1e-12) - 1.0), self.most)


class Borrows(NamedTuple):
    """Preemptions that are expected of a job's guest blocks."""

    own: int
    """GPUs of the job's base blocks, which are not preempted."""
    each: int
    """GPUs of one guest block."""
    rate: float
    """Expected preemptions per second of each guest block; its expected lifetime is 1 / rate."""
    loss_s: float
    """Seconds of training that each preemption costs the job."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One opted-in job as a policy sees it. Times are seconds on the caller's clock.

    A policy that chooses sizes needs the first two groups of fields. Each further group is for policies that consider
    deadlines, preemptions or the like.
    """

    # Request, present allocation and limits.
    job_id: int
    submitted: float
    requested: int
    """GPUs that the user asked for at submission."""
    requested_batch: int
    """Global batch at the start of the job's first run; the base batch if the job has not run."""
    shape: Shape | None
    """Shape of the running job; None while it waits."""
    nodes: Mapping[str, int]
    """GPUs that the job holds on each node; empty while it waits."""
    batch: int
    """Present global batch; while the job waits, its last run's batch, or the base batch if it has not run."""
    base_batch: int
    limits: Limits
    fixed: Reason | None = None
    """Reason why the job must keep its shape, or must go on waiting, in this round; None if it may change."""

    # Speed and remaining work.
    model: ThroughputModel
    """Throughput model on the kind of GPU that the job has or, if it waits, will most likely get."""
    on: Mapping[str, ThroughputModel] = field(default_factory=dict)
    """Throughput model for each kind of GPU that the job may use; empty if `model` is good for every kind."""
    efficiency: EfficiencyModel
    progress: Progress
    dataset: int

    # Past.
    samples: float
    """Progress since the job's first run, in samples at the base batch: each sample is multiplied by its batch's
    efficiency."""
    running_s: float
    """Total time for which the job has run, in seconds."""
    resizes: int = 0
    epochs: int
    """Number of epochs done."""
    epochs_since_change: int
    """Number of epochs done since the job's last resize ended; without a resize, since the job's start."""
    losses: tuple[tuple[float, float], ...] = ()
    """Pairs (epochs done, loss), one for each epoch whose loss the job reported."""

    # Costs of a resize.
    resize_s: float = 30.0
    """Expected pause of training at a resize, in seconds. If `shrink_s` is given, this is the pause at resizes that add
    GPUs."""
    shrink_s: float | None = None
    """Expected pause of training when the job gives up GPUs, in seconds; None if it is `resize_s`."""
    prepare_s: float = 0.0
    """Seconds from a block's start until it joins, in which the job trains on at its old size. It is 0 if a resize is a
    requeue, whose pause includes the start."""

    borrows: Borrows | None = None
    """Preemptions expected of the job's guest blocks; None if the job does not grow by guests."""

    # Changes in place, for a running job of blocks.
    smaller: Mapping[int, Mapping[str, int]] | None = None
    """Sizes to which the job can shrink without being placed again, each with the GPUs kept on each node. None if it
    can shrink to any size."""
    joins: bool = False
    """True if the job can add GPUs on any nodes and keep its own; False if growth means another placement."""
    nodes_at: Mapping[int, int] | None = None
    """Number of nodes at each size; None if the job always takes the fewest nodes possible."""

    # Deadline.
    deadline: float | None = None
    """Time by which the owner wants the job to end, on the caller's clock; None without a deadline."""
    promised: bool | None = None
    """True if an earlier schedule promised the deadline, False if one refused it, None before any answer
    (`Schedule.promises`)."""

    # Known only in simulations.
    true_remaining_s: float = math.nan
    """Remaining seconds with the GPUs and batch that the user asked for; only a simulator knows them."""

    @property
    def held_nodes(self) -> int:
        """Number of nodes that the job runs on; 0 while it waits."""
        if self.shape is None:
            return 0
        return (self.nodes_at or {}).get(self.shape.gpus, self.shape.nodes)

    def accepts(self, kind: str) -> bool:
        """Tell whether the job may use GPUs of this kind."""
        return not self.on or kind in self.on

    def on_kind(self, kind: str, *, runs: bool) -> JobView:
        """Return the job's view for one kind of GPU, with this kind's model; without sizes if the job does not accept
        the kind. With `runs` False it is the view of a waiting job."""
        limits = self.limits if self.accepts(kind) else replace(self.limits, gpus=())
        found = replace(self, model=self.on.get(kind, self.model), on={}, limits=limits)
        return found if runs else replace(found, shape=None, nodes={}, smaller=None, joins=False, nodes_at=None)


@dataclass(frozen=True)
class Allocation:
    """Shape, global batch and kind of GPU that a schedule gives one job."""

    shape: Shape
    batch: int
    """Global batch in samples."""
    kind: str = ""
    """Kind of the allocated GPUs; empty if any kind is accepted."""


class Weighed(NamedTuple):
    """A size that the policy considered for a job, and how much it is worth."""

    allocation: Allocation | None
    """Shape and batch that were considered; None means that the job waits."""
    worth: float
    """Worth for this job, apart from other jobs, in the policy's own unit; more is better."""


class Promise(NamedTuple):
    """Answer to a job's deadline: promised or refused, with the reason."""

    given: bool
    reason: Reason


@dataclass(frozen=True)
class Schedule:
    """Shape and batch of every job that is to run.

    Every running job has an allocation or is in `parked`. A waiting job without either keeps waiting until Slurm has
    room for the shape that its user asked for.
    """

    allocations: Mapping[int, Allocation]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Reason for each job's allocation, or for its wait, by job id."""
    score: float = float("nan")
    parked: frozenset[int] = frozenset()
    """Jobs that must not run until a later schedule no longer parks them. If such a job runs, it is checkpointed and
    requeued; if it waits, it is kept from starting."""
    weighed: Mapping[int, tuple[Weighed, ...]] = field(default_factory=dict)
    """Sizes of highest worth for each job that may change, best first; empty if the policy does not weigh sizes."""
    gains: Mapping[int, float] = field(default_factory=dict)
    """Worth of one more borrowed GPU to each job that grows by guests, by job id; empty if the policy does not compute
    it."""
    refused: Mapping[int, Reason] = field(default_factory=dict)
    """Limit of the site that keeps a job from more GPUs, by job id. Policies leave it empty; `slurm_ones.rules` fills
    it in."""
    promises: Mapping[int, Promise] = field(default_factory=dict)
    """Deadlines that this schedule promises or refuses, by job id. A promise is never taken back; a refused deadline
    may be promised later."""


class Policy(Protocol):
    """Contract of all policies, checked by one test suite.

    A schedule never gives a GPU to two jobs, respects every job's limits, and leaves `fixed` jobs as they are. It
    allocates or parks every other running job. All shapes fit on the nodes while unchanged jobs stay on theirs. Equal
    inputs, seeds and states of the policy give equal schedules.
    """

    name: str

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """Return the schedule that is to hold from now on. `jobs` are all jobs that opted in, waiting and running."""


def check_options(options: Any, least: Mapping[str, float], most: Mapping[str, float]) -> None:
    """Raise ValueError, which names the option, if an option's type is not its default's, or its value is out of
    bounds. The bounds are the option's entries in `least` (0 without an entry) and `most`."""
    for one in fields(options):
        value, low, high = getattr(options, one.name), least.get(one.name, 0), most.get(one.name, math.inf)
        if isinstance(one.default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{one.name}: {value!r} must be true or false")
            continue
        whole = isinstance(one.default, int)
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not low <= value <= min(high, sys.float_info.max):
            bounds = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
            raise ValueError(f"{one.name}: {value!r} must be {'a whole' if whole else 'a'} number {bounds}")
