"""Plain frozen data that goes into the store and comes out of it.

A field that is a column of `ones_db.tables` means what that column says. A batch is a global batch in samples, and all
times are Unix seconds. Text is stored as it came: whoever prints it guards the terminal. `ones_wrapper.protocol`
defines what jobs report. Records of only one subject stand with it: nodes, actions and health in `ones_db.site`, lines
and bars for people in `ones_db.summary`.
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
    """A job as the newest snapshot has it."""

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
    """One start of a job. None if not known (yet), zeros for a shape. The last start of its ranks counts, but for
    `hello_time`."""

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
    """One start of a block: of a task of a job array whose tasks train together."""

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
    """One start of a guest."""

    partition: str
    start_time: float
    end_time: float | None
    preempted: bool


@dataclass(frozen=True)
class MembershipRecord:
    """The blocks of a job that train together from a moment on."""

    job_id: int
    term: int
    number: int
    time: float
    report: Membership


class HeldRecord(NamedTuple):
    """GPUs that a running job, or a block of one, holds on a node."""

    job_id: int
    node: str
    gpus: int
    """GPUs on the node; 0 if unknown."""


RESIZE_DONE = "done"
"""Final state of a resize that took effect; in any other final state the job kept its old shape."""
RESIZE_ROLLED_BACK = "rolled_back"
"""Final state of a resize that interrupted its job without effect."""
RESIZE_OVERTAKEN = "started_before_reshape"
"""Outcome code if a job started before it had its new shape. For a pending job it is no failure, and no reason to
wait."""
RESIZE_PREEMPTED = "block_preempted"
"""Outcome code if Slurm preempted a block before it joined: no failure either."""


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
    """A decision's shape and batch for one job, or None (it waits)."""

    job_id: int
    shape: Shape | None
    batch: int | None
    reason: Reason
    from_shape: Shape | None = None
    from_batch: int | None = None
    acted: bool = False
    outcome: Reason = NO_REASON
    alternatives: tuple[AlternativeRecord, ...] = ()
    """The best few for this job, best first, what it got among them or not; where the policy tells."""

    def __hash__(self) -> int:
        return hash((self.job_id, self.batch, self.reason.code, self.outcome.code))


@dataclass(frozen=True)
class DecisionRecord:
    """One schedule of a policy. `score` is None (or NaN, stored as None) where the policy has none."""

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
    """A resize of one job, stored before it begins."""

    job_id: int
    restart: int
    """-1 if the job waited."""
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
    """Task and shape of each joining block; for a pending job, of the block that it starts with."""
    dropped: tuple[int, ...] = ()
    guests: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    old_kind: str = ""
    new_kind: str = ""
    let_go: tuple[int, ...] = ()
    """Tasks seen out of the companion's hold since; a later hold is not the companion's."""
    preempted: tuple[int, ...] = ()
    """Tasks that the companion held after this resize, since Slurm preempted them or may do so."""

    @property
    def stage(self) -> str:
        """State of the resize and whether it is on its way back, in one word."""
        return self.state + "_back" * self.back


@dataclass(frozen=True)
class ResizeStepRecord:
    """One step of a resize; sequence 0 is its beginning."""

    resize_id: int
    sequence: int
    state: str
    time: float
    detail: Reason
    back: bool = False

    @property
    def stage(self) -> str:
        """See `ResizeRecord.stage`."""
        return self.state + "_back" * self.back


class EpochPoint(NamedTuple):
    """An epoch as the last run that trained it ended it."""

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
    """Kind of its GPUs; empty if it is unknown."""


class PlacedPoint(NamedTuple):
    """Throughput that a run measured last at a global batch, and its nodes."""

    restart: int
    node_names: tuple[str, ...]
    gpus_per_node: int
    batch: int
    samples_per_s: float
    """Median of the newest few measurements."""
    time: float
    """Time of the newest."""
    kind: str = ""
    """Kind of its GPUs; empty if it is unknown."""


class NoisePoint(NamedTuple):
    """One measured gradient noise scale, in samples."""

    noise: float
    time: float


@dataclass(frozen=True)
class JobHistory:
    """History of a job: all that learning needs."""

    job: JobRecord
    spec: Spec | None
    epochs: tuple[EpochPoint, ...]
    """Ascending, each epoch once. One that a lost checkpoint undid is not there until it is done again."""
    throughput: tuple[ThroughputPoint, ...]
    """The newest few for each shape and batch, oldest first."""
    samples: float
    """Samples used since the job's first run; work that was repeated after a lost checkpoint counts once."""
    batch: int | None
    """Global batch in force in the last run that said."""
    ended_runs_s: float
    """Seconds that its ended runs took in all."""
    running_since: float | None
    """Start of the run in progress."""
    resizes: int
    """Resizes of a job that ran and that took effect, by whatever mechanism: those of a waiting job do not count, being
    parked does."""
    last_resize_end: float | None
    """End of the last resize, also of one that was rolled back: it interrupted the job as well."""
    epochs_since_change: int
    """Epochs that ended after the last resize did, or the last change of its blocks; or all."""
    first_loss: float | None
    failures: int = 0
    """Resizes that did not take effect since the last one that did, but for those that a start of the job overtook."""
    first_batch: int | None = None
    """Global batch that its first run began with."""
    noise: tuple[NoisePoint, ...] = ()
    """The newest few gradient noise scales, oldest first."""
    progress: float | None = None
    """Progress since its first run in samples of the base batch, as it said last; never above `samples`."""
    pause_s: float | None = None
    """Mean pause of its last few resizes by requeue that took effect, if it is known."""
    interrupted: tuple[float, ...] = ()
    """Start times of the resizes that interrupted it, ascending, rolled back ones included. Blocks that join or leave
    do not interrupt it."""
    epoch_samples: float | None = None
    """Mean samples of its epochs that ended; what an epoch is for a job that does not know its dataset's length."""
    ran: tuple[tuple[Shape, float], ...] = ()
    """Shapes on which it has run, and for how many seconds in all: by Slurm's clock, of a run that has
    not ended until its newest report. One node with all GPUs stands for nodes that give unequally many."""
    membership: MembershipRecord | None = None
    """Newest membership of a job of blocks."""
    switch_s: float | None = None
    """Mean pause of the last few ordered changes of a job of blocks, if it is known."""
    join_s: float | None = None
    """Mean pause of those changes in which blocks joined, if known: sending them the job's state takes long."""
    moved_in_vain: int = 0
    """Number of newest ordered changes of blocks in a row that neither changed the GPUs nor lowered the number of
    nodes."""
    misfit: tuple[int, int] | None = None
    """Ranks and GPUs of the newest run that said hello, if they differ; never of a job of blocks."""
    steps_since_change: int | None = None
    """Optimizer steps since its number of GPUs last changed; None if it never did, or has not said."""
    preempted: tuple[float, ...] = ()
    """Times at which blocks of it were preempted, ascending."""
    placed: tuple[PlacedPoint, ...] = ()
    """Measurements of its runs by their nodes, oldest run first; none of a job of blocks, whose nodes change within a
    run."""

    def running_s(self, now: float) -> float:
        """Seconds it has run in all."""
        return self.ended_runs_s + (max(0.0, now - self.running_since) if self.running_since else 0.0)


@dataclass(frozen=True)
class ReportLine:
    """One line of a run's report file, as numbered and timed by the job."""

    number: int
    time: float
    report: Report


@dataclass(frozen=True)
class RunReports:
    """The reports of one run that were read in one look, in the order of their numbers."""

    job_id: int
    restart: int
    offset: int
    """Bytes of the report file that were read with them."""
    number: int | None
    """Number of the last report in those bytes, believed or not; None if they held none."""
    spec: Spec | None = None
    """Spec of the job, if it was read too; without a report it creates no run."""
    lines: Sequence[ReportLine] = ()
