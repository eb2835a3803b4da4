"""What must never happen to a job of blocks, seen at once: every change of the companion to one of its tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ones_db.shape import Shape
from ones_wrapper.protocol import Order
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.training.training import Training
from slurm_ones.slurm.model import Job, Task
from tests.faults.safety import SafetyChecker


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

    def observed(self, job: Job) -> None:
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
        if task in self._seen and task in self.owners and self._waits_held(task):
            self.checker.report(f"release {task}: its owner holds it")

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

    def note_order(self, job: Job, order: Order) -> None:
        """An order was written."""
        self._orders[job.job_id] = order

    def check_order(self, job: Job, order: Order) -> None:
        """One that lets nobody go on who trains, or asks for a drain: jobs of blocks train on."""
        if order.drain:
            self.checker.report(f"order {order.number} drains {job.job_id}, a job of blocks")

    def _running(self, task: Task) -> bool:
        return any(job.running for job in self._records(task.array) if task.task in job.array_tasks)

    def _waits_held(self, task: Task) -> bool:
        return any(
            job.pending and job.held_by == "user" for job in self._records(task.array) if task.task in job.array_tasks
        )
