"""Quantities read from one job's history: group, measurements, progress, gradient noise, and pauses of its changes.

**Statistical efficiency** is the progress per sample at a batch, relative to the base batch M0. It follows from the
gradient noise scale B = tr(Σ)/|G|² (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018). A step at
batch M makes M/(B + M) times the progress of a step along the true gradient. So a sample at batch M makes (B + M0)/(B +
M) times the progress of a sample at M0. Pollux (OSDI 2021, §3.1) multiplies the throughput by this efficiency.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from ones_db import JobHistory, ThroughputPoint
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.growth import bound
from slurm_ones.learn.hierarchy import COMPARED, GroupPath, Ratio, faster
from slurm_ones.learn.progress import FinishedJob, TrainingState
from slurm_ones.learn.step_time import Fit, Points, StepLayout, layout_of, log_step, log_step_and_slopes
from slurm_ones.learn.throughput import MeasuredThroughput, MeasuredThroughputs, points_of, reference_of
from slurm_ones.policy.contract import Floats, Ints

SILENT_S = 600.0
"""Seconds for which a running job may report nothing, as during an evaluation. If it is silent longer, its expected
remaining epochs rise."""
FLAT = 0.05
"""Smallest slope of log step time against log compute speed at which a speed ratio of two kinds of GPU is derived."""
LEAST, MOST = 1e-2, 1e4
"""Bounds on the gradient noise scale, in multiples of the base batch."""
CAUTIOUS = 4.0
"""Noise scale before any job has reported one, in multiples of the base batch, at the low end of measured values. At
four times the base batch a sample is then worth 5/8."""


class NoiseEfficiency:
    """`EfficiencyModel` from a gradient noise scale in samples. If it is infinite, all batches are equally efficient.

    Batches up to `free` are as efficient as the base batch, because the optimizer adapts to them
    (`ones_wrapper.protocol.growth`).
    """

    def __init__(self, base_batch: float, noise: float, free: float = 0.0) -> None:
        self.base_batch = max(float(base_batch), 1.0)
        self.noise = float(noise) if noise >= 0 else math.inf
        self.free = max(float(free), self.base_batch)

    def efficiency(self, batches: Ints) -> Floats:
        """Return the progress per sample at each global batch, in (0, 1], relative to the base batch. It is 1 up to
        `free`, and up to the base batch."""
        batch = np.asarray(batches, dtype=np.float64)
        batch = np.where(batch > self.free, batch, self.base_batch)
        if math.isinf(self.noise):
            return np.ones_like(batch)
        return (self.noise + self.base_batch) / (self.noise + batch)


def noise_ratio(base_batch: float, noises: Iterable[float]) -> float | None:
    """Return the median of the reported noise scales, in multiples of the base batch and within bounds; None without a
    valid report."""
    known = [noise / max(base_batch, 1.0) for noise in noises if math.isfinite(noise) and noise > 0]
    return min(max(median(known), LEAST), MOST) if known else None


def plain_spec(spec: Spec) -> Spec:
    """Return the spec without what differs between jobs of one script or changes in time: the term, whether the batch
    is fixed, and the batch to which the optimizer has grown."""
    if spec.limits is not None and spec.limits.batch_fixed:
        spec = replace(spec, limits=replace(spec.limits, batch_fixed=False))
    return replace(spec, term=0, grown=0) if spec.term or spec.grown else spec


def group_of(history: JobHistory) -> GroupPath:
    """Return the job's place in the tree of `hierarchy`. Jobs of one family have the same batches and strategy."""
    spec = history.spec
    if spec is None:
        return GroupPath(None, None, history.job.user)
    strategy = spec.limits.strategy if spec.limits is not None else ""
    family = (spec.base_batch, spec.max_batch, spec.max_local_batch, strategy)
    return GroupPath(family, plain_spec(spec), history.job.user)


def reshards(spec: Spec | None) -> bool:
    return spec is not None and spec.limits is not None and spec.limits.reshards


def by_terms(spec: Spec | None) -> bool:
    """Tell whether each change of the job's blocks restarts training from a checkpoint, in a new term."""
    return spec is not None and not spec.hot


def inexact(spec: Spec | None) -> bool:
    """Tell whether training at the same batch has another result on another number of GPUs."""
    return spec is not None and spec.limits is not None and not spec.limits.exact


def is_wired(spec: Spec | None) -> bool:
    """Tell whether the job's spec says how many bytes its ranks send."""
    return layout_of(spec).wired


def without_bytes(history: JobHistory) -> JobHistory | None:
    """Return the history without the size of the job's gradients; None if it reported none, or has a strategy."""
    spec = history.spec
    if spec is None or spec.limits is not None or not spec.gradient_bytes:
        return None
    return replace(history, spec=replace(spec, gradient_bytes=0))


def join_of(history: JobHistory) -> float | None:
    """Return the job's mean pause, in seconds, in its last changes in which blocks joined; None if unknown. If each
    change starts a new term, all changes count."""
    return history.switch_s if by_terms(history.spec) else history.join_s


def leave_of(history: JobHistory) -> float | None:
    """Return the job's mean pause, in seconds, in its last changes if blocks only left; else None."""
    return history.switch_s if history.join_s is None else None


def ready_of(history: JobHistory) -> float | None:
    """Return the seconds from the start of the last joined blocks until they were ready; None if no block has
    joined."""
    ready = history.membership.report.ready_s if history.membership is not None else 0.0
    return ready if ready > 0 else None


def points_in(history: JobHistory) -> tuple[Points, float]:
    """Return the job's measurements on its base kind of GPU (`base_kind`), and its reference local batch."""
    measured = of_kind(history.throughput, base_kind(history.throughput))
    layout = layout_of(history.spec)
    base = history.spec.base_batch if history.spec is not None else None
    reference = reference_of(measured, base, layout.max_local)
    ran = {(shape.nodes, shape.gpus): seconds for shape, seconds in history.ran}
    return points_of(measured, reference, layout, ran if history.ran else None), reference


def unreported_epochs(history: JobHistory, efficiency: NoiseEfficiency, now: float) -> float:
    """Return the epochs that a running job has trained, at its last speed, since its silence exceeded `SILENT_S`.
    Return 0 for a shorter silence."""
    dataset = dataset_of(history)
    if history.running_since is None or not history.throughput or not dataset:
        return 0.0
    last = history.throughput[-1]
    silent_s = now - max(last.time, history.running_since) - SILENT_S
    rate = last.samples_per_s * float(efficiency.efficiency(np.array([last.batch]))[0])
    return max(silent_s, 0.0) * rate / dataset


def own_noise(history: JobHistory) -> float | None:
    """Return the noise scale that the job reported, in multiples of the base batch; None without a valid report."""
    if history.spec is None:
        return None
    points = history.noise
    if inexact(history.spec) and history.last_resize_end is not None:
        # The efficiency of a sample then depends on the number of GPUs too.
        points = tuple(point for point in points if point.time > history.last_resize_end)
    return noise_ratio(history.spec.base_batch, (point.noise for point in points))


def free_batch(history: JobHistory) -> float:
    """Return the largest batch that is as efficient as the base batch; 0 without a reported noise scale. It is the
    batch that the job reported, at most what its optimizer's rule gives for this noise scale."""
    spec, ratio = history.spec, own_noise(history)
    if spec is None or ratio is None:
        return 0.0
    return min(spec.grown, bound(spec.rule, spec.base_batch, ratio * spec.base_batch))


def progress_in(history: JobHistory) -> float:
    """Return the job's progress in samples of the base batch; if it reports none, the number of samples used."""
    return history.progress if history.progress is not None else history.samples


def epochs_in(history: JobHistory) -> float:
    """Return the job's progress in epochs."""
    dataset = dataset_of(history)
    return progress_in(history) / dataset if dataset else float(len(history.epochs))


def dataset_of(history: JobHistory) -> int:
    """Return the number of samples in an epoch; for a stream it is measured, and 0 until the first epoch has ended."""
    if history.spec is not None and history.spec.dataset:
        return history.spec.dataset
    return round(history.epoch_samples or 0.0)


def training_after(history: JobHistory, epochs: float, upto: int) -> TrainingState:
    """Return the training state after `epochs` epochs of progress, with loss and accuracy of the report on epoch `upto`
    (from 1; 0: without)."""
    last = history.epochs[upto - 1] if upto else None
    return TrainingState(
        dataset=dataset_of(history),
        epochs=epochs,
        initial_loss=history.first_loss,
        loss=last.loss if last is not None else None,
        accuracy=last.accuracy if last is not None else None,
    )


def log_of(history: JobHistory) -> FinishedJob:
    """Return a finished job as data for `BetaProgress`, with equal progress in all its epochs."""
    total = epochs_in(history) if history.progress is not None else float(len(history.epochs))
    each = total / max(len(history.epochs), 1)
    points = [training_after(history, (point.epoch + 1) * each, i + 1) for i, point in enumerate(history.epochs)]
    return FinishedJob(points, total, float(history.spec.epochs) if history.spec is not None else 0.0)


def base_kind(points: Sequence[ThroughputPoint]) -> str:
    """Return the kind of GPU on which the job measured most pairs of shape and batch, and among equals the kind
    measured last; "" without measurements."""
    if len(kinds := {point.kind for point in points}) < 2:
        return kinds.pop() if kinds else ""
    tried = Counter(kind for kind, _ in {(point.kind, point[:3]) for point in points if point.kind})
    last = {point.kind: point.time for point in sorted(points, key=lambda point: point.time)}
    return max(tried, key=lambda kind: (tried[kind], last[kind]), default="")


def of_kind(points: Sequence[ThroughputPoint], kind: str) -> tuple[ThroughputPoint, ...]:
    """Return the measurements on this kind of GPU, or on an unknown kind."""
    return tuple(point for point in points if point.kind in (kind, ""))


def ratios(points: Sequence[ThroughputPoint], fit: Fit, layout: StepLayout, here: str) -> list[Ratio]:
    """Return the ratio of compute speed on each other kind of GPU to that on `here`, fitted to the measurements."""
    found, along, model = [], faster(layout), MeasuredThroughputs((MeasuredThroughput(fit, layout),))
    for there in sorted({point.kind for point in points} - {here, ""}) if here else ():
        seen = points_of([point for point in points if point.kind == there], fit.reference, layout)
        if not len(seen.count):
            continue
        reference, row = np.float64(fit.reference), seen.at.each(lambda values: values[None])
        # The misfit at a size is assumed to be the same on both kinds.
        misfit = model.log_step(row)[0] - log_step(fit.parameters, seen.at, reference)
        log, slope = 0.0, np.zeros(0)
        for _ in range(6):
            steps, slopes = log_step_and_slopes(fit.parameters + along * log, seen.at, reference)
            slope = slopes @ along
            if np.abs(slope).max() < FLAT:
                break
            log += float(np.clip(slope @ (seen.log_step - steps - misfit) / (slope @ slope), -1.0, 1.0))
        else:
            doubt = float((slope**2 @ model.variance(row)[0]) / (slope @ slope) ** 2)
            found.append(Ratio(here, there, log, COMPARED**2 + doubt))
    return found
