"""What the rules need to know of a running job of blocks: which of its tasks train, could join, or have to go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ones_db import RESIZE_DONE, JobHistory, ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.config import LimitSettings
from slurm_ones.jobs.eligibility import Elastic
from slurm_ones.rules.dwell import near_limit
from slurm_ones.rules.moves import Moves, RunningBlock
from slurm_ones.slurm.model import Job, JobState, Node

REQUEUE, BLOCKS = "requeue", "blocks"
"""`ResizeRecord.mechanism` of a resize by a requeue, or of a job that waits, and by blocks that join and leave."""
REUSED_WITHIN_S = 240.0
"""A block that completed longer ago is not used again: Slurm forgets it after MinJobAge, 300 s by default."""


def hot(elastic: Elastic) -> bool:
    """Whether the job changes by blocks that join and leave: it is one of blocks, and trains."""
    return bool(elastic.blocks) and not elastic.job.pending


def task_of(job: Job) -> int:
    """Number of the one task of its array that the job is."""
    return job.array_tasks[0]


def training(elastic: Elastic, history: JobHistory | None) -> tuple[RunningBlock, ...]:
    """The blocks that run, the one that leads first, and then the oldest."""
    leader = next(iter(members_of(history)), -1)
    running = sorted(
        (job for job in elastic.blocks if job.running),
        key=lambda job: (task_of(job) != leader, job.start_time, task_of(job)),
    )
    return tuple(RunningBlock(task_of(job), shape_of_block(elastic, job), job.node_list) for job in running)


def shape_of_block(elastic: Elastic, job: Job) -> Shape:
    """The shape of one of its blocks."""
    return Shape(job.nodes, elastic.gpus_per_node if elastic.whole_nodes else job.gpus_per_node)


def starting(elastic: Elastic, *, prepared: bool) -> int:
    """GPUs of the blocks of a job that runs that Slurm may start at any moment, such as those that it requeued; none
    behind the throttle of an array that nobody has lifted: of one that is not `prepared`."""
    if not (hot(elastic) and prepared):
        return 0
    return sum(shape_of_block(elastic, job).gpus for job in elastic.blocks if job.pending and not job.held)


def spare(elastic: Elastic, ours: Collection[int], members: Collection[int], now: float) -> tuple[int, ...]:
    """Tasks that could join, the best first: those that wait, and those that completed a short while ago.

    Of those that are held, ours alone: the others are held by their owner, or by an operator. Not `members`, the tasks
    that trained last: one of them that waits is started again by Slurm.
    """
    waiting = [
        task_of(job)
        for job in elastic.blocks
        if job.pending
        and not job.completing
        and (not job.admin_held and task_of(job) in ours if job.held else task_of(job) not in members)
    ]
    completed = [
        task_of(job)
        for job in elastic.blocks
        if job.state is JobState.COMPLETED and job.ended and not job.completing and now - job.end_time < REUSED_WITHIN_S
    ]
    return (*sorted(waiting), *sorted(completed))


def to_hold(elastic: Elastic, members: Collection[int]) -> tuple[int, ...]:
    """Tasks that wait, mostly behind the throttle of their array, and have to be held before that is lifted."""
    tasks = (task_of(job) for job in elastic.blocks if job.pending and not job.held)
    return tuple(sorted(task for task in tasks if task not in members))


def members_of(history: JobHistory | None) -> tuple[int, ...]:
    """The tasks that train together, by the newest report of that, the one that leads first."""
    known = history.membership if history is not None else None
    return known.report.blocks if known is not None else ()


def going(elastic: Elastic, nodes: Mapping[str, Node], limits: LimitSettings, now: float) -> tuple[int, ...]:
    """Tasks of running blocks that are to be replaced, the most urgent first: their time is nearly over, or one of
    their nodes takes no more jobs."""
    ends = {
        task_of(job): job.start_time + job.time_limit_s
        for job in elastic.blocks
        if job.running and near_limit(job, limits, now) is not None
    }
    drained = {
        task_of(job)
        for job in elastic.blocks
        if job.running and any(name in nodes and _drains(nodes[name]) for name in job.node_list)
    }
    return tuple(sorted(ends, key=lambda task: (ends[task], task))) + tuple(sorted(drained - ends.keys()))


def _drains(node: Node) -> bool:
    """Whether it is to be emptied. One that is reserved may be reserved for the job."""
    return not node.usable and any(word in node.state.upper() for word in ("DRAIN", "FAIL", "DOWN"))


def moves_of(resize: ResizeRecord) -> Moves:
    """The blocks that join and leave in a resize under way: none leaves any more once it is taken back."""
    return Moves(resize.added, () if resize.state == "withdrawing" else resize.dropped)


def held_by_us(resizes: Iterable[ResizeRecord]) -> frozenset[int]:
    """Of one job's resizes, in their order, the tasks that have been put into a hold of ours, and neither left it nor
    were held by their owner since."""
    ours: set[int] = set()
    for resize in resizes:
        if resize.mechanism == BLOCKS:
            ours |= {*resize.held, *resize.dropped}
            added = {task for task, _ in resize.added}
            ours = ours - added if resize.state == RESIZE_DONE else ours | added
            ours -= _given_up(resize.outcome) | {*resize.let_go}
    return frozenset(ours)


def ever_held_by_us(resizes: Iterable[ResizeRecord]) -> frozenset[int]:
    """The same with those that left it, or that their owner was seen to hold."""
    ours: set[int] = set()
    for resize in resizes:
        if resize.mechanism == BLOCKS:
            ours |= {*resize.held, *resize.dropped, *(task for task, _ in resize.added)}
    return frozenset(ours)


def held_by_others(tasks: Collection[int]) -> Reason:
    """Why a change was taken back of which others hold these tasks: none of them is ours from then on."""
    if len(tasks) == 1:
        return reason("block_held", task=min(tasks))
    return reason("blocks_held", tasks=", ".join(map(str, sorted(tasks))))


def _given_up(outcome: Reason) -> set[int]:
    """The tasks that `held_by_others` named."""
    if outcome.code not in ("block_held", "blocks_held"):
        return set()
    return {int(task) for named in dict(outcome.arguments).values() for task in str(named).split(", ")}
