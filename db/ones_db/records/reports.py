"""What runs report, each kind with the number of its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ones_db.records.jobs import SpecRecord


@dataclass(frozen=True)
class HelloRecord:
    """First report of a run, and of each later start of its ranks within it."""

    number: int
    time: float
    nodes: int
    gpus_per_node: int
    batch: int
    lr_factor: float
    epoch: int
    cursor: int
    step: int
    checkpoint: str = ""
    note: str = ""
    launch_s: float = 0.0
    group_s: float = 0.0
    load_s: float = 0.0
    noise: float | None = None
    progress: float | None = None
    queue_s: float = 0.0
    import_s: float = 0.0
    resizes: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class FirstRecord:
    """The first step of a run ended."""

    number: int
    time: float
    step: int
    seconds: float


@dataclass(frozen=True)
class ThroughputRecord:
    """Samples used over a stretch of steps."""

    number: int
    time: float
    epoch: int
    step: int
    cursor: int
    samples: int
    seconds: float
    batch: int
    lr_factor: float
    loss: float | None = None
    noise: float | None = None
    """Gradient noise scale, samples."""
    progress: float | None = None
    """Progress since the job's first run, samples of the base batch."""
    nonfinite: int = 0


@dataclass(frozen=True)
class EpochRecord:
    """An epoch ended."""

    number: int
    time: float
    epoch: int
    step: int
    samples: int
    loss: float | None = None
    accuracy: float | None = None
    nonfinite: int = 0


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint became durable."""

    number: int
    time: float
    name: str
    epoch: int
    cursor: int
    step: int
    bytes: int
    seconds: float
    order_number: int | None = None
    stall_s: float | None = None


@dataclass(frozen=True)
class BatchRecord:
    """The global batch changed at a step boundary."""

    number: int
    time: float
    step: int
    batch: int
    lr_factor: float
    order_number: int | None = None
    passes: int = 1
    ramp: int = 0


@dataclass(frozen=True)
class ByeRecord:
    """Last report of a run that could still speak."""

    number: int
    time: float
    reason: str
    step: int
    exit_code: int = 0
    note: str = ""


AnyReport = HelloRecord | FirstRecord | ThroughputRecord | EpochRecord | CheckpointRecord | BatchRecord | ByeRecord


@dataclass(frozen=True)
class RunReports:
    """The reports of one run that were read in one look, each kind in the order of its numbers."""

    job_id: int
    restart: int
    offset: int
    """Bytes of the report file that were read with them."""
    number: int | None
    """Number of the last report in those bytes; None where they held none."""
    spec: SpecRecord | None = None
    """What the job says of itself now, where that was read too; without a report it makes no run."""
    hello: HelloRecord | None = None
    """The last one, where the run's ranks were started several times in this look."""
    begun: float | None = None
    """When the first of those was written."""
    first: FirstRecord | None = None
    throughput: Sequence[ThroughputRecord] = ()
    epochs: Sequence[EpochRecord] = ()
    checkpoints: Sequence[CheckpointRecord] = ()
    batches: Sequence[BatchRecord] = ()
    bye: ByeRecord | None = None

    def last(self) -> list[AnyReport]:
        """The last report of each kind."""
        kinds = (self.throughput, self.epochs, self.checkpoints, self.batches)
        ends = [report for report in (self.hello, self.first, self.bye) if report is not None]
        return [*(kind[-1] for kind in kinds if kind), *ends]

    def all(self) -> list[AnyReport]:
        """Every report."""
        ends = [report for report in (self.hello, self.first, self.bye) if report is not None]
        return [*self.throughput, *self.epochs, *self.checkpoints, *self.batches, *ends]
