"""What is known of each job: its history turned into the models that policies weigh."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ones_db import JobHistory
from slurm_ones.decide.policy import EfficiencyModel, Progress, ThroughputModel
from slurm_ones.learn.efficiency import ConstantEfficiency
from slurm_ones.learn.progress import BetaProgress, FinishedJob, Training
from slurm_ones.learn.throughput import PRIOR_PER_GPU, MeasuredThroughput, Measurement


@dataclass(frozen=True)
class Known:
    """The models of one job."""

    throughput: ThroughputModel
    efficiency: EfficiencyModel
    progress: Progress


def _measurements(history: JobHistory) -> list[Measurement]:
    return [Measurement(p.nodes, p.gpus_per_node, p.batch, p.samples_per_s, p.time) for p in history.throughput]


def _training(history: JobHistory, epochs: float, upto: int) -> Training:
    """The job's training after `epochs` epochs, the last of `history.epochs` that counts being `upto` - 1."""
    last = history.epochs[upto - 1] if upto else None
    return Training(
        dataset=history.spec.dataset if history.spec is not None else 0,
        epochs=epochs,
        initial_loss=history.first_loss,
        loss=last.loss if last is not None else None,
        accuracy=last.accuracy if last is not None else None,
    )


def _log(history: JobHistory) -> FinishedJob:
    points = [_training(history, float(point.epoch + 1), i + 1) for i, point in enumerate(history.epochs)]
    return FinishedJob(points, float(len(history.epochs)))


class Learner:
    """Turns histories into models; what it has learned from finished jobs is fitted anew when one finishes."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._finished: tuple[int, ...] = ()
        self._progress = BetaProgress(seed=seed)
        self._prior_per_gpu = PRIOR_PER_GPU

    def finished(self, histories: Sequence[JobHistory]) -> None:
        """Learn from the jobs that ended by themselves; free when they are the same as before."""
        ended = tuple(sorted(history.job.job_id for history in histories))
        if ended == self._finished:
            return
        self._finished = ended
        self._progress = BetaProgress([_log(history) for history in histories], seed=self._seed)
        self._prior_per_gpu = self._typical(histories)

    @staticmethod
    def _typical(histories: Iterable[JobHistory]) -> float:
        speeds = [m.samples_per_s / m.gpus for h in histories for m in _measurements(h) if m.believable]
        return statistics.median(speeds) if speeds else PRIOR_PER_GPU

    def about(self, history: JobHistory | None) -> Known:
        """The models of a job; of one without a history, what is typical."""
        if history is None:
            nothing = Training(dataset=0, epochs=0.0)
            return Known(
                MeasuredThroughput((), self._prior_per_gpu), ConstantEfficiency(), self._progress.progress(nothing)
            )
        dataset = history.spec.dataset if history.spec is not None else 0
        epochs = history.samples / dataset if dataset else float(len(history.epochs))
        declared = float(history.spec.epochs) if history.spec is not None else 0.0
        return Known(
            MeasuredThroughput(_measurements(history), self._prior_per_gpu),
            ConstantEfficiency(),
            self._progress.progress(_training(history, epochs, len(history.epochs)), declared),
        )
