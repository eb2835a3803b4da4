"""Elastic jobs of a snapshot: which jobs may be resized, within what, and why the others may not.

A job is one or more blocks. Slurm knows the tasks of an array; people, rules and policies know one job: the tasks of
each array whose comment says `array=blocks` become one `Job` that stands for them, and one `Job` a task. Nothing here
reads a file or asks Slurm.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ones_db import JobRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from ones_wrapper.protocol import MAX_BLOCKS
from slurm_ones.config import Settings
from slurm_ones.jobs.optin import ANY, BadComment, OptIn, near_miss, parse_comment
from slurm_ones.slurm.fields import LICENCES
from slurm_ones.slurm.model import NO_LICENSES, Job, JobState, Queue, Snapshot, partition_gpus

Guests = Mapping[str, Queue]
"""Of each partition the queue of its guests: blocks beyond what a user asked for, which Slurm preempts."""
NO_GUESTS: Guests = {}


@dataclass(frozen=True)
class BlockJob:
    """A job of blocks."""

    job: Job
    """The whole of it: id of the array, `restart` is its term, nodes and GPUs are those of all blocks that run. While
    it waits it is as the block that starts first; it has the `key` of that one, or of the array as long as nothing was
    asked of a task by itself."""
    blocks: tuple[Job, ...]
    """One for each task, ascending."""
    refusal: Reason | None = None
    """Why its blocks cannot be resized, by what its tasks show."""


def arrays(jobs: Iterable[Job]) -> dict[int, tuple[Job, ...]]:
    """Records of each job array of blocks, by the array's id: one whose comment of a task that has not ended says
    so, or of any once all have ended."""
    found: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.array_id and job.array_tasks:
            found[job.array_id].append(job)
    # Only the newest record of a task counts; to sort that out for every sweep would cost too much.
    return {
        array: tuple(records)
        for array, records in found.items()
        if _any_says_blocks(records) and _any_says_blocks(_tasks(records))
    }


def _any_says_blocks(records: Sequence[Job]) -> bool:
    return any(says_blocks(job.comment) for job in [one for one in records if not one.ended] or records)


def is_whole(job: Job) -> bool:
    """The job stands for all tasks of an array of blocks."""
    return job.array_id == job.job_id and says_blocks(job.comment)


def says_blocks(comment: str) -> bool:
    """The tasks of an array with this comment are blocks of one job."""
    # Most comments need no parsing.
    if "array=" not in comment:
        return False
    try:
        optin = parse_comment(comment)
    except BadComment:
        # A word that is wrong elsewhere in it takes no running job apart.
        return "array=blocks" in comment.replace(",", " ").split()
    return optin is not None and optin.blocks


def fold(snapshot: Snapshot, found: Mapping[int, BlockJob]) -> Snapshot:
    """The snapshot with one job in place of the tasks of each of these."""
    if not found:
        return snapshot
    jobs = {id_: job for id_, job in snapshot.jobs.items() if job.array_id not in found}
    return replace(snapshot, jobs={**jobs, **{array: one.job for array, one in found.items()}})


def with_throttles(snapshot: Snapshot, throttles: Mapping[int, int]) -> Snapshot:
    """The snapshot with these limits of arrays, by the array's id."""
    jobs = {
        id_: replace(job, throttle=throttles[job.array_id]) if job.array_id in throttles else job
        for id_, job in snapshot.jobs.items()
    }
    return replace(snapshot, jobs=jobs)


def block_job(
    array: int, records: Sequence[Job], known: JobRecord | None = None, term: int = 0, guests: Guests = NO_GUESTS
) -> BlockJob:
    """The job that the records of an array make. `known` is its stored record, None for a new one; `term` that of its
    leader."""
    tasks = _tasks(records)
    blocks, others = _of_one_kind(tasks[:MAX_BLOCKS], guests)
    whole = _whole(array, blocks, known, term)
    if is_guest(whole, guests):
        own = home(blocks, guests)
        whole = replace(whole, partitions=own.partitions, account=own.account, qos=own.qos, licenses=own.licenses)
        if known is not None and is_guest(own, guests):
            # All its tasks have been guests: Slurm does not know any more where it was submitted.
            partitions = tuple(known.partition.split(","))
            licenses = LICENCES.text(known.licenses.removeprefix(NO_LICENSES))
            whole = replace(whole, partitions=partitions, account=known.account, qos=known.qos, licenses=licenses)
    if whole.running:
        # Its guests may be held for their next start.
        base = [job for job in blocks if job.running and not is_guest(job, guests)][:1]
        whole = replace(whole, held=any(job.held for job in base), admin_held=any(job.admin_held for job in base))
    return BlockJob(whole, blocks, _blocks_refusal(blocks, others, len(tasks), known))


def guests_of(settings: Settings) -> Guests:
    """The queues of guests that the settings name: nothing that a user writes chooses one."""
    return {name: Queue(one.partition, one.qos, one.account) for name, one in settings.guests.items()}


def is_guest(job: Job, guests: Guests) -> bool:
    """Tell whether a block waits or runs in a queue of guests."""
    return any(not any(queue.other_than(job)) for queue in guests.values())


def home(blocks: Collection[Job], guests: Guests) -> Job:
    """A block in the queue that the job was submitted to; if all are guests, any."""
    return min(blocks, key=lambda job: (is_guest(job, guests), not job.running, job.ended, job.array_tasks))


def base_first(tasks: Iterable[int], blocks: Iterable[Job], guests: Guests) -> tuple[int, ...]:
    """These tasks, ascending, base blocks before guests: one that stays leads rather than one that Slurm preempts."""
    lent = {task for job in blocks if is_guest(job, guests) for task in job.array_tasks}
    return tuple(sorted(tasks, key=lambda task: (task in lent, task)))


def as_one(shapes: Sequence[Shape]) -> Shape:
    """The shape of a job of blocks of these shapes; one node with all GPUs stands for nodes that give unequally
    many."""
    each = {shape.gpus_per_node for shape in shapes}
    if len(each) == 1:
        return Shape(sum(shape.nodes for shape in shapes), each.pop())
    return Shape(1, sum(shape.gpus for shape in shapes))


def _tasks(records: Sequence[Job]) -> tuple[Job, ...]:
    """One job a task, ascending: of several records of a task the one that has not ended, then the newest start."""
    found: dict[int, Job] = {}
    for record in records:
        # One more than a job of blocks may have tells that there are too many.
        for task in record.array_tasks[: MAX_BLOCKS + 1]:
            one = record if len(record.array_tasks) == 1 else replace(record, array_tasks=(task,))
            other = found.get(task)
            if other is None or _newness(one) > _newness(other):
                found[task] = one
    return tuple(found[task] for task in sorted(found))


def _newness(job: Job) -> tuple[bool, int, bool, float, int]:
    # Tasks that were cancelled while they waited together leave a record that may pass for the first task's, with a
    # later start: what had nodes ran.
    return not job.ended, job.restart, bool(job.node_list), job.start_time, job.job_id


def _of_one_kind(tasks: Sequence[Job], guests: Guests) -> tuple[tuple[Job, ...], str]:
    """The tasks that belong together, and what sets others apart, in words; "" for none. A task that differs and has
    ended is left out: it is not used again."""
    first = _speaker([job for job in tasks if not is_guest(job, guests)] or tasks)
    kept, apart = [], ""
    for job in tasks:
        different = _difference(first, job, guests)
        if not different or not job.ended:
            kept.append(job)
            apart = apart or different
    return tuple(kept), apart


def _speaker(tasks: Sequence[Job]) -> Job:
    return min(tasks, key=lambda job: (not says_blocks(job.comment), job.ended))


def _difference(one: Job, other: Job, guests: Guests) -> str:
    if other is one:
        return ""
    if is_guest(other, guests):
        other = replace(other, partitions=one.partitions, account=one.account)
    if not one.shares_partition(other):
        return "partition"
    same = {"uid": "user", "account": "account", "work_dir": "directory", "comment": "comment"}
    return next((what for name, what in same.items() if getattr(one, name) != getattr(other, name)), "")


def _blocks_refusal(blocks: Sequence[Job], others: str, count: int, known: JobRecord | None) -> Reason | None:
    if count > MAX_BLOCKS:
        return reason("blocks_many", most=MAX_BLOCKS)
    live = [job for job in blocks if not job.ended]
    # Tasks in a hold show that a companion prepared them, or that their owner keeps them. Once prepared, it has none.
    prepared = known is not None and known.refusal.code != "blocks_unthrottled"
    if not (prepared or len(live) < 2 or any(job.throttle or (job.pending and job.held) for job in live)):
        return reason("blocks_unthrottled")
    if others:
        return reason("blocks_differ", what=others)
    depending = [job for job in live if job.pending and job.reason.startswith("Dependency")]
    # A dependency of the whole array keeps its first task too.
    if depending and (len(depending) < len(live) or len(live) < len(blocks)):
        return reason("blocks_depend")
    return None


def _whole(array: int, blocks: Sequence[Job], known: JobRecord | None, term: int) -> Job:
    first = _representative(blocks, known, term)
    # Slurm has one record of tasks that nothing was asked of one by one.
    together = len({job.job_id for job in blocks}) == 1
    whole = replace(
        first,
        job_id=array,
        array=True,
        array_id=array,
        comment=_speaker(blocks).comment,
        array_tasks=first.array_tasks
        if first.pending and not together
        else tuple(job.array_tasks[0] for job in blocks),
        restart=term,
        submit_time=min([job.submit_time for job in blocks] + ([known.submit_time] if known is not None else [])),
        requeue=all(job.requeue for job in blocks if not job.ended),
        task_counts=any(job.task_counts for job in blocks if not job.ended),
        throttle=max(job.throttle for job in blocks),
    )
    running = [job for job in blocks if job.running]
    if running:
        return _running(whole, running)
    if whole.ended:
        begun = [job.start_time for job in blocks if job.start_time]
        return replace(whole, start_time=min(begun, default=0.0))
    if known is not None and known.end_time is not None and whole.pending and whole.held:
        # It ended, and Slurm has forgotten all but the tasks that stand in a hold.
        return replace(whole, state=JobState(known.state), flags=frozenset(), held=False, end_time=known.end_time)
    return whole


def _representative(blocks: Sequence[Job], known: JobRecord | None, term: int) -> Job:
    """The task that the job is like: the first that runs, else that is neither waiting nor ended, else that may start,
    else the last that ended, else that waits. Held tasks do not keep alive a job that has ended."""
    live = [job for job in blocks if not job.ended]
    active = [job for job in live if job.running] or [job for job in live if not job.pending]
    startable = [job for job in live if job.pending and not job.held]
    if active or startable:
        return (active or startable)[0]
    ended = [job for job in blocks if job.ended]
    # One that was requeued into a hold has not ended.
    stopped = [job for job in live if job.restart or job.completing]
    if ended and not stopped:
        # Of a task that was cancelled while it waited Slurm has a start too, but no nodes.
        return max(ended, key=lambda job: (bool(job.node_list), bool(job.start_time), job.end_time, job.array_tasks))
    return (stopped or live)[0]


def _running(whole: Job, running: Sequence[Job]) -> Job:
    """The job while blocks run: it has what all of them have, until the time limit of the last one."""
    gpus: dict[str, int] = defaultdict(int)
    for job in running:
        for node in job.node_list:
            gpus[node] += job.gpus_per_node
    each = set(gpus.values()) or {job.gpus_per_node for job in running}
    nodes = len(gpus) or sum(job.nodes for job in running)
    start = min(job.start_time for job in running)
    unlimited = any(not job.time_limit_s for job in running)
    return replace(
        whole,
        nodes=nodes,
        max_nodes=nodes,
        gpus_per_node=each.pop() if len(each) == 1 else 0,
        gpus_total=sum(job.gpus_total or job.nodes * job.gpus_per_node for job in running),
        tasks=sum(job.tasks for job in running),
        node_list=tuple(gpus),
        start_time=start,
        end_time=max(job.end_time for job in running),
        time_limit_s=0.0 if unlimited else max(job.start_time + job.time_limit_s for job in running) - start,
    )


@dataclass(frozen=True)
class Elastic:
    """A job that opted in. With a `refusal` it is measured and left alone."""

    job: Job
    optin: OptIn | None
    gpus_per_node: int
    """GPUs of a full node of its partition."""
    whole_nodes: bool
    refusal: Reason | None = None
    """Why it is not resized; None if it may be."""
    blocks: tuple[Job, ...] = ()
    """Tasks of a job of blocks that Slurm knows, ascending; `job` then stands for all of them."""

    @property
    def parts(self) -> tuple[Job, ...]:
        """What Slurm allocates, each by itself: its blocks, or the job."""
        return self.blocks or (self.job,)

    @property
    def shape(self) -> Shape:
        """Nodes × GPUs per node that it has or asks for; one node with all GPUs if its blocks hold unequal numbers of
        GPUs on their nodes."""
        if not (self.blocks and self.job.running):
            return self.shape_of(self.job)
        gpus, held = sum(self.shape_of(job).gpus for job in self.running_blocks), self.holdings
        each = set(held.values())
        return Shape(len(held), each.pop()) if len(each) == 1 and sum(held.values()) == gpus else Shape(1, gpus)

    @property
    def holdings(self) -> dict[str, int]:
        """GPUs that it holds on each of its nodes; none unless it runs."""
        held: Counter[str] = Counter()
        for job in self.parts if self.job.running else ():
            for node in job.node_list if job.running else ():
                held[node] += self.shape_of(job).gpus_per_node
        return held

    @property
    def running_blocks(self) -> tuple[Job, ...]:
        """Those blocks that run."""
        return tuple(job for job in self.blocks if job.running)

    def shape_of(self, job: Job) -> Shape:
        """Nodes × GPUs per node of the job, or of one of its blocks."""
        return Shape(job.nodes, self.gpus_per_node if self.whole_nodes else job.gpus_per_node)

    @property
    def partition(self) -> str:
        """The partition whose jobs it competes with: the first of those that a pending job names."""
        return self.job.partition

    @property
    def weighed(self) -> bool:
        """A policy is shown it, if only as one that keeps what it has."""
        return self.optin is not None and self.shape.gpus > 0

    @property
    def gpu_range(self) -> tuple[int, int]:
        """Fewest and most GPUs its owner allows."""
        if self.optin is not None and self.optin.gpus is not None:
            return self.optin.gpus
        if self.optin is not None and self.optin.nodes is not None:
            low, high = self.optin.nodes
            return low * self.gpus_per_node, high * self.gpus_per_node
        return self.shape.gpus, self.shape.gpus

    def allows(self, gpus: int) -> bool:
        """Its owner's range holds this number of GPUs, by its steps."""
        low, high = self.gpu_range
        return low <= gpus <= high and (gpus - low) % (self.optin.step if self.optin is not None else 1) == 0


@dataclass(frozen=True)
class Observation:
    """What a tick has observed: the whole queue, and of it the jobs that opted in and have not ended."""

    snapshot: Snapshot
    """With one job in place of the tasks of each job of blocks."""
    elastic: dict[int, Elastic]
    left: dict[int, Elastic] = field(default_factory=dict)
    """Jobs of blocks that have ended, and left tasks in a hold."""


def _refusal(
    job: Job,
    optin: OptIn,
    gpus_per_node: int,
    whole: bool,
    own_uid: int | None,
    blocks: BlockJob | None,
    snapshot: Snapshot,
) -> Reason | None:
    if own_uid is not None and job.uid != own_uid:
        return reason("other_user", user=job.user)
    if optin.blocks and not job.array:
        return reason("blocks_no_array")
    if job.array and blocks is None and (refused := _task_refusal(job, snapshot)) is not None:
        return refused
    if blocks is not None and blocks.refusal is not None:
        return blocks.refusal
    if not job.batch:
        return reason("interactive")
    if not job.requeue:
        return reason("not_requeueable")
    if job.task_counts:
        return reason("task_counts")
    if gpus_per_node == 0:
        return reason("gpus_unknown", partition=job.partition)
    live = [one for one in blocks.blocks if not one.ended] if blocks is not None else [job]
    if not whole and any(one.gpus_per_node == 0 for one in live):
        return reason("gpus_per_job")
    if not all(one.of_one_kind for one in live):
        return reason("several_gpu_types")
    there = {*snapshot.kinds(job.partition).values()}
    if there and optin.kinds and ANY not in optin.kinds and there.isdisjoint(optin.kinds):
        kinds = ", ".join(optin.kinds)
        return reason("kinds_nowhere", kinds=kinds, partition=job.partition, there=", ".join(sorted(there)))
    if not optin.resize:
        return reason("resize_off")
    return None


def _task_refusal(job: Job, snapshot: Snapshot) -> Reason | None:
    """Why a task of a job array that is a job of its own, or a part of a heterogeneous job, is left as it is."""
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
    job: Job,
    snapshot: Snapshot,
    whole_node_gpus: dict[str, int],
    own_uid: int | None,
    blocks: BlockJob | None = None,
) -> Elastic | None:
    """What the job's owner allows; None for a job that did not opt in, which is never touched. `blocks` if `job` stands
    for these."""
    try:
        optin, right = parse_comment(job.comment), near_miss(job.comment)
        refusal = reason("near_comment", right=right) if right else None
    except BadComment as error:
        optin, refusal = None, reason("bad_comment", problem=str(error))
    if optin is None and refusal is None:
        return None
    partition = snapshot.partitions.get(job.partition)
    gpus, whole = partition_gpus(partition, snapshot, whole_node_gpus) if partition is not None else (0, False)
    if optin is not None:
        refusal = _refusal(job, optin, gpus, whole, own_uid, blocks, snapshot)
    return Elastic(job, optin, gpus, whole, refusal, blocks.blocks if blocks is not None else ())
