"""Contract of a policy: plain data in, a schedule out.

A policy is pure: it has no clock, I/O or database, and draws all randomness from the generator it is given. So the same
policy runs in the daemon, in our simulator and in other simulators. A policy may keep the state of its search (the
population of ONES) between calls: a start for the next search, not a fact about the cluster.
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
    """Nodes of one partition, in Slurm's order, on which the policy schedules jobs."""

    nodes: Sequence[NodeView]
    whole_nodes: bool = False
    """True if Slurm allocates only whole nodes: every shape takes all GPUs of its nodes."""
    node_gpus: int = 0
    """GPUs of a whole node, including GPUs that other jobs hold; 0 for the largest count of any node here."""
    uniform: bool = True
    """True if a job has the same number of GPUs on each of its nodes, as Slurm requires. False, as in published
    simulators, if a job may have any number of GPUs on any nodes, written as shape 1 × n."""
    reserved: Sequence[Reserved] = ()
    """GPUs reserved for others from a later time on; jobs that hold those GPUs then must leave."""
    gpus_of_kind: Mapping[str, int] = field(default_factory=dict)
    """GPUs of a whole node by kind, if there are several kinds; a missing kind or 0 means `node_gpus`."""
    taper: float = 1.0
    """Factor by which gradient exchange between leaf switches is slower than below one switch."""

    @cached_property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def gpus_per_node(self) -> int:
        """GPUs of a whole node; shapes of several nodes consist of whole nodes."""
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
        """Return the kinds of the GPUs that the job holds, in the order of `kinds`; none for a waiting job.

        Slurm may start a job that asked for no kind on several kinds; such a job trains at the pace of the slowest.
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
    """Replicas that share the samples of a step; one per GPU for a purely data-parallel job."""
    most: int
    """Largest global batch, summed over the accumulation steps; 0 if unknown."""
    quantum: int = 1
    """Divisor, in samples, of every global batch at this size, including a fixed batch."""
    together: int = 1
    """Number of consecutive ranks that share a node."""

    def fits(self, shape: Shape) -> bool:
        """Tell whether this shape keeps ranks together that must share a node: on one, or in whole groups."""
        return shape.nodes == 1 or shape.gpus_per_node % self.together == 0


@dataclass(frozen=True)
class Limits:
    """Limits that a job's owner, script and training strategy set."""

    gpus: tuple[int, ...]
    """Valid GPU counts, ascending."""
    min_batch: int
    max_batch: int
    max_local_batch: int
    """Most samples per GPU per step, summed over its accumulation steps."""
    quantum: int = 1
    """Divisor, in samples, of every global batch that is not fixed."""
    rules: tuple[SizeRule, ...] = ()
    """Rule at each GPU count that the job's training strategy supports. Empty for a data-parallel job, which takes
    `max_local_batch` on each GPU."""
    strategy: str = ""
    """Name of the training strategy, shown in reasons."""

    def at(self, gpus: int) -> SizeRule:
        """Return the job's rule on this number of GPUs."""
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

    A class may offer a classmethod `together(models)` that combines models into one batched query. The result has the
    same two methods, on arrays with one row per model; fifty jobs then cost little more than one.
    """

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return samples/s by element, all arrays of one shape: `gpus` in all on `nodes` at global `batches`."""

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """Return the relative standard deviation of `throughput` for the same arguments; 0 if certain."""


class EfficiencyModel(Protocol):
    """Model of a job's progress per sample."""

    def efficiency(self, batches: Ints) -> Floats:
        """Return the progress per sample relative to the base batch, in (0, 1], in the shape of `batches`."""


@dataclass(frozen=True)
class Progress:
    """Beta(alpha, beta) distribution of ρ, the completed fraction of a job (ONES §3.2): α epochs done, β epochs
    remaining.

    Epochs count progress: a sample used at a batch of efficiency e counts as e samples.
    """

    alpha: float
    beta: float
    concentration: float = 1.0
    """Factor on α and β that calibrates the width of ρ's distribution; the mean stays."""
    most: float = math.inf
    """Upper bound on the remaining epochs that the job declared; infinite without a declaration."""

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
    """Expected preemptions of a job's guest blocks, which hold its borrowed GPUs."""

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

    A policy that chooses sizes needs the first two groups of fields. Each further group serves policies that consider
    its subject.
    """

    # What it asks for, has, and may have.
    job_id: int
    submitted: float
    requested: int
    """GPUs asked for at submission."""
    requested_batch: int
    """Global batch at the start of the job's first run, or its base batch."""
    shape: Shape | None
    """Shape of the running job; None while it waits."""
    nodes: Mapping[str, int]
    """GPUs that the job holds on each node; empty while it waits."""
    batch: int
    """Current global batch: that of the last run, or else the base batch."""
    base_batch: int
    limits: Limits
    fixed: Reason | None = None
    """Reason why the job's shape, or its wait, must not change in this round; None if it may."""

    # How fast it trains, and how much is to come.
    model: ThroughputModel
    """Throughput model of the job, on the kind of GPU that it has or is most likely to get."""
    on: Mapping[str, ThroughputModel] = field(default_factory=dict)
    """Throughput model on each kind of GPU that the job may use; empty if `model` holds for every kind."""
    efficiency: EfficiencyModel
    progress: Progress
    dataset: int

    # What it has had so far.
    samples: float
    """Progress since the job's first run in samples of the base batch: samples used times their efficiency."""
    running_s: float
    """Total seconds for which the job has run."""
    resizes: int = 0
    epochs: int
    """Epochs done."""
    epochs_since_change: int
    """Epochs done since the job's last resize ended, or since its start."""
    losses: tuple[tuple[float, float], ...] = ()
    """Pairs (epochs done, loss) at the ends of the epochs for which the job reported a loss."""

    # What a resize costs.
    resize_s: float = 30.0
    """Expected pause of training in seconds at a resize; only at a growing one if `shrink_s` is set."""
    shrink_s: float | None = None
    """Expected pause of training in seconds when the job gives up GPUs; None for `resize_s`."""
    prepare_s: float = 0.0
    """Seconds for which gained GPUs are held before they train, while the job trains on at its old size. 0 if a resize
    is a requeue, whose pause includes the start."""

    borrows: Borrows | None = None
    """Expected preemptions of the job's guest blocks; None if it grows without guests."""

    # How a running job of blocks changes in place.
    smaller: Mapping[int, Mapping[str, int]] | None = None
    """GPUs kept on each node, by each size to which the job can shrink in place; None if every size is possible."""
    joins: bool = False
    """True if the job grows by GPUs on any nodes next to its own; False if a larger size must be placed again."""
    nodes_at: Mapping[int, int] | None = None
    """Number of nodes at each size, if it may exceed the fewest possible; None for a job placed on the fewest nodes."""

    # Its deadline.
    deadline: float | None = None
    """Deadline that the owner set for the job's end, on the caller's clock; None for no deadline."""
    promised: bool | None = None
    """True if an earlier schedule promised the deadline, False if refused (`Schedule.promises`); None if undecided."""

    # Known only in simulations.
    true_remaining_s: float = math.nan
    """Remaining seconds at the requested GPUs and batch."""

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
        """Return the job's view restricted to one kind of GPU, with its model there. It waits unless it `runs` there,
        and has no sizes if it does not accept the kind."""
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
    """Kind of the allocated GPUs; empty if any kind will do."""


class Weighed(NamedTuple):
    """A size that the policy considered for a job, and its worth."""

    allocation: Allocation | None
    """Allocation considered; None for waiting."""
    worth: float
    """Worth for the job without regard to other jobs, in the policy's own unit; more is better."""


class Promise(NamedTuple):
    """Decision to promise or refuse a job's deadline, with the reason."""

    given: bool
    reason: Reason


@dataclass(frozen=True)
class Schedule:
    """Shape and batch of every job that is to run.

    A job left out waits: Slurm starts it at its requested shape as soon as it fits. A running job may be left out only
    if it is in `parked`.
    """

    allocations: Mapping[int, Allocation]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Reason for what each job gets, or for its wait."""
    score: float = float("nan")
    parked: frozenset[int] = frozenset()
    """Jobs that must not run until a later schedule omits them here. A running one is checkpointed and requeued, a
    waiting one is kept from starting."""
    weighed: Mapping[int, tuple[Weighed, ...]] = field(default_factory=dict)
    """Sizes of highest worth of each job that may change, best first; empty for policies that do not weigh sizes."""
    gains: Mapping[int, float] = field(default_factory=dict)
    """Worth of each borrowed GPU, by job id, for jobs that grow by borrowing; empty if the policy cannot compute it."""
    refused: Mapping[int, Reason] = field(default_factory=dict)
    """Site limit that restricted a job, by job id. Filled in by `rules`, not by policies."""
    promises: Mapping[int, Promise] = field(default_factory=dict)
    """Deadlines promised or refused in this schedule, by job id. From then on the caller sets the job's `promised`. A
    promise is never taken back; a refused one may be given later."""


class Policy(Protocol):
    """Contract of all policies, checked by one test suite.

    A schedule never gives a GPU to two jobs, respects every job's limits, and leaves `fixed` jobs as they are. It
    allocates or parks every other running job. It can be placed on the nodes while unchanged jobs stay. Equal inputs,
    memory and seeds give equal schedules.
    """

    name: str

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """Return the schedule that holds from now on. `jobs` are all opted-in jobs, waiting and running."""


def check_options(options: Any, least: Mapping[str, float]) -> None:
    """Raise ValueError that names the option if its type differs from its default's, or its value is below `least` (0
    if unnamed)."""
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
