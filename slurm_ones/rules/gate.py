"""What one tick's rules say of each job: computed once, read by what a policy is shown and by what may begin.

A `Round` is built from what a tick has seen. Its `PartitionRules` have, of each elastic job, why it may not change now;
of the partition its free GPUs and its caps. Both are plain data and know no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ones_db import JobHistory, PromiseRecord, ResizeRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.config import ResizeSettings, Settings
from slurm_ones.jobs.eligibility import Elastic, Observation
from slurm_ones.policy.ledger import Ledger
from slurm_ones.rules.blocks import (
    BLOCKS,
    going,
    hot,
    members_of,
    moves_of,
    spare,
    starting,
    to_hold,
    training,
)
from slurm_ones.rules.caps import Cap, CappedJob, caps_of
from slurm_ones.rules.dwell import near_limit, pack_dwell_s, requeue_dwell_s, resized_enough, rested_at, switch_dwell_s
from slurm_ones.rules.kinds import Kinds
from slurm_ones.rules.moves import NO_MOVES, Moves, RunningBlock
from slurm_ones.rules.rigid import rigid_jobs
from slurm_ones.rules.strategy import too_soon
from slurm_ones.slurm.model import Partition, partition_gpus


def target_of(resize: ResizeRecord) -> Shape:
    """The shape that the resize is heading for: the old one once it is on its way back."""
    return resize.old_shape if _goes_back(resize) else resize.new_shape


def kind_of_target(resize: ResizeRecord) -> str:
    """The kind of GPU that the job asks for there; empty for any."""
    return resize.old_kind if _goes_back(resize) else resize.new_kind


def _goes_back(resize: ResizeRecord) -> bool:
    return resize.state.endswith("_back") or resize.state == "withdrawing"


class WaitingStart(NamedTuple):
    """What a waiting job is to start with."""

    job_id: int
    shape: Shape
    kind: str
    """Of its GPUs; empty for any."""


@dataclass(frozen=True)
class JobRules:
    """An elastic job, and what the rules of this round say of it."""

    elastic: Elastic
    history: JobHistory | None
    target: Shape | None
    """The shape that its resize under way heads for, None where none is."""
    untouchable: Reason | None
    """Why nothing may be done to it, not even keep it from starting."""
    resting: Reason | None
    """Why it may not be resized although it is not untouchable."""
    moves: Moves = NO_MOVES
    """Of its resize under way, where blocks join or leave in that."""
    blocks: tuple[RunningBlock, ...] = ()
    """Of a job of blocks those that run, the one that leads first."""
    prepared: bool = False
    """Whether it is a job of blocks, and a change of ours has lifted the throttle of its array, or is about to."""
    spare: tuple[int, ...] = ()
    """Of a job of blocks the tasks that could join, the best first."""
    to_hold: tuple[int, ...] = ()
    """Of its tasks those that have to be held before the throttle of their array is lifted."""
    going: tuple[int, ...] = ()
    """Of its blocks those that are to be replaced, the most urgent first."""
    settled: bool = False
    """It may move to fewer nodes, although it keeps its number of GPUs."""

    @property
    def fixed(self) -> Reason | None:
        """Why it may not be resized now, None where it may."""
        return self.untouchable or self.resting

    @property
    def asked(self) -> int | None:
        """GPUs that its owner asks for by hand."""
        optin = self.elastic.optin
        return optin.size if optin is not None else None

    @property
    def requested(self) -> int:
        """GPUs that no cap takes from it: what it asked for at first, or asks for now or has, whichever is more."""
        job = self.history.job if self.history is not None else None
        asked = job.requested_shape.gpus if job is not None else 0
        return max(asked, self.elastic.shape.gpus)

    @property
    def spec(self) -> Spec | None:
        """What it can do, by its own word; None where it has not said."""
        return self.history.spec if self.history is not None else None

    @property
    def gpus(self) -> int:
        """GPUs that it has, or is about to have through a resize, whichever is more."""
        return _gpus(self.elastic, self.target, self.moves, prepared=self.prepared)


@dataclass(frozen=True)
class PartitionRules:
    """What the rules say of one partition and its elastic jobs."""

    name: str
    jobs: Mapping[int, JobRules]
    """The elastic jobs that name this partition first, ascending."""
    free: Ledger
    """GPUs that Slurm could hand out on each node and no resize under way is about to need."""
    caps: tuple[Cap, ...]
    settings: ResizeSettings
    open_resizes: int
    """Resizes under way in all partitions, but for those by blocks."""
    open_changes: int = 0
    """Those by blocks."""
    node_gpus: int = 0
    """GPUs of a full node."""
    whole_nodes: bool = False
    split_nodes: bool = True
    """Two blocks of a job on one node see each other's GPUs."""
    kinds: Kinds = field(default_factory=Kinds)
    """Of its GPUs."""
    later: tuple[WaitingStart, ...] = ()
    """Jobs that a resize under way has in the queue at a shape for which too few GPUs are `free` yet."""
    closed: frozenset[str] = frozenset()
    """Nodes that take no more jobs."""
    rigid_wait: bool = False
    """Rigid jobs wait for room here."""


@dataclass(frozen=True)
class Round:
    """What one tick has seen."""

    seen: Observation
    histories: Mapping[int, JobHistory]
    settings: Settings
    targets: Mapping[int, Shape]
    """The shapes that resizes under way head for, by job."""
    now: float
    moves: Mapping[int, Moves] = field(default_factory=dict)
    """Of those by blocks the blocks that join and leave, by job."""
    held: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Tasks that stand in holds of ours, of those jobs of blocks that were changed before."""
    split_nodes: bool = True
    """Two blocks of a job on one node see each other's GPUs."""
    promises: Mapping[int, PromiseRecord] = field(default_factory=dict)
    """What was said of the jobs' deadlines, by job."""
    target_kinds: Mapping[int, str] = field(default_factory=dict)
    """The kinds of GPU that resizes under way ask for, by job; empty for any."""
    types_given: bool = True
    """See `Kinds.given`."""
    switches: Mapping[int, float] = field(default_factory=dict)
    """Of jobs of blocks the seconds for which a change is expected to interrupt them."""

    @classmethod
    def build(
        cls,
        seen: Observation,
        histories: Mapping[int, JobHistory],
        settings: Settings,
        resizes: Iterable[ResizeRecord],
        now: float,
        *,
        held: Mapping[int, frozenset[int]] | None = None,
        split_nodes: bool = True,
        promises: Mapping[int, PromiseRecord] | None = None,
        types_given: bool = True,
        switches: Mapping[int, float] | None = None,
    ) -> Round:
        under_way = list(resizes)
        targets = {resize.job_id: target_of(resize) for resize in under_way}
        moves = {resize.job_id: moves_of(resize) for resize in under_way if resize.mechanism == BLOCKS}
        kinds = {resize.job_id: kind_of_target(resize) for resize in under_way}
        known = held or {}, split_nodes, promises or {}, kinds, types_given, switches or {}
        return cls(seen, histories, settings, targets, now, moves, *known)

    def begun(
        self,
        targets: Mapping[int, Shape],
        moves: Mapping[int, Moves] | None = None,
        kinds: Mapping[int, str] | None = None,
    ) -> Round:
        """The same once resizes to these shapes and kinds, or by these moves of blocks, are under way as well."""
        if not targets:
            return self
        return replace(
            self,
            targets={**self.targets, **targets},
            moves={**self.moves, **(moves or {})},
            target_kinds={**self.target_kinds, **(kinds or {})},
        )

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """Those with elastic jobs."""
        return tuple(sorted({one.partition for one in self.seen.elastic.values()}))

    def full_node(self, partition: Partition) -> tuple[int, bool]:
        """GPUs of a full node of the partition, and whether Slurm hands out its nodes whole."""
        return partition_gpus(partition, self.seen.snapshot, self.settings.whole_node_gpus)

    @cached_property
    def _built(self) -> dict[str, PartitionRules]:
        return {}

    def partition(self, name: str) -> PartitionRules:
        """The rules of one partition, built once: what a policy is shown and what may begin are read from the same."""
        if name not in self._built:
            self._built[name] = self._build_rules(name)
        return self._built[name]

    def _build_rules(self, name: str) -> PartitionRules:
        here: dict[int, CappedJob] = {}
        there: list[CappedJob] = []
        jobs: dict[int, JobRules] = {}
        for job_id, one in sorted(self.seen.elastic.items()):
            gpus = _gpus(one, self.targets.get(job_id), self.moves.get(job_id, NO_MOVES), prepared=job_id in self.held)
            capped = CappedJob(one.job.user, one.job.account, gpus)
            if one.partition == name:
                here[job_id], jobs[job_id] = capped, self._job_rules(one)
            else:
                there.append(capped)
        caps = caps_of(here, there, self.settings.limits, name, self._all_gpus(name))
        requeues = len(self.targets.keys() - self.moves.keys())
        free, later = self._free(name)
        return PartitionRules(
            name,
            jobs,
            free,
            caps,
            self.settings.resize,
            requeues,
            len(self.moves),
            *self._nodes_of(name),
            self.split_nodes,
            self._kinds(name),
            later,
            frozenset(node for node in free if not self.seen.snapshot.nodes[node].usable),
            bool(rigid_jobs(self.seen.snapshot, name, self.seen.elastic)),
        )

    def _free(self, name: str) -> tuple[Ledger, tuple[WaitingStart, ...]]:
        """See `PartitionRules.free` and `later`."""
        later: list[WaitingStart] = []
        free = Ledger.of_partition(self.seen.snapshot, name, self.settings.whole_node_gpus)
        for job_id, target in self.targets.items():
            one = self.seen.elastic.get(job_id)
            if one is None or not self._share_nodes(name, one.partition):
                continue
            kind = self.target_kinds.get(job_id, "")
            only = self._kinds(one.partition).nodes(kind) if kind else None
            if job_id in self.moves:
                held = {block.task for block in training(one, None)}
                for task, shape in self.moves[job_id].added:
                    if task not in held:
                        free.take(shape, only=only)
            elif not (one.job.running and one.shape == target and (only is None or one.holdings.keys() <= only)):
                found = free.take(target, one.holdings, only)
                if not found and one.job.pending:
                    later.append(WaitingStart(job_id, target, kind))
        return free, tuple(later)

    def _kinds(self, name: str) -> Kinds:
        kinds = self.seen.snapshot.kinds(name)
        # Where the setting gives GPUs to nodes of which Slurm knows none, nobody says of which kind those are.
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
        """GPUs of the partition, also of nodes that are down."""
        partition = self.seen.snapshot.partitions.get(name)
        if partition is None:
            return 0
        full, _ = self.full_node(partition)
        nodes = [self.seen.snapshot.nodes[node] for node in partition.node_names if node in self.seen.snapshot.nodes]
        return sum(full if name in self.settings.whole_node_gpus else node.gpus for node in nodes)

    def _job_rules(self, elastic: Elastic) -> JobRules:
        job_id = elastic.job.job_id
        history, target = self.histories.get(job_id), self.targets.get(job_id)
        rules = JobRules(elastic, history, target, _untouchable(elastic, target), self._resting(elastic, history))
        if not elastic.blocks:
            return rules
        return replace(
            rules,
            moves=self.moves.get(job_id, NO_MOVES),
            prepared=job_id in self.held,
            blocks=training(elastic, history),
            spare=spare(elastic, self.held.get(job_id, ()), members_of(history), self.now),
            to_hold=to_hold(elastic, members_of(history)),
            going=going(elastic, self.seen.snapshot.nodes, self.settings.limits, self.now),
            settled=hot(elastic) and self.now >= self._settled_at(elastic, history),
        )

    def _dwell_s(self, elastic: Elastic, history: JobHistory | None) -> float:
        """Least time between two resizes of the job."""
        settings = self.settings.resize
        if hot(elastic):
            return switch_dwell_s(self.switches.get(elastic.job.job_id, 0.0), settings)
        return requeue_dwell_s(history, settings)

    def _settled_at(self, elastic: Elastic, history: JobHistory | None) -> float:
        """When a job of blocks may move to fewer nodes."""
        dwell_s = pack_dwell_s(self._dwell_s(elastic, history))
        return rested_at(elastic.job, history, dwell_s, by_blocks=True)

    def _resting(self, elastic: Elastic, history: JobHistory | None) -> Reason | None:
        """Of a job that is not untouchable."""
        job = elastic.job
        dwell_s = self._dwell_s(elastic, history)
        rested = rested_at(job, history, dwell_s, by_blocks=hot(elastic))
        # What its owner asks for by hand waits for no dwell time.
        by_hand = elastic.optin is not None and elastic.optin.size not in (None, elastic.shape.gpus)
        if self.now < rested and not by_hand:
            if history is not None and history.failures and rested > job.start_time + dwell_s:
                return reason("dwell_failures", seconds=rested - self.now, times=history.failures)
            return reason("dwell_time", seconds=rested - self.now, dwell_s=dwell_s)
        if job.running and (history is None or history.spec is None):
            return reason("nothing_reported")
        if job.running and (early := too_soon(history)) is not None:
            return early
        if history is not None and history.misfit is not None and not elastic.blocks:
            ranks, gpus = history.misfit
            return reason("gpus_idle" if ranks < gpus else "gpus_shared", ranks=ranks, gpus=gpus)
        batch = elastic.optin.batch if elastic.optin is not None else None
        if batch and history is not None and history.spec is not None and batch[0] > history.spec.max_batch:
            base, most = history.spec.base_batch, history.spec.max_batch
            return reason("batch_misses", first=batch[0], last=batch[1], base=base, most=most)
        limits = self.settings.limits
        if hot(elastic):
            return None  # of its blocks each has a time limit of its own: see `rules.blocks.going`
        return near_limit(job, limits, self.now) or resized_enough(job, history, limits, self.now)


def _untouchable(elastic: Elastic, target: Shape | None) -> Reason | None:
    job = elastic.job
    if target is not None:
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


def _gpus(elastic: Elastic, target: Shape | None, moves: Moves, *, prepared: bool) -> int:
    """GPUs that the job has, or is about to have through a resize to `target`, whichever is more. Blocks that are to
    join count beside those that they replace."""
    if hot(elastic):
        held = {block.task: block.shape.gpus for block in training(elastic, None)}
        joining = sum(shape.gpus for task, shape in moves.added if task not in held)
        own = sum(held.values()) + joining + starting(elastic, prepared=prepared)
        return max(own, target.gpus if target is not None else 0)
    return max(elastic.shape.gpus if elastic.job.running else 0, target.gpus if target is not None else 0)
