"""Elastic jobs of a snapshot: which jobs may be resized, to which sizes, and why other jobs may not.

A job (`WholeJob`) is a single Slurm job, or an array whose comment says `array=blocks`. The tasks of such an array are
its blocks: they train together as one job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from ones_db import JobRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from ones_wrapper.protocol import MAX_BLOCKS
from ones_wrapper.protocol.optin import ANY, BadComment, GuestQueue, OptIn, near_miss, parse_comment
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.config import Settings
from slurm_ones.slurm.fields import LICENCES
from slurm_ones.slurm.model import JobKey, JobState, Queue, SlurmJob, Snapshot, partition_gpus

Guests = Mapping[str, Queue]
"""Queue of the guest blocks in each partition. Guests are blocks beyond the user's request; Slurm may preempt them."""
NO_GUESTS: Guests = {}


@dataclass(frozen=True)
class WholeJob:
    """A user's job of one or more blocks. Each block is a job in Slurm."""

    job_id: int
    """Id of the job, or of its array. The job's files, orders and records have this id."""
    restart: int
    """Number of the job's present run: Slurm's restart count for a plain job, the term for a job of blocks."""
    blocks: tuple[SlurmJob, ...]
    """Blocks of the job, by ascending task number; for a plain job, the job itself."""
    first: SlurmJob
    """Block whose state is the state of the whole job (see `_representative`)."""
    home: SlurmJob
    """Base block whose owner, queue and comment are the job's. If all blocks are guests, it is a guest with the job's
    stored queue."""
    submit_time: float
    key: JobKey
    """Id of the job in Slurm's commands. For a waiting job of blocks it is the array's; or if a block was changed
    separately, that of the block that starts first."""
    by_blocks: bool = False
    """True if blocks join and leave during training. A plain job has one block and is resized by a requeue."""
    refusal: Reason | None = None
    """Reason, found in the blocks, why the job may not be resized, such as blocks that differ; None without one."""
    guests: frozenset[int] = frozenset()
    """Task numbers of the job's guest blocks, waiting or running."""

    @classmethod
    def of(cls, job: SlurmJob, array: int = 0) -> WholeJob:
        """Return the job that consists of this block. `array` is the array's id if it is a job of blocks, else 0."""
        return cls(array or job.job_id, job.restart, (job,), job, job, job.submit_time, job.key, by_blocks=array > 0)

    @cached_property
    def tasks(self) -> Mapping[int, SlurmJob]:
        """Blocks by task number; empty for a job that is no array."""
        return {block.array_tasks[0]: block for block in self.blocks if block.array_tasks}

    def is_guest(self, block: SlurmJob) -> bool:
        """Tell whether a block of the job is a guest."""
        return not self.guests.isdisjoint(block.array_tasks)

    def base_first(self, tasks: Iterable[int]) -> tuple[int, ...]:
        """Return the tasks, base blocks before guests. The first should lead the training, and Slurm does not preempt
        base blocks."""
        return tuple(sorted(tasks, key=lambda task: (task in self.guests, task)))

    @property
    def uid(self) -> int:
        return self.home.uid

    @property
    def user(self) -> str:
        return self.home.user

    @property
    def work_dir(self) -> str:
        return self.home.work_dir

    @property
    def pending(self) -> bool:
        return self.first.pending

    @property
    def running(self) -> bool:
        return self.first.running

    @property
    def ended(self) -> bool:
        return self.first.ended

    @property
    def held(self) -> bool:
        return self.first.held

    @property
    def eligible_time(self) -> float:
        return self.first.eligible_time

    @cached_property
    def running_blocks(self) -> tuple[SlurmJob, ...]:
        return tuple(block for block in self.blocks if block.running)

    @property
    def node_list(self) -> tuple[str, ...]:
        """Nodes of the job's present run, or else of its last run."""
        return tuple(dict.fromkeys(name for block in self.running_blocks or (self.first,) for name in block.node_list))

    @property
    def gpus(self) -> int:
        """GPUs that the job holds; 0 unless it runs."""
        return sum(block.gpus for block in self.running_blocks)

    @property
    def start_time(self) -> float:
        """Unix time of the earliest start of a running block; for an ended job, of any block."""
        begun = self.blocks if self.ended else self.running_blocks or (self.first,)
        return min((block.start_time for block in begun if block.start_time), default=0.0)

    @property
    def run_start(self) -> float:
        """Start of the job's present run. For a job of blocks it is the submission, since Slurm does not know terms."""
        return self.submit_time if self.by_blocks else self.start_time

    @property
    def end_time(self) -> float:
        return max(block.end_time for block in self.running_blocks or (self.first,))


def arrays(jobs: Iterable[SlurmJob]) -> dict[int, tuple[SlurmJob, ...]]:
    """Return the records of each array of blocks, by the array's id. An array is one of blocks if a live task's comment
    says so; if all tasks have ended, any task's comment."""
    found: dict[int, list[SlurmJob]] = defaultdict(list)
    for job in jobs:
        if job.array_id and job.array_tasks:
            found[job.array_id].append(job)
    # Only the newest record of a task counts. To find it for every array would take too long.
    return {
        array: tuple(records)
        for array, records in found.items()
        if _any_says_blocks(records) and _any_says_blocks(newest(records))
    }


def _any_says_blocks(records: Sequence[SlurmJob]) -> bool:
    return any(says_blocks(job.comment) for job in [one for one in records if not one.ended] or records)


def says_blocks(comment: str) -> bool:
    """Tell whether the tasks of an array with this comment are blocks of one job."""
    # Most comments need no parsing.
    if "array=" not in comment:
        return False
    try:
        optin = parse_comment(comment)
    except BadComment:
        # A mistake elsewhere in the comment must not turn a running job of blocks into separate jobs.
        return "array=blocks" in comment.replace(",", " ").split()
    return optin is not None and optin.blocks


def whole_job(
    array: int, records: Sequence[SlurmJob], known: JobRecord | None = None, term: int = 0, guests: Guests = NO_GUESTS
) -> WholeJob:
    """Return the job of an array's records. `known` is the job's stored record, if any; `term` is its present term."""
    tasks = newest(records)
    blocks, others, lent = _of_one_kind(tasks[:MAX_BLOCKS], guests)
    first = _representative(blocks)
    if first.running:
        first = min((job for job in blocks if job.running), key=lambda job: job.array_tasks[0] in lent)
        if first.array_tasks[0] in lent and (first.held or first.admin_held):
            # A running guest may be held for its next start.
            first = replace(first, held=False, admin_held=False)
    home = min(
        blocks, key=lambda job: (not says_blocks(job.comment), job.array_tasks[0] in lent, job is not first, job.ended)
    )
    if known is not None and home.array_tasks[0] in lent:
        # All its tasks have been guests, so Slurm no longer knows the partition to which it was submitted.
        licenses = LICENCES.text(known.licenses.removeprefix(NO_LICENSES))
        partitions = tuple(known.partition.split(","))
        home = replace(home, partitions=partitions, account=known.account, qos=known.qos, licenses=licenses)
    if known is not None and known.end_time is not None and first.pending and first.held:
        # The job has ended, and Slurm has forgotten all tasks but the held ones.
        first = replace(first, state=JobState(known.state), flags=frozenset(), held=False, end_time=known.end_time)
    submitted = min([job.submit_time for job in blocks] + ([known.submit_time] if known is not None else []))
    apart = first.pending and len({job.job_id for job in blocks}) > 1
    key = first.key if apart or len(blocks) == 1 else array
    refusal = _blocks_refusal(blocks, others, len(tasks), known)
    return WholeJob(array, term, blocks, first, home, submitted, key, by_blocks=True, refusal=refusal, guests=lent)


def guests_of(settings: Settings) -> Guests:
    """Return the guests' queues that the settings name, by partition."""
    return {name: Queue(one.partition, one.qos, one.account) for name, one in settings.guests.items()}


def is_guest(job: SlurmJob, guests: Guests) -> bool:
    """Tell whether a block is in a guests' queue, named by the settings or by the owner's comment.

    The job's own launcher moves blocks into the comment's queue; the companion releases none there. If Slurm does not
    preempt jobs of this queue, such a block is given back to waiting jobs like any other block.
    """
    names = ",".join(job.partitions), job.qos, job.account
    own = (all(one in ("", name) for one, name in zip(queue, names, strict=False)) for queue in guests.values())
    return any(own) or _lent(job)


def _lent(job: SlurmJob) -> bool:
    if "guests=" not in job.comment:
        return False
    with suppress(BadComment):
        optin = parse_comment(job.comment)
        queue = optin.guests if optin is not None and optin.blocks else None
        if isinstance(queue, GuestQueue):
            return (job.partition if queue.kind == "partition" else job.qos) == queue.name
    return False


def as_one(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of a job with blocks of these shapes: 1 × all GPUs if the blocks differ in GPUs per node."""
    each = {shape.gpus_per_node for shape in shapes}
    if len(each) == 1:
        return Shape(sum(shape.nodes for shape in shapes), each.pop())
    return Shape(1, sum(shape.gpus for shape in shapes))


def newest(records: Sequence[SlurmJob]) -> tuple[SlurmJob, ...]:
    """Return one record for each array task, by ascending task number: the live record, or else the newest."""
    found: dict[int, SlurmJob] = {}
    for record in records:
        # One task more than a job of blocks may have is enough to see that there are too many.
        for task in record.array_tasks[: MAX_BLOCKS + 1]:
            one = record.of_task(task)
            other = found.get(task)
            if other is None or _newness(one) > _newness(other):
                found[task] = one
    return tuple(found[task] for task in sorted(found))


def _newness(job: SlurmJob) -> tuple[bool, int, bool, float, int]:
    # Tasks that were cancelled while they waited together leave a record that looks like one of the first task, with a
    # later start. The record with nodes is the one that ran.
    return not job.ended, job.restart, bool(job.node_list), job.start_time, job.job_id


def _of_one_kind(tasks: Sequence[SlurmJob], guests: Guests) -> tuple[tuple[SlurmJob, ...], str, frozenset[int]]:
    """Return the tasks that may form one job, the first difference between them as text ("" for none), and the task
    numbers of their guests. Ended tasks that differ are left out."""
    lent = {job.array_tasks[0] for job in tasks if is_guest(job, guests)}
    base = [job for job in tasks if job.array_tasks[0] not in lent] or tasks
    first = min(base, key=lambda job: (not says_blocks(job.comment), job.ended))
    kept, apart = [], ""
    for job in tasks:
        different = _difference(first, job, guest=job.array_tasks[0] in lent)
        if not different or not job.ended:
            kept.append(job)
            apart = apart or different
    return tuple(kept), apart, frozenset(lent & {job.array_tasks[0] for job in kept})


def _difference(one: SlurmJob, other: SlurmJob, *, guest: bool) -> str:
    if other is one:
        return ""
    if not guest and not one.shares_partition(other):
        return "partition"
    same = {"uid": "user", "work_dir": "directory", "comment": "comment"}
    same = same if guest else {"uid": "user", "account": "account", **same}
    return next((what for name, what in same.items() if getattr(one, name) != getattr(other, name)), "")


def _blocks_refusal(blocks: Sequence[SlurmJob], others: str, count: int, known: JobRecord | None) -> Reason | None:
    if count > MAX_BLOCKS:
        return reason("blocks_many", most=MAX_BLOCKS)
    live = [job for job in blocks if not job.ended]
    # Held tasks show that a companion prepared them, or that their owner keeps them; guests show that their launcher
    # did. A prepared array has no throttle.
    prepared = (known is not None and known.refusal.code != "blocks_unthrottled") or any(map(_lent, live))
    if not (prepared or len(live) < 2 or any(job.throttle or (job.pending and job.held) for job in live)):
        return reason("blocks_unthrottled")
    if others:
        return reason("blocks_differ", what=others)
    depending = [job for job in live if job.pending and job.reason.startswith("Dependency")]
    # A dependency of the whole array keeps its first task from starting too.
    if depending and (len(depending) < len(live) or len(live) < len(blocks)):
        return reason("blocks_depend")
    return None


def _representative(blocks: Sequence[SlurmJob]) -> SlurmJob:
    """Return the block whose state is the job's. The order of preference: a running block, an otherwise active block,
    one that may start, the block that ended last, a held block."""
    live = [job for job in blocks if not job.ended]
    active = [job for job in live if job.running] or [job for job in live if not job.pending]
    startable = [job for job in live if job.pending and not job.held]
    if active or startable:
        return (active or startable)[0]
    ended = [job for job in blocks if job.ended]
    # A task that was requeued into a hold has not ended.
    stopped = [job for job in live if job.restart or job.completing]
    if ended and not stopped:
        # For a task that was cancelled while it waited, Slurm shows a start but no nodes.
        return max(ended, key=lambda job: (bool(job.node_list), bool(job.start_time), job.end_time, job.array_tasks))
    return (stopped or live)[0]


@dataclass(frozen=True)
class Elastic:
    """Job whose owner opted in to resizing. A job with a `refusal` is measured, but never resized."""

    job: WholeJob
    optin: OptIn | None
    gpus_per_node: int
    """GPUs of a full node of the job's partition."""
    whole_nodes: bool
    refusal: Reason | None = None
    """Reason why the job may not be resized; None if it may be."""

    @property
    def shape(self) -> Shape:
        """Shape that the job has or asks for; 1 × all GPUs if the GPUs on its nodes are unequal."""
        running = self.job.running_blocks
        if len(running) < 2:
            return self.shape_of(running[0] if running else self.job.first)
        gpus, held = sum(self.shape_of(job).gpus for job in running), self.holdings
        each = set(held.values())
        return Shape(len(held), each.pop()) if len(each) == 1 and sum(held.values()) == gpus else Shape(1, gpus)

    @property
    def holdings(self) -> dict[str, int]:
        """GPUs that the job holds on each node; empty unless it runs."""
        held: Counter[str] = Counter()
        for job in self.job.running_blocks:
            for node in job.node_list:
                held[node] += self.shape_of(job).gpus_per_node
        return held

    def shape_of(self, job: SlurmJob) -> Shape:
        """Return the shape of a Slurm job that is the whole job or one of its blocks."""
        return Shape(job.nodes, self.gpus_per_node if self.whole_nodes else job.gpus_per_node)

    @property
    def partition(self) -> str:
        """Partition in which the job competes for GPUs; the first if a pending job names several."""
        return self.job.home.partition

    @property
    def weighed(self) -> bool:
        """True if policies see the job, even if it must keep its size."""
        return self.optin is not None and self.shape.gpus > 0

    @property
    def takes_guests(self) -> bool:
        """True if the owner lets the job grow by guest blocks."""
        return self.job.by_blocks and self.optin is not None and bool(self.optin.guests)

    @property
    def gpu_range(self) -> tuple[int, int]:
        """Fewest and most GPUs that the job's owner allows."""
        if self.optin is not None and self.optin.gpus is not None:
            return self.optin.gpus
        if self.optin is not None and self.optin.nodes is not None:
            low, high = self.optin.nodes
            return low * self.gpus_per_node, high * self.gpus_per_node
        return self.shape.gpus, self.shape.gpus

    def allows(self, gpus: int) -> bool:
        """Tell whether this number of GPUs is in the owner's range, in whole steps from its lower end."""
        low, high = self.gpu_range
        return low <= gpus <= high and (gpus - low) % (self.optin.step if self.optin is not None else 1) == 0


@dataclass(frozen=True)
class Observation:
    """Result of one tick's observation: Slurm's snapshot, and the jobs that opted in and have not ended."""

    snapshot: Snapshot
    elastic: dict[int, Elastic]
    left: dict[int, Elastic] = field(default_factory=dict)
    """Ended jobs of blocks whose array still has waiting tasks, by job id."""
    idle: Mapping[int, float] = field(default_factory=dict)
    """Mean GPU use, in [0, 1], of each idle job, by job id."""

    @cached_property
    def of_blocks(self) -> Mapping[int, Elastic]:
        """Elastic jobs of blocks, by job id."""
        return {id_: one for id_, one in self.elastic.items() if one.job.by_blocks}


def _refusal(
    job: WholeJob, optin: OptIn, gpus_per_node: int, whole: bool, own_uid: int | None, snapshot: Snapshot
) -> Reason | None:
    if own_uid is not None and job.uid != own_uid:
        return reason("other_user", user=job.user)
    if (refused := job.refusal if job.by_blocks else _task_refusal(job.first, optin, snapshot)) is not None:
        return refused
    live = [block for block in job.blocks if not block.ended] or job.blocks
    if not all(block.batch for block in live):
        return reason("interactive")
    if not all(block.requeue for block in live):
        return reason("not_requeueable")
    if any(block.deadline for block in live) and not (job.by_blocks and job.running):
        return reason("slurm_deadline")
    if any(block.task_counts for block in live):
        return reason("task_counts")
    partition = job.home.partition
    if gpus_per_node == 0:
        return reason("gpus_unknown", partition=partition)
    if not whole and any(block.gpus_per_node == 0 for block in live):
        return reason("gpus_per_job")
    if not all(block.of_one_kind for block in live):
        return reason("several_gpu_types")
    there = {*snapshot.kinds(partition).values()}
    if there and optin.kinds and ANY not in optin.kinds and there.isdisjoint(optin.kinds):
        kinds = ", ".join(optin.kinds)
        return reason("kinds_nowhere", kinds=kinds, partition=partition, there=", ".join(sorted(there)))
    if not optin.resize:
        return reason("resize_off")
    return None


def _task_refusal(job: SlurmJob, optin: OptIn, snapshot: Snapshot) -> Reason | None:
    """Return the reason why a single array task, or a component of a heterogeneous job, may not be resized; else
    None."""
    if not job.array:
        return reason("blocks_no_array") if optin.blocks else None
    if not job.array_id:
        return reason("job_array")
    if len(job.array_tasks) > 1:
        return reason("task_waits")
    if job.job_id == job.array_id:
        return reason("task_named_as_array")
    waiting = snapshot.jobs.get(job.array_id)
    if waiting is not None and waiting.pending and waiting.throttle:
        return reason("task_throttled", most=waiting.throttle)
    return None


def elastic_job(
    job: WholeJob, snapshot: Snapshot, whole_node_gpus: dict[str, int], own_uid: int | None
) -> Elastic | None:
    """Return the job with its owner's limits; None for a job that did not opt in."""
    comment = job.home.comment
    try:
        optin, right = parse_comment(comment), near_miss(comment)
        refusal = reason("near_comment", right=right) if right else None
    except BadComment as error:
        optin, refusal = None, reason("bad_comment", problem=str(error))
    if optin is None and refusal is None:
        return None
    partition = snapshot.partitions.get(job.home.partition)
    gpus, whole = partition_gpus(partition, snapshot, whole_node_gpus) if partition is not None else (0, False)
    if optin is not None:
        refusal = _refusal(job, optin, gpus, whole, own_uid, snapshot)
    return Elastic(job, optin, gpus, whole, refusal)
