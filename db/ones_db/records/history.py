"""What learning gets to see of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ones_db.records.jobs import JobRecord, SpecRecord


class EpochPoint(NamedTuple):
    """An epoch as the last run that trained it ended it."""

    epoch: int
    loss: float | None
    accuracy: float | None
    time: float
    restart: int


class ThroughputPoint(NamedTuple):
    """One measured throughput."""

    nodes: int
    gpus_per_node: int
    batch: int
    samples_per_s: float
    time: float


class NoisePoint(NamedTuple):
    """One measured gradient noise scale, in samples."""

    noise: float
    time: float


@dataclass(frozen=True)
class JobHistory:
    """What a job has shown so far: all that learning needs."""

    job: JobRecord
    spec: SpecRecord | None
    epochs: tuple[EpochPoint, ...]
    """Ascending, each epoch once. One that a lost checkpoint undid is not there until it is done again."""
    throughput: tuple[ThroughputPoint, ...]
    """The newest few for each shape and batch, oldest first."""
    samples: float
    """Samples used since the job's first run; work that was repeated after a lost checkpoint counts once."""
    batch: int | None
    """Global batch in force in the last run that said."""
    first_start: float | None
    ended_runs_s: float
    """Seconds that its ended runs took in all."""
    running_since: float | None
    """Start of the run in progress."""
    resizes: int
    """Resizes that interrupted it and took effect: those of a waiting job do not count, being parked does."""
    last_resize_end: float | None
    """End of the last resize, also of one that was rolled back: it interrupted the job as well."""
    epochs_since_change: int
    """Epochs that ended after the last resize did, or all."""
    first_loss: float | None
    failures: int = 0
    """Resizes that did not take effect since the last one that did."""
    first_batch: int | None = None
    """Global batch that its first run began with."""
    noise: tuple[NoisePoint, ...] = ()
    """The newest few gradient noise scales, oldest first."""
    progress: float | None = None
    """Progress since its first run in samples of the base batch, as it said last; never above `samples`."""
    pause_s: float | None = None
    """Mean pause of its last few resizes that took effect, where it is known."""
    interrupted: tuple[float, ...] = ()
    """When each resize began that interrupted it, ascending, also of those that were rolled back."""
    epoch_samples: float | None = None
    """Mean samples of its epochs that ended; what an epoch is for a job that does not know its dataset's length."""
    ran: tuple[tuple[int, int, float], ...] = ()
    """Nodes and GPUs per node that it has run on, and for how many seconds in all: by Slurm's clock, of a run that has
    not ended until its newest report."""

    def running_s(self, now: float) -> float:
        """Seconds it has run in all."""
        return self.ended_runs_s + (max(0.0, now - self.running_since) if self.running_since else 0.0)
