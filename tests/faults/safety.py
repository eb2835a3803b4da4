"""What must never happen, seen at once: every change of the companion against what it had last looked at, and how long
its resizes take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ones_db import ResizeRecord, StoreError
from ones_db.shape import Shape
from ones_wrapper.protocol import CHECKPOINTS, DRAIN_WAIT_S, MANIFEST, Order
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.act.machine import ASK_AGAIN_S
from slurm_ones.act.transitions import TRANSITIONS
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.training.training import Training
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.model import SlurmJob, Task
from tests.faults.harm import base_of, is_guest


def bound_s(settings: Settings) -> float:
    """The longest way through the states without a fault: there, given up in the queue, and back."""
    resize = settings.resize
    waits = resize.drain_timeout_s + DRAIN_WAIT_S + 2 * resize.max_wait_s + 2 * resize.start_timeout_s
    return waits + len(TRANSITIONS) * (ASK_AGAIN_S + resize.advance_s)


@dataclass
class _Age:
    seconds: float
    faults: int
    set_back: int


class ResizeAges:
    """The resizes under way, and for how long: time without a companion or a controller is not counted."""

    def __init__(self, settings: Settings) -> None:
        self._bound = bound_s(settings)
        # A fault costs the tick, and perhaps the next one, before the state's action comes again.
        self._fault = 3 * settings.interval_s + ASK_AGAIN_S
        resize = settings.resize
        # A clock that is set back begins the time of a state anew at most.
        self._longest = max(resize.drain_timeout_s, resize.max_wait_s, resize.start_timeout_s, DRAIN_WAIT_S)
        self._ages: dict[int, _Age] = {}
        self._reported: set[int] = set()

    def passed(self, seconds: float, opened: Iterable[int], faults: int, set_back: int) -> list[int]:
        """So much time passed with these resizes open. `faults` is how many faults there were until then, and
        `set_back` how often the companion's clock was set back. Returns those that now take too long."""
        ages = {}
        late = []
        for resize in opened:
            age = self._ages.get(resize) or _Age(0.0, faults, set_back)
            age.seconds += seconds
            ages[resize] = age
            allowed = self._bound + (faults - age.faults) * self._fault + (set_back - age.set_back) * self._longest
            if age.seconds > allowed and resize not in self._reported:
                self._reported.add(resize)
                late.append(resize)
        self._ages = ages
        return late


@dataclass(frozen=True)
class OpenResize:
    """A resize under way, as the database has it."""

    id: int
    state: str
    back: bool
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
class SafetyChecker:
    """Checks each change when it is made. `violations` says what was wrong, in words."""

    cluster: SimulatedCluster
    trainings: dict[int, Training]
    stop_file: Path
    open: Callable[[], dict[int, OpenResize]]
    unreliable: Callable[[int], bool]
    """Whether the job reports checkpoints that it never made, so that no requeue of it is a violation."""
    opted_in: set[int]
    """Jobs that ever let us resize them."""
    reshaped_by_owner: set[int]
    """Jobs whose shape their owner changed."""
    unknowable: Callable[[int, int], bool]
    """Whether the job trains on after that order, and nobody could know: clocks disagree, and it has not said so."""
    violations: list[str] = field(default_factory=list)
    leader_problem: Callable[[], str] = lambda: ""
    """What is wrong with the host that acts now; empty when nothing is."""
    _wanted: dict[int, bool] = field(default_factory=dict)
    """At the companion's last look at each job."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """Of the last order to each job."""

    def report(self, what: str) -> None:
        """Something must never happen, and did."""
        self.violations.append(f"{self.cluster.timeline.now:.0f}: {what}")

    # -- what the companion looks at -----------------------------------------------------------------------------

    def observed(self, job: SlurmJob) -> None:
        """The companion saw the job as it is now."""
        job_id = job.array_id or job.job_id
        self._wanted[job_id] = self._wants(job_id)

    def _wants(self, job_id: int) -> bool:
        return opts_in(self.cluster.jobs[job_id].request.comment) and not self.stop_file.exists()

    def is_new(self, job_id: int, shape: Shape) -> bool:
        """Whether a resize gives the job a shape that neither its owner nor Slurm ever gave it."""
        resize, asked = self.open().get(job_id), self.cluster.jobs[job_id].request
        had = {Shape(asked.nodes, asked.gpus_per_node), resize.old if resize is not None else None}
        return resize is not None and resize.state == "reshaping" and not resize.back and shape not in had

    # -- what it changes -----------------------------------------------------------------------------------------

    def check_change(self, job_id: int, what: str) -> None:
        """Any change, also one that gives back what the job had."""
        if wrong := self.leader_problem():
            self.report(f"{what} {job_id}: {wrong}")
        if job_id not in self.opted_in:
            self.report(f"{what} {job_id}: it never opted in")

    def check_wanted(self, job_id: int, what: str) -> None:
        """A change that the owner must want."""
        self.check_change(job_id, what)
        if job_id in self.cluster.jobs and not self._wanted.get(job_id, True) and not self._wants(job_id):
            self.report(f"{what} {job_id}: its owner, or the stop file, does not want it")

    def check_begin(self, record: ResizeRecord) -> None:
        self.check_wanted(record.job_id, "begin a resize of")

    def check_requeue(self, job_id: int) -> None:
        self.check_wanted(job_id, "requeue")

    def check_requeued(self, job_id: int) -> None:
        """A requeue takes effect."""
        job, training = self.cluster.jobs[job_id], self.trainings.get(job_id)
        if not job.running or training is None or training.files is None or self.unreliable(job_id):
            return
        resize = self.open().get(job_id)
        if resize is None or resize.order is None:
            self.report(f"requeue {job_id}: no resize of it is open")
        elif training.drained_for != resize.order and not self.unknowable(job_id, resize.order):
            answered = training.drained_for
            self.report(
                f"requeue {job_id}: it waits for {answered}, not for order {resize.order} ({training.phase.value})"
            )
        elif training.drained_for is not None and training.position != training.durable:
            self.report(f"requeue {job_id}: its checkpoint does not hold all that it did")
        else:
            name = f"step-{training.durable.step:09d}"
            manifest = training.files.directory / CHECKPOINTS / name / MANIFEST
            if not manifest.exists() or not manifest.stat().st_size:
                self.report(f"requeue {job_id}: {name} is not complete")

    def check_hold(self, job_id: int) -> None:
        resize = self.open().get(job_id)
        if resize is not None and resize.back:
            self.check_change(job_id, "hold")
        else:
            self.check_wanted(job_id, "hold")

    def check_reshape(self, job_id: int, shape: Shape) -> None:
        resize, job = self.open().get(job_id), self.cluster.jobs[job_id]
        if shape in (Shape(job.nodes, job.gpus_per_node), resize and resize.old):
            self.check_change(job_id, "reshape")
        else:
            self.check_wanted(job_id, f"reshape to {shape}")

    def check_release(self, job_id: int) -> None:
        """A job is released at the shape that its resize is heading for, and at no other that Slurm made of it."""
        self.check_change(job_id, "release")
        resize, job = self.open().get(job_id), self.cluster.jobs[job_id]
        if resize is None or resize.state != "releasing" or resize.back or not job.pending:
            return
        if job_id in self.reshaped_by_owner:
            return
        if job.nodes != resize.new.nodes or job.gpus_per_node not in (0, resize.new.gpus_per_node):
            self.report(f"release {job_id}: at {job.nodes}x{job.gpus_per_node}, not {resize.new}")

    def check_defer(self, job_id: int, until: float) -> None:
        if until:
            self.check_wanted(job_id, "defer")
        else:
            self.check_change(job_id, "let start")

    def check_order(self, job: WholeJob, order: Order) -> None:
        if order.drain or job.job_id not in self.open():
            self.check_wanted(job.job_id, f"order {order}")
        else:
            self.check_change(job.job_id, f"order {order}")

    def note_order(self, job_id: int, order: Order) -> None:
        before = self._numbers.get(job_id, -1)
        if order.number < before:
            self.report(f"order {order.number} to job {job_id} comes after {before}, and the job will not obey it")
        self._numbers[job_id] = max(order.number, before)


class FailureLog(logging.Handler):
    """Records exceptions that a companion survived, though no injected fault caused them."""

    def __init__(self, checker: SafetyChecker) -> None:
        super().__init__(logging.WARNING)
        self._checker = checker

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, (StoreError, SlurmError)):
            self._checker.report(f"the companion failed: {type(error).__name__}: {error}")


@dataclass
class BlockSafety:
    """Checks each change when it is made, and says to the checker what was wrong."""

    checker: SafetyChecker
    owners: set[Task]
    """Tasks that their owners hold."""
    arrays: set[int]
    """Arrays that their owners hold as a whole."""
    _seen: set[Task] = field(default_factory=set)
    """Tasks that the companion has looked at since their owners hold them."""
    _orders: dict[int, Order] = field(default_factory=dict)
    """The last order to each job that was written."""

    def _records(self, job_id: int) -> list[SimulatedJob]:
        return self.checker.cluster.records.known_of(job_id)

    def _training(self, job_id: int) -> Training:
        training = self.checker.trainings[job_id]
        assert training.hot is not None
        return training

    def observed(self, job: SlurmJob) -> None:
        """The companion saw the job as it is now."""
        for task in job.array_tasks:
            key = Task(job.array_id, task)
            (self._seen.add if key in self.owners else self._seen.discard)(key)

    def requeue(self, task: Task) -> None:
        """A block that trains is never requeued."""
        self.checker.check_change(task.array, "requeue a block of")
        if self._running(task):
            self.checker.report(f"requeue {task}: a block that runs is requeued")

    def hold(self, task: Task) -> None:
        """What waits, to be used later."""
        self.checker.check_change(task.array, "hold a block of")

    def reshape(self, task: Task, shape: Shape) -> None:
        """What is to join; or a job that waits gets its old shape back."""
        resize = self.checker.open().get(task.array)
        if resize is not None and shape == resize.old:
            self.checker.check_change(task.array, "reshape a block of")
        else:
            self.checker.check_wanted(task.array, f"reshape to {shape} a block of")

    def release(self, task: Task) -> None:
        """Where blocks are to join, the order to train with them comes first; and what the owner holds stays held."""
        self.checker.check_change(task.array, "release a block of")
        order = self._orders.get(task.array)
        resize = self.checker.open().get(task.array)
        joins = resize is not None and resize.state in ("preparing", "opening", "joining")
        if joins and (order is None or order.blocks is None or task.task not in order.blocks):
            self.checker.report(f"release {task}: no order was written to train with it")
        elif joins and order is not None and order.blocks is not None:
            self._check_guest(task, order.blocks)
        if task in self._seen and task in self.owners and self._waits_held(task):
            self.checker.report(f"release {task}: its owner holds it")

    def _check_guest(self, task: Task, blocks: Collection[int]) -> None:
        """What a user asked for is never left to Slurm to take."""
        record, records = self.checker.cluster.records.get(task), self._records(task.array)
        asked = record.request.nodes * record.request.gpus_per_node
        base, gpus = base_of(records, blocks), record.nodes * record.gpus_per_node
        if is_guest(record) and base + gpus <= asked:
            self.checker.report(f"release {task}: a guest of {gpus} GPUs, and {base} of {asked} are base")

    def release_array(self, job_id: int) -> None:
        """No task that its owner holds is let go with the others."""
        for task in self._seen & self.owners:
            if task.array == job_id and self._waits_held(task):
                self.checker.report(f"release {job_id}: the owner of {task} holds it")

    def reuse(self, task: Task) -> None:
        """It has run, so that no hold of its owner's from before is left."""
        self.checker.check_change(task.array, "use a block again of")
        self.owners.discard(task)
        self._seen.discard(task)

    def throttle(self, job_id: int) -> None:
        """All that waits is held before the throttle is lifted: else it would start."""
        self.checker.check_change(job_id, "lift the throttle of")
        loose = [job for job in self._records(job_id) if job.pending and not job.held_by]
        tasks = [task for job in loose for task in job.array_tasks if not job.restart and task]
        array = self.checker.cluster.records.arrays[job_id]
        if array.throttle and tasks and not self.arrays & {job_id}:
            self.checker.report(f"throttle of {job_id} is lifted, and tasks {tasks} are not held")

    def cancel_waiting(self, job_id: int) -> None:
        """The job is over: no block runs, and none may start without us."""
        self.checker.check_change(job_id, "cancel what waits of")
        training = self._training(job_id)
        alive = [job for job in self._records(job_id) if job.running or (job.pending and not job.held_by)]
        if not training.finished and alive:
            self.checker.report(f"cancel what waits of {job_id}: it is not over")

    def note_order(self, job: WholeJob, order: Order) -> None:
        self._orders[job.job_id] = order

    def check_order(self, job: WholeJob, order: Order) -> None:
        """One that lets nobody go on who trains, or asks for a drain: jobs of blocks train on. Of those that stay no
        guest takes the place of a base block."""
        if order.drain:
            self.checker.report(f"order {order.number} drains {job.job_id}, a job of blocks")
        blocks, records = order.blocks or (), self._records(job.job_id)
        members = {*self._training(job.job_id).members}
        if not any(is_guest(one) for one in records if {*one.array_tasks} & {*blocks}):
            return
        request = self.checker.cluster.jobs[job.job_id].request
        had, has = base_of(records, members), base_of(records, blocks)
        if has < min(had, request.nodes * request.gpus_per_node):
            self.checker.report(f"order {order.number} to {job.job_id}: {has} of {had} base GPUs stay, next to guests")

    def _running(self, task: Task) -> bool:
        return any(job.running for job in self._records(task.array) if task.task in job.array_tasks)

    def _waits_held(self, task: Task) -> bool:
        return any(
            job.pending and job.held_by in ("user", "exit")
            for job in self._records(task.array)
            if task.task in job.array_tasks
        )
