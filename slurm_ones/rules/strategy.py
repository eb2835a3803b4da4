"""What a job's training strategy lets it have: sizes, batches and how often, and the reason where it does not.

A strategy's limits are the job's own word (`ones_wrapper.limits`). They only ever take something from the job: no size
that its owner or the cluster does not allow comes from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ones_db import JobHistory
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.limits import Limits, SizeLimits
from ones_wrapper.protocol import Spec
from slurm_ones.policy.contract import SizeRule
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
