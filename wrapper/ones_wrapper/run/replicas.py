"""Division of a step's samples over the present ranks, or over a strategy's replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm

from ones_wrapper.data.feed import Cut, accumulation_count, clamp_batch
from ones_wrapper.group import Group
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import MEMORY_SHARE, MOST_GPUS, SizeLimits, StrategyLimits
from ones_wrapper.run.memory import LargestBatch, device_bytes
from ones_wrapper.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Division(Cut):
    """Division of steps at one world size and within a strategy's limits, for this rank. Its batch is set later."""

    first: bool = True
    """True if this rank is the first of its replica, and so writes the replica's samples to the trace."""
    quantum: int = 1
    """Divisor of all global batches except an epoch's last."""

    def passes(self, batch: int) -> int:
        """Return the number of accumulation steps in a step of `batch` samples."""
        return accumulation_count(batch, self.replicas, self.max_local, self.unit)


def limits_of(strategy: Strategy | None, spec: Spec, group: Group) -> StrategyLimits | None:
    """Return a strategy's limits in this job, with the memory of the smallest GPU by default. Collective. Raises
    TypeError if the object is no strategy, and ValueError if the strategy cannot use the present ranks."""
    if strategy is None:
        return None
    if not isinstance(strategy, Strategy):
        raise TypeError(f"init: strategy={strategy!r:.60} is no ones_wrapper.strategy.Strategy")
    limits = strategy.limits(spec, max(MOST_GPUS, group.world), group.gpus_per_node)
    row = limits.at(group.world)
    replicas = strategy.replicas(group.world)  # first: the strategy's own sentence is better
    if row is None:
        raise ValueError(limits.refusal(group.world))
    if row.replicas != replicas:
        raise ValueError(f"{strategy.name}: {group.world} GPUs are {replicas} replicas, its limits say {row.replicas}")
    memory = -group.maximum([-device_bytes(group.device)])[0]
    return replace(limits, memory_bytes=limits.memory_bytes or memory)


def as_found(spec: Spec, world: int, found: LargestBatch | None) -> Spec:
    """Return the spec corrected by the trial `found`, perhaps at another world size. The trial corrects a strategy's
    formula for memory, or else lowers the largest local batch."""
    if found is None:
        return spec
    if spec.limits is not None:
        row = spec.limits.at(found.gpus)
        said = row.most_local(spec.limits.memory_bytes) if row else None
        if said is not None and said >= found.samples >= spec.max_local_batch:
            return spec  # all declared samples fit; how many more is not known
        corrected = spec.limits.corrected(found.gpus, found.samples)
        if corrected is not spec.limits:
            return replace(spec, limits=corrected)
        if found.gpus != world and not _each_a_replica(spec.limits):  # else a GPU holds as many samples at any size
            return spec
    return replace(spec, max_local_batch=min(spec.max_local_batch, found.samples))


def limits_again(strategy: Strategy | None, spec: Spec, group: Group) -> StrategyLimits | None:
    """Return the strategy's limits, computed again for the models that it now knows. Not collective."""
    if strategy is None or spec.limits is None:
        return spec.limits
    limits = strategy.limits(spec, max(MOST_GPUS, group.world), group.gpus_per_node)
    return replace(limits, memory_bytes=limits.memory_bytes or spec.limits.memory_bytes)


def row_of(spec: Spec, world: int) -> SizeLimits:
    """Return the limits at this world size. Raises ValueError if the strategy cannot use it."""
    if spec.limits is None:
        return SizeLimits(world, world)
    row = spec.limits.at(world)
    if row is None:
        raise ValueError(spec.limits.refusal(world))
    return row


def divide(spec: Spec, world: int, rank: int, equal: bool = False) -> Division:
    """Return the division at this world size; with `equal`, all shares have the same size. Raises ValueError if the
    strategy cannot use this world size."""
    row = row_of(spec, world)
    if equal:
        row = replace(row, quantum=lcm(row.quantum, row.replicas))
    each = world // row.replicas
    unit = row.quantum // gcd(row.quantum, row.replicas)
    fits = row.most_local(spec.limits.memory_bytes if spec.limits else 0)
    most = spec.max_local_batch if fits is None else min(spec.max_local_batch, fits)
    local, whole = max(unit, most - most % unit), row.quantum if equal else 1
    mine = 0, row.replicas, rank // each, local, unit
    return Division(*mine, whole=whole, first=rank % each == 0, quantum=row.quantum)


def in_force(spec: Spec, wanted: int, division: Division) -> int:
    """Return the global batch for an order of `wanted` samples. It is a multiple of the strategy's divisor, and of
    init's `multiple_of` if a batch within the bounds is. Raises ValueError if the bounds exclude all multiples of the
    divisor."""
    most = spec.max_batch, division.max_local, spec.max_passes
    batch = clamp_batch(wanted, division.replicas, *most, lcm(spec.multiple_of, division.quantum))
    if batch % division.quantum:
        batch = clamp_batch(wanted, division.replicas, *most, division.quantum)
    if batch % division.quantum and spec.limits is None:
        raise ValueError(
            f"init: shares='equal' gives each of {division.replicas} GPUs equally many samples, and init leaves at "
            f"most {batch} a step: raise batch or max_batch, or use fewer GPUs"
        )
    if batch % division.quantum:
        assert spec.limits is not None
        raise ValueError(
            f"{spec.limits.strategy}: global batches are multiples of {division.quantum} with {division.replicas} "
            f"replicas, and init's max_batch={spec.max_batch}, max_local_batch={spec.max_local_batch} and "
            f"max_accumulation_steps={spec.max_passes} leave at most {batch}; raise them to {division.quantum}"
        )
    return batch


def _each_a_replica(limits: StrategyLimits) -> bool:
    return all(row.replicas == row.gpus for row in limits.sizes)


def noise_may_be_measured(strategy: Strategy | None, spec: Spec) -> bool:
    """Return True if the gradient noise scale can be measured: the strategy allows it, and each rank is a replica at
    any world size."""
    if strategy is None or spec.limits is None:
        return True
    return strategy.measures_noise and _each_a_replica(spec.limits)


def look_at(spec: Spec, world: int) -> str:
    """Return a hint if not even one sample fits by a strategy's formula; else empty."""
    limits, row = spec.limits, row_of(spec, world)
    if limits is None or row.most_local(limits.memory_bytes) != 0:
        return ""
    fit = [str(one.gpus) for one in limits.sizes if one.most_local(limits.memory_bytes)][:3]
    return (
        f"{limits.strategy}: with {world} GPUs one sample needs {row.fixed_bytes + row.sample_bytes} bytes of a GPU "
        f"by its formula, which is more than {MEMORY_SHARE:.0%} of {limits.memory_bytes}; "
        + (f"{', '.join(fit)} GPUs would hold it" if fit else "no number of GPUs would hold it")
    )
