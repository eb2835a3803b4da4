"""Rules for one job: sizes of its training strategy, kinds of GPU that it accepts, dwell times, and its next start.

A job itself reports the limits of its strategy (`ones_wrapper.protocol.limits`). They only exclude sizes that the owner
and the cluster allow.

The kinds of GPU are Slurm's types (`gres/gpu:a100`). A job whose comment names kinds (`kinds=a100,v100`, or
`kinds=any`) may have any of these, and change between them. Every other job keeps the kind that it asked sbatch for. If
it asked for none, it stays on the kind that Slurm chose.

A job is not resized during the dwell time after a resize, after too many resizes, or near its end. Dwell times follow
from the measured pauses, unless the site sets them. So a job trains for a multiple of the time for which resizes pause
it.

A job is not requeued if it could not start again. A requeue restarts the job's time limit, and Slurm starts no job
whose time limit reaches into a reservation of its nodes. Partitions may close, and some releases of Slurm lose the
licences of a requeued job.
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
"""Upper bound on the batch per GPU, in samples, for jobs that report none or a larger one."""
ANY_GPUS = 2**20
"""Upper bound on the number of GPUs that a job may report; a larger one is ignored."""


def size_rules(spec: Spec | None, node_gpus: int) -> tuple[SizeRule, ...]:
    """Return the rule at each GPU count that the job's strategy supports; empty without a strategy. `node_gpus` is the
    number of GPUs per node."""
    if spec is None or spec.limits is None:
        return ()
    return tuple(_rule(spec, spec.limits, row, node_gpus) for row in spec.limits.sizes)


def _rule(spec: Spec, limits: StrategyLimits, row: SizeLimits, node_gpus: int) -> SizeRule:
    """Return the rule at one size. Its largest global batch follows from the local batch that the script allows and
    that the GPU's memory holds. It is 0 if not even one sample fits."""
    if row.gpus > ANY_GPUS or row.quantum > ANY_BATCH:
        return SizeRule(row.gpus, row.replicas, 0)
    fits = row.most_local(limits.memory_bytes)
    local = spec.max_local_batch if fits is None else min(spec.max_local_batch, fits)
    most = min(row.replicas * local * max(spec.max_passes, 1), ANY_BATCH)
    # Ranks of a group share a node. On several nodes, groups may be divided into parts that fill nodes equally.
    together = row.together if row.gpus <= node_gpus else math.gcd(row.together, max(node_gpus, 1))
    return SizeRule(row.gpus, row.replicas, most, row.quantum, together)


def breaks(
    spec: Spec | None, shape: Shape, old_batch: int | None, new_batch: int | None, node_gpus: int = 0
) -> Reason | None:
    """Return the reason why the job's strategy cannot train at this shape and global batch; None if it can.

    If `new_batch` is None, the job keeps `old_batch`. Without `node_gpus`, the nodes of the shape are assumed to be
    full. Callers check again before and during a resize, because the job may report new limits.
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
    """Tell whether a division into blocks of these shapes separates ranks that must share a node (`rule.together` at a
    time)."""
    if len(blocks) == 1:
        return not rule.fits(blocks[0])
    return any(block.gpus_per_node % rule.together for block in blocks)


def too_soon(history: JobHistory | None) -> Reason | None:
    """Return the reason why the job's strategy needs more steps at this size before the next resize; None if it does
    not."""
    limits = history.spec.limits if history is not None and history.spec is not None else None
    if history is None or limits is None or history.steps_since_change is None:
        return None
    left = limits.min_steps - history.steps_since_change
    return reason("strategy_steps", strategy=limits.strategy, steps=left) if left > 0 else None


@dataclass(frozen=True)
class Kinds:
    """Kinds of GPU in a partition."""

    of: Mapping[str, str] = field(default_factory=dict)
    """Kind of GPU of each node; empty if the site names no kinds."""
    given: bool = True
    """True if a job may ask Slurm for another GPU type than at its submission."""

    @cached_property
    def every(self) -> tuple[str, ...]:
        """All kinds in the partition, each once."""
        return tuple(dict.fromkeys(self.of.values()))

    def nodes(self, kind: str) -> frozenset[str] | None:
        """Return the nodes whose GPUs are of this kind; None for all nodes, if `kind` is empty or no node has it."""
        return frozenset(name for name, its in self.of.items() if its == kind) or None if kind else None

    def held(self, elastic: Elastic) -> str:
        """Return the kind of the GPUs that the job holds; empty if it holds none or their kind is unknown."""
        return kind_of(elastic.holdings, self.of)

    def may_change(self, elastic: Elastic) -> bool:
        """Tell whether the job's owner and Slurm allow it to change its kind of GPU."""
        # If the blocks do not have equally many GPUs per node, each block asks for its own kind.
        asks = any(block.gpus_per_node for block in elastic.job.blocks) and not elastic.whole_nodes
        return elastic.optin is not None and bool(elastic.optin.kinds) and asks and self.given

    def leaves(self, elastic: Elastic, got: Allocation) -> bool:
        """Tell whether this allocation moves a running job to GPUs of another kind; False if its present kind is
        unknown."""
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
        """Return the kind to request from Slurm for this allocation. The job's own request stays if the allocation
        names no kind, or if the job may not change its kind."""
        asks, held = elastic.job.first.kind, self.held(elastic)
        if not got.kind or len(self.every) < 2:
            return asks
        if elastic.job.by_blocks and held in self.every and self.given:
            # Joining blocks have the kind of the training blocks, unless they replace all of them.
            return got.kind if self.may_change(elastic) else held
        if not self.may_change(elastic) or (got.shape == elastic.shape and held == got.kind):
            return asks
        return got.kind


HOUR_S = 3600.0
SURE = 0.9
"""Least probability of an end within a given time from which a job counts as near its end."""

MOST_DOUBLINGS = 6
AGAIN_S = 5.0
"""Shortest dwell time, in seconds, after a failure; doubling begins from it. A dwell time of 0 stays 0."""
WORTH = 20.0
"""Dwell time between two changes of a job's blocks, as a multiple of the pause of one change."""
PACK_S = 120.0
"""Shortest time, in seconds, before a job of blocks moves to fewer nodes at the same number of GPUs."""
REPAYS = 4.0
"""Dwell time between two requeues, as a multiple of the pause of one requeue. With 4, a job pauses for at most a fifth
of its time."""
ENDS = 2.0
"""Remaining time below which a job is not requeued, as a multiple of the pause of a requeue."""
CHECKPOINT_S = 600.0
"""Seconds between two periodic checkpoints of a job (the wrapper's first interval)."""
LONGEST_S = 1800.0
"""Longest dwell time, in seconds, that is derived from reported pauses. A job gives up no GPUs during its dwell time,
so false reports must not make it longer."""


def requeue_s(history: JobHistory | None) -> float:
    """Return the pause of training at a requeue, in seconds: the mean of the job's last requeues, or else a default."""
    return history.pause_s if history is not None and history.pause_s is not None else RESIZE_S


def requeue_dwell_s(history: JobHistory | None, settings: ResizeSettings) -> float:
    """Return the shortest time between two requeues of a job, in seconds."""
    return settings.dwell_s if settings.dwell_s is not None else min(REPAYS * requeue_s(history), LONGEST_S)


def requeue_near_end_s(history: JobHistory | None, limits: LimitSettings) -> float:
    """Return the remaining time, in seconds, below which a job is no longer requeued."""
    return limits.near_end_s if limits.near_end_s is not None else min(ENDS * requeue_s(history), LONGEST_S)


def switch_dwell_s(switch_s: float, settings: ResizeSettings) -> float:
    """Return the shortest time between two changes of a job's blocks, in seconds. `switch_s` is the expected pause of
    one change."""
    most = LONGEST_S if settings.dwell_s is None else settings.dwell_s
    return min(most, max(settings.blocks_dwell_s, WORTH * switch_s))


def pack_dwell_s(dwell_s: float, in_vain: int = 0) -> float:
    """Return the time, in seconds, before a job of blocks moves to fewer nodes at the same size. Each move in a row
    that saved no node (`in_vain`) doubles this time, up to 64 times."""
    return max(dwell_s, PACK_S) * 2.0 ** min(in_vain, MOST_DOUBLINGS)


def switch_near_end_s(view: JobView, settings: ResizeSettings, limits: LimitSettings) -> float:
    """Return the remaining time, in seconds, below which the job's blocks are no longer changed: new blocks take that
    long to join."""
    most = math.inf if limits.near_end_s is None else limits.near_end_s
    return min(most, settings.blocks_wait_s, view.prepare_s + view.resize_s)


def rested_at(job: WholeJob, history: JobHistory | None, dwell_s: float) -> float:
    """Return the Unix time from which the job may be resized. The dwell time begins at its last resize and, for a plain
    job, also at its start.

    Each failed resize in a row doubles the dwell time, up to 64 times. A pending job without failures may be resized at
    once.
    """
    failures = history.failures if history is not None else 0
    last = (history.last_resize_end if history is not None else None) or 0.0
    wait_s = max(dwell_s, AGAIN_S) * 2.0 ** min(failures, MOST_DOUBLINGS) if failures and dwell_s else dwell_s
    again = last + wait_s
    if job.running and not job.by_blocks:
        return max(job.start_time + dwell_s, again)
    return again if failures or job.running else 0.0


def grows_at(preempted: Sequence[float], rest_s: float) -> float:
    """Return the Unix time from which a job may grow again after Slurm preempted some of its blocks; 0 if it may at any
    time.

    `preempted` are the times of the preemptions, ascending. Each starts a rest of `rest_s` seconds, or starts the
    present rest again. If a preemption comes soon after a rest, within the length of that rest, the new rest is twice
    as long.
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
    """Return the seconds of training that a job of blocks loses when a guest is preempted: the pause when blocks leave.
    If each change restarts from a checkpoint, it is the pause of a restart. If the grace time is too short for a new
    checkpoint, the expected work since the last one is added."""
    if known.shrink_s is not None:
        return known.shrink_s
    return known.resize_s + (CHECKPOINT_S / 2 if known.resize_s > grace_s else 0.0)


def resized_enough(job: WholeJob, history: JobHistory | None, limits: LimitSettings, now: float) -> Reason | None:
    """Return a reason if resizes have interrupted the running job as often as the site allows, else None."""
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
    # A new block with a short limit would otherwise be near it at its start, and be replaced again and again.
    within_s = min(limits.near_limit_s, job.time_limit_s / 2)
    if job.running and job.time_limit_s and job.start_time + job.time_limit_s - now < within_s:
        return reason("near_time_limit", seconds=within_s)
    return None


def near_end(jobs: Sequence[tuple[JobView, float]]) -> list[Reason | None]:
    """Return, for each (job, seconds), a reason if the job almost surely ends within this time. Return None if it does
    not, or if the job is pending."""
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
"""Seconds from a decision to the start of the job's next run: a checkpoint, the requeue, and Slurm's next
scheduling."""
LOSES_LICENSES = (25, 5, 0), (25, 11, 7)
"""First release of Slurm that loses the licences of a requeued job, and first later release that keeps them."""


class ReservedNodes(NamedTuple):
    """Nodes with a reservation that begins before a run started now would reach its time limit."""

    nodes: frozenset[str] = frozenset()
    reason: Reason | None = None
    """Reason that names the earliest of these reservations; None without one."""


NOTHING_AHEAD = ReservedNodes()


def ahead_of(job: SlurmJob, snapshot: Snapshot, now: float) -> ReservedNodes:
    """Return the nodes of the job's partition with a reservation for others that begins before a run started now would
    reach its time limit."""
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
    why = reason("reserved_ahead", name=first.name, begin=first.start_time)
    return ReservedNodes(ours.intersection(name for one in found for name in one.node_names), why)


def reserved_ahead(
    job: SlurmJob, shape: Shape, snapshot: Snapshot, whole_node_gpus: Mapping[str, int], now: float
) -> Reason | None:
    """Return the reason why a running job could not restart at this shape on its own and free nodes, else None. Reasons
    are a closed partition, and reservations before the time limit that leave too few nodes."""
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
    """Tell whether this release of Slurm forgets the licences of a requeued job."""
    first, fixed = LOSES_LICENSES
    return first <= release < fixed
