"""Rules of one tick for each job: computed once, used for the policy's views and for planning resizes.

A `Round` holds one tick's observations. Its `PartitionRules` say why each elastic job may not change now, and have the
partition's free GPUs and caps. Both are plain data without a clock.
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
from slurm_ones.slurm.model import Partition, Quotas, SlurmJob, partition_gpus

LOOK_S = 60.0
"""Seconds after a resize or a submission within which Slurm has scheduled its queue again."""


def target_of(resize: ResizeRecord) -> Shape:
    """Return the shape that the resize is heading for: the old shape on its way back."""
    return resize.old_shape if resize.back else resize.new_shape


def kind_of_target(resize: ResizeRecord) -> str:
    """Return the kind of GPU that the job asks for at the resize's target; empty for any kind."""
    return resize.old_kind if resize.back else resize.new_kind


class UnderWay(NamedTuple):
    """Target of an open resize."""

    target: Shape
    """Shape that the resize is heading for: the old shape on its way back."""
    kind: str = ""
    """Kind of GPU that the job asks for at the target; empty for any kind."""
    moves: Moves | None = None
    """Joining and leaving blocks of a resize by blocks; None for a requeue."""


def under_way(resizes: Iterable[ResizeRecord]) -> dict[int, UnderWay]:
    """Return the targets of these resizes, by job id."""
    found = {}
    for resize in resizes:
        # No block leaves any more once it is taken back.
        dropped = () if resize.back else resize.dropped
        moves = Moves(resize.added, dropped) if resize.mechanism == BLOCKS else None
        found[resize.job_id] = UnderWay(target_of(resize), kind_of_target(resize), moves)
    return found


class GivenBack(NamedTuple):
    """Size of a job after it has given back growth."""

    shape: Shape
    nodes: Mapping[str, int]
    """GPUs on each node."""
    tasks: tuple[int, ...]
    """Tasks of the blocks that stay, for a job of blocks."""
    reason: Reason


@dataclass(frozen=True)
class Growth:
    """Result of `rules.growth` for one round."""

    back: Mapping[int, GivenBack] = field(default_factory=dict)
    """Size that each job gives back to, by job id."""
    contested: Mapping[str, int] = field(default_factory=dict)
    """Id of the pending job that waits for room on a node, by node; no job grows on such a node."""
    unserved: Mapping[str, int] = field(default_factory=dict)
    """Subset of `contested` on which not even guests are added."""
    limited: Mapping[int, int] = field(default_factory=dict)
    """Id of the pending job that waits for a shared limit, by id of the job that must not grow meanwhile."""

    def stops(self, elastic: Elastic, *, guests: bool) -> int | None:
        """Return the id of the pending job that keeps this job from growing, or None; `guests` tells whether the job's
        partition has guests."""
        contested = self.unserved if guests and elastic.job.by_blocks else self.contested
        limited = self.limited.get(elastic.job.job_id)
        return limited or next((contested[name] for name in elastic.holdings if name in contested), None)


class WaitingStart(NamedTuple):
    """Shape and kind of GPU with which a waiting job will start."""

    job_id: int
    shape: Shape
    kind: str
    """Kind of the job's GPUs; empty for any kind."""


@dataclass(frozen=True)
class JobRules:
    """An elastic job and the rules that hold for it in this round."""

    elastic: Elastic
    history: JobHistory | None
    under_way: UnderWay | None
    """The job's open resize; None without one."""
    untouchable: Reason | None
    """Reason against any change, even a delay of its start."""
    resting: Reason | None
    """Reason against a resize of a job that is not untouchable."""
    blocks: tuple[RunningBlock, ...] = ()
    """Running blocks of a job of blocks, the leader first."""
    prepared: bool = False
    """True for a job of blocks if our changes have lifted its array's throttle, or are about to."""
    spare: tuple[int, ...] = ()
    """Tasks of a job of blocks that may join, the best first."""
    to_hold: tuple[int, ...] = ()
    """Tasks of a job of blocks that must be held before the array's throttle is lifted."""
    going: tuple[int, ...] = ()
    """Tasks of blocks to replace, the most urgent first."""
    renewal: Moves | None = None
    """New base blocks that the job needs even if there is no room now."""
    staying: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tasks that stay, for each size that the job reaches by leaving blocks only."""
    settled: bool = False
    """True if the job may move to fewer nodes at the same number of GPUs."""
    given_back: GivenBack | None = None
    """Size that the job gives growth back to; None if it gives nothing back."""
    guests: frozenset[int] | None = None
    """Tasks of the job's blocks that run as guests; None if the job does not grow by guests."""
    ahead: ReservedNodes = NOTHING_AHEAD
    """Reservations that would begin during a run begun now."""
    barred: frozenset[str] = frozenset()
    """Nodes on which the job's user does not let it start."""

    @property
    def fixed(self) -> Reason | None:
        """Reason against a resize now; None if the job may be resized."""
        return self.untouchable or self.resting

    @property
    def asked(self) -> int | None:
        """GPUs that the owner asks for by hand (`size=`)."""
        optin = self.elastic.optin
        return optin.size if optin is not None else None

    @property
    def requested(self) -> int:
        """GPUs that no cap takes from the job: the first request, or its present request or GPUs, whichever is more."""
        job = self.history.job if self.history is not None else None
        asked = job.requested_shape.gpus if job is not None else 0
        return max(asked, self.elastic.shape.gpus)

    @property
    def spec(self) -> Spec | None:
        """Limits that the job itself reported; None before its first report."""
        return self.history.spec if self.history is not None else None

    @property
    def gpus(self) -> int:
        """GPUs that the job has, or will have after its open resize, whichever is more."""
        return _gpus(self.elastic, self.under_way, prepared=self.prepared)


@dataclass(frozen=True)
class PartitionRules:
    """Rules of one partition and its elastic jobs."""

    name: str
    jobs: Mapping[int, JobRules]
    """Elastic jobs whose first-named partition is this one, by ascending id."""
    free: Ledger
    """GPUs that Slurm could allocate on each node, without those that open resizes are about to need."""
    caps: tuple[Cap, ...]
    settings: ResizeSettings
    open: Counter[str]
    """Number of open resizes in all partitions, by mechanism."""
    node_gpus: int = 0
    """GPUs of a full node."""
    whole_nodes: bool = False
    split_nodes: bool = True
    """True if two blocks of a job on one node see each other's GPUs."""
    kinds: Kinds = field(default_factory=Kinds)
    """Kinds of the partition's GPUs."""
    later: tuple[WaitingStart, ...] = ()
    """Jobs that a resize queued at a shape for which too few GPUs are `free` yet."""
    closed: frozenset[str] = frozenset()
    """Nodes that accept no more jobs."""
    draining: frozenset[str] = frozenset()
    """Nodes of `closed` on which a job that is requeued does not start again."""
    contested: frozenset[str] = frozenset()
    """Nodes on which no job grows, since pending jobs wait for room there."""
    most_guests: int = 0
    """Most guests of a job (`GuestSettings.most`); 0 if no job grows by guests in this partition."""

    def guest_sizes(self, job: JobRules) -> GuestSizes | None:
        """Return the sizes of the guests by which the job grows, or None. One spare task is kept for a base block that
        replaces another."""
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
    """Open resizes, by job id."""
    now: float
    held: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Tasks in holds of ours, by id, for jobs of blocks that were resized before."""
    split_nodes: bool = True
    """True if two blocks of a job on one node see each other's GPUs."""
    promises: Mapping[int, PromiseRecord] = field(default_factory=dict)
    """Promises about the jobs' deadlines, by job id."""
    types_given: bool = True
    """True if Slurm lets jobs ask for another GPU type than at submission (`Kinds.given`)."""
    switches: Mapping[int, float] = field(default_factory=dict)
    """Expected pause of a change of blocks in seconds, by job id."""
    lives: GuestLives = field(default_factory=GuestLives)
    """Observed lifetimes of guests."""
    growth: Growth = field(default_factory=Growth)
    """Growth that goes back to pending jobs, and nodes on which no job grows."""
    quotas: Quotas = field(default_factory=Quotas)
    """Slurm's limits of accounts, QOS and users, and their use now."""
    loses_licenses: bool = False
    """True if this Slurm forgets the licences of requeued jobs."""

    def begun(self, resizes: Mapping[int, UnderWay]) -> Round:
        """Return the round with these resizes counted as open too, for the partitions decided later."""
        return replace(self, under_way={**self.under_way, **resizes}) if resizes else self

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions with elastic jobs."""
        return tuple(sorted({one.partition for one in self.seen.elastic.values()}))

    def full_node(self, partition: Partition) -> tuple[int, bool]:
        """Return the GPUs of a full node of the partition, and whether Slurm allocates its nodes whole."""
        return partition_gpus(partition, self.seen.snapshot, self.settings.whole_node_gpus)

    def partition(self, name: str) -> PartitionRules:
        """Return the rules of one partition, which both the policy's views and the plan use."""
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
            *self._nodes_of(name),
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
        """Return caps that stop growth: room that another waits for, preempted blocks, or idle GPUs."""
        stopped: dict[int, list[int]] = {}
        resting: list[Cap] = []
        for job_id, job in jobs.items():
            waiting = self.growth.stops(job.elastic, guests=job.elastic.partition in self.settings.guests)
            preempted = job.history.preempted if job.history is not None and job.elastic.job.running else ()
            rest_s = grows_at(preempted, self.settings.resize.preempted_s) - self.now
            if (use := self.seen.idle.get(job_id)) is not None:
                resting.append(Cap(0, frozenset({job_id}), self.unused(use, job.elastic.shape.gpus)))
            elif waiting is not None:
                stopped.setdefault(waiting, []).append(job_id)
            elif rest_s > 0.0:
                resting.append(Cap(0, frozenset({job_id}), reason("growth_rests", seconds=rest_s)))
        contested = (Cap(0, frozenset(ids), reason("growth_stops", job=job)) for job, ids in stopped.items())
        return (*contested, *resting)

    def unused(self, use: float, gpus: int, before: int = 0) -> Reason:
        """Return the reason for a job with idle GPUs: it does not grow or, with `before`, gives growth back."""
        percent, minutes = use * 100, self.settings.limits.idle_s / 60
        if before:
            return reason("idle_returns", percent=percent, minutes=minutes, before=before, gpus=gpus)
        return reason("idle_stays", percent=percent, minutes=minutes, gpus=gpus)

    def _free(self, name: str) -> tuple[Ledger, tuple[WaitingStart, ...]]:
        """Return `PartitionRules.free` and `PartitionRules.later` of the partition."""
        later: list[WaitingStart] = []
        free = Ledger.of_partition(self.seen.snapshot, name, self.settings.whole_node_gpus)
        for job_id, (target, kind, moves) in self.under_way.items():
            one = self.seen.elastic.get(job_id)
            if one is None or not self._share_nodes(name, one.partition):
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
        """Return the partition's kinds of GPU."""
        kinds = self.seen.snapshot.kinds(name)
        # If the setting gives GPUs to nodes for which Slurm lists none, nobody knows their kind.
        if name in self.settings.whole_node_gpus and not kinds.keys() >= self._nodes_known(name):
            kinds = {}
        return Kinds(kinds, self.types_given)

    def _nodes_known(self, name: str) -> set[str]:
        partition = self.seen.snapshot.partitions.get(name)
        return {*partition.node_names} & self.seen.snapshot.nodes.keys() if partition is not None else set()

    def _nodes_of(self, name: str) -> tuple[int, bool]:
        partition = self.seen.snapshot.partitions.get(name)
        return self.full_node(partition) if partition is not None else (0, False)

    def _share_nodes(self, one: str, other: str) -> bool:
        if one == other:
            return True
        partitions = self.seen.snapshot.partitions
        nodes = [set(partitions[name].node_names) if name in partitions else set() for name in (one, other)]
        return bool(nodes[0] & nodes[1])

    def _all_gpus(self, name: str) -> int:
        """Return the partition's GPUs, including nodes that are down."""
        partition = self.seen.snapshot.partitions.get(name)
        if partition is None:
            return 0
        full, _ = self.full_node(partition)
        nodes = [self.seen.snapshot.nodes[node] for node in partition.node_names if node in self.seen.snapshot.nodes]
        return sum(full if name in self.settings.whole_node_gpus else node.gpus for node in nodes)

    def against_shrinking(self, elastic: Elastic) -> Reason | None:
        """Return why the job may not give growth back now, or None. The reasons are those of any resize, but a dwell
        time counts only after failures."""
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
            staying = staying_at(blocks, self._nodes_of(elastic.partition)[0], leaving, guests or ())
        return replace(
            rules,
            prepared=job_id in self.held,
            blocks=blocks,
            spare=could_join,
            to_hold=to_hold(elastic, members_of(history)),
            going=leaving,
            renewal=self._renewal(elastic, history, could_join) if back is None else None,
            staying=staying,
            settled=self.now >= self._settled_at(elastic, history),
            guests=guests,
        )

    def _guests(self, elastic: Elastic) -> frozenset[int] | None:
        if elastic.partition not in self.settings.guests or not elastic.takes_guests:
            return None
        return frozenset(map(task_of, elastic.job.running_blocks)) & elastic.job.guests

    @cached_property
    def _lent(self) -> Counter[str]:
        """GPUs that guests hold on each node, including preempted guests that are still ending."""
        held = Counter[str]()
        for elastic in self.seen.elastic.values():
            for job in elastic.job.blocks:
                if (job.running or job.completing) and elastic.job.is_guest(job):
                    held.update(dict.fromkeys(job.node_list, elastic.shape_of(job).gpus_per_node))
        return held

    def _served(self, elastic: Elastic) -> bool:
        """Tell whether Slurm is about to preempt guests for a pending job, which has waited `LOOK_S` at most."""
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
        """Return reservations on nodes where blocks will join. Guests are left out: they end before a reservation."""
        if hot(elastic) and elastic.partition in self.settings.guests:
            return NOTHING_AHEAD
        joining = next((block for block in elastic.job.blocks if block.pending), elastic.job.first)
        return ahead_of(joining, self.seen.snapshot, self.now)

    def _barred(self, job: SlurmJob) -> frozenset[str]:
        if not (job.excluded_nodes or job.features):
            return frozenset()
        return frozenset(name for name, node in self.seen.snapshot.nodes.items() if not node.takes(job))

    def _restarts(self, elastic: Elastic) -> Reason | None:
        """Return why the job could not start again after a requeue, or None."""
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

    def _settled_at(self, elastic: Elastic, history: JobHistory | None) -> float:
        in_vain = history.moved_in_vain if history is not None else 0
        dwell_s = pack_dwell_s(self._dwell_s(elastic, history), in_vain)
        return rested_at(elastic.job, history, dwell_s)

    def _resting(self, elastic: Elastic, history: JobHistory | None, *, at_once: bool = False) -> Reason | None:
        """Return the reason against a resize of a job that is not untouchable, or None."""
        job = elastic.job
        if self._served(elastic):
            return reason("guests_leave")
        dwell_s = self._dwell_s(elastic, history)
        rested = rested_at(job, history, dwell_s)
        failed = history is not None and history.failures > 0
        # What its owner asks for by hand waits for no dwell time.
        by_hand = elastic.optin is not None and elastic.optin.size not in (None, elastic.shape.gpus)
        if self.now < rested and not by_hand and not (at_once and not failed):
            if history is not None and failed and rested > job.start_time + dwell_s:
                return reason("dwell_failures", seconds=rested - self.now, times=history.failures)
            return reason("dwell_time", seconds=rested - self.now, dwell_s=dwell_s)
        if job.running and (history is None or history.spec is None):
            return reason("nothing_reported")
        if job.running and (early := too_soon(history)) is not None:
            return early
        if history is not None and history.misfit is not None and not elastic.job.by_blocks:
            ranks, gpus = history.misfit
            return reason("gpus_idle" if ranks < gpus else "gpus_shared", ranks=ranks, gpus=gpus)
        batch = elastic.optin.batch if elastic.optin is not None else None
        if batch and history is not None and history.spec is not None and batch[0] > history.spec.max_batch:
            base, most = history.spec.base_batch, history.spec.max_batch
            return reason("batch_misses", first=batch[0], last=batch[1], base=base, most=most)
        limits = self.settings.limits
        if hot(elastic):
            return None  # of its blocks each has a time limit of its own: see `rules.blocks.going`
        worn = near_limit(job.first, limits, self.now) or resized_enough(job, history, limits, self.now)
        return worn or self._restarts(elastic)


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
    """Return the GPUs that the job has, or will have after its open resize, whichever is more. Joining blocks count in
    addition to the blocks that they replace."""
    target = under_way.target.gpus if under_way is not None else 0
    if elastic.job.pending:
        return target
    held = {block.task: block.shape.gpus for block in training(elastic, None)}
    moves = under_way.moves if under_way is not None else None
    joining = sum(shape.gpus for task, shape in (moves.added if moves else ()) if task not in held)
    return max(sum(held.values()) + joining + (starting(elastic) if prepared else 0), target)
