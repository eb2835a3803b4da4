"""Columns of jobs, nodes, resizes and decisions. Each is declared once, for terminals, pages and JSON.

A new column is added to its list, and JSON then has it. To show it in a table, add its name to the table's line below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ones_db import DecisionJobRecord, DecisionRecord, JobSummary, PromiseRecord, ResizeRecord, ResizeStepRecord
from ones_db.shape import Shape
from slurm_ones.text import changed, clock, left_s, per_gpu, plain, planned, progress, seconds, shape, throughput

T = TypeVar("T")


@dataclass(frozen=True)
class ShownJob:
    """A job, and what its newest decision says about it."""

    job: JobSummary
    why: str = ""
    """Reason for the job's present size or for its wait; empty if the job has ended."""
    cause: str | None = None
    """Code (in `CAUSES`) of the reason why the job keeps its size; None if there is none."""
    wrong: str = ""
    """Mistake in how the job was started, as a sentence; empty if none is known."""
    promise: PromiseRecord | None = None
    """Newest answer about the job's deadline: promised or refused."""

    def __hash__(self) -> int:
        return hash((self.job, self.why))


@dataclass(frozen=True)
class ShownNode:
    """A node, and the number of GPUs that each elastic job holds on it, by job id."""

    name: str
    state: str
    gpus: int
    held: dict[int, int]

    @property
    def free(self) -> int:
        """GPUs of the node that no elastic job holds."""
        return max(self.gpus - sum(self.held.values()), 0)


@dataclass(frozen=True)
class ShownResize:
    """A resize with its steps, and the phases of the job's start after it as text."""

    resize: ResizeRecord
    steps: Sequence[ResizeStepRecord] = ()
    start: str = ""


@dataclass(frozen=True)
class ShownDecision:
    """Part of a decision for one job, and its outcome."""

    decision: DecisionRecord
    given: DecisionJobRecord
    name: str = ""
    """Name of the job."""
    resize: ResizeRecord | None = None
    """Resize that carries out the decision; None if there is none."""


@dataclass(frozen=True, eq=False)
class ShownColumn(Generic[T]):
    """Column of a table of objects T: how values are read, formatted and placed."""

    name: str
    """Name of the column's field in JSON."""
    value: Callable[[T], Any]
    """Function from an object to its value in JSON; None if the value is unknown."""
    help: str
    title: str = ""
    """Heading of the column in a table."""
    form: Callable[[Any], str] = str
    """Function from a known value to its text."""
    unit: str = ""
    own: Callable[[T], str] | None = None
    """Function from an object to the cell's text, for a text that needs more than `value`. It replaces `form`."""
    left: bool = False
    """True if the column is left-aligned."""
    width: int = 8
    """Width in characters, in a table with fixed widths."""
    most: int = 400
    """Largest number of characters of a cell in a table with widths by content. A longer text is cut."""
    json: bool = True
    key: Callable[[T], Any] | None = field(default=None)
    """Function from an object to its sort key, if that is not `value`. Rows with None come last."""

    def text(self, one: T) -> str:
        """Return the cell's text, printable and without markup; – if there is no value."""
        value = self.own(one) if self.own is not None else self.value(one)
        return "–" if value is None or value == "" else plain(value if self.own is not None else self.form(value), 400)

    @property
    def long(self) -> bool:
        """True for a wide column, whose text may take several lines on a page."""
        return self.width >= 20


def record(columns: Sequence[ShownColumn[T]], one: T) -> dict[str, Any]:
    """Return a job, node, resize or decision as a JSON object with a field for each column."""
    return {column.name: column.value(one) for column in columns if column.json}


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text. Dataclasses become objects."""

    def default(item: Any) -> Any:
        if is_dataclass(item) and not isinstance(item, type):
            return asdict(item)
        raise TypeError(f"{type(item).__name__} is not JSON")

    return json.dumps(value, default=default, indent=indent, allow_nan=False)


def _job(name: str) -> Callable[[ShownJob], Any]:
    return attrgetter(f"job.{name}")


def gpus(job: JobSummary) -> int:
    """Return the number of GPUs that the job holds; 0 unless it runs."""
    return job.shape.gpus if job.running and job.shape else 0


def _why(one: ShownJob) -> str:
    waits = not one.job.running and one.job.end_time is None
    nothing = "nothing was decided for it yet" if waits else " "
    return f"resize under way: {one.job.resizing}" if one.job.resizing else one.why or nothing


def _became(one: ShownDecision) -> str:
    if one.resize is not None:
        return str(one.resize.outcome) or one.resize.stage
    if one.given.outcome:
        return " " if one.given.outcome == one.given.reason else str(one.given.outcome)
    return "carried out" if one.given.acted else " "


CODES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
}
"""Short codes of job states, as squeue prints them."""
_SHORT = {name: code for code, name in CODES.items()}

JOB: tuple[ShownColumn[ShownJob], ...] = (
    ShownColumn("job_id", _job("job_id"), "Slurm's job id", "job"),
    ShownColumn("user", _job("user"), "its owner", "user", left=True, width=10, most=16),
    ShownColumn("name", _job("name"), "its name", "name", left=True, width=10, most=24),
    ShownColumn("account", _job("account"), "account it is charged to", left=True),
    ShownColumn("partition", _job("partition"), "partition it was last seen in", left=True),
    ShownColumn(
        "state", _job("state"), "base state, as Slurm names it", "state", left=True,
        own=lambda one: one.job.state + (f" ({one.job.resizing})" if one.job.resizing else ""),
    ),
    ShownColumn(
        "st", _job("state"), "squeue's short name of the state", "st",
        form=lambda state: _SHORT.get(state, state[:3]), left=True, width=3, json=False,
    ),
    ShownColumn("elastic", _job("elastic"), "true if it opted in and may be resized"),
    ShownColumn("refusal", lambda one: str(one.job.refusal), "why the job is not elastic; empty if it is"),
    ShownColumn("refusal_code", _job("refusal_code"), "code of the refusal"),
    ShownColumn(
        "shape", lambda one: shape(one.job), "nodes x GPUs per node while the job runs", "shape",
        left=True, width=6, key=lambda one: gpus(one.job),
    ),
    ShownColumn("nodes", lambda one: one.job.shape and one.job.shape.nodes, "nodes of its newest run"),
    ShownColumn("gpus_per_node", lambda one: one.job.shape and one.job.shape.gpus_per_node, "GPUs on each node"),
    ShownColumn("running", _job("running"), "true if its newest run has not ended"),
    ShownColumn("batch", lambda one: one.job.batch or None, "global batch, samples", "batch", width=6),
    ShownColumn(
        "local_batch", _job("local_batch"), "most samples in a forward pass of a replica", "per GPU",
        own=lambda one: per_gpu(one.job),
    ),
    ShownColumn("passes", _job("passes"), "forward passes per optimizer step"),
    ShownColumn(
        "samples_per_s", _job("samples_per_s"), "throughput", "samples/s", unit="samples/s",
        own=lambda one: throughput(one.job), width=9,
        key=lambda one: (one.job.running and one.job.samples_per_s) or 0.0,
    ),
    ShownColumn("strategy", _job("strategy"), "training strategy", "strategy", left=True, most=16),
    ShownColumn("limits", _job("limits"), "limits of the strategy"),
    ShownColumn(
        "epochs", _job("epochs"), "epochs that it will train", "epochs", own=lambda one: progress(one.job), width=9,
        key=lambda one: one.job.epoch or 0,
    ),
    ShownColumn("epoch", _job("epoch"), "epochs done"),
    ShownColumn("cursor", _job("cursor"), "samples of the current epoch already used"),
    ShownColumn("dataset", _job("dataset"), "samples in an epoch"),
    ShownColumn(
        "left_s", lambda one: left_s(one.job), "time to its end at this throughput", "left", seconds, "s", width=9,
    ),
    ShownColumn("loss", _job("loss"), "newest loss"),
    ShownColumn("accuracy", _job("accuracy"), "newest accuracy, 0 to 1", "accuracy", "{:.3f}".format),
    ShownColumn("resizes", _job("resizes"), "resizes of the running job that took effect", "resizes", width=7),
    ShownColumn("resizing", _job("resizing"), "state of the open resize"),
    ShownColumn(
        "pause_s", _job("pause_s"), "sum of the pauses of all its resizes", "paused", unit="s",
        own=lambda one: seconds(one.job.pause_s) if one.job.resizes else "",
    ),
    ShownColumn("submit_time", _job("submit_time"), "submission, Unix seconds", "submitted", clock),
    ShownColumn("start_time", _job("start_time"), "first start, Unix seconds", "started", clock),
    ShownColumn("end_time", _job("end_time"), "end, Unix seconds", "ended", clock),
    ShownColumn("jct_s", _job("jct_s"), "submission to end", "JCT", seconds, "s"),
    ShownColumn("attempts", _job("attempts"), "restarts of the ranks within runs"),
    ShownColumn("nonfinite", _job("nonfinite"), "steps with a loss that is not a finite number"),
    ShownColumn("nonfinite_step", _job("nonfinite_step"), "step of the newest report with such a loss (see nonfinite)"),
    ShownColumn("report_note", _job("report_note"), "what was wrong with the job's directory or reports"),
    ShownColumn("why", lambda one: one.why, "why the job has its size", "why", own=_why, left=True, width=20),
    ShownColumn("cause", lambda one: one.cause or None, "code of the reason why the job keeps its size"),
    ShownColumn("deadline", lambda one: one.promise and one.promise.deadline, "its deadline, Unix seconds"),
    ShownColumn("promised", lambda one: one.promise and one.promise.given, "true if the deadline is promised"),
)  # fmt: skip

NODE: tuple[ShownColumn[ShownNode], ...] = (
    ShownColumn("name", attrgetter("name"), "its name", "node", left=True, width=16),
    ShownColumn("state", attrgetter("state"), "as Slurm names it", "state", left=True, width=9),
    ShownColumn("gpus", attrgetter("gpus"), "its GPUs; 0 if unknown", "GPUs"),
    ShownColumn(
        "held", lambda one: [{"job_id": job_id, "gpus": count} for job_id, count in one.held.items()],
        "GPUs that each elastic job holds on the node",
    ),
)  # fmt: skip

RESIZE: tuple[ShownColumn[ShownResize], ...] = (
    ShownColumn("id", attrgetter("resize.id"), "its id"),
    ShownColumn("job_id", attrgetter("resize.job_id"), "Slurm's job id"),
    ShownColumn("started", attrgetter("resize.started"), "its start, Unix seconds", "begun", clock, left=True),
    ShownColumn("ended", attrgetter("resize.ended"), "its end, Unix seconds; null while open", "ended", clock),
    ShownColumn("change", lambda one: changed(one.resize), "what it changes", "change", left=True),
    ShownColumn("old_shape", lambda one: _sized(one.resize.old_shape), "shape before"),
    ShownColumn("new_shape", lambda one: _sized(one.resize.new_shape), "shape after"),
    ShownColumn("old_batch", attrgetter("resize.old_batch"), "global batch before, samples"),
    ShownColumn("new_batch", attrgetter("resize.new_batch"), "global batch after, samples"),
    ShownColumn("old_kind", attrgetter("resize.old_kind"), "kind of GPU before; empty for any"),
    ShownColumn("new_kind", attrgetter("resize.new_kind"), "kind of GPU after; empty for any"),
    ShownColumn("mechanism", attrgetter("resize.mechanism"), "requeue or blocks", "by", left=True),
    ShownColumn("blocks", lambda one: planned(one.resize), "blocks that it adds and drops"),
    ShownColumn("restart", attrgetter("resize.restart"), "restart count of the run it ends; -1 if it waited"),
    ShownColumn("decision_id", attrgetter("resize.decision_id"), "decision that it carries out"),
    ShownColumn("state", attrgetter("resize.stage"), "its state", "state", left=True),
    ShownColumn("pause_s", attrgetter("resize.pause_s"), "pause of training", "pause", seconds, "s"),
    ShownColumn(
        "steps", lambda one: [_step(step) for step in one.steps], "its steps", "steps", left=True, width=40,
        own=lambda one: ", ".join(f"{step.stage} {step.time - one.resize.started:.1f} s" for step in one.steps),
    ),
    ShownColumn("start", attrgetter("start"), "phases of the start after the resize"),
    ShownColumn(
        "outcome", lambda one: str(one.resize.outcome), "outcome of the resize", "what came of it", left=True, width=40
    ),
    ShownColumn("outcome_code", attrgetter("resize.outcome.code"), "code of the outcome"),
    ShownColumn("outcome_arguments", lambda one: dict(one.resize.outcome.arguments), "values in the outcome text"),
)  # fmt: skip

DECISION: tuple[ShownColumn[ShownDecision], ...] = (
    ShownColumn("time", attrgetter("decision.time"), "time of the decision, Unix seconds", "when", clock, left=True),
    ShownColumn("policy", attrgetter("decision.policy"), "policy"),
    ShownColumn("mode", attrgetter("decision.mode"), "advise or act"),
    ShownColumn("job_id", attrgetter("given.job_id"), "Slurm's job id", "job"),
    ShownColumn("name", attrgetter("name"), "its name", "name", left=True, json=False),
    ShownColumn(
        "from_shape", lambda one: _sized(one.given.from_shape), "shape that the job had", "had",
        left=True,
        own=lambda one: _choice(one.given.from_shape, one.given.from_batch, "waited"),
    ),
    ShownColumn("from_batch", attrgetter("given.from_batch"), "global batch that the job had, samples"),
    ShownColumn(
        "shape", lambda one: _sized(one.given.shape), "shape that the job gets; null if it waits", "gets",
        left=True,
        own=lambda one: _choice(one.given.shape, one.given.batch, "waits"),
    ),
    ShownColumn("nodes", lambda one: one.given.shape and one.given.shape.nodes, "nodes that the job gets"),
    ShownColumn("gpus_per_node", lambda one: one.given.shape and one.given.shape.gpus_per_node, "GPUs on each node"),
    ShownColumn("batch", attrgetter("given.batch"), "global batch that the job gets, samples"),
    ShownColumn("reason", lambda one: str(one.given.reason), "reason for this size", "why", left=True, width=40),
    ShownColumn("reason_code", attrgetter("given.reason.code"), "code of the reason"),
    ShownColumn("reason_arguments", lambda one: dict(one.given.reason.arguments), "values in the reason's sentence"),
    ShownColumn(
        "outcome", lambda one: str(one.given.outcome), "outcome", "what came of it", left=True, width=40,
        own=_became,
    ),
    ShownColumn("outcome_code", attrgetter("given.outcome.code"), "code of the outcome"),
    ShownColumn("outcome_arguments", lambda one: dict(one.given.outcome.arguments), "values in the outcome's sentence"),
    ShownColumn("acted", attrgetter("given.acted"), "true if the companion began to carry out the decision"),
    ShownColumn(
        "alternatives",
        lambda one: [each._asdict() | {"shape": _sized(each.shape)} for each in one.given.alternatives],
        "sizes considered", "weighed", left=True,
        own=lambda one: ", ".join(_weighed(each) for each in one.given.alternatives) or " ",
    ),
)  # fmt: skip


def _sized(shape: Shape | None) -> str | None:
    return str(shape) if shape and shape.nodes else None


def _choice(shape: Shape | None, batch: int | None, none: str) -> str:
    size = _sized(shape)
    if size is None:
        return none
    return f"{size}, batch {batch}" if batch else size


def _weighed(one: Any) -> str:
    size = _sized(one.shape)
    batch = f"/{one.batch}" if one.batch else ""
    return f"{size}{batch} ({one.worth:.3g})" if size else f"waiting ({one.worth:.3g})"


def _step(step: ResizeStepRecord) -> dict[str, Any]:
    detail = step.detail
    found = {"sequence": step.sequence, "state": step.stage, "time": step.time}
    return found | {"detail": str(detail), "detail_code": detail.code, "detail_arguments": dict(detail.arguments)}


def _of(columns: Sequence[ShownColumn[T]], names: str) -> tuple[ShownColumn[T], ...]:
    by_name = {column.name: column for column in columns}
    return tuple(by_name[name] for name in names.split())


JOBS = _of(
    JOB, "job_id name user state shape batch local_batch samples_per_s strategy epochs accuracy resizes pause_s jct_s"
)
"""Columns of `slurm-ones jobs`."""
TOP = _of(JOB, "job_id user name st shape batch samples_per_s epochs left_s resizes why")
"""Columns of `slurm-ones top`. The last one takes the remaining width."""
RUNNING = _of(JOB, "job_id name user shape batch samples_per_s epochs left_s resizes why")
WAITING = _of(JOB, "job_id name user state why")
ENDED = _of(JOB, "job_id name user state end_time jct_s resizes pause_s")
"""Columns of the three tables on the first page: RUNNING, WAITING and ENDED jobs."""
RESIZES = _of(RESIZE, "started change mechanism state pause_s steps outcome")
DECIDED = _of(DECISION, "time shape reason outcome alternatives")
"""Columns of the two tables on a job's page: RESIZES and DECIDED."""
GIVEN = _of(DECISION, "job_id name from_shape shape reason outcome alternatives")
"""Columns of the table of a decision's jobs."""
GIVE_WAY = "pause_s resizes accuracy jct_s left_s local_batch strategy user samples_per_s name epochs batch shape state"
"""Columns in the order in which a table that is too wide leaves them out. The job id always stays."""
