"""What is known beside jobs that the companion looks after: nodes, operators' actions, accounting, roll-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ones_db.records.jobs import JobRecord, RunRecord


class NodeRecord(NamedTuple):
    """A node as it is now."""

    name: str
    state: str
    """UP while it takes jobs, has it any or not; RESERVED; else what Slurm says of it."""
    usable: bool
    """Up, and neither drained, reserved, failing nor in maintenance."""
    gpus: int
    """0 where Slurm knows of none."""
    partitions: str = ""
    """Separated by commas."""


class NodeChange(NamedTuple):
    """What a node was from a moment on, until its next change."""

    time: float
    node: NodeRecord


class ActionRecord(NamedTuple):
    """What somebody did to the companion, its database or its jobs."""

    time: float
    user: str
    """Login name."""
    action: str
    """A command such as `run --act`, or what was seen of a file."""
    detail: str = ""


class LeaderRecord(NamedTuple):
    """Which companion of a cluster acts, or did last."""

    term: int
    """How often the lead was taken, this time included."""
    holder: str
    """As host:process id; empty once it gave the lead back."""
    since: float
    beat: float
    """When it was last heard of, by its own clock."""


@dataclass(frozen=True)
class AccountingJob:
    """A job that has ended, as Slurm's accounting has it."""

    job: JobRecord
    runs: tuple[RunRecord, ...]
    """By their start; empty where it never started."""
    time_limit_s: float | None = None


class Imported(NamedTuple):
    """What became of jobs that were read from accounting."""

    new: int = 0
    changed: int = 0
    """Known from accounting before, and more is told now."""
    same: int = 0
    companion: int = 0
    """Known by the companion, and left as they are."""

    def plus(self, other: Imported) -> Imported:
        """Both together."""
        return Imported(*(a + b for a, b in zip(self, other, strict=True)))


class PastJob(NamedTuple):
    """A job that has ended, whoever told of it; times in seconds."""

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    state: str
    submit_time: float
    start_time: float | None
    """Of its first run; None where it never started."""
    end_time: float
    runs: int
    run_s: float
    """In all its runs."""
    gpus: int
    """Of its largest run."""
    gpu_s: float
    """GPU-seconds of all its runs."""


class RolledUp(NamedTuple):
    """What one step of a roll-up did, or would do."""

    read: int
    """Samples that were looked at."""
    removed: int
    """Samples that others stand for now."""


class HealthRecord(NamedTuple):
    """How the companion that acted last was at its last tick."""

    time: float
    """When it wrote this, Unix seconds."""
    mode: str
    interval_s: float
    """Seconds from one tick to the next."""
    tick_time: float | None = None
    """End of its last tick that was not in vain, Unix seconds; None before the first."""
    tick_s: float | None = None
    """What that tick took, seconds."""
    running: int | None = None
    """Elastic jobs that ran then."""
    waiting: int | None = None
    gpus: int | None = None
    """On which elastic jobs ran."""
    error: str = ""
    """Its last complaint since it started."""
    error_time: float | None = None
