"""Slurm's jobs, nodes and partitions as plain frozen data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Annotated, NamedTuple

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.slurm.fields import (
    COUNT,
    FLAG,
    HOSTS,
    ID,
    LICENCES,
    NAMES,
    SET_FLAG,
    TASKS,
    TEXT,
    TIME,
    TIME_LIMIT,
    UID,
    Field,
)

_ONE_KIND = re.compile(r"[A-Za-z0-9_.-]*")


class Task(NamedTuple):
    """A task of a job array, as Slurm's commands take it."""

    array: int
    """Job id of the array: what sbatch answered."""
    task: int

    def __str__(self) -> str:
        return f"{self.array}_{self.task}"


JobKey = int | Task
"""Name of a job to Slurm."""


class JobState(str, Enum):
    """A job's base state, as Slurm names it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"


ENDED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
    }
)
"""Final states of a job. A preempted job that is requeued is pending, not PREEMPTED."""


@dataclass(frozen=True)
class SlurmJob:
    """One job of the queue; each annotated field is read by its row, the others are derived (`parse.job_of`).

    Text fields are the user's own and not to be trusted in terminals or SQL.
    """

    job_id: Annotated[int, Field(ID, "JobID", "job_id", "id")]
    name: Annotated[str, Field(TEXT, "Name", "name", "name")]
    user: Annotated[str, Field(TEXT, "UserName", "user_name", "user_name")]
    uid: Annotated[int, Field(UID, "UserID", "user_id", "user_id")]
    account: Annotated[str, Field(TEXT, "Account", "account", "account")]
    partitions: Annotated[tuple[str, ...], Field(NAMES, "Partition", "partition", "partition")]
    """Partition that it runs in, or all that it may start in."""
    state: JobState
    flags: frozenset[str]
    """Slurm's state flags besides the base state: COMPLETING, REQUEUED, REQUEUE_HOLD, CONFIGURING, …"""
    reason: Annotated[str, Field(TEXT, "Reason", "state_reason", "state_reason")]
    held: bool
    """True if the job is held: its priority is 0, so Slurm does not start it."""
    admin_held: bool
    """Held by an operator or root, so its owner cannot release it."""
    restart: Annotated[int, Field(COUNT, "RestartCnt", "restart_cnt", "requeue_count")]
    """Times that Slurm has restarted it: 0 in the first run."""
    requeue: Annotated[bool, Field(FLAG, "Requeue", "requeue", "is_requeueable")]
    """Slurm may requeue it."""
    nodes: Annotated[int, Field(COUNT, "NumNodes", "node_count", "num_nodes")]
    """Nodes it has, or asks for."""
    max_nodes: Annotated[int, Field(COUNT, "MaxNodes", "max_nodes", "max_nodes")]
    """Most nodes it asks for; above `nodes` for a request such as `--nodes=1-4`."""
    gpus_per_node: int
    """GPUs of `--gres` or `--gpus-per-node`, 0 if it asked for none."""
    gpus_total: int
    """GPUs allocated, or requested in another form (`--gpus`); 0 if Slurm knows of none."""
    tasks: Annotated[int, Field(COUNT, "NumTasks", "tasks", "ntasks")]
    """Tasks that Slurm counts: one a node for a job without task counts."""
    task_counts: bool
    """Submitted with task counts, so that its user cannot resize it."""
    node_list: Annotated[tuple[str, ...], Field(HOSTS, "NodeList", "nodes", "allocated_nodes")]
    submit_time: Annotated[float, Field(TIME, "SubmitTime", "submit_time", "submit_time")]
    """Unix time in seconds, as all times; 0 for none."""
    start_time: Annotated[float, Field(TIME, "StartTime", "start_time", "start_time")]
    end_time: Annotated[float, Field(TIME, "EndTime", "end_time", "end_time")]
    time_limit_s: Annotated[float, Field(TIME_LIMIT, "TimeLimit", "time_limit", "time_limit")]
    """0 for none."""
    work_dir: Annotated[str, Field(TEXT, "WorkDir", "current_working_directory", "working_directory")]
    comment: Annotated[str, Field(TEXT, "Comment", "comment", "comment")]
    priority: int = 0
    array: bool = False
    """Part of a job array or of a heterogeneous job."""
    batch: Annotated[bool, Field(SET_FLAG, "BatchFlag", "batch_flag", "is_batch_job")] = True
    """Has a batch script; an interactive job has none and cannot be requeued."""
    exit_code: int = 0
    """Exit code as a shell gives it: 128 + the signal that ended it."""
    eligible_time: Annotated[float, Field(TIME, "EligibleTime", "eligible_time", "eligible_time")] = 0.0
    """Earliest start (Unix time) by `--begin`, the delay after a requeue or `SlurmClient.defer`; 0 for none."""
    requeue_held: bool = False
    """True if it was requeued into a hold and not released since. A snapshot may not show that an operator holds it as
    well; `SlurmClient.job` does."""
    array_id: Annotated[int, Field(COUNT, "ArrayJobID", "array_job_id", "array_id")] = 0
    """Job id of its array, 0 for none."""
    array_tasks: Annotated[
        tuple[int, ...], Field(TASKS, "ArrayTaskID", "array_task_string", "array_tasks_waiting")
    ] = ()
    """Its task of the array. Slurm keeps waiting tasks that nothing sets apart in one record, which has several."""
    throttle: Annotated[int, Field(COUNT, "", "array_max_tasks", "array_tasks_parallel")] = 0
    """Most tasks of its array that may run at once; 0 for no limit. A snapshot need not show it."""
    kind: str = ""
    """Type of the GPUs that it asks for on each node, as in `--gres=gpu:TYPE:4`, "" if any will do; of several types
    all, with commas between."""
    qos: Annotated[str, Field(TEXT, "QOS", "qos", "qos")] = ""
    """"" without accounting."""
    cpus: Annotated[int, Field(COUNT, "NumCPUs", "cpus", "cpus")] = 0
    """CPUs on all its nodes that it has, or asks for."""
    licenses: Annotated[tuple[tuple[str, int], ...], Field(LICENCES, "Licenses", "licenses", "licenses")] = ()
    """Each licence that it has or asks for, and how many of it."""
    requested_nodes: Annotated[tuple[str, ...], Field(HOSTS, "ReqNodes", "required_nodes", "required_nodes")] = ()
    """Nodes that it must have (`--nodelist`)."""
    reservation: Annotated[str, Field(TEXT, "Reservation", "resv_name", "reservation")] = ""
    preempt_time: Annotated[float, Field(TIME, "PreemptTime", "preempt_time", "preempt_time")] = 0.0
    """Time at which Slurm began to take its nodes for another job; 0 for never."""
    # Not every source shows those that follow, so they do not count in comparisons.
    memory_mb: int = field(default=0, compare=False)
    """Memory that it has or asks for on each node, 0 if that is unknown. PySlurm knows only what the user named."""
    exclusive: bool = field(default=False, compare=False)
    """It asks for whole nodes. JSON and PySlurm do not show what a script asks of 26.05."""
    excluded_nodes: Annotated[
        tuple[str, ...], Field(HOSTS, "ExcNodes", "excluded_nodes", "excluded_nodes", since=(26, 5))
    ] = field(default=(), compare=False)
    """Nodes that it must not get. Before 26.05 a snapshot by squeue does not show them."""
    # Only `SlurmClient.details` shows the others.
    switches: Annotated[int, Field(COUNT, "", "required_switches")] = field(default=0, compare=False)
    """Most leaf switches that it asks for, 0 for no limit; Slurm 23.02 and later show it, and the next."""
    switch_wait_s: Annotated[float, Field(TIME, "", "maximum_switch_wait_time")] = field(default=0.0, compare=False)
    """Longest wait for few switches, in seconds."""
    command: Annotated[str, Field(TEXT, "", "command")] = field(default="", compare=False)
    """Path of its batch script."""
    submit_line: Annotated[str, Field(TEXT, "", "submit_line")] = field(default="", compare=False)
    """Command that submitted it, words joined by spaces: sbatch, options, script, arguments. 22.05 does not show it."""
    stdout: Annotated[str, Field(TEXT, "", "standard_output")] = field(default="", compare=False)
    """Path of its log; "" if that is not known."""

    @property
    def partition(self) -> str:
        """Partition that it runs in, or the first that it names."""
        return self.partitions[0] if self.partitions else ""

    @property
    def gpus(self) -> int:
        """GPUs that it has, or asks for."""
        return self.gpus_total or self.nodes * self.gpus_per_node

    @property
    def gpus_each(self) -> int:
        """GPUs on each of its nodes; for a total of GPUs, the most on a node."""
        return self.gpus_per_node or -(-self.gpus_total // max(self.nodes, 1))

    @property
    def key(self) -> JobKey:
        """Name of the job to Slurm."""
        tasks = self.array_tasks
        return Task(self.array_id, tasks[0]) if self.array_id and len(tasks) == 1 else self.job_id

    def shares_partition(self, other: SlurmJob) -> bool:
        """Tell whether both jobs name a common partition."""
        return not {*self.partitions}.isdisjoint(other.partitions)

    @property
    def pending(self) -> bool:
        return self.state is JobState.PENDING

    @property
    def of_one_kind(self) -> bool:
        """True if its GPUs are of at most one type, as an update can name."""
        return _ONE_KIND.fullmatch(self.kind) is not None

    @property
    def running(self) -> bool:
        return self.state is JobState.RUNNING and not self.completing

    @property
    def ended(self) -> bool:
        return self.state in ENDED and not self.flags & {"REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}

    @property
    def completing(self) -> bool:
        """True until all processes of its last run are gone."""
        return "COMPLETING" in self.flags

    @property
    def never_starts(self) -> bool:
        """True if Slurm accepted a shape that it will never start: beyond the partition, or beyond a job's limits."""
        return self.reason in ("BadConstraints", "PartitionNodeLimit") or "PerJob" in self.reason

    @property
    def limited(self) -> bool:
        """True if it waits for a limit of its account or QOS, or for nodes that it may not have."""
        return self.pending and self.reason.startswith(("Assoc", "QOS", "ReqNodeNotAvail"))

    def has_shape(self, shape: Shape) -> bool:
        """Tell whether the pending job asks for exactly this shape; without GRES only nodes count."""
        right = self.nodes == shape.nodes and self.max_nodes in (0, shape.nodes)
        return right and self.gpus_per_node in (0, shape.gpus_per_node)


class Queue(NamedTuple):
    """Queue of a job: partition, time limit, licences and so on; "" or 0 leaves what the job has."""

    partition: str = ""
    qos: str = ""
    account: str = ""
    time_limit_s: float = 0.0
    """Slurm keeps whole minutes."""
    licenses: str = ""
    """Licences as `sbatch --licenses` takes them, or `NO_LICENSES`."""

    @classmethod
    def of(cls, job: SlurmJob) -> Queue:
        """Return the queue of a job."""
        licenses = ",".join(f"{name}:{count}" for name, count in job.licenses if count) or NO_LICENSES
        return cls(",".join(job.partitions), job.qos, job.account, job.time_limit_s, licenses)

    def other_than(self, job: SlurmJob) -> Queue:
        """Return the fields that differ from the job's; with partition, QOS or account also the time limit, which Slurm
        then resets."""
        wanted = self._replace(time_limit_s=self.time_limit_s // 60 * 60.0)
        same = [name for name, value, has in zip(self._fields, wanted, Queue.of(job), strict=True) if value == has]
        new = wanted._replace(**{name: self._field_defaults[name] for name in same})
        return new._replace(time_limit_s=wanted.time_limit_s or job.time_limit_s) if any(new[:3]) else new


@dataclass(frozen=True)
class Node:
    """One compute node."""

    name: str
    state: str
    usable: bool
    """Up, and neither drained, reserved, failing nor in maintenance."""
    gpus: int
    """GPUs it has, 0 if Slurm knows of none."""
    gpus_used: int
    partitions: tuple[str, ...]
    idle: bool
    """True if no job holds any part of the node."""
    leaf: str = ""
    """Its leaf switch, or its block if the network is one of blocks; "" if Slurm knows no topology."""
    kind: str = ""
    """Type of its GPUs, as Slurm names it, several with commas between; "" for none."""
    cpus: int = 0
    cpus_used: int = 0
    memory_mb: int = 0
    memory_used_mb: int = 0
    """Memory that jobs were given; 0 if Slurm does not hand out memory."""


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    up: bool
    node_names: tuple[str, ...]
    max_time_s: float
    max_nodes: int
    """0 for no limit."""
    whole_nodes: bool
    """True if every job gets whole nodes."""
    default: bool = False
    qos: str = ""
    """QOS whose limits hold for all its jobs besides their own; "" for none."""
    tier: int = 1
    """Under preempt/partition_prio jobs of higher tiers preempt those of lower ones."""
    preempt_mode: str = ""
    """Fate of its jobs then: CANCEL, REQUEUE, SUSPEND, … as Slurm shows it."""
    grace_s: float = 0.0

    @cached_property
    def node_set(self) -> frozenset[str]:
        """Names of its nodes."""
        return frozenset(self.node_names)


class GpuUse(NamedTuple):
    """Use of GPUs."""

    gpus: float = 0.0
    """Use in GPUs: half of it if one is in use half of the time."""
    memory_bytes: int = 0


class Quota(NamedTuple):
    """Most of one resource that an association or a QOS lets its jobs hold at once."""

    resource: str
    """Name in Slurm: gres/gpu, cpu, mem (MB), node, license/NAME."""
    most: int
    used: int = 0
    qos: str = ""
    """"" for a quota of an association."""
    account: str = ""
    user: str = ""
    """"" for all users of the account or the QOS together."""
    per_job: bool = False
    """True if the quota holds for each job by itself."""


@dataclass(frozen=True)
class Quotas:
    """Quotas that `scontrol show assoc_mgr` knows; none without accounting.

    A QOS shows its quota of a user or an account only while that has jobs in it.
    """

    all: tuple[Quota, ...] = ()
    parents: Mapping[str, str] = field(default_factory=dict)
    """Account above each account."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """PreemptMode of each QOS, in lower case: what becomes of its jobs; "" or off for what the cluster does."""
    usage_factors: Mapping[str, float] = field(default_factory=dict)
    """UsageFactor of each QOS: what a GPU-hour there counts. {} if accounting does not answer."""

    def above(self, account: str) -> set[str]:
        """Return all accounts above an account."""
        found, name = {""}, self.parents.get(account, "")
        while name not in found:
            found.add(name)
            name = self.parents.get(name, "")
        return found - {""}

    def of(self, job: SlurmJob, partition_qos: str = "") -> tuple[Quota, ...]:
        """Return the quotas that bind the job: its QOS', its user's, and those of its account and all above. A QOS'
        quota replaces an association's of the same resource. If two QOS have one, both count here; Slurm takes one."""
        key = job.qos, job.account, job.user, partition_qos
        if key not in self._bound:
            self._bound[key] = self._binding(*key)
        return self._bound[key]

    @cached_property
    def _bound(self) -> dict[tuple[str, str, str, str], tuple[Quota, ...]]:
        """Quotas of a queue, cached: thousands of jobs share a few hundred queues."""
        return {}

    def _binding(self, job_qos: str, account: str, user: str, partition_qos: str) -> tuple[Quota, ...]:
        above = self.above(account) | {""}

        def binds(quota: Quota) -> bool:
            if not (quota.user or quota.qos) and quota.account in above:
                return True
            its = quota.qos in ("", job_qos, partition_qos) and quota.user in ("", user)
            return its and quota.account in (account, "" if quota.qos else account)

        found = list(filter(binds, self.all))
        of_qos = {(one.resource, one.per_job) for one in found if one.qos and not (one.user or one.account)}
        return tuple(one for one in found if one.qos or (one.resource, one.per_job) not in of_qos)


@dataclass(frozen=True)
class Reservation:
    """A reservation of nodes."""

    name: str
    node_names: tuple[str, ...]
    start_time: float
    end_time: float
    """0 for none."""
    flags: frozenset[str] = frozenset()
    """Flags in Slurm's words: MAINT, IGNORE_JOBS, DAILY, …"""


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one moment, read with a constant number of calls whatever the length of the queue."""

    time: float
    jobs: Mapping[int, SlurmJob]
    nodes: Mapping[str, Node]
    partitions: Mapping[str, Partition]
    reservations: tuple[Reservation, ...] = field(default=())
    licenses: Mapping[str, int] = field(default_factory=dict)
    """Number of free licences, by name; {} if no job asks for any."""

    def next_reservation(self, names: Collection[str], own: str = "") -> Reservation | None:
        """The first reservation to come that has any of these nodes, besides the `own` one of a job; None for none.

        Slurm starts no job there whose time limit reaches into it, whatever its flags are. One that repeats shows its
        next start.
        """
        ahead = [one for one in self.reservations if one.start_time > self.time and one.name != own]
        found = [one for one in ahead if not {*one.node_names}.isdisjoint(names)]
        return min(found, key=lambda one: (one.start_time, one.name), default=None)

    def kinds(self, partition: str) -> dict[str, str]:
        """The kind of GPU of each node of the partition that has GPUs; {} if a node's are of no type, or of several."""
        found = self.partitions.get(partition)
        nodes = [self.nodes[name] for name in found.node_names if name in self.nodes] if found is not None else []
        kinds = {node.name: node.kind for node in nodes if node.gpus}
        named = all(kind and _ONE_KIND.fullmatch(kind) for kind in kinds.values())
        return kinds if named else {}

    @cached_property
    def gpus_of_node(self) -> Mapping[str, int]:
        """GPUs of a full node of each partition, as far as Slurm knows of any."""
        return {
            name: max((self.nodes[node].gpus for node in partition.node_names if node in self.nodes), default=0)
            for name, partition in self.partitions.items()
        }


def kind_of(nodes: Iterable[str], kinds: Mapping[str, str]) -> str:
    """The kind of GPU of these nodes, by the `kinds` of nodes, several with commas between; "" if one is unknown."""
    found = {kinds.get(name, "") for name in nodes}
    return ",".join(sorted(found)) if all(found) else ""


def partition_gpus(partition: Partition, snapshot: Snapshot, whole_node_gpus: Mapping[str, int]) -> tuple[int, bool]:
    """GPUs of a full node of the partition, 0 if unknown, and whether Slurm hands out its nodes whole.

    `whole_node_gpus` names the GPUs of partitions for which Slurm knows of none.
    """
    if partition.name in whole_node_gpus:
        return whole_node_gpus[partition.name], True
    return snapshot.gpus_of_node.get(partition.name, 0), partition.whole_nodes


def longest_run_s(snapshot: Snapshot, partition: str, shape: Shape, own: str = "") -> float:
    """Longest time limit with which a job of this shape may start now in the partition: on the nodes that have room, or
    on all if these are too few, until their next reservations, and within the partition's MaxTime. `own` is the job's
    reservation."""
    part = snapshot.partitions.get(partition)
    if part is None:
        return math.inf
    nodes = [node for name in part.node_names if (node := snapshot.nodes.get(name)) is not None and node.usable]
    room = [n for n in nodes if (n.gpus - n.gpus_used >= shape.gpus_per_node if n.gpus else n.idle)]
    ahead = [snapshot.next_reservation((n.name,), own) for n in (room if len(room) >= shape.nodes else nodes)]
    left = sorted((one.start_time - snapshot.time if one is not None else math.inf for one in ahead), reverse=True)
    until = left[shape.nodes - 1] if len(left) >= shape.nodes else math.inf
    return min(until, part.max_time_s or math.inf)


def fewest_switches(snapshot: Snapshot, partition: str, nodes: int) -> int:
    """Return the fewest leaf switches that cover this number of usable nodes of the partition; 0 if unknown."""
    part = snapshot.partitions.get(partition)
    known = [snapshot.nodes[name] for name in (part.node_names if part is not None else ()) if name in snapshot.nodes]
    below = Counter(node.leaf for node in known if node.usable)
    if not below or "" in below or len({node.leaf for node in known}) < 2:
        return 0
    left = nodes
    for switches, (_, count) in enumerate(below.most_common(), 1):
        left -= count
        if left <= 0:
            return switches
    return 0
