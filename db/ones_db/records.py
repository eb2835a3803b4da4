"""Plain frozen data that goes into the store and comes out of it.

A field with the name of a column in `ones_db.tables` has that column's meaning. A batch is a global batch in samples,
and all times are Unix seconds. Text may hold control characters: callers escape text before printing. Reports of jobs
are defined in `ones_wrapper.protocol`, records of nodes, actions and health in `ones_db.site`, and summaries for people
in `ones_db.summary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ones_db.reasons import NO_REASON, Reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import Membership, Report, Spec


@dataclass(frozen=True)
class JobRecord:
    """State of a job in the newest snapshot."""

    job_id: int
    name: str
    user: str
    submit_time: float
    requested_shape: Shape
    account: str = ""
    partition: str = ""
    qos: str = ""
    licenses: str = ""
    comment: str = ""
    work_dir: str = ""
    restart: int = 0
    elastic: bool = False
    refusal: Reason = NO_REASON
    state: str = "PENDING"
    end_time: float | None = None
    exit_code: int | None = None
    report_note: str = ""


@dataclass(frozen=True)
class RunRecord:
    """One start of a job. None stands for an unknown value, and zeros for an unknown shape. Except for `hello_time`,
    values are of the last start of the ranks within the run."""

    job_id: int
    restart: int
    shape: Shape = PARKED
    node_list: tuple[str, ...] = ()
    start_time: float | None = None
    end_time: float | None = None
    batch: int | None = None
    lr_factor: float | None = None
    checkpoint: str | None = None
    launch_s: float | None = None
    group_s: float | None = None
    load_s: float | None = None
    end_reason: str | None = None
    exit_code: int | None = None
    note: str | None = None
    epoch: int | None = None
    cursor: int | None = None
    step: int | None = None
    hello_time: float | None = None
    report_time: float | None = None
    report_offset: int = 0
    report_number: int = 0
    noise: float | None = None
    progress: float | None = None
    queue_s: float | None = None
    import_s: float | None = None
    first_step_s: float | None = None
    resizes: int | None = None
    world: int | None = None
    attempts: int | None = None
    nonfinite: int | None = None
    nonfinite_step: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class BlockRecord:
    """One start of a block, which is a task of a job array whose tasks train together."""

    job_id: int
    task: int
    restart: int
    slurm_id: int
    shape: Shape
    node_list: tuple[str, ...]
    state: str
    start_time: float
    end_time: float | None = None
    guest: bool = False


class GuestRun(NamedTuple):
    """One start of a guest block."""

    partition: str
    start_time: float
    end_time: float | None
    preempted: bool


@dataclass(frozen=True)
class MembershipRecord:
    """Report of the blocks of a job that train together from a moment on."""

    job_id: int
    term: int
    number: int
    time: float
    report: Membership


class HeldRecord(NamedTuple):
    """GPUs that a running job, or one of its blocks, holds on a node."""

    job_id: int
    node: str
    gpus: int
    """GPUs on the node; 0 if unknown."""


RESIZE_DONE = "done"
"""Final state of a resize that took effect; after any other final state the job has its old shape."""
RESIZE_ROLLED_BACK = "rolled_back"
"""Final state of a resize that interrupted its job without effect."""
RESIZE_OVERTAKEN = "started_before_reshape"
"""Outcome code if a job started before it had its new shape: no failure of a job that was pending."""
RESIZE_PREEMPTED = "block_preempted"
"""Outcome code if Slurm preempted a block before the block joined; this is no failure either."""


class AlternativeRecord(NamedTuple):
    """A size that a decision weighed for a job."""

    shape: Shape
    batch: int
    worth: float


@dataclass(frozen=True)
class PromiseRecord:
    """A job's deadline, and whether it was promised."""

    job_id: int
    deadline: float
    time: float
    given: bool
    reason: Reason = NO_REASON


@dataclass(frozen=True)
class DecisionJobRecord:
    """Shape and batch that a decision gives one job, or None for both if the job waits."""

    job_id: int
    shape: Shape | None
    batch: int | None
    reason: Reason
    from_shape: Shape | None = None
    from_batch: int | None = None
    acted: bool = False
    outcome: Reason = NO_REASON
    alternatives: tuple[AlternativeRecord, ...] = ()
    """Best few sizes for this job, best first, with or without the chosen size; empty if the policy gives none."""

    def __hash__(self) -> int:
        return hash((self.job_id, self.batch, self.reason.code, self.outcome.code))


@dataclass(frozen=True)
class DecisionRecord:
    """One schedule of a policy. `score` is None, or NaN which is stored as None, if the policy gives no score."""

    time: float
    policy: str
    mode: str
    seconds: float
    score: float | None = None
    generations: int | None = None
    jobs: tuple[DecisionJobRecord, ...] = ()
    id: int = 0
    """Set by the store."""


@dataclass(frozen=True)
class ResizeRecord:
    """A resize of one job, stored before the resize begins."""

    job_id: int
    restart: int
    """Restart count of the run that the resize ends; -1 if the job waited."""
    old_shape: Shape
    old_batch: int | None
    new_shape: Shape
    """`PARKED` to stop the job."""
    new_batch: int | None
    state: str
    started: float
    back: bool = False
    decision_id: int | None = None
    order_number: int | None = None
    deadline: float | None = None
    ended: float | None = None
    outcome: Reason = NO_REASON
    pause_s: float | None = None
    id: int = 0
    """Set by the store."""
    mechanism: str = "requeue"
    added: tuple[tuple[int, Shape], ...] = ()
    """Task and shape of each joining block; for a pending job, of its first block."""
    dropped: tuple[int, ...] = ()
    guests: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    old_kind: str = ""
    new_kind: str = ""
    let_go: tuple[int, ...] = ()
    """Tasks seen released from the companion's hold since; a later hold of these tasks is not the companion's."""
    preempted: tuple[int, ...] = ()
    """Tasks that the companion held after this resize, since Slurm preempted these tasks or may do so."""

    @property
    def stage(self) -> str:
        """State of the resize, with the suffix `_back` while the job returns to its old shape."""
        return self.state + "_back" * self.back


@dataclass(frozen=True)
class ResizeStepRecord:
    """State that a resize entered; sequence 0 is the begin of the resize."""

    resize_id: int
    sequence: int
    state: str
    time: float
    detail: Reason
    back: bool = False

    @property
    def stage(self) -> str:
        """State, with the suffix `_back`, as in `ResizeRecord.stage`."""
        return self.state + "_back" * self.back


class EpochPoint(NamedTuple):
    """End of an epoch in the last run that trained the epoch."""

    epoch: int
    loss: float | None
    accuracy: float | None
    time: float
    restart: int


class ThroughputPoint(NamedTuple):
    """One measured throughput."""

    shape: Shape
    batch: int
    samples_per_s: float
    time: float
    kind: str = ""
    """Kind of GPU; empty if unknown."""


class PlacedPoint(NamedTuple):
    """Newest throughput of a run at a global batch, with the run's nodes."""

    restart: int
    node_names: tuple[str, ...]
    gpus_per_node: int
    batch: int
    samples_per_s: float
    """Median of the newest few measurements."""
    time: float
    """Time of the newest measurement."""
    kind: str = ""
    """Kind of GPU; empty if unknown."""


class NoisePoint(NamedTuple):
    """One measured gradient noise scale, in samples."""

    noise: float
    time: float


@dataclass(frozen=True)
class JobHistory:
    """History of a job, with all that learning reads."""

    job: JobRecord
    spec: Spec | None
    epochs: tuple[EpochPoint, ...]
    """Ended epochs, ascending, each once. An epoch undone by a lost checkpoint is left out until its next end."""
    throughput: tuple[ThroughputPoint, ...]
    """Newest few samples at each shape and batch, oldest first."""
    samples: float
    """Samples used since the job's first run; work that was repeated after a lost checkpoint counts once."""
    batch: int | None
    """Global batch last in force; None if no run reported a batch."""
    ended_runs_s: float
    """Seconds of all ended runs together."""
    running_since: float | None
    """Start of the run in progress; None if no run goes on."""
    resizes: int
    """Number of resizes of the running job that took effect, by requeue or by blocks. Parking counts; resizes while the
    job waited do not."""
    last_resize_end: float | None
    """End of the last resize, rolled-back resizes included, since these interrupt the job too."""
    epochs_since_change: int
    """Number of epochs that ended after the last resize or change of blocks; all epochs if there was neither."""
    first_loss: float | None
    failures: int = 0
    """Number of resizes without effect since the last with effect, except resizes that a start of the job overtook."""
    first_batch: int | None = None
    """Global batch with which the job's first run began."""
    noise: tuple[NoisePoint, ...] = ()
    """Newest few gradient noise scales, oldest first."""
    progress: float | None = None
    """Newest reported progress since the job's first run, in samples of the base batch; never above `samples`."""
    pause_s: float | None = None
    """Mean pause of the last few resizes by requeue that took effect, seconds; None if unknown."""
    interrupted: tuple[float, ...] = ()
    """Start times, ascending, of the resizes, rolled back or not, that interrupted the job; blocks never do."""
    epoch_samples: float | None = None
    """Mean samples of the ended epochs, which stands for an epoch's length if the job does not know its dataset's."""
    ran: tuple[tuple[Shape, float], ...] = ()
    """Each shape on which the job ran, with the seconds by Slurm's clock; an unended run counts until its newest
    report. One node with all GPUs stands for nodes that give unequally many."""
    membership: MembershipRecord | None = None
    """Newest membership of a job of blocks; None for any other job."""
    switch_s: float | None = None
    """Mean pause of the last few ordered changes of blocks, seconds; None if unknown."""
    join_s: float | None = None
    """Mean pause of the last few ordered changes in which blocks joined and got the state; None if unknown."""
    moved_in_vain: int = 0
    """Number of the newest ordered changes of blocks, in a row, that brought neither other GPUs nor fewer nodes."""
    misfit: tuple[int, int] | None = None
    """Ranks and GPUs of the newest run that reported ranks, if these differ; always None for a job of blocks."""
    steps_since_change: int | None = None
    """Optimizer steps since the job's number of GPUs last changed; None without a change or a report of steps."""
    preempted: tuple[float, ...] = ()
    """Times at which Slurm preempted blocks of the job, ascending."""
    placed: tuple[PlacedPoint, ...] = ()
    """Measurements of the job's runs with their nodes, oldest first; none of a job of blocks, which move in a run."""

    def running_s(self, now: float) -> float:
        """Return the seconds for which the job has run in all."""
        return self.ended_runs_s + (max(0.0, now - self.running_since) if self.running_since else 0.0)


@dataclass(frozen=True)
class ReportLine:
    """One line of a run's report file, with the number and time that the job gave the line."""

    number: int
    time: float
    report: Report


@dataclass(frozen=True)
class RunReports:
    """Reports of one run from one read of its file, in the order of their numbers."""

    job_id: int
    restart: int
    offset: int
    """Bytes of the report file that have been read, these reports included."""
    number: int | None
    """Number of the last report in the bytes just read, refused or not; None if there was none."""
    spec: Spec | None = None
    """Spec of the job, if read too; a spec without a report creates no run."""
    lines: Sequence[ReportLine] = ()
