"""Evidence in one job's history: its group, measurements, progress, and pauses of its changes.

**Statistical efficiency** is the worth of a sample at a batch. It follows from the gradient noise scale B = tr(Σ)/|G|²
(McCandlish et al., "An Empirical Model of Large-Batch Training", 2018). A step at batch M brings as much as M/(B + M)
of a step along the true gradient. So a sample at batch M is worth (B + M0)/(B + M) of one at the base batch M0 (Pollux,
OSDI 2021, §3.1, multiplies throughput by it).
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
"""Seconds of silence of a running job, as in an evaluation, that do not raise its remaining work."""
FLAT = 0.05
"""Least effect of compute speed on a step's time from which a ratio of speeds is derived."""
LEAST, MOST = 1e-2, 1e4
"""Bounds of the noise scale, in base batches."""
CAUTIOUS = 4.0
"""Noise scale of a job that never reported one, in base batches, before any job has: a batch four times the base is
then worth 5/8 of its samples. Low among what is measured, since a large batch that was not worth it cannot be had back.
"""


class NoiseEfficiency:
    """An `EfficiencyModel` from a gradient noise scale in samples. A scale without end makes all batches equal, and the
    rule of the job's optimizer those up to `free` (`ones_wrapper.protocol.growth`)."""

    def __init__(self, base_batch: float, noise: float, free: float = 0.0) -> None:
        self.base_batch = max(float(base_batch), 1.0)
        self.noise = float(noise) if noise >= 0 else math.inf
        self.free = max(float(free), self.base_batch)

    def efficiency(self, batches: Ints) -> Floats:
        """Worth of a sample at each global batch, in (0, 1]; 1 up to the base batch, and up to `free`."""
        batch = np.asarray(batches, dtype=np.float64)
        batch = np.where(batch > self.free, batch, self.base_batch)
        if math.isinf(self.noise):
            return np.ones_like(batch)
        return (self.noise + self.base_batch) / (self.noise + batch)


def noise_ratio(base_batch: float, noises: Iterable[float]) -> float | None:
    """The gradient noise scale in base batches, from the newest reports: their median, within bounds; None if none of
    them makes sense. The scale drifts over epochs and jumps from report to report."""
    known = [noise / max(base_batch, 1.0) for noise in noises if math.isfinite(noise) and noise > 0]
    return min(max(median(known), LEAST), MOST) if known else None


def plain_spec(spec: Spec) -> Spec:
    """Return the spec without fields that vary between jobs of one script, or over time: the leader's, a batch fixed
    for now, and the batch's growth so far."""
    if spec.limits is not None and spec.limits.batch_fixed:
        spec = replace(spec, limits=replace(spec.limits, batch_fixed=False))
    return replace(spec, term=0, grown=0) if spec.term or spec.grown else spec


def group_of(history: JobHistory) -> GroupPath:
    """The job's place among others: jobs of a family have the same batches, and may differ in their data."""
    spec = history.spec
    if spec is None:
        return GroupPath(None, None, history.job.user)
    strategy = spec.limits.strategy if spec.limits is not None else ""
    family = (spec.base_batch, spec.max_batch, spec.max_local_batch, strategy)
    return GroupPath(family, plain_spec(spec), history.job.user)


def reshards(spec: Spec | None) -> bool:
    return spec is not None and spec.limits is not None and spec.limits.reshards


def by_terms(spec: Spec | None) -> bool:
    """Tell whether each change of the job of blocks begins a term from a checkpoint."""
    return spec is not None and not spec.hot


def inexact(spec: Spec | None) -> bool:
    """Tell whether training at the same batch differs with the number of GPUs."""
    return spec is not None and spec.limits is not None and not spec.limits.exact


def is_wired(spec: Spec | None) -> bool:
    """Tell whether the job reports the bytes that it sends."""
    return layout_of(spec).wired


def without_bytes(history: JobHistory) -> JobHistory | None:
    """The history without the bytes that it sends; None if it does not report them, or a strategy does."""
    spec = history.spec
    if spec is None or spec.limits is not None or not spec.gradient_bytes:
        return None
    return replace(history, spec=replace(spec, gradient_bytes=0))


def join_of(history: JobHistory) -> float | None:
    """Return the pause of changes in which blocks joined (any change, if each begins a term), in seconds; None without
    one."""
    return history.switch_s if by_terms(history.spec) else history.join_s


def leave_of(history: JobHistory) -> float | None:
    """Return the pause of changes in which blocks only left, in seconds; None if unknown, or mixed with others."""
    return history.switch_s if history.join_s is None else None


def ready_of(history: JobHistory) -> float | None:
    """Return the seconds that the last joining blocks took to get ready; None if none joined."""
    ready = history.membership.report.ready_s if history.membership is not None else 0.0
    return ready if ready > 0 else None


def points_in(history: JobHistory) -> tuple[Points, float]:
    """Measurements on the kind of GPU that the job knows best, and the reference local batch of its speed."""
    measured = of_kind(history.throughput, base_kind(history.throughput))
    layout = layout_of(history.spec)
    base = history.spec.base_batch if history.spec is not None else None
    reference = reference_of(measured, base, layout.max_local)
    ran = {(shape.nodes, shape.gpus): seconds for shape, seconds in history.ran}
    return points_of(measured, reference, layout, ran if history.ran else None), reference


def unreported_epochs(history: JobHistory, efficiency: NoiseEfficiency, now: float) -> float:
    """Epochs of progress that a running job would make, at its last speed, since its last report."""
    dataset = dataset_of(history)
    if history.running_since is None or not history.throughput or not dataset:
        return 0.0
    last = history.throughput[-1]
    silent_s = now - max(last.time, history.running_since) - SILENT_S
    rate = last.samples_per_s * float(efficiency.efficiency(np.array([last.batch]))[0])
    return max(silent_s, 0.0) * rate / dataset


def own_noise(history: JobHistory) -> float | None:
    """The job's own gradient noise scale in base batches."""
    if history.spec is None:
        return None
    points = history.noise
    if inexact(history.spec) and history.last_resize_end is not None:
        # The worth of a sample depends on the number of GPUs too.
        points = tuple(point for point in points if point.time > history.last_resize_end)
    return noise_ratio(history.spec.base_batch, (point.noise for point in points))


def free_batch(history: JobHistory) -> float:
    """The largest batch that costs no samples: as the job says, and as its optimizer's rule and its own noise scale
    allow; 0 before it measured one."""
    spec, ratio = history.spec, own_noise(history)
    if spec is None or ratio is None:
        return 0.0
    return min(spec.grown, bound(spec.rule, spec.base_batch, ratio * spec.base_batch))


def progress_in(history: JobHistory) -> float:
    """Progress in samples of the base batch: as reported, or else every sample used counts whole."""
    return history.progress if history.progress is not None else history.samples


def epochs_in(history: JobHistory) -> float:
    """Epochs of progress done."""
    dataset = dataset_of(history)
    return progress_in(history) / dataset if dataset else float(len(history.epochs))


def dataset_of(history: JobHistory) -> int:
    """Samples in an epoch. A stream's length is not known before its first epoch has ended: 0 until then."""
    if history.spec is not None and history.spec.dataset:
        return history.spec.dataset
    return round(history.epoch_samples or 0.0)


def training_after(history: JobHistory, epochs: float, upto: int) -> TrainingState:
    """The job's training after `epochs` epochs of progress, the last end of an epoch that counts being `upto` - 1."""
    last = history.epochs[upto - 1] if upto else None
    return TrainingState(
        dataset=dataset_of(history),
        epochs=epochs,
        initial_loss=history.first_loss,
        loss=last.loss if last is not None else None,
        accuracy=last.accuracy if last is not None else None,
    )


def log_of(history: JobHistory) -> FinishedJob:
    """The log of a finished job. Its progress at an epoch's end is not stored, and taken to have come evenly."""
    total = epochs_in(history) if history.progress is not None else float(len(history.epochs))
    each = total / max(len(history.epochs), 1)
    points = [training_after(history, (point.epoch + 1) * each, i + 1) for i, point in enumerate(history.epochs)]
    return FinishedJob(points, total, float(history.spec.epochs) if history.spec is not None else 0.0)


def base_kind(points: Sequence[ThroughputPoint]) -> str:
    """The kind on which most sizes and batches were measured, latest on ties; "" for none."""
    if len(kinds := {point.kind for point in points}) < 2:
        return kinds.pop() if kinds else ""
    tried = Counter(kind for kind, _ in {(point.kind, point[:3]) for point in points if point.kind})
    last = {point.kind: point.time for point in sorted(points, key=lambda point: point.time)}
    return max(tried, key=lambda kind: (tried[kind], last[kind]), default="")


def of_kind(points: Sequence[ThroughputPoint], kind: str) -> tuple[ThroughputPoint, ...]:
    """Return the measurements on this kind of GPU, or on an unknown one."""
    return tuple(point for point in points if point.kind in (kind, ""))


def ratios(points: Sequence[ThroughputPoint], fit: Fit, layout: StepLayout, here: str) -> list[Ratio]:
    """Speeds of computing on other kinds that explain best what a job with this fit of kind `here` measured there."""
    found, along, model = [], faster(layout), MeasuredThroughputs((MeasuredThroughput(fit, layout),))
    for there in sorted({point.kind for point in points} - {here, ""}) if here else ():
        seen = points_of([point for point in points if point.kind == there], fit.reference, layout)
        if not len(seen.count):
            continue
        reference, row = np.float64(fit.reference), seen.at.each(lambda values: values[None])
        # The misfit at a size is taken to be alike on both kinds.
        misfit = model.log_step(row)[0] - log_step(fit.figures, seen.at, reference)
        log, slope = 0.0, np.zeros(0)
        for _ in range(6):
            steps, slopes = log_step_and_slopes(fit.figures + along * log, seen.at, reference)
            slope = slopes @ along
            if np.abs(slope).max() < FLAT:
                break
            log += float(np.clip(slope @ (seen.log_step - steps - misfit) / (slope @ slope), -1.0, 1.0))
        else:
            doubt = float((slope**2 @ model.variance(row)[0]) / (slope @ slope) ** 2)
            found.append(Ratio(here, there, log, COMPARED**2 + doubt))
    return found
