"""Plain advice to a job's owner. Each piece follows from measured figures and names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ones_db import JobSummary
from slurm_ones.show.usage import Measured, Usage
from slurm_ones.text import seconds, troubles

NEARLY = 0.9
"""A size with this share of another's useful throughput trains nearly as fast."""
WORTH_IT = 0.75
"""A GPU that does this share of what one does at the smallest size is well used."""
LONG_S = 60.0
"""What was measured for less says little."""
PAUSED = 0.05
"""Share of the time that resizes may stop training."""
IMPORTS_S = 15.0
"""Seconds of imports at each start from which on they are worth a look."""
STARTS = 2


@dataclass(frozen=True)
class Allowed:
    """What the job's comment and script allow; None where it does not say."""

    gpus: tuple[int, int] | None = None
    max_batch: int | None = None
    """None too where the owner fixed the batch."""
    blocks: bool = False
    step: int = 1
    """Of the GPUs: every so many-th number, from the first on."""
    valid: frozenset[int] = frozenset()
    """Numbers of GPUs that its training strategy can use; empty: any."""
    batch_fixed: bool = False
    """Its training strategy keeps the batch."""

    def gpus_to(self, low: int, high: int) -> str:
        """The word of the comment that allows so many, in the present step."""
        return f"gpus={low}-{high}" + (f":{self.step}" if self.step > 1 else "")


Rule = Callable[[Usage, Allowed], str | None]


def advice(usage: Usage, allowed: Allowed, summary: JobSummary | None = None) -> list[str]:
    """Sentences without their full stops, most telling first; what is wrong with its training comes before all."""
    found = list(troubles(summary)) if summary is not None else []
    if summary is not None and summary.limits is not None:
        valid = frozenset(row.gpus for row in summary.limits.sizes)
        allowed = replace(allowed, valid=valid, batch_fixed=summary.limits.batch_fixed)
    return found + [text for rule in RULES if (text := rule(usage, allowed)) is not None]


def _fewer(usage: Usage, allowed: Allowed) -> str | None:
    """Asked for more than it can use."""
    asked = _at(usage, usage.job.requested_gpus)
    if asked is None:
        return None
    for small in _sizes(usage):
        if small.gpus < asked.gpus and small.useful >= NEARLY * asked.useful:
            return (
                f"asked for {_gpus(asked.gpus)}, and trains nearly as fast on {small.gpus}: {small.useful:.4g} useful "
                f"samples/s there, {asked.useful:.4g} on {asked.gpus}; gpus={small.gpus} costs "
                f"{small.gpus / asked.gpus:.0%} of the GPUs"
            )
    return None


def _more(usage: Usage, allowed: Allowed) -> str | None:
    """Its comment ends below what it could use."""
    sizes = _sizes(usage)
    if not sizes or allowed.gpus is None or len(sizes) < 2:
        return None
    low, high = allowed.gpus
    largest, smallest = sizes[-1], sizes[0]
    if allowed.valid and max(allowed.valid) <= high:
        return None
    if largest.gpus < high or largest.gpus <= smallest.gpus:
        return None
    each = largest.useful / largest.gpus / (smallest.useful / smallest.gpus)
    if each < WORTH_IT:
        return None
    return (
        f"its comment ends at {_gpus(high)}, where each GPU still did {each:.0%} of what one did on {smallest.gpus} "
        f"({largest.useful:.4g} and {smallest.useful:.4g} useful samples/s in all): "
        f"{allowed.gpus_to(low, 2 * high)} would let it use more where they are free"
    )


def _batch(usage: Usage, allowed: Allowed) -> str | None:
    """Its largest batch keeps it from more GPUs, though samples are still worth nearly as much there."""
    most = allowed.max_batch
    at_most = [one for one in _sizes(usage) if most is not None and one.batch >= most]
    known = [one for one in at_most if one.statistical_efficiency is not None]
    if not known or most is None:
        return None
    one = known[-1]
    worth = one.statistical_efficiency or 0.0
    if worth < NEARLY or allowed.batch_fixed:
        return None
    return (
        f"trained at its largest batch, {one.batch}, where a sample was still worth {worth:.0%} of one at its base "
        f"batch: a largest batch of {2 * one.batch} (ones.init, and batch= in the comment) would keep "
        f"{_gpus(2 * one.gpus)} as busy as {one.gpus} now"
    )


def _waited(usage: Usage, allowed: Allowed) -> str | None:
    """Waited longer than it ran, and could have begun smaller."""
    job = usage.job
    if allowed.gpus is None or not job.queueing_s or not job.running_s or job.queueing_s <= job.running_s:
        return None
    low, high = allowed.gpus
    least = min(allowed.valid, default=allowed.step)
    if low <= least:
        return None
    return (
        f"waited {seconds(job.queueing_s)} to run {seconds(job.running_s)}: {allowed.gpus_to(least, high)} in place of "
        f"{low}-{high} would let it start on {_gpus(least)} and grow, where its model fits there"
    )


def _pauses(usage: Usage, allowed: Allowed) -> str | None:
    """Requeues stop it for long."""
    pauses = [one.pause_s for one in usage.resized if one.mechanism == "requeue" and one.pause_s]
    running = usage.job.running_s or 0.0
    if not pauses or allowed.blocks or sum(pauses) <= PAUSED * (running + sum(pauses)):
        return None
    share = sum(pauses) / (running + sum(pauses))
    return (
        f"{len(pauses)} requeue{'s' * (len(pauses) != 1)} stopped its training for {seconds(sum(pauses))}, {share:.0%} "
        "of its time: as a job of blocks (array=blocks) it would train on while it changes its size"
    )


def _imports(usage: Usage, allowed: Allowed) -> str | None:
    """Each start spends long on imports."""
    times = [one.import_s for one in usage.resized if one.import_s]
    if len(times) < STARTS or sum(times) / len(times) < IMPORTS_S:
        return None
    return (
        f"imports took {seconds(sum(times) / len(times))} of each of {len(times)} starts: keep its Python environment "
        "on a local disk or in a container image"
    )


def _repaid(usage: Usage, allowed: Allowed) -> str | None:
    """Resizing made it later than it would have been."""
    job = usage.job
    if (
        usage.predicted_jct_s is None
        or job.jct_s is None
        or not job.resizes
        or job.jct_s <= usage.predicted_jct_s / NEARLY
    ):
        return None
    return (
        f"took {seconds(job.jct_s)}, and by its own throughput on the {_gpus(job.requested_gpus)} it asked for would "
        f"have taken {seconds(usage.predicted_jct_s)}: others had its GPUs meanwhile; gpus={job.requested_gpus} keeps "
        "its size"
    )


RULES: tuple[Rule, ...] = (_fewer, _more, _batch, _waited, _pauses, _imports, _repaid)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _sizes(usage: Usage) -> list[Measured]:
    """The best batch at each number of GPUs that was measured long enough, by GPUs.

    Of those with a goodput, if there are any. Without one, throughput tells nothing across batches: of the batch that
    was measured longest.
    """
    long = [one for one in usage.measured if one.measured_s >= LONG_S]
    alike = [one for one in long if one.goodput is not None]
    if long and not alike:
        of_batch: dict[int, float] = {}
        for one in long:
            of_batch[one.batch] = of_batch.get(one.batch, 0.0) + one.measured_s
        longest = max(of_batch, key=lambda batch: of_batch[batch])
        alike = [one for one in long if one.batch == longest]
    best: dict[int, Measured] = {}
    for one in alike:
        if one.gpus not in best or one.useful > best[one.gpus].useful:
            best[one.gpus] = one
    return [best[gpus] for gpus in sorted(best)]


def _at(usage: Usage, gpus: int) -> Measured | None:
    return next((one for one in _sizes(usage) if one.gpus == gpus), None)
