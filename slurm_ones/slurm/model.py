"""Slurm's jobs, nodes and partitions as plain frozen data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, NamedTuple

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.slurm.fields import (
    ANY_OF,
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
_FEATURE = re.compile(r"[^&,()\[\]\s]+")


class Task(NamedTuple):
    """A task of a job array, as Slurm's commands name it."""

    array: int
    """Job id of the array, as sbatch returned it."""
    task: int

    def __str__(self) -> str:
        return f"{self.array}_{self.task}"


JobKey = int | Task
"""Id of a job or an array, or one task of an array (`Task`)."""


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


ENDED = frozenset(JobState) - {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.UNKNOWN}
"""States of a job that has ended. A job that was preempted and requeued is PENDING, not PREEMPTED."""


@dataclass(frozen=True)
class SlurmJob:
    """One job of the queue. A field annotated with a `Field` is read from Slurm; `parse.job_of` derives all other
    fields.

    Users write the text fields: escape them before you pass them to a terminal or into SQL.
    """

    job_id: Annotated[int, Field(ID, "JobID", "job_id", "id")]
    name: Annotated[str, Field(TEXT, "Name", "name", "name")]
    user: Annotated[str, Field(TEXT, "UserName", "user_name", "user_name")]
    uid: Annotated[int, Field(UID, "UserID", "user_id", "user_id")]
    account: Annotated[str, Field(TEXT, "Account", "account", "account")]
    partitions: Annotated[tuple[str, ...], Field(NAMES, "Partition", "partition", "partition")]
    """Partition in which the job runs, or all partitions in which it may start."""
    state: JobState
    flags: frozenset[str]
    """Slurm's state flags besides the base state: COMPLETING, REQUEUED, REQUEUE_HOLD, CONFIGURING, …"""
    reason: Annotated[str, Field(TEXT, "Reason", "state_reason", "state_reason")]
    held: bool
    """True if the job is held: its priority is 0, so Slurm does not start it."""
    admin_held: bool
    """True if an operator or root holds the job, so its owner cannot release it."""
    restart: Annotated[int, Field(COUNT, "RestartCnt", "restart_cnt", "requeue_count")]
    """Number of times that Slurm has restarted the job: 0 in the first run."""
    requeue: Annotated[bool, Field(FLAG, "Requeue", "requeue", "is_requeueable")]
    """True if Slurm may requeue the job."""
    nodes: Annotated[int, Field(COUNT, "NumNodes", "node_count", "num_nodes")]
    """Number of nodes that the job has, or asks for."""
    max_nodes: Annotated[int, Field(COUNT, "MaxNodes", "max_nodes", "max_nodes")]
    """Largest number of nodes that the job asks for; above `nodes` for a request such as `--nodes=1-4`."""
    gpus_per_node: int
    """GPUs per node by `--gres` or `--gpus-per-node`; 0 if the job asked for none."""
    gpus_total: int
    """Total GPUs allocated, or requested in another form (`--gpus`); 0 if Slurm shows none."""
    tasks: Annotated[int, Field(COUNT, "NumTasks", "tasks", "ntasks")]
    """Number of tasks as Slurm counts them; for a job submitted without a task count, the number of nodes."""
    task_counts: bool
    """True if the job was submitted with a task count; its user then cannot resize it."""
    node_list: Annotated[tuple[str, ...], Field(HOSTS, "NodeList", "nodes", "allocated_nodes")]
    submit_time: Annotated[float, Field(TIME, "SubmitTime", "submit_time", "submit_time")]
    """Time of submission, Unix seconds like all times here; 0 for none."""
    start_time: Annotated[float, Field(TIME, "StartTime", "start_time", "start_time")]
    end_time: Annotated[float, Field(TIME, "EndTime", "end_time", "end_time")]
    time_limit_s: Annotated[float, Field(TIME_LIMIT, "TimeLimit", "time_limit", "time_limit")]
    """Time limit in seconds; 0 for none."""
    work_dir: Annotated[str, Field(TEXT, "WorkDir", "current_working_directory", "working_directory")]
    comment: Annotated[str, Field(TEXT, "Comment", "comment", "comment")]
    priority: int = 0
    array: bool = False
    """True if the job belongs to a job array or a heterogeneous job."""
    batch: Annotated[bool, Field(SET_FLAG, "BatchFlag", "batch_flag", "is_batch_job")] = True
    """True if the job has a batch script; an interactive job has none and cannot be requeued."""
    exit_code: int = 0
    """Exit code as a shell reports it: 128 + N after signal N."""
    eligible_time: Annotated[float, Field(TIME, "EligibleTime", "eligible_time", "eligible_time")] = 0.0
    """Earliest start (Unix time) by `--begin`, the delay after a requeue or `SlurmClient.defer`; 0 for none."""
    requeue_held: bool = False
    """True from a requeue into a hold until the job's release. Only `SlurmClient.job` shows for certain that an
    operator holds the job too."""
    array_id: Annotated[int, Field(COUNT, "ArrayJobID", "array_job_id", "array_id")] = 0
    """Job id of the job's array; 0 for none."""
    array_tasks: Annotated[
        tuple[int, ...], Field(TASKS, "ArrayTaskID", "array_task_string", "array_tasks_waiting")
    ] = ()
    """Task numbers of the record: one, or several if identical tasks wait."""
    throttle: Annotated[int, Field(COUNT, "", "array_max_tasks", "array_tasks_parallel")] = 0
    """Largest number of the array's tasks that may run at once; 0 for no limit, and if Slurm does not show it."""
    kind: str = ""
    """GPU types that the job asks for, separated by commas: TYPE in `--gres=gpu:TYPE:4`; "" for any type."""
    other_gres: str = ""
    """Generic resources that the job asks for on each node besides GPUs, as in `--gres`; "" for none."""
    qos: Annotated[str, Field(TEXT, "QOS", "qos", "qos")] = ""
    """QOS of the job; "" without accounting."""
    cpus: Annotated[int, Field(COUNT, "NumCPUs", "cpus", "cpus")] = 0
    """Total CPUs that the job has, or asks for."""
    licenses: Annotated[tuple[tuple[str, int], ...], Field(LICENCES, "Licenses", "licenses", "licenses")] = ()
    """Licences that the job has or asks for: (name, count). The last is `ANY_OF` if one of them suffices."""
    requested_nodes: Annotated[tuple[str, ...], Field(HOSTS, "ReqNodes", "required_nodes", "required_nodes")] = ()
    """Nodes that the job requires (`--nodelist`)."""
    features: Annotated[str, Field(TEXT, "Feature", "features", "constraints")] = ""
    """Features that the job's nodes must have (`--constraint`), as its user wrote them."""
    reservation: Annotated[str, Field(TEXT, "Reservation", "resv_name", "reservation")] = ""
    deadline: Annotated[float, Field(TIME, "Deadline", "deadline", "deadline")] = 0.0
    """Unix time by which the job must have ended (`--deadline`); 0 for none. Slurm cancels a waiting job whose time
    limit reaches beyond it."""
    preempt_time: Annotated[float, Field(TIME, "PreemptTime", "preempt_time", "preempt_time")] = 0.0
    """Time at which Slurm began to preempt the job; 0 for never."""
    # Not every source shows the next fields, so they do not count when jobs are compared.
    memory_mb: int = field(default=0, compare=False)
    """Memory per node that the job has or asks for, in MB; 0 if unknown. PySlurm shows only the request."""
    exclusive: bool = field(default=False, compare=False)
    """True if the job asks for whole nodes. On 26.05, JSON and PySlurm do not show an `#SBATCH --exclusive`."""
    excluded_nodes: Annotated[
        tuple[str, ...], Field(HOSTS, "ExcNodes", "excluded_nodes", "excluded_nodes", since=(26, 5))
    ] = field(default=(), compare=False)
    """Nodes that the job excludes (`--exclude`). Before 26.05 a snapshot by squeue leaves this empty."""
    # The next fields are only shown by `SlurmClient.details`.
    switches: Annotated[int, Field(COUNT, "", "required_switches")] = field(default=0, compare=False)
    """Largest number of leaf switches that the job asks for; 0 for no limit, and before Slurm 23.02."""
    switch_wait_s: Annotated[float, Field(TIME, "", "maximum_switch_wait_time")] = field(default=0.0, compare=False)
    """Longest wait for at most `switches` leaf switches, in seconds; 0 before Slurm 23.02."""
    considered: Annotated[float, Field(TIME, "", "last_sched_evaluation")] = field(default=0.0, compare=False)
    """Time at which Slurm last considered starting the job; 0 for never. Slurm considers no held job."""
    command: Annotated[str, Field(TEXT, "", "command")] = field(default="", compare=False)
    """Path of the job's batch script."""
    submit_line: Annotated[str, Field(TEXT, "", "submit_line")] = field(default="", compare=False)
    """Command that submitted the job, joined by spaces: sbatch, options, script, arguments. 22.05 does not show it."""
    stdout: Annotated[str, Field(TEXT, "", "standard_output")] = field(default="", compare=False)
    """Path of the job's log; "" if unknown."""

    @property
    def partition(self) -> str:
        """Partition in which the job runs, or the first that it names."""
        return self.partitions[0] if self.partitions else ""

    @property
    def gpus(self) -> int:
        """Total GPUs that the job has, or asks for."""
        return self.gpus_total or self.nodes * self.gpus_per_node

    @property
    def gpus_each(self) -> int:
        """GPUs on each of the job's nodes; of a total GPU count, the mean rounded up."""
        return self.gpus_per_node or -(-self.gpus_total // max(self.nodes, 1))

    @property
    def key(self) -> JobKey:
        """Id by which Slurm's commands name the job."""
        tasks = self.array_tasks
        return Task(self.array_id, tasks[0]) if self.array_id and len(tasks) == 1 else self.job_id

    def of_task(self, task: int) -> SlurmJob:
        """Return the record of one waiting task, taken from a record of several."""
        if len(self.array_tasks) == 1:
            return self
        if task not in self._of_tasks:
            self._of_tasks[task] = replace(self, array_tasks=(task,))
        return self._of_tasks[task]

    @cached_property
    def _of_tasks(self) -> dict[int, SlurmJob]:
        return {}

    def shares_partition(self, other: SlurmJob) -> bool:
        """Tell whether both jobs name a common partition."""
        return not {*self.partitions}.isdisjoint(other.partitions)

    @property
    def pending(self) -> bool:
        return self.state is JobState.PENDING

    @property
    def of_one_kind(self) -> bool:
        """True if the job names at most one GPU type; an update can set only one."""
        return _ONE_KIND.fullmatch(self.kind) is not None

    @property
    def running(self) -> bool:
        return self.state is JobState.RUNNING and not self.completing

    @property
    def ended(self) -> bool:
        return self.state in ENDED and not self.flags & {"REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}

    @property
    def completing(self) -> bool:
        """True while processes of the job's last run are still being cleaned up."""
        return "COMPLETING" in self.flags

    @property
    def never_starts(self) -> bool:
        """True if Slurm accepted the job's shape but never starts it: it exceeds a limit of the partition or
        per job."""
        return self.reason in ("BadConstraints", "PartitionNodeLimit") or "PerJob" in self.reason

    @property
    def limited(self) -> bool:
        """True if a limit of an account or QOS, or an unavailable node, keeps the job waiting."""
        by_limit = self.reason.startswith(("Assoc", "QOS")) or self.reason.endswith(("PerAccount", "PerUser"))
        return self.pending and (by_limit or self.reason.startswith("ReqNodeNotAvail"))

    def has_shape(self, shape: Shape) -> bool:
        """Tell whether the pending job asks for exactly this shape; without GRES, for this number of nodes."""
        right = self.nodes == shape.nodes and self.max_nodes in (0, shape.nodes)
        return right and self.gpus_per_node in (0, shape.gpus_per_node)


class Queue(NamedTuple):
    """Partition, QOS, account, time limit and licences of a job. In an update, "" or 0 leaves the job's own value."""

    partition: str = ""
    qos: str = ""
    account: str = ""
    time_limit_s: float = 0.0
    """Time limit in seconds, infinity for none; Slurm keeps whole minutes."""
    licenses: str = ""
    """Licences as `sbatch --licenses` takes them, or `NO_LICENSES`."""

    @classmethod
    def of(cls, job: SlurmJob) -> Queue:
        """Return the queue of a job."""
        between = "|" if ANY_OF in job.licenses else ","
        licenses = between.join(f"{name}:{count}" for name, count in job.licenses if count) or NO_LICENSES
        return cls(",".join(job.partitions), job.qos, job.account, job.time_limit_s or math.inf, licenses)

    def other_than(self, job: SlurmJob) -> Queue:
        """Return the update that moves the job to this queue. Fields that stay the same are empty. A change of
        partition, QOS or account includes the time limit, because Slurm resets it."""
        limit_s = self.time_limit_s
        wanted = self if math.isinf(limit_s) else self._replace(time_limit_s=limit_s // 60 * 60.0)
        same = [name for name, value, has in zip(self._fields, wanted, Queue.of(job), strict=True) if value == has]
        new = wanted._replace(**{name: self._field_defaults[name] for name in same})
        return new._replace(time_limit_s=wanted.time_limit_s or job.time_limit_s) if any(new[:3]) else new


@dataclass(frozen=True)
class Node:
    """One compute node."""

    name: str
    state: str
    usable: bool
    """True if jobs can start on the node: up, not drained, reserved, failing or in maintenance."""
    gpus: int
    """GPUs that the node has; 0 if Slurm shows none."""
    gpus_used: int
    partitions: tuple[str, ...]
    idle: bool
    """True if no job holds any part of the node."""
    leaf: str = ""
    """Leaf switch of the node, or its block in a block topology; "" if Slurm shows no topology."""
    kind: str = ""
    """GPU type of the node as Slurm names it; several types are separated by commas, "" for none."""
    cpus: int = 0
    cpus_used: int = 0
    memory_mb: int = 0
    memory_used_mb: int = 0
    """Memory allocated to jobs, in MB; 0 if the site's Slurm does not allocate memory."""
    features: frozenset[str] = frozenset()

    def takes(self, job: SlurmJob) -> bool:
        """Tell whether the job's `--exclude` and `--constraint` allow this node. A constraint with a count (`a*2`)
        allows every node."""
        if self.name in job.excluded_nodes:
            return False
        ways = (_FEATURE.findall(way) for way in job.features.split("|"))
        return "*" in job.features or any(self.features.issuperset(way) for way in ways)


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    up: bool
    node_names: tuple[str, ...]
    max_time_s: float
    max_nodes: int
    """Largest number of nodes that one job may have; 0 for no limit."""
    whole_nodes: bool
    """True if every job gets whole nodes."""
    default: bool = False
    qos: str = ""
    """QOS of the partition, whose limits bind all its jobs in addition to each job's own QOS; "" for none."""
    tier: int = 1
    """Priority tier: under preempt/partition_prio, jobs of higher tiers preempt jobs of lower ones."""
    preempt_mode: str = ""
    """PreemptMode of the partition, as Slurm shows it: CANCEL, REQUEUE, SUSPEND, …"""
    grace_s: float = 0.0
    closed: bool = False
    """True if no job starts in the partition (DOWN, INACTIVE); False if it drains, since queued jobs still start."""

    @cached_property
    def node_set(self) -> frozenset[str]:
        """Names of the partition's nodes."""
        return frozenset(self.node_names)


class GpuUse(NamedTuple):
    """Compute and memory use of a job's GPUs."""

    gpus: float = 0.0
    """Mean number of GPUs in use: 0.5 for one GPU in use half of the time."""
    memory_bytes: int = 0


class Quota(NamedTuple):
    """Limit on the amount of one resource that jobs of an association or a QOS may hold at once."""

    resource: str
    """Name in Slurm: gres/gpu, cpu, mem (MB), node, license/NAME."""
    most: int
    used: int = 0
    qos: str = ""
    """QOS that sets the quota; "" if an association sets it."""
    account: str = ""
    user: str = ""
    """User for whom the quota is; "" if all users of the account or the QOS share it."""
    per_job: bool = False
    """True if the quota limits each job, False if it limits the sum over jobs."""
    partition: str = ""
    """Partition of the user's association that sets the quota; "" for his association without a partition."""


@dataclass(frozen=True)
class Quotas:
    """Quotas that `scontrol show assoc_mgr` shows; none without accounting.

    A QOS may limit each user or account. Slurm shows such a quota only while the user or account has jobs in the QOS.
    """

    all: tuple[Quota, ...] = ()
    parents: Mapping[str, str] = field(default_factory=dict)
    """Parent account of each account."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """PreemptMode of each QOS in lower case; "" or off for the cluster's default."""
    usage_factors: Mapping[str, float] = field(default_factory=dict)
    """UsageFactor of each QOS: the weight of a GPU-hour. {} if accounting does not answer."""

    def above(self, account: str) -> set[str]:
        """Return all ancestors of an account."""
        found, name = {""}, self.parents.get(account, "")
        while name not in found:
            found.add(name)
            name = self.parents.get(name, "")
        return found - {""}

    def association(self, account: str, user: str, partition: str) -> str:
        """Return the partition if the user has an association for it that sets quotas, else "". These quotas replace
        those of his association without a partition."""
        return partition if (account, user, partition) in self._of_partitions else ""

    @cached_property
    def _of_partitions(self) -> frozenset[tuple[str, str, str]]:
        return frozenset((one.account, one.user, one.partition) for one in self.all if one.partition)

    def of(self, job: SlurmJob, partition_qos: str = "") -> tuple[Quota, ...]:
        """Return the quotas that bind the job: of its QOS, user and account, and of all parent accounts. A QOS's quota
        replaces an association's on the same resource. If the QOS of both the job and the partition limit a resource,
        both quotas are returned, although Slurm applies only one."""
        key = job.qos, job.account, job.user, partition_qos, self.association(job.account, job.user, job.partition)
        if key not in self._bound:
            self._bound[key] = self._binding(*key)
        return self._bound[key]

    @cached_property
    def _bound(self) -> dict[tuple[str, str, str, str, str], tuple[Quota, ...]]:
        """Cached results of `of`. A key has a job's QOS, account and user, the QOS of the job's partition, and the
        partition of the user's association."""
        return {}

    def _binding(self, job_qos: str, account: str, user: str, partition_qos: str, partition: str) -> tuple[Quota, ...]:
        above = self.above(account) | {""}

        def binds(quota: Quota) -> bool:
            if not (quota.user or quota.qos) and quota.account in above:
                return True
            if quota.user and not quota.qos and quota.partition != partition:
                return False
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
    """End of the reservation; 0 for none."""
    flags: frozenset[str] = frozenset()
    """Flags in Slurm's words: MAINT, IGNORE_JOBS, DAILY, …"""


@dataclass(frozen=True)
class Snapshot:
    """Cluster at one moment."""

    time: float
    jobs: Mapping[int, SlurmJob]
    nodes: Mapping[str, Node]
    partitions: Mapping[str, Partition]
    reservations: tuple[Reservation, ...] = field(default=())
    licenses: Mapping[str, int] = field(default_factory=dict)
    """Number of free licences, by name; {} if no job asks for any."""

    def next_reservation(self, names: Collection[str], own: str = "") -> Reservation | None:
        """Return the next reservation on any of these nodes, without the job's `own` (`a` or `a,b`); None if there is
        none.

        Slurm starts no job whose time limit reaches into a reservation of its nodes, whatever the flags. A repeating
        reservation shows its next start.
        """
        ahead = [one for one in self.reservations if one.start_time > self.time and one.name not in own.split(",")]
        found = [one for one in ahead if not {*one.node_names}.isdisjoint(names)]
        return min(found, key=lambda one: (one.start_time, one.name), default=None)

    def kinds(self, partition: str) -> dict[str, str]:
        """Return the GPU type of each node with GPUs in the partition; {} if any type is unknown or mixed."""
        found = self.partitions.get(partition)
        nodes = [self.nodes[name] for name in found.node_names if name in self.nodes] if found is not None else []
        kinds = {node.name: node.kind for node in nodes if node.gpus}
        named = all(kind and _ONE_KIND.fullmatch(kind) for kind in kinds.values())
        return kinds if named else {}

    @cached_property
    def gpus_of_node(self) -> Mapping[str, int]:
        """GPUs of a full node of each partition; 0 if Slurm shows none."""
        return {
            name: max((self.nodes[node].gpus for node in partition.node_names if node in self.nodes), default=0)
            for name, partition in self.partitions.items()
        }


def kind_of(nodes: Iterable[str], kinds: Mapping[str, str]) -> str:
    """Return the GPU types of these nodes, looked up in `kinds` and separated by commas; "" if any is unknown."""
    found = {kinds.get(name, "") for name in nodes}
    return ",".join(sorted(found)) if all(found) else ""


def partition_gpus(partition: Partition, snapshot: Snapshot, whole_node_gpus: Mapping[str, int]) -> tuple[int, bool]:
    """Return the GPUs of a full node (0 if unknown), and True if Slurm allocates the partition's nodes whole.

    `whole_node_gpus` gives the GPUs per node of partitions for which Slurm shows none.
    """
    if partition.name in whole_node_gpus:
        return whole_node_gpus[partition.name], True
    return snapshot.gpus_of_node.get(partition.name, 0), partition.whole_nodes


def longest_run_s(snapshot: Snapshot, partition: str, shape: Shape, own: str = "") -> float:
    """Return the longest time limit, in seconds, with which a job of this shape can start now in the partition. MaxTime
    and the nodes' next reservations limit it. Nodes with free GPUs are considered, or all nodes if these are too few.
    `own` names the job's own reservations."""
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
    """Return the fewest leaf switches with this number of usable nodes of the partition; 0 if unknown."""
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
