"""Rules for one job: sizes of its training strategy, kinds of GPU that it accepts, dwell times, and its next start.

A job reports its strategy's limits itself (`ones_wrapper.protocol.limits`). They can only exclude sizes: none is added
that the owner or the cluster does not allow.

Slurm's types of GPU (`gres/gpu:a100`) are the kinds. A job whose comment names kinds (`kinds=a100,v100`, or
`kinds=any`) may have any of these, and change between them. Every other job keeps the kind that it asked sbatch for. If
it asked for none, Slurm chooses, and the job stays on the kind that Slurm chose.

A job is not resized during the dwell time after a resize, after too many resizes, or near its end. Whether a change
pays is for the policy to decide. These rules guard against policies that act on wavering figures: a job trains for a
multiple of the time that resizes interrupt it. Dwell times follow from the measured pauses, unless the site sets them.

Nor is a job requeued if it could not start again. Slurm starts no job whose time limit reaches into a reservation of
its nodes, and a requeue restarts the job's time limit. So a requeued job may find no node, although there was time
enough at its first start. Partitions close, and some releases of Slurm lose a requeued job's licences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ones_db import JobHistory
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from ones_wrapper.protocol.optin import ANY
from slurm_ones.config import LimitSettings, ResizeSettings
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.learn.learner import RESIZE_S, JobModel
from slurm_ones.policy.contract import Allocation, JobView, SizeRule
from slurm_ones.policy.tables import predict_each
from slurm_ones.slurm.model import SlurmJob, Snapshot, kind_of, partition_gpus
from slurm_ones.text import counts

ANY_BATCH = 2**31
"""Largest believed batch per GPU, in samples; also the limit of a job that reports none."""
ANY_GPUS = 2**20
"""Largest believed number of GPUs of a job."""


def size_rules(spec: Spec | None, node_gpus: int) -> tuple[SizeRule, ...]:
    """Return the rule at each GPU count that the strategy knows, none without; `node_gpus` are GPUs per node."""
    if spec is None or spec.limits is None:
        return ()
    return tuple(_rule(spec, spec.limits, row, node_gpus) for row in spec.limits.sizes)


def _sharing(row: SizeLimits, node_gpus: int) -> int:
    """Return the number of consecutive ranks that share a node: a whole group if one node holds the job or groups fill
    nodes, else the greatest common divisor of group and node."""
    return row.together if row.gpus <= node_gpus else math.gcd(row.together, max(node_gpus, 1))


def _rule(spec: Spec, limits: StrategyLimits, row: SizeLimits, node_gpus: int) -> SizeRule:
    """Return the rule at one size. A replica's pass takes the script's largest batch or as many samples as fit into
    memory, whichever is less; 0 if no sample fits."""
    if row.gpus > ANY_GPUS or row.quantum > ANY_BATCH:
        return SizeRule(row.gpus, row.replicas, 0)
    fits = row.most_local(limits.memory_bytes)
    local = spec.max_local_batch if fits is None else min(spec.max_local_batch, fits)
    most = min(row.replicas * local * max(spec.max_passes, 1), ANY_BATCH)
    return SizeRule(row.gpus, row.replicas, most, row.quantum, _sharing(row, node_gpus))


def breaks(
    spec: Spec | None, shape: Shape, old_batch: int | None, new_batch: int | None, node_gpus: int = 0
) -> Reason | None:
    """Return why the job's strategy cannot train at this shape and global batch, or None if it can.

    `old_batch` is in force; a `new_batch` of None keeps it. Without `node_gpus`, a shape of several nodes counts as
    whole nodes. Callers check again before and during a resize, since the job's reported limits may change.
    """
    limits = spec.limits if spec is not None else None
    if limits is None or shape == PARKED:
        return None
    if limits.batch_fixed and new_batch is not None and old_batch is not None and new_batch != old_batch:
        return reason("strategy_batch", strategy=limits.strategy, batch=old_batch)
    rules = {rule.gpus: rule for rule in size_rules(spec, node_gpus or shape.gpus_per_node)}
    if not rules:
        return None
    rule = rules.get(shape.gpus)
    if rule is None:
        return reason("strategy_size", strategy=limits.strategy, counts=counts(limits.sizes), gpus=shape.gpus)
    if not rule.fits(shape):
        return reason("strategy_together", strategy=limits.strategy, ranks=rule.together, shape=str(shape))
    batch = new_batch if new_batch is not None else old_batch
    if rule.most < rule.replicas:
        return reason("strategy_memory", strategy=limits.strategy, gpus=shape.gpus)
    if batch is not None and not (rule.replicas <= batch <= rule.most and batch % rule.quantum == 0):
        return reason(
            "strategy_takes",
            strategy=limits.strategy,
            gpus=shape.gpus,
            quantum=rule.quantum,
            most=rule.most // rule.quantum * rule.quantum,
            batch=batch,
        )
    return None


def parts(rule: SizeRule, blocks: Sequence[Shape]) -> bool:
    """Tell whether blocks of these shapes may separate ranks that must share a node. Ranks follow the blocks' order, so
    each node of a block must hold whole groups."""
    if len(blocks) == 1:
        return not rule.fits(blocks[0])
    return any(block.gpus_per_node % rule.together for block in blocks)


def parts_groups(spec: Spec | None, blocks: Sequence[Shape], node_gpus: int) -> bool:
    """Tell whether these blocks may part ranks that must share a node; `node_gpus` are GPUs per node."""
    gpus = sum(block.gpus for block in blocks)
    return any(parts(rule, blocks) for rule in size_rules(spec, node_gpus) if rule.gpus == gpus)


def too_soon(history: JobHistory | None) -> Reason | None:
    """Return a reason if the strategy needs more steps at its present size before the next resize, else None."""
    limits = history.spec.limits if history is not None and history.spec is not None else None
    if history is None or limits is None or history.steps_since_change is None:
        return None
    left = limits.min_steps - history.steps_since_change
    return reason("strategy_steps", strategy=limits.strategy, steps=left) if left > 0 else None


@dataclass(frozen=True)
class Kinds:
    """Kinds of GPU in a partition."""

    of: Mapping[str, str] = field(default_factory=dict)
    """Kind of each node with GPUs; empty if the site names no kinds."""
    given: bool = True
    """True if Slurm lets jobs ask for another GPU type than at submission."""

    @cached_property
    def every(self) -> tuple[str, ...]:
        """All kinds in the partition, each once."""
        return tuple(dict.fromkeys(self.of.values()))

    def nodes(self, kind: str) -> frozenset[str] | None:
        """Return the nodes with GPUs of that kind; None for all nodes, if `kind` is empty or no node has it."""
        return frozenset(name for name, its in self.of.items() if its == kind) or None if kind else None

    def held(self, elastic: Elastic) -> str:
        """Return the kind of the job's GPUs; empty if it has none or their kind is unknown."""
        return kind_of(elastic.holdings, self.of)

    def may_change(self, elastic: Elastic) -> bool:
        """Tell whether the job may change between kinds: its owner allows it, and Slurm can be asked for a kind."""
        # Of blocks that together hold unequally many GPUs of their nodes each asks for its own.
        asks = any(block.gpus_per_node for block in elastic.job.blocks) and not elastic.whole_nodes
        return elastic.optin is not None and bool(elastic.optin.kinds) and asks and self.given

    def leaves(self, elastic: Elastic, got: Allocation) -> bool:
        """Tell whether a running job changes to GPUs of another kind than its present known kind."""
        held = self.held(elastic)
        return elastic.job.running and self.may_change(elastic) and bool(got.kind) and held not in ("", got.kind)

    def accepted(self, elastic: Elastic) -> tuple[str, ...]:
        """Return the kinds of GPU that the job may have; empty if the site names no kinds."""
        if elastic.optin is not None and self.may_change(elastic):
            named = elastic.optin.kinds
            return tuple(kind for kind in self.every if kind in named or ANY in named) or self.every
        own = elastic.job.first.kind or self.held(elastic)
        return (own,) if own in self.every else self.every

    def asked(self, elastic: Elastic, got: Allocation) -> str:
        """Return the kind to ask Slurm for, so that the job gets the decided kind. The job's own request stays if the
        kind does not matter or may not change."""
        asks, held = elastic.job.first.kind, self.held(elastic)
        if not got.kind or len(self.every) < 2:
            return asks
        if elastic.job.by_blocks and held in self.every and self.given:
            # Blocks that join are of the kind of those that train, or take the place of all of them.
            return got.kind if self.may_change(elastic) else held
        if not self.may_change(elastic) or (got.shape == elastic.shape and held == got.kind):
            return asks
        return got.kind


HOUR_S = 3600.0
SURE = 0.9
"""Probability that a job counted as near its end does end within the given time."""

MOST_DOUBLINGS = 6
AGAIN_S = 5.0
"""Shortest dwell time in seconds that failures double; a dwell time of 0 stays 0."""
WORTH = 20.0
"""Dwell time between changes of a job's blocks, as a multiple of a change's pause."""
PACK_S = 120.0
"""Least seconds before a job of blocks moves to fewer nodes at the same number of GPUs."""
REPAYS = 4.0
"""Dwell time between requeues, as a multiple of a requeue's pause: at most a fifth of a job's time is lost."""
ENDS = 2.0
"""Remaining time below which a job is not requeued, as a multiple of a requeue's pause."""
CHECKPOINT_S = 600.0
"""Seconds between two periodic checkpoints of a job (the wrapper's first interval)."""
LONGEST_S = 1800.0
"""Longest dwell time in seconds derived from pauses: jobs report pauses themselves, and a resting job gives up no
GPUs."""


def requeue_s(history: JobHistory | None) -> float:
    """Return the seconds for which a requeue stops the job: the mean of its last ones, else a default."""
    return history.pause_s if history is not None and history.pause_s is not None else RESIZE_S


def requeue_dwell_s(history: JobHistory | None, settings: ResizeSettings) -> float:
    """Return the least seconds between two requeues of a job."""
    return settings.dwell_s if settings.dwell_s is not None else min(REPAYS * requeue_s(history), LONGEST_S)


def requeue_near_end_s(history: JobHistory | None, limits: LimitSettings) -> float:
    """Return the seconds before a job's end within which the job is no longer requeued."""
    return limits.near_end_s if limits.near_end_s is not None else min(ENDS * requeue_s(history), LONGEST_S)


def switch_dwell_s(switch_s: float, settings: ResizeSettings) -> float:
    """Return the least seconds between two changes of a job's blocks; `switch_s` is the expected pause of a change."""
    most = LONGEST_S if settings.dwell_s is None else settings.dwell_s
    return min(most, max(settings.blocks_dwell_s, WORTH * switch_s))


def pack_dwell_s(dwell_s: float, in_vain: int = 0) -> float:
    """Return the seconds before a job of blocks moves to fewer nodes at the same size. During the move the job holds
    both sets of GPUs. Each consecutive move that saved no node (`in_vain`) doubles the time, up to 64 times."""
    return max(dwell_s, PACK_S) * 2.0 ** min(in_vain, MOST_DOUBLINGS)


def switch_near_end_s(view: JobView, settings: ResizeSettings, limits: LimitSettings) -> float:
    """Return the seconds before a job's end within which its blocks stay: the time until new blocks train with it.
    Whether an earlier change pays is for the policy to decide."""
    most = math.inf if limits.near_end_s is None else limits.near_end_s
    return min(most, settings.blocks_wait_s, view.prepare_s + view.resize_s)


def rested_at(job: WholeJob, history: JobHistory | None, dwell_s: float) -> float:
    """Return the Unix time from which the job may be resized: the dwell time after its last resize and its start. The
    start of a job of blocks does not count, since it interrupted no training.

    Each consecutive failed resize doubles the dwell time, up to 64 times: Slurm mostly refuses again, and each try
    costs a restart. A pending job without failures may be resized at once.
    """
    failures = history.failures if history is not None else 0
    last = (history.last_resize_end if history is not None else None) or 0.0
    wait_s = max(dwell_s, AGAIN_S) * 2.0 ** min(failures, MOST_DOUBLINGS) if failures and dwell_s else dwell_s
    again = last + wait_s
    if job.running and not job.by_blocks:
        return max(job.start_time + dwell_s, again)
    return again if failures or job.running else 0.0


def grows_at(preempted: Sequence[float], rest_s: float) -> float:
    """Return the Unix time from which a job may grow again after Slurm preempted its blocks; 0 for always.

    `preempted` are the ascending times of preemptions. Each starts a rest of `rest_s`. The rest doubles if the next
    preemption follows within one rest's length after the last rest; preemptions during a rest do not double it.
    """
    until = wait_s = 0.0
    for at in preempted:
        if at > until + wait_s:
            wait_s = rest_s
        elif at > until:
            wait_s = min(2.0 * wait_s, max(LONGEST_S, rest_s))
        until = at + wait_s
    return until if rest_s else 0.0


def loss_s(known: JobModel, grace_s: float) -> float:
    """Return the seconds of training that a job of blocks loses by a preempted guest: the pause when blocks leave. If
    each change starts from a checkpoint, that restart's pause counts. The work since the last checkpoint is added
    unless the grace time suffices for a new one."""
    if known.shrink_s is not None:
        return known.shrink_s
    return known.resize_s + (CHECKPOINT_S / 2 if known.resize_s > grace_s else 0.0)


def resized_enough(job: WholeJob, history: JobHistory | None, limits: LimitSettings, now: float) -> Reason | None:
    """Return a reason if a running job was interrupted as often as the site's limits allow, else None."""
    if history is None or not job.running:
        return None
    most, hourly = limits.resizes_per_job, limits.resizes_per_hour
    if most is not None and len(history.interrupted) >= most:
        return reason("resizes_per_job", times=most)
    if hourly is not None and sum(begun > now - HOUR_S for begun in history.interrupted) >= hourly:
        return reason("resizes_per_hour", times=hourly)
    return None


def near_limit(job: SlurmJob, limits: LimitSettings, now: float) -> Reason | None:
    """Return a reason if the job will reach its time limit soon, else None."""
    if job.running and job.time_limit_s and job.start_time + job.time_limit_s - now < limits.near_limit_s:
        return reason("near_time_limit", seconds=limits.near_limit_s)
    return None


def near_end(jobs: Sequence[tuple[JobView, float]]) -> list[Reason | None]:
    """Return for each (job, seconds) a reason if the job almost surely ends within these seconds at its size, else
    None. Pending jobs get None.

    One call predicts for all jobs: separate predictions would take a third of a decision's time.
    """
    runs = [j for j, (view, within_s) in enumerate(jobs) if view.shape is not None and view.dataset and within_s]
    views = [jobs[j][0] for j in runs]
    shapes = [view.shape for view in views if view.shape is not None]
    nodes, gpus = np.array([s.nodes for s in shapes], dtype=int), np.array([s.gpus for s in shapes], dtype=int)
    _, goodput = predict_each(views, nodes, gpus, np.array([max(view.batch, 1) for view in views], dtype=int))
    found: list[Reason | None] = [None] * len(jobs)
    for j, view, speed in zip(runs, views, goodput.tolist(), strict=True):
        seconds, within_s = view.progress.to_come(SURE) * view.dataset / speed, jobs[j][1]
        if math.isfinite(seconds) and seconds < within_s:
            found[j] = reason("near_end", seconds=within_s)
    return found


START_S = 60.0
"""Seconds from a decision to the next run's start: a checkpoint, the requeue and Slurm's next scheduling."""
LOSES_LICENSES = (25, 5, 0), (25, 11, 7)
"""First release of Slurm that forgets the licences of requeued jobs, and the first one that keeps them again."""


class ReservedNodes(NamedTuple):
    """Nodes whose reservations would begin during a run of the job begun now."""

    nodes: frozenset[str] = frozenset()
    reason: Reason | None = None
    """The earliest of these reservations, in words; None without one."""


NOTHING_AHEAD = ReservedNodes()


def ahead_of(job: SlurmJob, snapshot: Snapshot, now: float) -> ReservedNodes:
    """Return the partition's nodes with other jobs' reservations that would begin during a run begun now."""
    part = snapshot.partitions.get(job.partition)
    if part is None:
        return NOTHING_AHEAD
    last = now + START_S + (job.time_limit_s or part.max_time_s or math.inf)
    own = job.reservation.split(",")
    soon = [one for one in snapshot.reservations if now < one.start_time < last and one.name not in own]
    ours = part.node_set
    found = [one for one in soon if not ours.isdisjoint(one.node_names)]
    if not found:
        return NOTHING_AHEAD
    first = min(found, key=lambda one: (one.start_time, one.name))
    why = reason("reserved_ahead", name=first.name, minutes=(first.start_time - now) / 60.0)
    return ReservedNodes(ours.intersection(name for one in found for name in one.node_names), why)


def reserved_ahead(
    job: SlurmJob, shape: Shape, snapshot: Snapshot, whole_node_gpus: Mapping[str, int], now: float
) -> Reason | None:
    """Return what keeps a running job from starting again at this shape, on its own and free nodes: its partition, or
    a reservation. Return None if the job could start, or if neither is to blame."""
    ahead, part = ahead_of(job, snapshot, now), snapshot.partitions.get(job.partition)
    if part is not None and part.closed:
        return reason("partition_closed", partition=part.name)
    if not ahead.nodes or part is None:
        return None
    full, whole = partition_gpus(part, snapshot, whole_node_gpus)
    room = []
    for name in part.node_names:
        node, own = snapshot.nodes.get(name), name in job.node_list
        if node is not None and (node.usable or own):
            free = full * node.idle if whole else node.gpus - node.gpus_used
            has = (full if whole else job.gpus_per_node) * own
            room += [name] if free + has >= shape.gpus_per_node else []
    return ahead.reason if len({*room} - ahead.nodes) < shape.nodes <= len(room) else None


def loses_licenses(release: tuple[int, int, int]) -> bool:
    """Tell whether that release of Slurm forgets the licences of requeued jobs."""
    first, fixed = LOSES_LICENSES
    return first <= release < fixed
