"""Rules of one tick for each job. Both the views that policies get and the planning of resizes use them.

A `Round` holds what one tick has observed. Its `PartitionRules` hold the reasons why elastic jobs may not change now,
the free GPUs of the partition, and the caps. Both are plain data without a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ones_db import JobHistory, PromiseRecord, ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.config import ResizeSettings, Settings
from slurm_ones.jobs.elastic import Elastic, Observation, guests_of
from slurm_ones.learn.workload import GuestLives
from slurm_ones.policy.contract import Allocation
from slurm_ones.policy.ledger import Ledger
from slurm_ones.rules.blocks import (
    BLOCKS,
    REQUEUE,
    GuestSizes,
    Moves,
    RunningBlock,
    drains,
    going,
    guest_gpus,
    hot,
    members_of,
    renewal,
    spare,
    starting,
    staying_at,
    task_of,
    to_hold,
    training,
)
from slurm_ones.rules.caps import Cap, CappedJob, caps_of
from slurm_ones.rules.job_rules import (
    NOTHING_AHEAD,
    Kinds,
    ReservedNodes,
    ahead_of,
    grows_at,
    near_limit,
    pack_dwell_s,
    requeue_dwell_s,
    reserved_ahead,
    resized_enough,
    rested_at,
    size_rules,
    switch_dwell_s,
    too_soon,
)
from slurm_ones.rules.quotas import quota_caps
from slurm_ones.slurm.model import Quotas, SlurmJob, partition_gpus

LOOK_S = 60.0
"""Seconds after a resize or a submission within which Slurm is assumed to have tried to start each pending job."""


def target_of(resize: ResizeRecord) -> Shape:
    """Return the shape that a job has after an open resize: the new shape, or the old one if the resize is being rolled
    back."""
    return resize.old_shape if resize.back else resize.new_shape


def kind_of_target(resize: ResizeRecord) -> str:
    """Return the kind of GPU that the job asks for after the resize; empty for any kind."""
    return resize.old_kind if resize.back else resize.new_kind


class UnderWay(NamedTuple):
    """Shape, kind of GPU and blocks of a job after its open resize."""

    target: Shape
    """Shape after the resize: the new shape, or the old one if the resize is being rolled back."""
    kind: str = ""
    """Kind of GPU that the job will ask for; empty for any kind."""
    moves: Moves | None = None
    """Blocks that join and leave; None for a resize by a requeue."""


def under_way(resizes: Iterable[ResizeRecord]) -> dict[int, UnderWay]:
    """Return shape, kind of GPU and blocks of each job after its open resize, by job id."""
    found = {}
    for resize in resizes:
        # While the resize is being taken back, no block leaves any more.
        dropped = () if resize.back else resize.dropped
        moves = Moves(resize.added, dropped) if resize.mechanism == BLOCKS else None
        found[resize.job_id] = UnderWay(target_of(resize), kind_of_target(resize), moves)
    return found


class GivenBack(NamedTuple):
    """Size of a job after it has given growth back, for pending jobs or because its GPUs are idle."""

    shape: Shape
    nodes: Mapping[str, int]
    """GPUs that the job keeps on each node."""
    tasks: tuple[int, ...]
    """Tasks of the blocks that stay; empty for a plain job."""
    reason: Reason


@dataclass(frozen=True)
class Growth:
    """Result of `rules.growth` for one tick: which jobs give growth back, and which must not grow."""

    back: Mapping[int, GivenBack] = field(default_factory=dict)
    """Size to which each job goes back, by job id."""
    contested: Mapping[str, int] = field(default_factory=dict)
    """Nodes on which a pending job waits for room, each with the id of this pending job. On them, jobs grow only by
    guests."""
    unserved: Mapping[str, int] = field(default_factory=dict)
    """Nodes of `contested` on which jobs do not grow at all, since Slurm does not preempt guests for the
    pending job."""
    limited: Mapping[int, int] = field(default_factory=dict)
    """Jobs that must not grow: for each id, the id of a pending job that waits for a limit both share."""

    def stops(self, elastic: Elastic, *, guests: bool) -> int | None:
        """Return the id of the pending job that keeps this job from growing; None if there is none. `guests` tells
        whether jobs of its partition grow by guests."""
        contested = self.unserved if guests and elastic.job.by_blocks else self.contested
        limited = self.limited.get(elastic.job.job_id)
        return limited or next((contested[name] for name in elastic.holdings if name in contested), None)


class WaitingStart(NamedTuple):
    """Shape and kind of GPU with which a waiting job is to start."""

    job_id: int
    shape: Shape
    kind: str
    """Kind of GPU that the job needs; empty for any kind."""


@dataclass(frozen=True)
class JobRules:
    """An elastic job, and the rules that hold for it in this tick."""

    elastic: Elastic
    history: JobHistory | None
    under_way: UnderWay | None
    """The job's open resize; None without one."""
    untouchable: Reason | None
    """Reason why nothing about the job may be changed, not even the time of its start; None if there is none."""
    resting: Reason | None
    """Reason why the job may not be resized now, such as its dwell time; None if there is none. It counts only if
    `untouchable` is None."""
    blocks: tuple[RunningBlock, ...] = ()
    """Running blocks of a job of blocks, the leader first."""
    prepared: bool = False
    """True for a job of blocks that was resized before, since its array's throttle is then lifted."""
    spare: tuple[int, ...] = ()
    """Tasks of a job of blocks that may join its training, best first."""
    to_hold: tuple[int, ...] = ()
    """Tasks of a job of blocks that must be held before the array's throttle is lifted."""
    going: tuple[int, ...] = ()
    """Tasks of the blocks that must be replaced, the most urgent first."""
    renewal: Moves | None = None
    """New base blocks that the job needs, and the blocks that they replace; None if it needs none. Slurm preempts
    guests for them."""
    staying: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tasks of the blocks that stay, for each size that the job can reach by blocks that leave."""
    settled: bool = False
    """True if the last resize is long enough ago for the job to move to fewer nodes with the same number of GPUs."""
    given_back: GivenBack | None = None
    """Size to which the job gives growth back, to pending jobs or because it is idle; None if it gives back none."""
    guests: frozenset[int] | None = None
    """Task numbers of the job's blocks that run as guests; None if the job does not grow by guests."""
    ahead: ReservedNodes = NOTHING_AHEAD
    """Nodes with a reservation that begins before a run started now would reach its time limit."""
    barred: frozenset[str] = frozenset()
    """Nodes that the job's user excludes, by `--exclude` or `--constraint`."""

    @property
    def fixed(self) -> Reason | None:
        """Reason why the job may not be resized now; None if it may."""
        return self.untouchable or self.resting

    @property
    def asked(self) -> int | None:
        """Number of GPUs that the owner sets by hand (`size=`); None without it."""
        optin = self.elastic.optin
        return optin.size if optin is not None else None

    @property
    def requested(self) -> int:
        """Number of GPUs that no cap takes from the job: the larger of its first request and its present shape."""
        job = self.history.job if self.history is not None else None
        asked = job.requested_shape.gpus if job is not None else 0
        return max(asked, self.elastic.shape.gpus)

    @property
    def spec(self) -> Spec | None:
        """Spec that the job reported (its batches and limits); None before its first report."""
        return self.history.spec if self.history is not None else None

    def batch_of(self, choice: Allocation | None) -> int | None:
        """Return the global batch of a choice for the job; None before the job's first report, since its script then
        sets the batch."""
        return choice.batch if choice is not None and self.spec is not None else None

    @property
    def gpus(self) -> int:
        """Larger of the job's GPUs now and after its open resize."""
        return _gpus(self.elastic, self.under_way, prepared=self.prepared)


@dataclass(frozen=True)
class PartitionRules:
    """Rules of one partition and of its elastic jobs."""

    name: str
    jobs: Mapping[int, JobRules]
    """Elastic jobs of this partition, by id, ascending. A job that names several partitions counts in the first."""
    free: Ledger
    """GPUs that Slurm could allocate on each node, minus the GPUs that open resizes are about to take."""
    caps: tuple[Cap, ...]
    settings: ResizeSettings
    open: Counter[str]
    """Number of open resizes in all partitions, by mechanism."""
    node_gpus: int = 0
    """GPUs of a full node."""
    whole_nodes: bool = False
    split_nodes: bool = True
    """False if Slurm shows a block only its own GPUs of a node; then two blocks of a job may not share a node."""
    kinds: Kinds = field(default_factory=Kinds)
    """Kinds of the partition's GPUs."""
    later: tuple[WaitingStart, ...] = ()
    """Waiting jobs with a new shape from an earlier resize, for which too few GPUs in `free` are left."""
    closed: frozenset[str] = frozenset()
    """Nodes on which Slurm starts no jobs."""
    draining: frozenset[str] = frozenset()
    """Nodes of `closed` that drain, fail or are down; a requeued job cannot start there again."""
    contested: frozenset[str] = frozenset()
    """Nodes on which no job grows, because pending jobs wait for their GPUs."""
    most_guests: int = 0
    """Largest number of guests of a job (`GuestSettings.most`); 0 if jobs do not grow by guests in this partition."""

    def guest_sizes(self, job: JobRules) -> GuestSizes | None:
        """Return the sizes of the guests by which the job grows; None if it does not. One spare task is kept for a new
        base block."""
        if job.guests is None or job.history is None:
            return None
        asked, optin = job.history.job.requested_shape.gpus, job.elastic.optin
        most = min(job.elastic.gpu_range[1], len(self.free) * self.node_gpus)
        tasks = min(len(job.spare) - 1, self.most_guests - len(job.guests))
        together = max((rule.together for rule in size_rules(job.spec, self.node_gpus)), default=1)
        together = math.lcm(together, optin.step if optin is not None else 1)
        apart = self.whole_nodes or not self.split_nodes
        to_grow = most - max(sum(block.shape.gpus for block in job.blocks), asked)
        each = self.node_gpus if apart else guest_gpus(to_grow, tasks, self.node_gpus, together)
        return GuestSizes(asked, job.guests, max(each, 1))


@dataclass(frozen=True)
class Round:
    """Observations of one tick, and the settings."""

    seen: Observation
    histories: Mapping[int, JobHistory]
    settings: Settings
    under_way: Mapping[int, UnderWay]
    """Shape, kind of GPU and blocks of each job after its open resize, by job id."""
    now: float
    held: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Tasks that the companion holds, for each job of blocks that it has resized before, by job id."""
    split_nodes: bool = True
    """False if Slurm shows a block only its own GPUs of a node; then two blocks of a job may not share a node."""
    promises: Mapping[int, PromiseRecord] = field(default_factory=dict)
    """Answer to each job's deadline, promised or refused, by job id."""
    types_given: bool = True
    """True if a job may ask Slurm for another GPU type than at its submission (see `Kinds.given`)."""
    switches: Mapping[int, float] = field(default_factory=dict)
    """Expected pause of each job when its blocks change, in seconds, by job id."""
    lives: GuestLives = field(default_factory=GuestLives)
    """Observed run times of guests."""
    growth: Growth = field(default_factory=Growth)
    """Jobs that give growth back, and jobs that must not grow."""
    quotas: Quotas = field(default_factory=Quotas)
    """Slurm's limits of accounts, QOS and users, with their present use."""
    loses_licenses: bool = False
    """True if this release of Slurm forgets the licences of a requeued job."""

    def begun(self, resizes: Mapping[int, UnderWay]) -> Round:
        """Return the round with these resizes added to the open ones, for the partitions that are decided later in this
        tick."""
        return replace(self, under_way={**self.under_way, **resizes}) if resizes else self

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions with elastic jobs."""
        return tuple(sorted({one.partition for one in self.seen.elastic.values()}))

    def full_node(self, name: str) -> tuple[int, bool]:
        """Return the number of GPUs of a full node of the partition, and True if Slurm allocates only whole nodes
        there. Return 0 and False for an unknown partition."""
        partition = self.seen.snapshot.partitions.get(name)
        given = self.settings.whole_node_gpus
        return partition_gpus(partition, self.seen.snapshot, given) if partition is not None else (0, False)

    def partition(self, name: str) -> PartitionRules:
        """Return the rules of one partition, for both the policy's views and the plan."""
        here: dict[int, CappedJob] = {}
        there: list[CappedJob] = []
        jobs: dict[int, JobRules] = {}
        for job_id, one in sorted(self.seen.elastic.items()):
            if one.partition == name:
                here[job_id], jobs[job_id] = self._capped(one), self._job_rules(one)
            else:
                there.append(self._capped(one))
        contested = self.growth.unserved if name in self.settings.guests else self.growth.contested
        caps = caps_of(here, there, self.settings.limits, name, self._all_gpus(name)) + self._growth_caps(jobs)
        caps += quota_caps(here, there, self.quotas, self.seen.snapshot)
        free, later = self._free(name)
        return PartitionRules(
            name,
            jobs,
            free,
            caps,
            self.settings.resize,
            Counter(REQUEUE if one.moves is None else BLOCKS for one in self.under_way.values()),
            *self.full_node(name),
            self.split_nodes,
            self.kinds(name),
            later,
            frozenset(node for node in free if not self.seen.snapshot.nodes[node].usable),
            frozenset(node for node in free if drains(self.seen.snapshot.nodes[node])),
            frozenset(contested.keys() & free.keys()),
            self.settings.guests[name].most if name in self.settings.guests else 0,
        )

    def _capped(self, one: Elastic) -> CappedJob:
        job_id = one.job.job_id
        history = self.histories.get(job_id)
        asked = history.job.requested_shape.gpus if history is not None else one.shape.gpus
        gpus = _gpus(one, self.under_way.get(job_id), prepared=job_id in self.held)
        return CappedJob.of(one, guests_of(self.settings).get(one.partition), asked, gpus)

    def _growth_caps(self, jobs: Mapping[int, JobRules]) -> tuple[Cap, ...]:
        """Return caps for the jobs that must not grow, since a pending job waits for room, Slurm preempted their
        blocks, or their GPUs are idle."""
        stopped: dict[int, list[int]] = {}
        resting: list[Cap] = []
        for job_id, job in jobs.items():
            waiting = self.growth.stops(job.elastic, guests=job.elastic.partition in self.settings.guests)
            preempted = job.history.preempted if job.history is not None and job.elastic.job.running else ()
            grows = grows_at(preempted, self.settings.resize.preempted_s)
            if (use := self.seen.idle.get(job_id)) is not None:
                resting.append(Cap(0, frozenset({job_id}), self.unused(use, job.elastic.shape.gpus)))
            elif waiting is not None:
                stopped.setdefault(waiting, []).append(job_id)
            elif grows > self.now:
                resting.append(Cap(0, frozenset({job_id}), reason("growth_rests", until=grows)))
        contested = (Cap(0, frozenset(ids), reason("growth_stops", job=job)) for job, ids in stopped.items())
        return (*contested, *resting)

    def unused(self, use: float, gpus: int, before: int = 0) -> Reason:
        """Return the reason why a job with idle GPUs does not grow. If `before` is given, return the reason why it
        shrinks from `before` to `gpus` GPUs."""
        percent, minutes = use * 100, self.settings.limits.idle_s / 60
        if before:
            return reason("idle_returns", percent=percent, minutes=minutes, before=before, gpus=gpus)
        return reason("idle_stays", percent=percent, minutes=minutes, gpus=gpus)

    def _free(self, name: str) -> tuple[Ledger, tuple[WaitingStart, ...]]:
        """Return the values of `PartitionRules.free` and `PartitionRules.later` for this partition."""
        later: list[WaitingStart] = []
        free = Ledger.of_partition(self.seen.snapshot, name, self.settings.whole_node_gpus)
        nodes = self._nodes_of(name)
        for job_id, (target, kind, moves) in self.under_way.items():
            one = self.seen.elastic.get(job_id)
            if one is None or (one.partition != name and nodes.isdisjoint(self._nodes_of(one.partition))):
                continue
            only = self.kinds(one.partition).nodes(kind) if kind else None
            if moves is not None:
                held = {block.task for block in training(one, None)}
                for task, shape in moves.added:
                    if task not in held:
                        free.take(shape, only=only)
            elif not (one.job.running and one.shape == target and (only is None or one.holdings.keys() <= only)):
                found = free.take(target, one.holdings, only)
                if not found and one.job.pending:
                    later.append(WaitingStart(job_id, target, kind))
        return free, tuple(later)

    def kinds(self, name: str) -> Kinds:
        """Return the kinds of GPU in the partition."""
        kinds, nodes = self.seen.snapshot.kinds(name), self._nodes_of(name) & self.seen.snapshot.nodes.keys()
        # If the setting gives GPUs to nodes for which Slurm lists none, their kind is unknown.
        if name in self.settings.whole_node_gpus and not kinds.keys() >= nodes:
            kinds = {}
        return Kinds(kinds, self.types_given)

    def _nodes_of(self, name: str) -> frozenset[str]:
        partition = self.seen.snapshot.partitions.get(name)
        return partition.node_set if partition is not None else frozenset()

    def _all_gpus(self, name: str) -> int:
        full = self.full_node(name)[0] if name in self.settings.whole_node_gpus else None
        nodes = self.seen.snapshot.nodes
        return sum(nodes[node].gpus if full is None else full for node in self._nodes_of(name) & nodes.keys())

    def against_shrinking(self, elastic: Elastic) -> Reason | None:
        """Return the reason why the job may not give GPUs back now; None if it may. The dwell time counts only after
        failed resizes."""
        job_id = elastic.job.job_id
        untouchable = _untouchable(elastic, self.under_way.get(job_id))
        return untouchable or self._resting(elastic, self.histories.get(job_id), at_once=True)

    def _job_rules(self, elastic: Elastic) -> JobRules:
        job_id = elastic.job.job_id
        history, under_way = self.histories.get(job_id), self.under_way.get(job_id)
        untouchable, resting = _untouchable(elastic, under_way), self._resting(elastic, history)
        back = self.growth.back.get(job_id)
        if back is not None:
            resting = None
        ahead, barred = self._ahead(elastic), self._barred(elastic.job.home)
        rules = JobRules(elastic, history, under_way, untouchable, resting, given_back=back, ahead=ahead, barred=barred)
        if not elastic.job.by_blocks:
            return rules
        blocks = training(elastic, history)
        leaving = going(elastic, self.seen.snapshot.nodes, self.settings.limits, self.now) if back is None else ()
        could_join = spare(elastic, self.held.get(job_id, ()), members_of(history), self.now)
        guests = self._guests(elastic)
        staying = {back.shape.gpus: back.tasks} if back is not None else None
        if staying is None:
            staying = staying_at(blocks, self.full_node(elastic.partition)[0], leaving, guests or ())
        in_vain = history.changes_without_effect if history is not None else 0
        dwell_s = pack_dwell_s(self._dwell_s(elastic, history), in_vain)
        return replace(
            rules,
            prepared=job_id in self.held,
            blocks=blocks,
            spare=could_join,
            to_hold=to_hold(elastic, members_of(history)),
            going=leaving,
            renewal=self._renewal(elastic, history, could_join) if back is None else None,
            staying=staying,
            settled=self.now >= rested_at(elastic.job, history, dwell_s),
            guests=guests,
        )

    def _guests(self, elastic: Elastic) -> frozenset[int] | None:
        if elastic.partition not in self.settings.guests or not elastic.takes_guests:
            return None
        return frozenset(map(task_of, elastic.job.running_blocks)) & elastic.job.guests

    @cached_property
    def _lent(self) -> Counter[str]:
        """GPUs that guests hold on each node. A preempted guest counts until it has ended."""
        held = Counter[str]()
        for elastic in self.seen.elastic.values():
            for job in elastic.job.blocks:
                if (job.running or job.completing) and elastic.job.is_guest(job):
                    held.update(dict.fromkeys(job.node_list, elastic.shape_of(job).gpus_per_node))
        return held

    def _served(self, elastic: Elastic) -> bool:
        """Tell whether Slurm is about to preempt guests for this pending job: it fits only with their GPUs, and has
        waited for at most `LOOK_S`."""
        job = elastic.job
        fresh = job.pending and self.now - max(job.submit_time, job.eligible_time) <= LOOK_S
        if not (self.settings.guests and fresh and self._lent):
            return False
        free = Ledger.of_partition(self.seen.snapshot, elastic.partition, self.settings.whole_node_gpus)
        if free.fits(elastic.shape):
            return False
        free.give(self._lent)
        return free.fits(elastic.shape)

    def _ahead(self, elastic: Elastic) -> ReservedNodes:
        """Return the nodes with a reservation that begins before the job's time limit; none if the job grows by
        guests."""
        if hot(elastic) and elastic.partition in self.settings.guests:
            return NOTHING_AHEAD
        joining = next((block for block in elastic.job.blocks if block.pending), elastic.job.first)
        return ahead_of(joining, self.seen.snapshot, self.now)

    def _barred(self, job: SlurmJob) -> frozenset[str]:
        if not (job.excluded_nodes or job.features):
            return frozenset()
        return frozenset(name for name, node in self.seen.snapshot.nodes.items() if not node.takes(job))

    def _restarts(self, elastic: Elastic) -> Reason | None:
        """Return the reason why the job could not start again after a requeue; None if it could."""
        if not elastic.job.running:
            return None
        if self.loses_licenses and elastic.job.home.licenses:
            return reason("licenses_lost")
        snapshot, given = self.seen.snapshot, self.settings.whole_node_gpus
        return reserved_ahead(elastic.job.first, elastic.shape, snapshot, given, self.now)

    def _renewal(self, elastic: Elastic, history: JobHistory | None, could_join: Sequence[int]) -> Moves | None:
        if history is None or not hot(elastic) or elastic.partition not in self.settings.guests:
            return None
        return renewal(elastic, history.job.requested_shape, could_join, self.settings.limits, self.now)

    def _dwell_s(self, elastic: Elastic, history: JobHistory | None) -> float:
        settings = self.settings.resize
        if hot(elastic):
            return switch_dwell_s(self.switches.get(elastic.job.job_id, 0.0), settings)
        return requeue_dwell_s(history, settings)

    def _resting(self, elastic: Elastic, history: JobHistory | None, *, at_once: bool = False) -> Reason | None:
        """Return the reason why the job may not be resized now, apart from reasons in `JobRules.untouchable`; None if
        it may. With `at_once` the dwell time counts only after failed resizes."""
        job = elastic.job
        if self._served(elastic):
            return reason("guests_leave")
        if (mistake := _mistake(elastic, history)) is not None:
            return mistake
        dwell_s = self._dwell_s(elastic, history)
        rested = rested_at(job, history, dwell_s)
        failed = history is not None and history.failures > 0
        # A size that the owner sets by hand does not wait for the dwell time.
        by_hand = elastic.optin is not None and elastic.optin.size is not None
        if self.now < rested and not by_hand and not (at_once and not failed):
            if history is not None and failed and rested > job.start_time + dwell_s:
                return reason("dwell_failures", until=rested, times=history.failures)
            return reason("dwell_time", until=rested, dwell_s=dwell_s)
        if job.running and (history is None or history.spec is None):
            return reason("nothing_reported")
        if job.running and (early := too_soon(history)) is not None:
            return early
        limits = self.settings.limits
        if hot(elastic):
            return None  # each block has its own time limit: see `rules.blocks.going`
        worn = near_limit(job.first, limits, self.now) or resized_enough(job, history, limits, self.now)
        return worn or self._restarts(elastic)


def _mistake(elastic: Elastic, history: JobHistory | None) -> Reason | None:
    """Return a mistake in how the job was started, which time does not correct; None if there is none."""
    if history is None:
        return None
    if history.misfit is not None and not elastic.job.by_blocks:
        ranks, gpus = history.misfit
        return reason("gpus_idle" if ranks < gpus else "gpus_shared", ranks=ranks, gpus=gpus)
    batch, spec = elastic.optin.batch if elastic.optin is not None else None, history.spec
    if batch and spec is not None and batch[0] > spec.max_batch:
        return reason("batch_misses", first=batch[0], last=batch[1], base=spec.base_batch, most=spec.max_batch)
    return None


def _untouchable(elastic: Elastic, under_way: UnderWay | None) -> Reason | None:
    job = elastic.job.first
    if under_way is not None:
        return reason("resize_under_way")
    if elastic.refusal:
        return elastic.refusal
    if job.held:
        return reason("held_by_operator") if job.admin_held else reason("held_by_owner")
    if job.completing:
        return reason("completing")
    if not (job.running or job.pending):
        return reason("not_running", state=job.state.value.lower())
    return None


def _gpus(elastic: Elastic, under_way: UnderWay | None, *, prepared: bool) -> int:
    """Return the larger of two numbers of GPUs: the job's now, with blocks that are joining, and after its open
    resize."""
    target = under_way.target.gpus if under_way is not None else 0
    if elastic.job.pending:
        return target
    held = {block.task: block.shape.gpus for block in training(elastic, None)}
    moves = under_way.moves if under_way is not None else None
    joining = sum(shape.gpus for task, shape in (moves.added if moves else ()) if task not in held)
    return max(sum(held.values()) + joining + (starting(elastic) if prepared else 0), target)
