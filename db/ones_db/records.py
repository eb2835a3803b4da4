"""What goes into the store and comes out of it: plain frozen data.

All times are Unix seconds. A batch is a global batch in samples. Text is stored as it came: whoever prints it
guards the terminal. Fields named like those of the reports that jobs write mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

RESIZE_DONE = "done"
"""State in which a resize ends that took effect; in every other one the job kept its old shape."""


@dataclass(frozen=True)
class JobRecord:
    """A job as the newest snapshot has it."""

    job_id: int
    name: str
    user: str
    submit_time: float
    """Slurm changes it when it requeues a job; the store keeps the first, from which the JCT counts."""
    requested_nodes: int
    """As first seen: later snapshots, which show what a resize made of it, do not change it."""
    requested_gpus_per_node: int
    account: str = ""
    partition: str = ""
    comment: str = ""
    work_dir: str = ""
    restart: int = 0
    """How often Slurm has restarted it."""
    elastic: bool = False
    refusal: str = ""
    """Why it is not elastic, in words for its user."""
    state: str = "PENDING"
    end_time: float | None = None
    """None until it has ended (Slurm shows the expected end of a running job: that is not it)."""
    exit_code: int | None = None
    report_note: str = ""
    """What of its directory or reports could not be believed."""


@dataclass(frozen=True)
class SpecRecord:
    """What a job can do, as it says itself."""

    base_batch: int
    max_batch: int
    max_local_batch: int
    dataset: int
    """Samples in an epoch; 0 when it does not know."""
    epochs: int
    """0 when the script does not say."""
    max_passes: int = 1
    """Most forward passes, of `max_local_batch` samples per GPU each, in an optimizer step."""


@dataclass(frozen=True)
class RunRecord:
    """One start of a job. None where not known (yet)."""

    job_id: int
    restart: int
    nodes: int = 0
    """0 where not known."""
    gpus_per_node: int = 0
    node_list: tuple[str, ...] = ()
    start_time: float | None = None
    end_time: float | None = None
    batch: int | None = None
    """Global batch in which it began."""
    lr_factor: float | None = None
    checkpoint: str | None = None
    """Name of the checkpoint it loaded, empty for none."""
    launch_s: float | None = None
    group_s: float | None = None
    load_s: float | None = None
    end_reason: str | None = None
    exit_code: int | None = None
    note: str | None = None
    epoch: int | None = None
    """Epoch that it has reached, from 0."""
    cursor: int | None = None
    """Samples of that epoch already used."""
    step: int | None = None
    hello_time: float | None = None
    """When its first hello was written; all else that a hello says is as its last start of the ranks said it."""
    report_time: float | None = None
    """When its newest report was written."""
    report_offset: int = 0
    """Bytes of its report file that were read."""
    report_number: int = 0
    """Number of the last report that was read."""
    noise: float | None = None
    """Gradient noise scale that it reported last, samples."""
    progress: float | None = None
    """Progress that it has reached since the job's first run, samples of the base batch."""
    queue_s: float | None = None
    import_s: float | None = None
    first_step_s: float | None = None
    """From the hello to the end of the first step."""
    resizes: int | None = None
    """The job's own count of its runs at another world size, this one included."""
    attempts: int | None = None
    """How often its ranks were started again within it."""
    nonfinite: int | None = None
    """Steps with a loss that is not a finite number."""
    nonfinite_step: int | None = None
    """Step of the last report that had such a loss."""


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


@dataclass(frozen=True)
class DecisionJobRecord:
    """What a decision gives one job: a shape and batch, or None (it waits)."""

    job_id: int
    nodes: int | None
    gpus_per_node: int | None
    batch: int | None
    reason: str
    from_nodes: int | None = None
    """What it held when the decision was made; None where it waited."""
    from_gpus_per_node: int | None = None
    from_batch: int | None = None
    acted: bool = False
    outcome: str = ""


@dataclass(frozen=True)
class DecisionRecord:
    """One schedule of a policy. `score` is None (or NaN, stored as None) where the policy has none."""

    time: float
    policy: str
    mode: str
    """advise or act."""
    seconds: float
    """What it took to decide."""
    score: float | None = None
    generations: int | None = None
    jobs: tuple[DecisionJobRecord, ...] = ()
    id: int = 0
    """Set by the store."""


@dataclass(frozen=True)
class ResizeRecord:
    """A resize of one job, from the moment it was meant."""

    job_id: int
    restart: int
    """The run it leaves; -1 where the job waited."""
    old_nodes: int
    old_gpus_per_node: int
    old_batch: int | None
    new_nodes: int
    """0 where the job is parked: taken to zero GPUs."""
    new_gpus_per_node: int
    new_batch: int | None
    state: str
    started: float
    decision_id: int | None = None
    order_number: int | None = None
    deadline: float | None = None
    """When the present state is given up."""
    ended: float | None = None
    """None while it is open."""
    outcome: str = ""
    pause_s: float | None = None
    """From the last step at the old shape to the first at the new one, where it is known."""
    id: int = 0
    """Set by the store."""


@dataclass(frozen=True)
class ResizeStepRecord:
    """One step of a resize; sequence 0 is its beginning."""

    resize_id: int
    sequence: int
    state: str
    time: float
    detail: str


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


class TimelineRow(NamedTuple):
    """One run, for plots; `end` is None while it runs."""

    job_id: int
    name: str
    user: str
    restart: int
    nodes: int
    gpus_per_node: int
    start: float
    end: float | None


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
    epoch_samples: float | None = None
    """Mean samples of its epochs that ended; what an epoch is for a job that does not know its dataset's length."""

    def running_s(self, now: float) -> float:
        """Seconds it has run in all."""
        return self.ended_runs_s + (max(0.0, now - self.running_since) if self.running_since else 0.0)


@dataclass(frozen=True)
class JobSummary:
    """One line of the table of jobs."""

    job_id: int
    name: str
    user: str
    partition: str
    state: str
    elastic: bool
    refusal: str
    nodes: int | None
    """Shape of its newest run; None where it has not run."""
    gpus_per_node: int | None
    running: bool
    """That run has not ended."""
    batch: int | None
    samples_per_s: float | None
    epoch: int | None
    """Epochs done."""
    epochs: int | None
    cursor: int | None
    dataset: int | None
    resizes: int
    """Resizes that interrupted it and took effect: those of a waiting job do not count, being parked does."""
    resizing: str | None
    """State of the resize that is open."""
    pause_s: float
    """Pauses of all its resizes together."""
    loss: float | None
    accuracy: float | None
    submit_time: float
    start_time: float | None
    end_time: float | None
    report_note: str
    passes: int | None = None
    """Forward passes per optimizer step; None where the batch, its shape or its spec is not known."""
    attempts: int = 0
    """How often ranks were started again within a run, over all runs."""
    nonfinite: int = 0
    """Steps with a loss that is not a finite number, over all runs."""
    nonfinite_step: int | None = None
    """Step of the last report that had such a loss."""

    @property
    def local_batch(self) -> int | None:
        """Samples per GPU and forward pass (the most of any GPU); None where it is not known."""
        gpus = (self.nodes or 0) * (self.gpus_per_node or 0)
        if self.batch is None or not self.passes or not gpus:
            return None
        return -(-self.batch // (gpus * self.passes))

    @property
    def jct_s(self) -> float | None:
        """Job completion time: submission to end."""
        return None if self.end_time is None else self.end_time - self.submit_time
