"""Planning: which resizes of a schedule begin now.

Each job that the schedule would change gets an outcome: its resize begins, or a reason why not. Planning changes no
job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ones_db.reasons import SITE_LIMITS, Reason, reason
from ones_db.shape import PARKED, Shape
from slurm_ones.jobs.elastic import Elastic, as_one
from slurm_ones.policy.contract import Allocation, JobView, Schedule
from slurm_ones.policy.ledger import Ledger
from slurm_ones.rules.blocks import (
    BLOCKS,
    REQUEUE,
    FreeGpus,
    Moves,
    hot,
    members_of,
    moves,
    returning_guests,
    train_together,
)
from slurm_ones.rules.caps import CapUse
from slurm_ones.rules.gate import JobRules, PartitionRules, Round, UnderWay, WaitingStart
from slurm_ones.rules.growth import with_growth
from slurm_ones.rules.job_rules import breaks, parts, size_rules
from slurm_ones.text import resized


@dataclass(frozen=True)
class PlannedChange:
    """Planned change of one job. The job is stopped if the new shape is `PARKED`. Without a resize (`resizes`), an
    order changes only its batch."""

    elastic: Elastic
    old: Shape
    new: Shape
    old_batch: int | None
    new_batch: int | None
    """Global batch to order; None if the job keeps its own."""
    moves: Moves | None = None
    blocks: tuple[int, ...] | None = None
    """Tasks of the blocks that train together after the change, ascending; None for a plain or a pending job."""
    to_hold: tuple[int, ...] = ()
    """Tasks to hold before the array's throttle is lifted (`JobRules.to_hold`)."""
    old_kind: str = ""
    """Kind of GPU that the job asks for now; empty for any kind."""
    new_kind: str = ""
    """Kind of GPU that the job will ask for; empty for any kind."""
    leaves_kind: bool = False
    """True if a running job changes to GPUs of another kind."""

    @property
    def resizes(self) -> bool:
        """True if the job's shape or kind of GPU changes, or a block joins or leaves; False if only the batch does."""
        if self.mechanism == BLOCKS:
            return bool(self.moves)
        return self.old != self.new or self.old_kind != self.new_kind

    @property
    def job_id(self) -> int:
        return self.elastic.job.job_id

    @property
    def mechanism(self) -> str:
        """Mechanism of the resize: `BLOCKS`, or `REQUEUE` for a plain or a pending job."""
        return BLOCKS if hot(self.elastic) else REQUEUE

    @property
    def parks(self) -> bool:
        return self.new == PARKED

    def __str__(self) -> str:
        return resized(self.old, self.new, self.old_batch, self.new_batch, self.old_kind, self.new_kind)


@dataclass(frozen=True)
class ResizePlan:
    """Changes that begin now, and the outcome for each job in the schedule."""

    begin: tuple[PlannedChange, ...]
    outcomes: Mapping[int, Reason]
    deferred: frozenset[int] = frozenset()
    """Ids of waiting jobs that must not start now."""
    queued: frozenset[int] = frozenset()
    """Ids of waiting jobs whose resize waits because too many resizes are open. Deferred jobs among them stay deferred
    until their resize begins."""


class GpuPool:
    """Free GPUs of a partition while a plan distributes them."""

    def __init__(self, rules: PartitionRules) -> None:
        self.free = rules.free.trial()
        """Free GPUs of each node, minus the GPUs that are kept for waiting jobs."""
        self._kinds, self._later, self._closed = rules.kinds, rules.later, rules.closed
        self._given: Counter[str] = Counter()
        self._known = True
        for job in rules.jobs.values():
            if job.under_way is not None and job.elastic.job.running:
                self.leave(job, job.under_way.moves)

    def leave(self, job: JobRules, moves: Moves | None) -> None:
        """Count the GPUs that become free when blocks leave. `moves` is None for a requeue, which frees an unknown
        number."""
        self._known = self._known and bool(moves)
        for block in job.blocks:
            if moves and block.task in moves.dropped:
                self._given.update(dict.fromkeys({*block.nodes} - self._closed, block.shape.gpus_per_node))

    def take(self, shape: Shape, kind: str) -> bool:
        """Take the shape's GPUs from the free ones of this kind (empty for any kind). Return False and take nothing if
        too few are free."""
        return self.free.take(shape, only=self._kinds.nodes(kind))

    def set_aside(self, waiting: Sequence[WaitingStart]) -> set[int]:
        """Keep GPUs, free now or soon, for jobs that are about to start: first for jobs that earlier ticks reshaped,
        then for `waiting`. Return the ids of the jobs that find too few GPUs; no ids if a requeue is open, since it may
        free enough."""
        after = self.free.trial()
        after.give(self._given)
        without = {
            start.job_id
            for start in (*self._later, *waiting)
            if not after.take(start.shape, only=self._kinds.nodes(start.kind))
        }
        self.free = self.free.at_most(after)
        return without if self._known else set()


def plan(schedule: Schedule, rules: PartitionRules) -> ResizePlan:
    """Return the changes of the schedule that begin now, and the outcome for each job.

    The site's limits are checked here too, in case the policy ignores them. Caps must hold at every moment while
    resizes are open. So each job counts with the larger of its GPUs before and after its resize.
    """
    jobs = rules.jobs
    parked = {id_: jobs[id_] for id_ in schedule.parked & jobs.keys() if jobs[id_].elastic.job.pending}
    changes = sorted(
        (
            _change(jobs[id_], schedule.allocations.get(id_), rules)
            for id_ in {*schedule.allocations, *schedule.parked} & jobs.keys() - parked.keys()
        ),
        key=lambda change: _turn(change, schedule),
    )
    planner = _Planner(rules, changes)
    for change in changes:
        planner.consider(change)
    # Jobs that keep their GPUs move to fewer nodes if other jobs leave room.
    for change in changes:
        job = jobs[change.job_id]
        fewest = -(-job.gpus // max(rules.node_gpus, 1))
        packs = _gained(change) == 0 and job.settled and len(job.elastic.job.node_list) > fewest
        if packs and change.job_id not in planner.outcomes:
            planner.consider(change, pack=True)
    planner.let_wait_small(schedule)
    kept = {id_: job.untouchable or reason("kept_waiting") for id_, job in parked.items()}
    deferred = frozenset(id_ for id_, job in parked.items() if job.untouchable is None)
    return ResizePlan(tuple(planner.begin), kept | planner.outcomes, deferred, frozenset(planner.queued))


class _Planner:
    """Builder of a plan, change by change."""

    def __init__(self, rules: PartitionRules, changes: Sequence[PlannedChange]) -> None:
        jobs = rules.jobs
        self._rules, self._room = rules, GpuPool(rules)
        # A waiting job that may start counts with the GPUs that it asks for.
        most = {id_: job.gpus for id_, job in jobs.items()}
        given = {change.job_id for change in changes if not change.parks}
        self._use = CapUse(rules.caps, most | {id_: jobs[id_].elastic.shape.gpus for id_ in given if not most[id_]})
        self._open = rules.open.copy()
        waiting = [change for change in changes if change.elastic.job.pending and not jobs[change.job_id].under_way]
        self._reserved = {change.job_id for change in waiting if self._is_reserved(change, jobs[change.job_id])}
        """Waiting jobs that now fit only on nodes with a coming reservation (see `ReservedNodes`)."""
        may_start = (change for change in waiting if change.job_id not in self._reserved)
        starts = sorted(WaitingStart(change.job_id, change.new, change.new_kind) for change in may_start)
        self._later = [start for start in starts if not self._room.take(start.shape, start.kind)]
        self._without: set[int] | None = None
        """Waiting jobs for which too few GPUs remain; None until GPUs have been kept for waiting jobs."""
        self.begin: list[PlannedChange] = []
        self.outcomes: dict[int, Reason] = {}
        self.queued: set[int] = set()

    def consider(self, change: PlannedChange, *, pack: bool = False) -> None:
        """Add the change to the plan, or store the reason why it does not begin now. With `pack` a job of blocks moves
        to fewer nodes at the same size."""
        rules, job = self._rules, self._rules.jobs[change.job_id]
        if self._without is None and (change.elastic.job.pending or _gained(change) >= 0):
            self._without = self._room.set_aside(self._later)
        by_blocks = change.mechanism == BLOCKS
        if by_blocks:
            change = _with_moves(change, job, rules, self._room.free, pack=pack)
        moves_on = change.resizes or change.parks or (by_blocks and change.leaves_kind)
        if not moves_on and change.old.gpus == change.new.gpus:
            self._order_batch(change, job)
            return
        against = _hindrance(change, job, rules, self._use)
        if by_blocks and against is not None and against.code in SITE_LIMITS:
            # To move to fewer nodes a job holds more GPUs for a moment than if blocks just join.
            joined = _with_moves(change, job, rules, self._room.free, apart=True)
            if joined.moves and _hindrance(joined, job, rules, self._use) is None:
                change, against = joined, None
        against = against or self._too_many(change.mechanism) or self._without_room(change, job)
        if against is None:
            self._begin(change, job, pack)
            return
        self.outcomes[change.job_id] = against
        if against.code == "max_open" and job.elastic.job.pending:
            self.queued.add(change.job_id)

    def _order_batch(self, change: PlannedChange, job: JobRules) -> None:
        # An order in the middle of a resize would cancel its drain.
        free_to_change = job.elastic.job.running and not job.elastic.refusal and job.under_way is None
        if free_to_change and change.new_batch and change.old_batch not in (None, change.new_batch):
            against = breaks(job.spec, change.old, change.old_batch, change.new_batch, self._rules.node_gpus)
            self.begin += [change] if against is None else []
            self.outcomes[change.job_id] = against or reason("batch_changes")

    def _too_many(self, mechanism: str) -> Reason | None:
        settings = self._rules.settings
        most = {REQUEUE: settings.max_open, BLOCKS: settings.max_open_blocks}[mechanism]
        return reason("max_open", resizes=most) if self._open[mechanism] >= most else None

    def _without_room(self, change: PlannedChange, job: JobRules) -> Reason | None:
        """Return a reason if the job's new shape does not fit, else None. For a running job that is requeued, also take
        its new shape from the free GPUs."""
        if change.mechanism == BLOCKS:
            return reason("no_moves", gpus=change.new.gpus) if change.moves is None else None
        if change.job_id in self._reserved or (job.elastic.job.running and self._is_reserved(change, job)):
            return job.ahead.reason
        if job.elastic.job.running:
            own = _own(change, self._rules)
            none = not self._room.free.take(change.new, own, _open_nodes(job, self._rules, change.new_kind))
        else:
            none = job.elastic.job.by_blocks and change.job_id in (self._without or ())
        return reason("gpus_not_free", shape=str(change.new)) if none else None

    def _is_reserved(self, change: PlannedChange, job: JobRules) -> bool:
        """Tell whether the job's new shape now fits only on nodes with a coming reservation (see `ReservedNodes`)."""
        if not job.ahead.nodes or (job.elastic.job.pending and _gained(change) <= 0):
            return False
        kind, own = change.new_kind, _own(change, self._rules)
        only = self._rules.kinds.nodes(kind), _open_nodes(job, self._rules, kind)
        room, rest = (self._room.free.nodes_for(change.new, own, names) is not None for names in only)
        return room and not rest

    def _begin(self, change: PlannedChange, job: JobRules, pack: bool) -> None:
        self.begin.append(change)
        for _, shape in change.moves.added if change.moves else ():
            self._room.take(shape, change.new_kind)
        if job.elastic.job.running:
            self._room.leave(job, change.moves)
        self._open[change.mechanism] += 1
        replaces = change.mechanism == BLOCKS and change.old.gpus == change.new.gpus and not change.leaves_kind
        replaced = reason("blocks_packed") if pack else reason("blocks_replaced")
        self.outcomes[change.job_id] = replaced if replaces else reason("begins")
        self._use.count_at_least(change.job_id, max(change.new.gpus, _at_once(change)))

    def let_wait_small(self, schedule: Schedule) -> None:
        """Let waiting jobs of blocks without an allocation ask for their smallest size, if their present shape finds no
        room.

        Such a job then starts on the first free GPUs, and grows by blocks. Nothing is done if other jobs wait for room.
        """
        rules = self._rules
        for id_, job in rules.jobs.items() if not rules.contested else ():
            elastic, given = job.elastic, id_ in schedule.allocations or id_ in schedule.parked
            waits = elastic.job.pending and elastic.job.by_blocks and job.under_way is None and job.fixed is None
            if given or not waits or job.asked is not None or self._too_many(REQUEUE):
                continue
            least, shape, kind = _least(job, rules), elastic.shape, elastic.job.first.kind
            room = self._room.free.nodes_for(shape, only=rules.kinds.nodes(kind))
            if least is not None and least.gpus < shape.gpus and room is None:
                self.begin.append(PlannedChange(elastic, shape, least, None, None, old_kind=kind, new_kind=kind))
                self._open[REQUEUE] += 1
                self.outcomes[id_] = reason("waits_small", gpus=least.gpus)


def _least(job: JobRules, rules: PartitionRules) -> Shape | None:
    """Return the smallest shape on one node that the job may have; None without one, or if the job has a training
    strategy."""
    low, spec = job.elastic.gpu_range[0], job.spec
    if spec is not None and spec.limits is not None:
        return None
    least = -(-spec.base_batch // max(spec.max_local_batch * spec.max_passes, 1)) if spec is not None else 1
    sizes = (rules.node_gpus,) if rules.whole_nodes else range(max(low, least, 1), rules.node_gpus + 1)
    return next((Shape(1, gpus) for gpus in sizes if gpus >= least and job.elastic.allows(gpus)), None)


def _turn(change: PlannedChange, schedule: Schedule) -> tuple[float, ...]:
    """Return the key by which changes are sorted: first those that free GPUs, then by gain of goodput, the largest
    first."""
    gained = max(_gained(change), 0) if change.elastic.job.pending else _gained(change)
    return min(gained, 1), -schedule.gains.get(change.job_id, 0.0), gained, change.job_id


def _open_nodes(job: JobRules, rules: PartitionRules, kind: str) -> frozenset[str] | None:
    only, barred = rules.kinds.nodes(kind), job.ahead.nodes | job.barred
    return (only or frozenset(rules.free)) - barred if barred else only


def _own(change: PlannedChange, rules: PartitionRules) -> dict[str, int]:
    """Return the job's GPUs on each of its nodes, without draining nodes."""
    return {name: gpus for name, gpus in change.elastic.holdings.items() if name not in rules.draining}


def _gained(change: PlannedChange) -> int:
    return change.new.gpus - change.old.gpus


def _with_moves(
    change: PlannedChange,
    job: JobRules,
    rules: PartitionRules,
    free: Ledger,
    *,
    pack: bool = False,
    apart: bool = False,
) -> PlannedChange:
    """Return the change with its `moves`, the blocks that join and leave. They are None if blocks cannot do it now."""
    running = sorted(block.task for block in job.blocks)
    change = replace(change, blocks=tuple(train_together(job.elastic, job.history) or running))
    if change.parks or job.fixed is not None:
        return change
    only = _open_nodes(job, rules, change.new_kind)
    sizes = rules.guest_sizes(job)
    site = FreeGpus(free.only(only), rules.node_gpus, rules.whole_nodes, rules.split_nodes, sizes)
    least = job.elastic.gpu_range[0]
    leaves = change.leaves_kind
    # Blocks of two kinds would train at the pace of the slower kind, so either all blocks are replaced or none.
    going = running if leaves else job.going
    allows = job.elastic.allows
    found = moves(
        job.blocks,
        job.spare,
        change.new.gpus,
        site,
        job.staying,
        going=going,
        least=least,
        pack=pack,
        apart=apart,
        allows=allows,
    )
    if job.renewal and not leaves and not (found and {*job.renewal.dropped} <= {*found.dropped}):
        found = job.renewal
    if not found or (leaves and {*found.dropped} != {*running}):
        return change if leaves else replace(change, moves=found)
    base = {*found.dropped} - job.elastic.job.guests
    if found.gained < sum(block.shape.gpus for block in job.blocks if block.task in base):
        # A guest that Slurm starts again would take the place of the base blocks.
        again = returning_guests(job.elastic, members_of(job.history))
        found = replace(found, dropped=tuple(sorted({*found.dropped, *again})))
    shapes = [block.shape for block in job.blocks if block.task not in found.dropped]
    shapes += [shape for _, shape in found.added]
    shape = as_one(shapes)
    if any(parts(rule, shapes) for rule in size_rules(job.spec, rules.node_gpus) if rule.gpus == shape.gpus):
        return change
    tasks = {*(change.blocks or ()), *(task for task, _ in found.added)} - {*found.dropped}
    change = replace(change, blocks=tuple(sorted(tasks)), to_hold=job.to_hold if found.added else ())
    if shape.gpus == change.new.gpus:
        return replace(change, moves=found)
    # In a step on the way the batch is at most what both sizes take.
    batches = [batch for batch in (change.old_batch, change.new_batch) if batch is not None]
    return replace(change, moves=found, new=shape, new_batch=min(batches, default=None))


def _at_once(change: PlannedChange) -> int:
    return change.old.gpus + change.moves.gained if change.moves else 0


def _change(job: JobRules, allocation: Allocation | None, rules: PartitionRules) -> PlannedChange:
    """Return the change from the job's present shape to its allocation; without an allocation the job is parked."""
    batch = job.history.batch if job.history is not None else None
    asks, shape = job.elastic.job.first.kind, job.elastic.shape
    if allocation is None:
        return PlannedChange(job.elastic, shape, PARKED, batch, None, old_kind=asks, new_kind=asks)
    kind, leaves = rules.kinds.asked(job.elastic, allocation), rules.kinds.leaves(job.elastic, allocation)
    shapes = shape, allocation.shape, batch, allocation.batch
    return PlannedChange(job.elastic, *shapes, old_kind=asks, new_kind=kind, leaves_kind=leaves)


def _hindrance(change: PlannedChange, job: JobRules, rules: PartitionRules, use: CapUse) -> Reason | None:
    """Return the reason why the job may not be resized in this way now; None if it may."""
    if job.untouchable is not None:
        return job.untouchable
    if change.parks and change.mechanism == BLOCKS:
        return reason("blocks_not_parked")
    if job.elastic.job.running:
        if change.parks and not rules.settings.preempt:
            return reason("preempting_off")
        if change.new.gpus < change.old.gpus and not rules.settings.shrink:
            return reason("shrinking_off")
    if job.resting is not None:
        return job.resting
    against = breaks(job.spec, change.new, change.old_batch, change.new_batch, rules.node_gpus)
    if against is not None:
        return against
    # While new blocks replace others, a job that gives up GPUs holds more for a moment.
    least = change.new.gpus < change.old.gpus or (change.moves is not None and change.moves == job.renewal)
    gpus = change.new.gpus if least else max(change.new.gpus, _at_once(change))
    cap = use.hindering(change.job_id, gpus, job.requested)
    return cap.reason if cap is not None else None


@dataclass(frozen=True)
class PartitionSchedule:
    """A policy's schedule for one partition, and what the policy was given."""

    partition: str
    schedule: Schedule
    seconds: float
    views: Mapping[int, JobView] = field(default_factory=dict)
    """View of each job that the policy was given, by job id."""


@dataclass(frozen=True)
class PartitionPlan:
    """One partition's schedule, and the plan of what begins now."""

    decided: PartitionSchedule
    jobs: Sequence[JobRules]
    """Jobs that the policy decided about."""
    plan: ResizePlan


def plans(
    round_: Round, decide: Callable[[Round, PartitionRules], PartitionSchedule], *, begins: bool = True
) -> list[PartitionPlan]:
    """Decide and plan one partition after another. If the plans will be carried out (`begins`), resizes planned in one
    partition count as open in the next."""
    found = []
    round_ = with_growth(round_)
    for partition in round_.partitions:
        rules = round_.partition(partition)
        decided = decide(round_, rules)
        made = plan(decided.schedule, rules)
        # The policy does not decide about a job with an open resize.
        found.append(PartitionPlan(decided, [job for job in rules.jobs.values() if job.under_way is None], made))
        if begins:
            resized = [change for change in made.begin if change.resizes]
            round_ = round_.begun({one.job_id: UnderWay(one.new, one.new_kind, one.moves) for one in resized})
    return found
