"""What one job may have, and when: by its training strategy, the kinds of GPU that it accepts, and times of peace.

A strategy's limits are the job's own word (`ones_wrapper.protocol.limits`). They only ever take something from the
job: no size that its owner or the cluster does not allow comes from them.

Slurm's types of GPU (`gres/gpu:a100`) are the kinds. A job whose comment names some (`kinds=a100,v100`, or `kinds=any`)
may have any of these, and change between them. Every other job keeps the kind that it asked sbatch for; where it named
none Slurm goes on choosing, and it is not moved from the kind that Slurm chose.

A job is left in peace between two resizes, once it had too many, and near its end. Whether a change pays is the
policy's business; this is a guard against figures that waver: whatever a policy makes of them, a job trains for a
multiple of the time that resizes interrupt it. So how long follows from what a resize costs, as far as the site does
not say it: of a requeue as measured of the job's last ones, of blocks as their changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ones_db import JobHistory
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import Limits, SizeLimits
from ones_wrapper.protocol.optin import ANY
from slurm_ones.config import LimitSettings, ResizeSettings
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.learn.learner import RESIZE_S, JobModel
from slurm_ones.policy.contract import Allocation, JobView, SizeRule
from slurm_ones.policy.tables import predict_each
from slurm_ones.slurm.model import Job, kind_of
from slurm_ones.text import counts

ANY_BATCH = 2**31
"""Largest batch of a GPU, of a job that has not said; and none that says more is believed."""
ANY_GPUS = 2**20
"""No job has more."""


def size_rules(spec: Spec | None, node_gpus: int) -> tuple[SizeRule, ...]:
    """What the job takes at each number of GPUs that its strategy knows, on nodes of so many; nothing where it takes
    any number."""
    if spec is None or spec.limits is None:
        return ()
    return tuple(_rule(spec, spec.limits, row, node_gpus) for row in spec.limits.sizes)


def _sharing(row: SizeLimits, node_gpus: int) -> int:
    """How many consecutive ranks share a node of so many GPUs: a whole group where one node holds the job or groups
    fill nodes, else as many as divide both."""
    return row.together if row.gpus <= node_gpus else math.gcd(row.together, max(node_gpus, 1))


def _rule(spec: Spec, limits: Limits, row: SizeLimits, node_gpus: int) -> SizeRule:
    """A pass of a replica takes what the script says, or what fits into a GPU's memory where that is less: none at all
    where not one sample fits."""
    if row.gpus > ANY_GPUS or row.quantum > ANY_BATCH:
        return SizeRule(row.gpus, row.replicas, 0)
    fits = row.most_local(limits.memory_bytes)
    local = spec.max_local_batch if fits is None else min(spec.max_local_batch, fits)
    most = min(row.replicas * local * max(spec.max_passes, 1), ANY_BATCH)
    return SizeRule(row.gpus, row.replicas, most, row.quantum, _sharing(row, node_gpus))


def breaks(
    spec: Spec | None, shape: Shape, old_batch: int | None, new_batch: int | None, node_gpus: int = 0
) -> Reason | None:
    """What the job's strategy has against that shape and global batch; None where nothing.

    `old_batch` is the batch in force; a `new_batch` of None leaves it. A shape of several nodes is taken for whole ones
    unless `node_gpus`, the GPUs of a node, are known. Looked at once more before a resize begins, and
    while it is under way: what a policy was shown may have changed.
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
    """Whether blocks of these shapes could part ranks that must share a node: each must hold whole groups on each of
    its nodes, since ranks follow the order of the blocks."""
    if len(blocks) == 1:
        return not rule.fits(blocks[0])
    return any(block.gpus_per_node % rule.together for block in blocks)


def parts_groups(spec: Spec | None, blocks: Sequence[Shape], node_gpus: int) -> bool:
    """The same of the strategy of a job that is to have these blocks, on nodes of so many GPUs."""
    gpus = sum(block.gpus for block in blocks)
    return any(parts(rule, blocks) for rule in size_rules(spec, node_gpus) if rule.gpus == gpus)


def too_soon(history: JobHistory | None) -> Reason | None:
    """That its strategy has to take more steps at its present size first; None where it may be resized."""
    limits = history.spec.limits if history is not None and history.spec is not None else None
    if history is None or limits is None or history.steps_since_change is None:
        return None
    left = limits.min_steps - history.steps_since_change
    return reason("strategy_steps", strategy=limits.strategy, steps=left) if left > 0 else None


@dataclass(frozen=True)
class Kinds:
    """The kinds of GPU of a partition."""

    of: Mapping[str, str] = field(default_factory=dict)
    """The kind of each node that has GPUs; empty where nobody names them."""
    given: bool = True
    """Slurm lets jobs ask for another type than they were submitted with."""

    @cached_property
    def every(self) -> tuple[str, ...]:
        """Each of them once."""
        return tuple(dict.fromkeys(self.of.values()))

    def nodes(self, kind: str) -> frozenset[str] | None:
        """Nodes with GPUs of that kind; None for all, where any will do or no node is said to have it."""
        return frozenset(name for name, its in self.of.items() if its == kind) or None if kind else None

    def held(self, elastic: Elastic) -> str:
        """The kind of GPUs that the job has; empty where it has none, or that is unknown."""
        return kind_of(elastic.holdings, self.of)

    def may_change(self, elastic: Elastic) -> bool:
        """Tell whether the job's owner lets it change between kinds, and Slurm can be asked for them."""
        # Of blocks that together hold unequally many GPUs of their nodes each asks for its own.
        asks = any(block.gpus_per_node for block in elastic.job.blocks) and not elastic.whole_nodes
        return elastic.optin is not None and bool(elastic.optin.kinds) and asks and self.given

    def leaves(self, elastic: Elastic, got: Allocation) -> bool:
        """Tell whether the job runs, and is to have GPUs of another kind than those that it is known to have."""
        held = self.held(elastic)
        return elastic.job.running and self.may_change(elastic) and bool(got.kind) and held not in ("", got.kind)

    def accepted(self, elastic: Elastic) -> tuple[str, ...]:
        """Kinds that the job may have GPUs of; none where nobody names them."""
        if elastic.optin is not None and self.may_change(elastic):
            named = elastic.optin.kinds
            return tuple(kind for kind in self.every if kind in named or ANY in named) or self.every
        own = elastic.job.first.kind or self.held(elastic)
        return (own,) if own in self.every else self.every

    def asked(self, elastic: Elastic, got: Allocation) -> str:
        """The kind that Slurm is to be asked for, so that the job gets what it was given; the one that it asks for
        where that does not matter, or is not for us to say."""
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
"""Chance with which a job that is said to be near its end is."""

MOST_DOUBLINGS = 6
AGAIN_S = 5.0
"""What failures double is at least so long, where there is a dwell time at all."""
WORTH = 20.0
"""A job trains at least so many times as long as changes of its blocks interrupt it."""
PACK_S = 120.0
"""A job of blocks that moves to fewer nodes, and has as many GPUs as before, has had them for so long."""
REPAYS = 4.0
"""A job trains at least so many times as long as a requeue interrupts it: at most a fifth of its time is lost."""
ENDS = 2.0
"""A job that ends within so many times as long as a requeue would interrupt it is left as it is."""
CHECKPOINT_S = 600.0
"""Between two checkpoints that a job writes unasked: the wrapper's first interval."""
LONGEST_S = 1800.0
"""No wait that follows from pauses is longer: jobs themselves say when they paused, and one that rests gives up no GPUs
to others."""


def requeue_s(history: JobHistory | None) -> float:
    """Seconds that a requeue interrupts the job: the mean of its last few."""
    return history.pause_s if history is not None and history.pause_s is not None else RESIZE_S


def requeue_dwell_s(history: JobHistory | None, settings: ResizeSettings) -> float:
    """Least time between two requeues of a job."""
    return settings.dwell_s if settings.dwell_s is not None else min(REPAYS * requeue_s(history), LONGEST_S)


def requeue_near_end_s(history: JobHistory | None, limits: LimitSettings) -> float:
    """How long before its end a job is no longer requeued."""
    return limits.near_end_s if limits.near_end_s is not None else min(ENDS * requeue_s(history), LONGEST_S)


def switch_dwell_s(switch_s: float, settings: ResizeSettings) -> float:
    """Least time between two changes of the blocks of a job, each of which is expected to interrupt it so long."""
    most = LONGEST_S if settings.dwell_s is None else settings.dwell_s
    return min(most, max(settings.blocks_dwell_s, WORTH * switch_s))


def pack_dwell_s(dwell_s: float, in_vain: int = 0) -> float:
    """How long a job of blocks keeps its GPUs before blocks on fewer nodes take their place for that alone: it holds
    both while these prepare, which must pay in the time that the next change leaves it. Slurm chooses the nodes, and
    may choose as many again: each time in a row `in_vain` doubles it, up to 64 times."""
    return max(dwell_s, PACK_S) * 2.0 ** min(in_vain, MOST_DOUBLINGS)


def switch_near_end_s(view: JobView, settings: ResizeSettings, limits: LimitSettings) -> float:
    """How long before its end the blocks of a job are left as they are: as long as others would take to train with it.
    Whether a change before that pays is the policy's business."""
    most = math.inf if limits.near_end_s is None else limits.near_end_s
    return min(most, settings.blocks_wait_s, view.prepare_s + view.resize_s)


def rested_at(job: WholeJob, history: JobHistory | None, dwell_s: float) -> float:
    """When the job may be resized (again): the dwell time after its start and its last resize. Of a job of blocks the
    start is no reason to wait: it cost no training, as a requeue does.

    Resizes in a row that did not take effect double it, up to 64 times: what Slurm refused or kept waiting (a limit of
    the user's, say) it will mostly refuse again, and each try costs a running job a restart. A job that waits is
    otherwise free at once, since nothing of it is interrupted.
    """
    failures = history.failures if history is not None else 0
    last = (history.last_resize_end if history is not None else None) or 0.0
    wait_s = max(dwell_s, AGAIN_S) * 2.0 ** min(failures, MOST_DOUBLINGS) if failures and dwell_s else dwell_s
    again = last + wait_s
    if job.running and not job.by_blocks:
        return max(job.start_time + dwell_s, again)
    return again if failures or job.running else 0.0


def grows_at(preempted: Sequence[float], rest_s: float) -> float:
    """When a job may grow again of which Slurm preempted blocks at these times, ascending; 0 if it always may.

    `rest_s` after that; twice as long each time in a row, which is one that comes within as long a time after the rest
    before: what it would grow into is wanted again and again. Blocks that go during a rest are of the same time.
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
    """Seconds of training that a job of blocks loses with a guest: those of blocks that leave; if each change begins a
    term from a checkpoint, those of a term, and the work since the last checkpoint unless there is time for one."""
    if known.shrink_s is not None:
        return known.shrink_s
    return known.resize_s + (CHECKPOINT_S / 2 if known.resize_s > grace_s else 0.0)


def resized_enough(job: WholeJob, history: JobHistory | None, limits: LimitSettings, now: float) -> Reason | None:
    """Why a job that runs may not be interrupted again, or not yet."""
    if history is None or not job.running:
        return None
    most, hourly = limits.resizes_per_job, limits.resizes_per_hour
    if most is not None and len(history.interrupted) >= most:
        return reason("resizes_per_job", times=most)
    if hourly is not None and sum(begun > now - HOUR_S for begun in history.interrupted) >= hourly:
        return reason("resizes_per_hour", times=hourly)
    return None


def near_limit(job: Job, limits: LimitSettings, now: float) -> Reason | None:
    """That the job reaches its time limit soon; None where it does not."""
    if job.running and job.time_limit_s and job.start_time + job.time_limit_s - now < limits.near_limit_s:
        return reason("near_time_limit", seconds=limits.near_limit_s)
    return None


def near_end(jobs: Sequence[tuple[JobView, float]]) -> list[Reason | None]:
    """Of each job that it is as good as sure to end within so many seconds at what it has; None if it is not, or waits.

    All are predicted at once: one by one takes a third of the time of a decision.
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
