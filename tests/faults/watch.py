"""What must never happen, seen at once: every change of the companion against what it had last looked at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ones_db import ResizeRecord, StoreError
from ones_wrapper.protocol import CHECKPOINTS, MANIFEST, Order
from slurm_ones.observe.optin import BadComment, parse_comment
from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.training.training import Training
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.model import Job, Shape


@dataclass(frozen=True)
class OpenResize:
    """A resize under way, as the database has it."""

    id: int
    state: str
    order: int | None
    old: Shape
    new: Shape


def opts_in(comment: str) -> bool:
    """Whether the comment lets the job be resized."""
    try:
        optin = parse_comment(comment)
    except BadComment:
        return False
    return optin is not None and optin.resize


@dataclass
class Watch:
    """Looks on. `broken` says what it saw, in words."""

    cluster: SimulatedCluster
    trainings: dict[int, Training]
    stop_file: Path
    open: Callable[[], dict[int, OpenResize]]
    liars: Callable[[int], bool]
    """Whether the job's own word about its checkpoints cannot be had against the companion."""
    consented: set[int]
    """Jobs that ever let us resize them."""
    reshaped: set[int]
    """Jobs whose shape their owner changed."""
    unheard: Callable[[int, int], bool]
    """Whether the job trains on after that order, and nobody could know: clocks disagree, and it has not said so."""
    broken: list[str] = field(default_factory=list)
    acting: Callable[[], str] = lambda: ""
    """Says what is wrong with who acts now; empty when nothing is."""
    _wanted: dict[int, bool] = field(default_factory=dict)
    """At the companion's last look at each job."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """Of the last order to each job."""

    def say(self, what: str) -> None:
        """Something is broken."""
        self.broken.append(f"{self.cluster.timeline.now:.0f}: {what}")

    # -- what the companion looks at -----------------------------------------------------------------------------

    def looked(self, job: Job) -> None:
        """The companion saw the job as it is now."""
        self._wanted[job.job_id] = self._wants(job.job_id)

    def _wants(self, job_id: int) -> bool:
        return opts_in(self.cluster.jobs[job_id].request.comment) and not self.stop_file.exists()

    def is_new(self, job_id: int, shape: Shape) -> bool:
        """Whether a resize gives the job a shape that neither its owner nor Slurm ever gave it."""
        resize, asked = self.open().get(job_id), self.cluster.jobs[job_id].request
        had = {Shape(asked.nodes, asked.gpus_per_node), resize.old if resize is not None else None}
        return resize is not None and resize.state == "reshaping" and shape not in had

    # -- what it changes -----------------------------------------------------------------------------------------

    def touches(self, job_id: int, what: str) -> None:
        """Any change, also one that gives back what the job had."""
        if wrong := self.acting():
            self.say(f"{what} {job_id}: {wrong}")
        if job_id not in self.consented:
            self.say(f"{what} {job_id}: it never opted in")

    def _forward(self, job_id: int, what: str) -> None:
        """A change of which its owner wants to hear."""
        self.touches(job_id, what)
        if job_id in self.cluster.jobs and not self._wanted.get(job_id, True) and not self._wants(job_id):
            self.say(f"{what} {job_id}: its owner, or the stop file, does not want it")

    def begins(self, record: ResizeRecord) -> None:
        self._forward(record.job_id, "begin a resize of")

    def requeues(self, job_id: int) -> None:
        self._forward(job_id, "requeue")

    def requeued(self, job_id: int) -> None:
        """A requeue takes effect."""
        job, training = self.cluster.jobs[job_id], self.trainings.get(job_id)
        if not job.running or training is None or training.files is None or self.liars(job_id):
            return
        resize = self.open().get(job_id)
        if resize is None or resize.order is None:
            self.say(f"requeue {job_id}: no resize of it is open")
        elif training.drained_for != resize.order and not self.unheard(job_id, resize.order):
            answered = training.drained_for
            self.say(
                f"requeue {job_id}: it waits for {answered}, not for order {resize.order} ({training.phase.value})"
            )
        elif training.drained_for is not None and training.position != training.durable:
            self.say(f"requeue {job_id}: its checkpoint does not hold all that it did")
        else:
            name = f"step-{training.durable.step:09d}"
            manifest = training.files.directory / CHECKPOINTS / name / MANIFEST
            if not manifest.exists() or not manifest.stat().st_size:
                self.say(f"requeue {job_id}: {name} is not complete")

    def holds(self, job_id: int) -> None:
        resize = self.open().get(job_id)
        if resize is not None and resize.state.endswith("_back"):
            self.touches(job_id, "hold")
        else:
            self._forward(job_id, "hold")

    def reshapes(self, job_id: int, shape: Shape) -> None:
        resize, job = self.open().get(job_id), self.cluster.jobs[job_id]
        if shape in (Shape(job.nodes, job.gpus_per_node), resize and resize.old):
            self.touches(job_id, "reshape")
        else:
            self._forward(job_id, f"reshape to {shape}")

    def releases(self, job_id: int) -> None:
        """A job is let go at the shape that its resize is heading for, and at no other that Slurm made of it."""
        self.touches(job_id, "release")
        resize, job = self.open().get(job_id), self.cluster.jobs[job_id]
        if resize is None or resize.state != "releasing" or not job.pending or job_id in self.reshaped:
            return
        if job.nodes != resize.new.nodes or job.gpus_per_node not in (0, resize.new.gpus_per_node):
            self.say(f"release {job_id}: at {job.nodes}x{job.gpus_per_node}, not {resize.new}")

    def defers(self, job_id: int, until: float) -> None:
        if until:
            self._forward(job_id, "defer")
        else:
            self.touches(job_id, "let start")

    def orders(self, job: Job, order: Order) -> None:
        if order.drain or job.job_id not in self.open():
            self._forward(job.job_id, f"order {order}")
        else:
            self.touches(job.job_id, f"order {order}")

    def ordered(self, job_id: int, order: Order) -> None:
        """An order was written."""
        before = self._numbers.get(job_id, -1)
        if order.number < before:
            self.say(f"order {order.number} to job {job_id} comes after {before}, and the job will not obey it")
        self._numbers[job_id] = max(order.number, before)


class Failures(logging.Handler):
    """Hears of exceptions that a companion survived, though no fault of ours caused them."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, (StoreError, SlurmError)):
            self._watch.say(f"the companion failed: {type(error).__name__}: {error}")
