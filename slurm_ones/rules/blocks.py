"""Blocks (running array tasks) of a job: which train, which may join or must be replaced, and which to choose for a new
size.

A running block keeps its shape. So a job grows by blocks that join and shrinks by blocks that leave, all between the
same two training steps. If no subset of its blocks has the wanted size, new blocks replace some or all of them. New
blocks need free GPUs, since old blocks leave only when new ones join.

Base blocks are ordinary jobs. Guests are blocks beyond the GPUs that the user asked for; Slurm preempts them for other
jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from typing import NamedTuple

from ones_db import RESIZE_DONE, JobHistory, ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.config import LimitSettings
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.policy.ledger import Ledger
from slurm_ones.rules.job_rules import near_limit
from slurm_ones.slurm.model import JobState, Node, SlurmJob

REQUEUE, BLOCKS = "requeue", "blocks"
"""Values of `ResizeRecord.mechanism`: running jobs of blocks are resized by `BLOCKS`, all other jobs by `REQUEUE`."""
REUSED_WITHIN_S = 240.0
"""Longest time, in seconds, from the end of a block to the use of its task for a new block. Slurm forgets the task
after MinJobAge, by default 300 s."""


class RunningBlock(NamedTuple):
    """A running block of a job: its task, shape and nodes."""

    task: int
    shape: Shape
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Moves:
    """Blocks that join and blocks that leave in one resize."""

    added: tuple[tuple[int, Shape], ...] = ()
    """Task number and shape of each block that joins, the largest first."""
    dropped: tuple[int, ...] = ()
    """Task numbers of the blocks that leave, ascending."""

    def __bool__(self) -> bool:
        return bool(self.added or self.dropped)

    @property
    def gained(self) -> int:
        """Total GPUs of the blocks that join."""
        return sum(shape.gpus for _, shape in self.added)


def hot(elastic: Elastic) -> bool:
    """Tell whether the job is a running job of blocks; such a job is resized without a requeue."""
    return elastic.job.by_blocks and not elastic.job.pending


def task_of(job: SlurmJob) -> int:
    """Return the task number of a Slurm job that is one array task; 0 for a job that is no array task."""
    return job.array_tasks[0] if job.array_tasks else 0


def has_left(job: SlurmJob) -> bool:
    """Tell whether the block has completed or was preempted, so that its task can be used for a new block."""
    return job.state in (JobState.COMPLETED, JobState.PREEMPTED)


def training(elastic: Elastic, history: JobHistory | None) -> tuple[RunningBlock, ...]:
    """Return the running blocks: the leader first, then all others from the oldest to the youngest."""
    leader = next(iter(members_of(history)), -1)
    running = sorted(
        elastic.job.running_blocks,
        key=lambda job: (task_of(job) != leader, job.start_time, task_of(job)),
    )
    return tuple(RunningBlock(task_of(job), elastic.shape_of(job), job.node_list) for job in running)


def starting(elastic: Elastic) -> int:
    """Return the total GPUs of pending blocks that are not held: Slurm may start them once the array's throttle is
    lifted."""
    return sum(elastic.shape_of(job).gpus for job in elastic.job.blocks if job.pending and not job.held)


def spare(elastic: Elastic, ours: Collection[int], members: Collection[int], now: float) -> tuple[int, ...]:
    """Return the tasks that may join the training, best first: waiting tasks, then tasks whose block left less than
    `REUSED_WITHIN_S` ago.

    A held task counts only if the companion holds it (`ours`). A waiting task without a hold does not count if it is
    one of the last `members`, since Slurm restarts it by itself.
    """
    waiting = [
        task_of(job)
        for job in elastic.job.blocks
        if job.pending
        and not job.completing
        and (not job.admin_held and task_of(job) in ours if job.held else task_of(job) not in members)
    ]
    gone = [
        task_of(job)
        for job in elastic.job.blocks
        if has_left(job) and job.ended and not job.completing and now - job.end_time < REUSED_WITHIN_S
    ]
    return (*sorted(waiting), *sorted(gone))


def to_hold(elastic: Elastic, members: Collection[int]) -> tuple[int, ...]:
    """Return the tasks to hold before the array's throttle is lifted: waiting tasks without a hold, except
    `members`."""
    tasks = (task_of(job) for job in elastic.job.blocks if job.pending and not job.held)
    return tuple(sorted(task for task in tasks if task not in members))


def members_of(history: JobHistory | None) -> tuple[int, ...]:
    """Return the tasks that train together according to the job's newest report, the leader first. Some may have ended
    or restarted since."""
    known = history.membership if history is not None else None
    return known.report.blocks if known is not None else ()


def returning_guests(elastic: Elastic, members: Collection[int]) -> list[int]:
    """Return the guests among `members` that are ending, or pending and not held. Slurm may start them again, and then
    they join."""
    guests = (job for job in elastic.job.blocks if elastic.job.is_guest(job))
    again = (job for job in guests if job.completing or (job.pending and not job.held))
    return [task for job in again if (task := task_of(job)) in members]


def train_together(elastic: Elastic, history: JobHistory | None) -> list[int]:
    """Return the running blocks that train together, as task numbers: those in the job's newest report, completed by
    `with_base`. Return none if the report names no running block. A block that Slurm restarted after the report is left
    out."""
    if history is None or history.membership is None:
        return []
    report = history.membership.report
    starts = set(zip(report.blocks, report.restarts, strict=True))
    known = {task_of(job) for job in elastic.job.running_blocks if (task_of(job), job.restart) in starts}
    asked = history.job.requested_shape.gpus
    return sorted(with_base(elastic.job, known, asked, lambda job: elastic.shape_of(job).gpus))


def with_base(array: WholeJob, training: set[int], asked: int, gpus_of: Callable[[SlurmJob], int]) -> set[int]:
    """Return the tasks `training`. If they include guests, and their base blocks have fewer than `asked` GPUs in total,
    add all running base blocks.

    `asked` is the number of GPUs that the user asked for; `gpus_of` returns the GPUs of a block.
    """
    if training.isdisjoint(array.guests):
        return training
    base = sum(gpus_of(array.tasks[task]) for task in training - array.guests)
    running = {task_of(job) for job in array.running_blocks}
    return training | (running - array.guests) if base < asked else training


def going(elastic: Elastic, nodes: Mapping[str, Node], limits: LimitSettings, now: float) -> tuple[int, ...]:
    """Return the tasks of the running blocks that must be replaced, the most urgent first. These are blocks near their
    time limit, then blocks on a node that drains, fails or is down."""
    ends = {
        task_of(job): job.start_time + job.time_limit_s
        for job in elastic.job.running_blocks
        if near_limit(job, limits, now) is not None
    }
    drained = {
        task_of(job)
        for job in elastic.job.running_blocks
        if any(name in nodes and drains(nodes[name]) for name in job.node_list)
    }
    return tuple(sorted(ends, key=lambda task: (ends[task], task))) + tuple(sorted(drained - ends.keys()))


def renewal(elastic: Elastic, asked: Shape, spare: Sequence[int], limits: LimitSettings, now: float) -> Moves | None:
    """Return the new base blocks that a job with guests needs, and the blocks that they replace. Return None if it
    needs none, or if too few tasks are `spare`. New base blocks need no free GPUs, since Slurm preempts guests for
    them.

    They replace base blocks near their time limit. If no base block runs or waits to start, one with the shape `asked`
    is added. Then running blocks leave, the smallest first, until as many GPUs are free as the new block needs.
    """
    running = sorted(elastic.job.running_blocks, key=lambda job: (elastic.shape_of(job).gpus, task_of(job)))
    base = [job for job in running if not elastic.job.is_guest(job)]
    old = [job for job in base if near_limit(job, limits, now) is not None]
    shapes = sorted((elastic.shape_of(job) for job in old), key=lambda shape: -shape.gpus)
    waiting = (job for job in elastic.job.blocks if job.pending and not job.held)
    if not base and all(map(elastic.job.is_guest, waiting)):
        shapes = [asked]
        while sum(elastic.shape_of(job).gpus for job in old) < asked.gpus and len(old) < len(running):
            old.append(running[len(old)])
    if not old or len(spare) < len(shapes):
        return None
    return Moves(tuple(zip(spare, shapes, strict=False)), tuple(sorted(map(task_of, old))))


def drains(node: Node) -> bool:
    """Tell whether the node drains, fails or is down. A reserved node does not count, since the job itself may have
    reserved it."""
    return not node.usable and any(word in node.state.upper() for word in ("DRAIN", "FAIL", "DOWN"))


def held_by_us(resizes: Iterable[ResizeRecord]) -> frozenset[int]:
    """Return the tasks that the companion holds now. `resizes` are all resizes of one job, in order. A task that was
    released since, or that somebody else holds, does not count."""
    ours: set[int] = set()
    for resize in resizes:
        if resize.mechanism == BLOCKS:
            ours |= {*resize.held}
            added = {task for task, _ in resize.added}
            ours = (ours - added if resize.state == RESIZE_DONE else ours | added) | {*resize.preempted}
            ours -= _given_up(resize.outcome) | {*resize.let_go}
    return frozenset(ours)


def ever_held_by_us(resizes: Iterable[ResizeRecord]) -> frozenset[int]:
    """Return all tasks that the companion has ever held, even if they were released or held by their owner later."""
    ours: set[int] = set()
    for resize in resizes:
        if resize.mechanism == BLOCKS:
            ours |= {*resize.held, *resize.dropped, *resize.preempted, *(task for task, _ in resize.added)}
    return frozenset(ours)


def held_by_others(tasks: Collection[int]) -> Reason:
    """Return the reason for rolling back a change: somebody else holds these tasks. The companion does not touch them
    any more."""
    if len(tasks) == 1:
        return reason("block_held", task=min(tasks))
    return reason("blocks_held", tasks=", ".join(map(str, sorted(tasks))))


def _given_up(outcome: Reason) -> set[int]:
    if outcome.code not in ("block_held", "blocks_held"):
        return set()
    return {int(task) for named in dict(outcome.arguments).values() for task in str(named).split(", ")}


class GuestSizes(NamedTuple):
    """Sizes of the guests by which a job grows."""

    asked: int
    """GPUs that the user asked for. New GPUs go to base blocks up to this number, and to guests beyond it."""
    running: frozenset[int]
    """Task numbers of the blocks that run as guests."""
    each: int
    """GPUs of each guest, all on one node."""

    def shapes(self, gpus: int, kept: Sequence[RunningBlock], full: int) -> list[Shape]:
        """Return the shapes of new blocks that have `gpus` GPUs in total, the largest first. The blocks `kept` go on
        training; `full` is the number of GPUs of a full node. Guests are small, because Slurm preempts a whole guest
        even for one GPU."""
        lacks = min(max(self.asked - self._base(kept), 0), gpus)
        guests, rest = divmod(gpus - lacks, self.each)
        found = [*_by_powers(lacks, full), *[Shape(1, self.each)] * guests, *[Shape(1, rest)] * bool(rest)]
        return sorted(found, key=lambda shape: -shape.gpus)

    def keep_base(
        self, blocks: Sequence[RunningBlock], stay: Sequence[RunningBlock], added: Iterable[tuple[int, Shape]] = ()
    ) -> bool:
        """Tell whether base blocks still have as many GPUs as before the change, as the user asked for, or as the whole
        job."""
        base, gpus = self._base(stay), sum(block.shape.gpus for block in stay)
        for _, shape in added:
            gpus += shape.gpus
            base += shape.gpus if base + shape.gpus <= self.asked else 0
        return base >= min(self._base(blocks), self.asked, gpus)

    def _base(self, blocks: Iterable[RunningBlock]) -> int:
        return sum(block.shape.gpus for block in blocks if block.task not in self.running)


def guest_gpus(to_grow: int, tasks: int, node_gpus: int, together: int = 1) -> int:
    """Return the GPUs of each guest: the smallest size at which `tasks` guests have at least `to_grow` GPUs, at most a
    full node. The size is a multiple of `together`, the number of ranks that must share a node."""
    sizes = (each for each in range(together, node_gpus, together) if each == together or node_gpus % each == 0)
    return next((each for each in sizes if -(-to_grow // each) <= tasks), max(node_gpus, 1))


@dataclass(frozen=True)
class FreeGpus:
    """Free GPUs on which blocks may be placed."""

    free: Ledger
    """GPUs of each node that are free now. GPUs of the job's own blocks are not included."""
    node_gpus: int
    """GPUs of a full node."""
    whole_nodes: bool = False
    """True if Slurm allocates only whole nodes."""
    split_nodes: bool = True
    """True if two blocks of a job may share a node: Slurm then lets each block see the GPUs of both."""
    guests: GuestSizes | None = None
    """Sizes of the guests by which the job grows; None if it grows only by base blocks."""


def moves(
    blocks: Sequence[RunningBlock],
    spare: Sequence[int],
    target: int,
    site: FreeGpus,
    staying: Mapping[int, tuple[int, ...]],
    *,
    going: Sequence[int] = (),
    least: int = 1,
    pack: bool = False,
    apart: bool = False,
    allows: Callable[[int], bool] = lambda gpus: True,
) -> Moves | None:
    """Return the blocks that join and leave so that the job has `target` GPUs, or None if that is impossible now.

    `blocks` train now, the leader first. `staying` maps each smaller size to the blocks that stay at this size (see
    `staying_at`). `spare` tasks may join, the best first. The blocks `going` must be replaced, the most urgent first.
    As many of them are replaced as free GPUs allow. Guests never replace base blocks.

    The best choice leaves the job on the fewest nodes and, among equals, replaces the fewest GPUs. With `apart` it
    replaces the fewest GPUs on any number of nodes. A job that already has `target` GPUs is changed only with `pack`,
    or to replace a block.

    If a growing job cannot reach `target`, it grows to the largest size below it that its owner `allows`. If a
    shrinking job cannot reach `target`, it drops blocks until it has fewer GPUs, but at least `least`. Once the dropped
    GPUs are free, new blocks bring it to `target`.
    """
    if target < 1 or not blocks:
        return None
    room, lent = site.free.gpus, site.guests.running if site.guests is not None else ()

    def keeps_base(stay: Sequence[RunningBlock], added: Iterable[tuple[int, Shape]] = ()) -> bool:
        return site.guests is None or site.guests.keep_base(blocks, stay, added)

    for urgent in range(len(going), -1, -1):
        leaving = frozenset(going[:urgent])
        rest = [block for block in blocks if block.task not in leaving]
        kept = staying_at(rest, site.node_gpus, going, lent, blocks[0].task) if leaving else staying
        if not pack and not leaving and sum(block.shape.gpus for block in blocks) == target:
            return Moves()
        ways = []
        for gpus in sorted((gpus for gpus in kept if target - room <= gpus <= target), reverse=True):
            stay = [block for block in blocks if block.task in kept[gpus]]
            added = _added(target - gpus, spare, stay, site)
            if added is not None and keeps_base(stay, added):
                ways.append((_nodes(stay, added, site), Moves(added, _others(blocks, kept[gpus]))))
        if ways:
            # If several ways end on equally few nodes, the first keeps most GPUs.
            return ways[0][1] if apart else min(ways, key=itemgetter(0))[1]
    has = sum(block.shape.gpus for block in blocks)
    if has < target <= has + room:
        for gpus in _on_the_way(has, target, site.node_gpus):
            if allows(gpus) and (added := _added(gpus - has, spare, blocks, site)):
                return Moves(added)
    if has > target:
        # Blocks that must be replaced are ignored in a step on the way.
        for gpus in sorted((gpus for gpus in staying if least <= gpus < target and gpus), reverse=True):
            if keeps_base([block for block in blocks if block.task in staying[gpus]]):
                return Moves((), _others(blocks, staying[gpus]))
    return None


def _on_the_way(has: int, target: int, full: int) -> Iterator[int]:
    """Yield sizes between `has` and `target`, descending: first all sizes less than a node (`full` GPUs) below
    `target`, then `has` plus whole nodes."""
    near = max(target - full, has)
    yield from range(target - 1, near, -1)
    yield from (has + nodes * full for nodes in range((near - has) // max(full, 1), 0, -1))


def _nodes(stay: Sequence[RunningBlock], added: Sequence[tuple[int, Shape]], site: FreeGpus) -> int:
    """Return the number of nodes on which the job runs with the blocks `stay` and `added`."""
    own = {name for block in stay for name in block.nodes}
    room = site.free.only(own)
    return len(own) + sum(shape.nodes for _, shape in added if not room.take(shape))


def _others(blocks: Sequence[RunningBlock], kept: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(block.task for block in blocks if block.task not in kept))


_Cost = tuple[int, ...]


def staying_at(
    blocks: Sequence[RunningBlock],
    node_gpus: int,
    going: Collection[int] = (),
    guests: Collection[int] = (),
    leader: int | None = None,
) -> dict[int, tuple[int, ...]]:
    """Return the tasks of the best subset of the blocks for each size that a subset has, 0 included.

    Subsets are compared by five criteria, the most important first: few blocks of `going`; few GPUs of `guests`; with
    the `leader` (by default the first block); many GPUs in blocks of whole nodes; few blocks.
    """
    leader = blocks[0].task if leader is None and blocks else leader
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {0: ((0, 0, 0, 0, 0), ())}
    for block in blocks:
        gone, leads = block.task in going, block.task == leader
        lent = block.shape.gpus if block.task in guests else 0
        whole = block.shape.gpus if block.shape.gpus_per_node == node_gpus else 0
        for gpus, (cost, tasks) in list(best.items()):
            total = tuple(map(add, cost, (gone, lent, -(leads and not gone), -whole, 1)))
            size = gpus + block.shape.gpus
            if size not in best or total < best[size][0]:
                best[size] = total, (*tasks, block.task)
    return {gpus: tasks for gpus, (_, tasks) in best.items()}


def _added(
    gpus: int, spare: Sequence[int], kept: Sequence[RunningBlock], site: FreeGpus
) -> tuple[tuple[int, Shape], ...] | None:
    """Return new blocks with `gpus` GPUs in total that fit next to the blocks `kept`: pairs of a spare task and a
    shape. Return None if there are none."""
    if not gpus:
        return ()
    for shapes in _shapes(gpus, kept, site):
        whole = sum(shape.gpus for shape in shapes) == gpus
        if whole and len(shapes) <= len(spare) and _fit(shapes, kept, site):
            return tuple(zip(spare, shapes, strict=False))
    return None


def _shapes(gpus: int, kept: Sequence[RunningBlock], site: FreeGpus) -> Iterator[list[Shape]]:
    """Yield ways to divide `gpus` GPUs into new blocks, the best way first, each with its largest block first.

    Blocks of 1, 2, 4… GPUs or nodes are preferred, so that the job can later shrink to any size.
    """
    full = site.node_gpus
    nodes, rest = divmod(gpus, full)
    if site.guests is not None:
        yield site.guests.shapes(gpus, kept, full)
    if not rest or not site.whole_nodes:
        yield _by_powers(gpus, full)
    if not rest:
        yield [Shape(nodes, full)]
    if site.whole_nodes:
        return
    if gpus < full:
        yield [Shape(1, gpus)]
    if len({block.shape.gpus_per_node for block in kept}) == 1:
        each = kept[0].shape.gpus_per_node
        if gpus % each == 0:
            yield [Shape(gpus // each, each)]
    for each in range(min(full, gpus), 0, -1):
        if gpus % each == 0:
            yield [Shape(gpus // each, each)]
    yield list(_filling(gpus, site.free, full))


def _by_powers(gpus: int, full: int) -> list[Shape]:
    nodes, rest = divmod(gpus, full)
    return [Shape(count, full) for count in _powers(nodes)] + [Shape(1, count) for count in _powers(rest)]


def _powers(count: int) -> list[int]:
    return [1 << bit for bit in range(count.bit_length() - 1, -1, -1) if count >> bit & 1]


def _filling(gpus: int, free: Mapping[str, int], full: int) -> Iterator[Shape]:
    """Yield shapes of blocks that fill the free nodes: few blocks for all wholly free nodes, then one for each partly
    free node. If too few GPUs are free, the shapes have fewer than `gpus` GPUs in total."""
    whole = min(sum(room >= full for room in free.values()), gpus // full)
    yield from (Shape(count, full) for count in _powers(whole))
    gpus -= whole * full
    for room in sorted(free.values(), reverse=True)[whole:]:
        if gpus and room:
            yield Shape(1, min(room, gpus))
            gpus -= min(room, gpus)


def _fit(shapes: Sequence[Shape], kept: Sequence[RunningBlock], site: FreeGpus) -> bool:
    """Tell whether Slurm finds room for all these shapes. If blocks must not share a node, return False if Slurm might
    place two on one node."""
    if not site.split_nodes:
        smallest = min(shape.gpus_per_node for shape in shapes)
        if len(shapes) > 1 and smallest < site.node_gpus:
            return False
        if any(site.free.get(name, 0) >= smallest for block in kept for name in block.nodes):
            return False
    room = site.free.trial()
    return all(room.take(shape) for shape in shapes)
