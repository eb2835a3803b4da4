"""One job out of a job array whose tasks are blocks: what a snapshot's tasks make together.

Slurm knows tasks; people, rules and policies know one job. Here the tasks of each array whose comment says
`array=blocks` become one `Job` that stands for them, and one `Job` a task. Nothing here reads a file or asks Slurm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ones_db import JobRecord
from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import MAX_BLOCKS
from slurm_ones.jobs.optin import BadComment, parse_comment
from slurm_ones.slurm.model import Job, JobState, Snapshot


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
    """The records of each job array of blocks, by the array's id: a task that has not ended says so in its comment, or
    all have ended and one said so."""
    found: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.array_id and job.array_tasks:
            found[job.array_id].append(job)
    # Of a task that is there twice the newer record counts; to sort that out for every sweep would cost too much.
    return {
        array: tuple(records)
        for array, records in found.items()
        if _any_says_blocks(records) and _any_says_blocks(_tasks(records))
    }


def _any_says_blocks(records: Sequence[Job]) -> bool:
    return any(says_blocks(job.comment) for job in [one for one in records if not one.ended] or records)


def is_whole(job: Job) -> bool:
    """Whether the job stands for all tasks of an array of blocks."""
    return job.array_id == job.job_id and says_blocks(job.comment)


def says_blocks(comment: str) -> bool:
    """Whether the tasks of an array with this comment are blocks of one job."""
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


def block_job(array: int, records: Sequence[Job], known: JobRecord | None = None, term: int = 0) -> BlockJob:
    """The job that the records of an array make. `known` is what is remembered of it, None of a new one; `term` that of
    its leader."""
    tasks = _tasks(records)
    blocks, others = _of_one_kind(tasks[:MAX_BLOCKS])
    return BlockJob(_composite(array, blocks, known, term), blocks, _refusal(blocks, others, len(tasks), known))


def _tasks(records: Sequence[Job]) -> tuple[Job, ...]:
    """One job a task, ascending. Of a task that is there twice, the record that has not ended counts, then the newest
    start."""
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


def _of_one_kind(tasks: Sequence[Job]) -> tuple[tuple[Job, ...], str]:
    """The tasks that belong together, and what sets apart others that have not ended, in words; empty where nothing
    does. One that ended is left out where it differs: it is not used again."""
    first = _speaker(tasks)
    kept, apart = [], ""
    for job in tasks:
        different = _difference(first, job)
        if not different or not job.ended:
            kept.append(job)
            apart = apart or different
    return tuple(kept), apart


def _speaker(tasks: Sequence[Job]) -> Job:
    """The task whose comment counts."""
    return min(tasks, key=lambda job: (not says_blocks(job.comment), job.ended))


def _difference(one: Job, other: Job) -> str:
    if other is one:
        return ""
    if not one.shares_partition(other):
        return "partition"
    for name, what in (("uid", "user"), ("account", "account"), ("work_dir", "directory"), ("comment", "comment")):
        if getattr(one, name) != getattr(other, name):
            return what
    return ""


def _refusal(blocks: Sequence[Job], others: str, count: int, known: JobRecord | None) -> Reason | None:
    """What speaks against a job of blocks, by its tasks alone."""
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


def _composite(array: int, blocks: Sequence[Job], known: JobRecord | None, term: int) -> Job:
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
    else the last that ended, else that waits. Tasks in a hold do not keep a job alive that has ended."""
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
    """The job while blocks run: it has what all of them have, and its time is over when the last one's is."""
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
