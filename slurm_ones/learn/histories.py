"""What a job's history says: among which it is, what it measured, how far it came, what its changes cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ones_db import JobHistory
from ones_wrapper.protocol import Spec
from slurm_ones.learn.efficiency import NoiseEfficiency, noise_ratio
from slurm_ones.learn.hierarchy import GroupPath
from slurm_ones.learn.kinds import base_kind, of_kind
from slurm_ones.learn.progress import FinishedJob, TrainingState
from slurm_ones.learn.step_time import Points, layout_of
from slurm_ones.learn.throughput import points_of, reference_of

SILENT_S = 600.0
"""A running job may keep silent for so long, for an evaluation, say, without being thought to have more to do."""


def plain_spec(spec: Spec) -> Spec:
    """The spec without what differs between jobs of one script, and from time to time: who leads a job of blocks, and
    whether its strategy keeps the batch now."""
    if spec.limits is not None and spec.limits.batch_fixed:
        spec = replace(spec, limits=replace(spec.limits, batch_fixed=False))
    return replace(spec, term=0) if spec.term else spec


def kin_of(history: JobHistory) -> GroupPath:
    """Where the job is among its like: jobs of a family have their batches alike, and may differ in their data."""
    spec = history.spec
    if spec is None:
        return GroupPath(None, None, history.job.user)
    strategy = spec.limits.strategy if spec.limits is not None else ""
    family = (spec.base_batch, spec.max_batch, spec.max_local_batch, strategy)
    return GroupPath(family, plain_spec(spec), history.job.user)


def reshards(spec: Spec | None) -> bool:
    return spec is not None and spec.limits is not None and spec.limits.reshards


def by_terms(spec: Spec | None) -> bool:
    """Whether each change of a job of blocks begins a term from a checkpoint, whoever joins or leaves."""
    return spec is not None and not spec.hot


def inexact(spec: Spec | None) -> bool:
    """Whether another number of GPUs is another training, at the same batch."""
    return spec is not None and spec.limits is not None and not spec.limits.exact


def is_wired(spec: Spec | None) -> bool:
    """Whether the job tells what it sends."""
    return layout_of(spec).wired


def without_bytes(history: JobHistory) -> JobHistory | None:
    """The same as if it had not said what it sends; None where it did not, or a strategy did."""
    spec = history.spec
    if spec is None or spec.limits is not None or not spec.gradient_bytes:
        return None
    return replace(history, spec=replace(spec, gradient_bytes=0))


def join_of(history: JobHistory) -> float | None:
    """Pause of a job's changes in which blocks joined, or of any where each begins a term; None where none was."""
    return history.switch_s if by_terms(history.spec) else history.join_s


def leave_of(history: JobHistory) -> float | None:
    """Pause of a job's changes in which blocks only left; None where that is unknown, or mixed with others."""
    return history.switch_s if history.join_s is None else None


def ready_of(history: JobHistory) -> float | None:
    """Seconds until blocks were ready that joined last; None where none did."""
    ready = history.membership.report.ready_s if history.membership is not None else 0.0
    return ready if ready > 0 else None


def points_in(history: JobHistory) -> tuple[Points, float]:
    """What the job measured on the kind of GPU that it knows best, and the local batch that its speed is told at."""
    measured = of_kind(history.throughput, base_kind(history.throughput))
    layout = layout_of(history.spec)
    base = history.spec.base_batch if history.spec is not None else None
    reference = reference_of(measured, base, layout.max_local)
    ran = {(shape.nodes, shape.gpus): seconds for shape, seconds in history.ran}
    return points_of(measured, reference, layout, ran if history.ran else None), reference


def unheard_epochs(history: JobHistory, efficiency: NoiseEfficiency, now: float) -> float:
    """Epochs of progress that a running job would make, at its last speed, in as long as nothing was heard of it."""
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
        # What a sample is worth depends on the number of GPUs too: of another one nothing is carried over.
        points = tuple(point for point in points if point.time > history.last_resize_end)
    return noise_ratio(history.spec.base_batch, (point.noise for point in points))


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
    """The log of a finished job. What progress it had made at an epoch's end is not stored: it is taken to have come
    evenly."""
    total = epochs_in(history) if history.progress is not None else float(len(history.epochs))
    each = total / max(len(history.epochs), 1)
    points = [training_after(history, (point.epoch + 1) * each, i + 1) for i, point in enumerate(history.epochs)]
    return FinishedJob(points, total, float(history.spec.epochs) if history.spec is not None else 0.0)
