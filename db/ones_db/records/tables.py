"""What people get to see: a line a job, a bar a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    refusal_code: str = ""

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
