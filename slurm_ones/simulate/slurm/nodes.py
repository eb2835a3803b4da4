"""Nodes of a simulated cluster, its partitions, and its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from slurm_ones.policy.ledger import NOTHING, Ledger, Resources
from slurm_ones.slurm.model import Node, Partition, Reservation

PreemptMode = Literal["", "cancel", "requeue"]
"""Treatment of preempted jobs by Slurm; "" if jobs are not preempted."""


@dataclass(frozen=True)
class PartitionSpec:
    """A partition of equal nodes. If two partitions share a node, both must give it the same resources."""

    name: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    whole_nodes: bool = False
    """True if Slurm allocates only whole nodes and does not count GPUs."""
    max_time_s: float = 0.0
    default: bool = True
    cpus_per_node: int = 0
    """CPUs of each node; 0 if Slurm does not count CPUs. `memory_mb` is its memory in MB, or 0."""
    memory_mb: int = 0
    tier: int = 1
    """PriorityTier: jobs in a partition of a higher tier start before others."""
    preempt: PreemptMode = ""
    """Treatment of this partition's jobs if a job in a partition of a higher tier needs their nodes."""
    grace_s: float = 0.0

    @property
    def capacity(self) -> Resources:
        """Resources of a node without jobs."""
        return Resources(self.gpus_per_node, self.cpus_per_node, self.memory_mb)

    def to_model(self) -> Partition:
        """Return the partition as Slurm shows it."""
        its = Partition(self.name, True, self.nodes, self.max_time_s, 0, self.whole_nodes, self.default)
        return replace(its, tier=self.tier, preempt_mode=self.preempt.upper(), grace_s=self.grace_s)


class Qos(NamedTuple):
    """A quality of service, as `sacctmgr` sets it."""

    name: str = "normal"
    priority: int = 0
    preempts: tuple[str, ...] = ()
    """Names of the QOS whose jobs Slurm may preempt for jobs of this QOS."""
    mode: PreemptMode = ""
    """Treatment of this QOS's jobs if Slurm preempts them."""
    grace_s: float = 0.0
    exempt_s: float = 0.0
    """Seconds after a run's start before it can be preempted (PreemptExemptTime)."""
    gpus: int = 0
    """Largest number of GPUs that all jobs of the QOS may hold together (GrpTRES); 0 for no limit."""
    user_gpus: int = 0
    """Largest number of GPUs that the jobs of one user may hold in this QOS (MaxTRESPU); 0 for no limit."""
    usage_factor: float = 1.0
    """Factor on the charge for a GPU-hour in this QOS."""


@dataclass(frozen=True)
class SlurmConf:
    """Configuration of a simulated Slurm, except for its nodes and partitions."""

    qos: tuple[Qos, ...] = (Qos(),)
    """All QOS. A job that names no QOS gets the first."""
    licenses: Mapping[str, int] = field(default_factory=dict)
    """Number of each licence, by licence name."""
    account_gpus: Mapping[str, int] = field(default_factory=dict)
    """Largest number of GPUs that all jobs of an account may hold together (GrpTRES), by account."""
    accounts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Accounts that each user may use. A user who is not listed may use all accounts."""
    own_qos: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """QOS that each user may use. A user who is not listed may use all QOS."""
    reservations: tuple[Reservation, ...] = ()
    youngest_first: bool = False
    """True if Slurm preempts the most recently started job first, among jobs of equal QOS priority and number of
    nodes."""
    reclaim_licenses: bool = False
    """True if Slurm also preempts jobs to free their licences."""
    kill_wait_s: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    requeue_exit: str = ""
    """Exit codes with which Slurm requeues a job, if it may be requeued (RequeueExit), such as `1,90-99`."""

    def requeues(self, code: int) -> bool:
        """Return True if Slurm requeues a job that ends with this exit code."""
        ranges = (part.partition("-") for part in self.requeue_exit.split(",") if part)
        return any(int(low) <= code <= int(high or low) for low, _, high in ranges)

    def refusal(self, user: str, account: str, qos: str, *, operator: bool) -> str:
        """Return Slurm's error message if a user may not use this account or QOS, else "". An operator may use any
        QOS."""
        if account and account not in self.accounts.get(user, {account}):
            return "Invalid account or account/partition combination specified"
        if qos and not operator and qos not in self.own_qos.get(user, {qos}):
            return "Invalid qos specification"
        return ""

    def qos_of(self, name: str) -> Qos:
        """Return the QOS of that name, or the first QOS if the name is empty."""
        return next(qos for qos in self.qos if name in ("", qos.name))


@dataclass
class NodeState:
    """State of one node."""

    name: str
    capacity: Resources
    partitions: tuple[str, ...]
    counted: bool
    """True if Slurm counts the node's GPUs."""
    down: bool = False
    drained: bool = False
    held: dict[int, Resources] = field(default_factory=dict)
    """Resources that jobs hold on the node, by job id."""

    @property
    def usable(self) -> bool:
        return not (self.down or self.drained)

    @property
    def used(self) -> Resources:
        used = NOTHING
        for amount in self.held.values():
            used = used.plus(amount)
        return used

    @property
    def free(self) -> Resources:
        """Resources of the node that Slurm could allocate now."""
        if not self.usable or (self.held and not self.counted):
            return NOTHING
        return self.capacity.without(self.used)

    def to_model(self, *, reserved: bool = False) -> Node:
        """Return the node as Slurm shows it."""
        used = self.used
        state = "ALLOCATED" if used.gpus == self.capacity.gpus else "MIXED" if self.held else "IDLE"
        if self.down:
            state = "DOWN"
        elif self.drained:
            state = "DRAIN"
        elif reserved:
            state += "+RESERVED"
        return Node(
            name=self.name,
            state=state,
            usable=self.usable and not reserved,
            gpus=self.capacity.gpus if self.counted else 0,
            gpus_used=used.gpus if self.counted else 0,
            partitions=self.partitions,
            idle=not self.held,
            cpus=self.capacity.cpus,
            cpus_used=used.cpus,
            memory_mb=self.capacity.memory_mb,
            memory_used_mb=used.memory_mb,
        )


class Nodes:
    """All nodes, in the order of the partitions."""

    def __init__(self, partitions: Sequence[PartitionSpec]) -> None:
        self.partitions = {partition.name: partition for partition in partitions}
        within: dict[str, list[PartitionSpec]] = {}
        for partition in partitions:
            for name in partition.nodes:
                within.setdefault(name, []).append(partition)
        self._states = {
            name: NodeState(name, of[0].capacity, tuple(one.name for one in of), not all(one.whole_nodes for one in of))
            for name, of in within.items()
        }
        self._place = {name: place for place, name in enumerate(self._states)}
        self._seen: dict[str, Node] = {}
        self._empty: dict[str, Ledger] = {}
        self._sharing: dict[str, frozenset[str]] = {}

    def __getitem__(self, name: str) -> NodeState:
        """Return the state of a node, for a change. The cached view of the node is dropped."""
        self._seen.pop(name, None)
        return self._states[name]

    def names(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return tuple(self._states)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return these node names in the cluster's order."""
        return tuple(sorted(names, key=self._place.__getitem__))

    def usable(self, name: str) -> bool:
        """True if the node is neither down nor drained."""
        return self._states[name].usable

    def sharing(self, partition: str) -> frozenset[str]:
        """Return the names of the other partitions that share a node with this partition."""
        if partition not in self._sharing:
            found = {name for node in self.partitions[partition].nodes for name in self._states[node].partitions}
            self._sharing[partition] = frozenset(found - {partition})
        return self._sharing[partition]

    def only(self, partition: str) -> frozenset[str] | None:
        """Return the nodes of a partition; None if the partition has all nodes of the cluster."""
        nodes = self.partitions[partition].nodes
        return None if len(nodes) == len(self._states) else frozenset(nodes)

    def ledger(self) -> Ledger:
        """Return the free resources of each usable node."""
        return Ledger({name: state.free for name, state in self._states.items() if state.usable})

    def free(self, partition: str) -> dict[str, int]:
        """Return the free GPUs of each usable node of a partition."""
        states = (self._states[name] for name in self.partitions[partition].nodes)
        return {state.name: state.free.gpus for state in states if state.usable}

    def empty(self, partition: str) -> Ledger:
        """Return the resources of a partition's nodes without any jobs."""
        if partition not in self._empty:
            spec = self.partitions[partition]
            self._empty[partition] = Ledger(dict.fromkeys(spec.nodes, spec.capacity))
        return self._empty[partition]

    def take(self, job_id: int, held: Mapping[str, Resources]) -> None:
        """Allocate these resources, by node, to a job. Raises ValueError if they are not free."""
        for name, amount in held.items():
            if not self[name].free.cover(amount):
                raise ValueError(f"{name}: {amount} for job {job_id}, {self[name].free} is free")
            self[name].held[job_id] = amount

    def give_back(self, job_id: int, names: Iterable[str]) -> None:
        """Free all resources that the job holds on these nodes."""
        for name in names:
            self[name].held.pop(job_id, None)

    def to_model(self, reserved: frozenset[str] = frozenset()) -> dict[str, Node]:
        """Return the nodes as Slurm shows them. Nodes in `reserved` are shown as reserved."""
        for name, state in self._states.items():
            if name not in self._seen:
                self._seen[name] = state.to_model()
        return {
            name: self._states[name].to_model(reserved=True) if name in reserved else self._seen[name]
            for name in self._states
        }
