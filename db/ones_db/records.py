"""Records that go into the store and come out of it: plain data that cannot be changed.

A field with the name of a column in `ones_db.tables` means the same as the column. Batches are global batches in
samples, and times are Unix seconds. Text may have control characters, so callers must escape it before they print it.
Jobs' reports are defined in `ones_wrapper.protocol`; records of nodes, actions and health in `ones_db.site`; and
summaries for people in `ones_db.summary`.
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
    """State of a job in the newest snapshot in which it was listed."""

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
    """One run of a job. Unknown values are None; an unknown shape has 0 nodes.

    If ranks were started several times within the run, values are of their last start, but `hello_time` of the first.
    """

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
    """One block: one start of a task of a job array whose tasks train together."""

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
    """One guest block, which is one start of its task."""

    partition: str
    start_time: float
    end_time: float | None
    preempted: bool


@dataclass(frozen=True)
class MembershipRecord:
    """Membership that a job reported: the blocks that train together from `time` on."""

    job_id: int
    term: int
    number: int
    time: float
    report: Membership


class HeldRecord(NamedTuple):
    """GPUs that a running job, or a block of it, holds on a node."""

    job_id: int
    node: str
    gpus: int
    """Number of GPUs held on this node; 0 if unknown."""


RESIZE_DONE = "done"
"""State at the end of a resize that took effect. After any other end state, the job has its old shape."""
RESIZE_ROLLED_BACK = "rolled_back"
"""State at the end of a resize that paused its job, but left its shape as it was."""
RESIZE_OVERTAKEN = "started_before_reshape"
"""Code of a resize's outcome: the job started at its old shape. For a job that waited this is no failure."""
RESIZE_PREEMPTED = "block_preempted"
"""Code of a resize's outcome: Slurm preempted a block before it joined. This is no failure."""


class AlternativeRecord(NamedTuple):
    """A size that a decision considered for a job."""

    shape: Shape
    batch: int
    worth: float


@dataclass(frozen=True)
class PromiseRecord:
    """A job's deadline, and the answer to it: promised or refused."""

    job_id: int
    deadline: float
    time: float
    given: bool
    reason: Reason = NO_REASON


@dataclass(frozen=True)
class DecisionJobRecord:
    """Part of a decision for one job: its shape and batch, or None for both if the job has to wait."""

    job_id: int
    shape: Shape | None
    batch: int | None
    reason: Reason
    from_shape: Shape | None = None
    from_batch: int | None = None
    acted: bool = False
    outcome: Reason = NO_REASON
    alternatives: tuple[AlternativeRecord, ...] = ()
    """The best few sizes for this job, best first. The chosen one may be among them. Empty if the policy gives none."""

    def __hash__(self) -> int:
        return hash((self.job_id, self.batch, self.reason.code, self.outcome.code))


@dataclass(frozen=True)
class DecisionRecord:
    """One decision: a policy's schedule. `score` is None if the policy gives none; NaN is stored as None."""

    time: float
    policy: str
    mode: str
    seconds: float
    score: float | None = None
    generations: int | None = None
    jobs: tuple[DecisionJobRecord, ...] = ()
    id: int = 0
    """Id, which the store sets."""


@dataclass(frozen=True)
class ResizeRecord:
    """A resize of one job. It is stored before it begins."""

    job_id: int
    restart: int
    """Restart count of the run that the resize ends; -1 if the job waits."""
    old_shape: Shape
    old_batch: int | None
    new_shape: Shape
    """Shape that the job gets; `PARKED` if it is stopped."""
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
    """Id, which the store sets."""
    mechanism: str = "requeue"
    added: tuple[tuple[int, Shape], ...] = ()
    """(task, shape) of each block that joins. For a waiting job, (task, shape) of its first block."""
    dropped: tuple[int, ...] = ()
    guests: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    old_kind: str = ""
    new_kind: str = ""
    let_go: tuple[int, ...] = ()
    """Tasks that were held for the resize, but no longer are. If one is held again, somebody else holds it."""
    preempted: tuple[int, ...] = ()
    """Tasks that the companion holds after the resize, because Slurm has preempted them or may do so."""

    @property
    def stage(self) -> str:
        """State, with the suffix `_back` while the resize is rolled back."""
        return self.state + "_back" * self.back


@dataclass(frozen=True)
class ResizeStepRecord:
    """A state that a resize entered. Step 0 is the beginning of the resize."""

    resize_id: int
    sequence: int
    state: str
    time: float
    detail: Reason
    back: bool = False

    @property
    def stage(self) -> str:
        """State, with the suffix `_back` as in `ResizeRecord.stage`."""
        return self.state + "_back" * self.back


class EpochPoint(NamedTuple):
    """End of an epoch, in the last run that trained it."""

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
    """Newest throughput of a run at one global batch, with the nodes of the run."""

    restart: int
    node_names: tuple[str, ...]
    gpus_per_node: int
    batch: int
    samples_per_s: float
    """Median throughput of the newest few measurements."""
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
    """History of a job: everything that learning reads."""

    job: JobRecord
    spec: Spec | None
    epochs: tuple[EpochPoint, ...]
    """Epochs that have ended, ascending, without those to repeat because of a lost checkpoint."""
    throughput: tuple[ThroughputPoint, ...]
    """The newest few throughput samples of each shape, batch and kind of GPU, oldest first."""
    samples: float
    """Samples used since the job's first run. Samples that were repeated after a lost checkpoint count once."""
    batch: int | None
    """Last global batch of the job; None if no run has reported one."""
    ended_runs_s: float
    """Total length of the runs that have ended, in seconds."""
    running_since: float | None
    """Start of the present run, Unix seconds; None if the job does not run."""
    resizes: int
    """Number of resizes of the running job that took effect, by requeue or by blocks. Stopping it counts too."""
    last_resize_end: float | None
    """End of the last resize, Unix seconds. A resize that was rolled back counts too, since it paused the job."""
    epochs_since_change: int
    """Number of epochs that ended since the last resize or change of blocks; without one, since the start."""
    first_loss: float | None
    failures: int = 0
    """Number of resizes in a row, up to the newest, that had no effect. A resize does not count if it failed because
    the waiting job started, or because Slurm preempted a block."""
    first_batch: int | None = None
    """Global batch at the beginning of the job's first run."""
    noise: tuple[NoisePoint, ...] = ()
    """The newest few gradient noise scales, oldest first."""
    progress: float | None = None
    """Newest progress that the job has reported, in samples of the base batch. It is at most `samples`."""
    pause_s: float | None = None
    """Mean pause of the last few resizes by requeue that took effect, in seconds; None if unknown."""
    interrupted: tuple[float, ...] = ()
    """Start times of the resizes that paused the job by a requeue, rolled back or not; ascending, Unix seconds."""
    epoch_samples: float | None = None
    """Mean number of samples in the ended epochs, used if the job does not know the size of its dataset."""
    ran: tuple[tuple[Shape, float], ...] = ()
    """(shape, seconds) for each shape on which the job ran. The present run counts until its newest report.

    If nodes have unequal numbers of GPUs, the shape is one node with all GPUs.
    """
    membership: MembershipRecord | None = None
    """Newest membership of a job of blocks; None for a plain job."""
    switch_s: float | None = None
    """Mean pause of the last few changes of blocks that the companion ordered, in seconds; None if unknown."""
    join_s: float | None = None
    """Mean pause of the last few ordered changes in which blocks joined, in seconds; None if unknown."""
    changes_without_effect: int = 0
    """Number of the newest ordered changes of blocks, in a row, that kept the number of GPUs and saved no node."""
    misfit: tuple[int, int] | None = None
    """(ranks, GPUs) of the newest run that reported its ranks; None if they agree, and for a job of blocks."""
    steps_since_change: int | None = None
    """Optimizer steps since the number of GPUs last changed; None if it never changed, or no steps are reported."""
    preempted: tuple[float, ...] = ()
    """Times at which Slurm preempted a block of the job, ascending."""
    placed: tuple[PlacedPoint, ...] = ()
    """Throughput of runs on known nodes, oldest first. A job of blocks has none: its nodes change within a run."""

    def running_s(self, now: float) -> float:
        """Return the seconds that the job has run until `now`."""
        return self.ended_runs_s + (max(0.0, now - self.running_since) if self.running_since else 0.0)


@dataclass(frozen=True)
class ReportLine:
    """One line of a report file, with the number and the time that the job wrote."""

    number: int
    time: float
    report: Report


@dataclass(frozen=True)
class RunReports:
    """Reports that were read from the file of one run, in order."""

    job_id: int
    restart: int
    offset: int
    """Number of bytes of the file that have been read so far, these reports included."""
    number: int | None
    """Number of the last report that was just read, even if it was refused. None if there was none."""
    spec: Spec | None = None
    """Spec of the job, if it was read too. A spec by itself does not show that the run has started."""
    lines: Sequence[ReportLine] = ()
