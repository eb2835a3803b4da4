"""Tasks of a job of blocks made ready to join: held with all that waits, without a throttle, in the shape to have.

Each change may be repeated. Nothing here lets a task start, and nothing takes anything from those that train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ones_db import ResizeRecord
from ones_db.reasons import Reason, reason
from slurm_ones.act.arrays import Array
from slurm_ones.act.machine import Machine
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import JobState

Change = Callable[[Machine, ResizeRecord, Array], Reason | None]
"""Changes tasks of a job so that others may join; why that cannot be, or None."""


def changes(resize: ResizeRecord) -> list[Change]:
    """All that may have to be done, in order."""
    return [_hold, _lift_throttle, *(partial(_give_shape, task=task) for task, _ in resize.added)]


def to_join(resize: ResizeRecord) -> set[int]:
    """Tasks of the blocks that are to join."""
    return {task for task, _ in resize.added}


def unfit(resize: ResizeRecord, array: Array) -> Reason | None:
    """Why one of the blocks that are to join cannot be prepared."""
    for task, _ in resize.added:
        job = array.tasks.get(task)
        if job is None:
            return reason("block_unknown", task=task)
        if job.admin_held:
            return reason("block_held", task=task)
        if not job.pending and job.state is not JobState.COMPLETED:
            return reason("block_taken", task=task)
    return elsewhere(resize, array)


def elsewhere(resize: ResizeRecord, array: Array) -> Reason | None:
    """That one of those that are to join waits in another partition than the others train in: its owner moved it since
    this was planned, and its shape is none of that partition's."""
    jobs = (array.tasks.get(task) for task, _ in resize.added)
    if all(job is None or not job.pending or job.shares_partition(array.job) for job in jobs):
        return None
    return reason("blocks_differ", what="partition")


def prepared(resize: ResizeRecord, array: Array) -> bool:
    """Whether all that wait are held, and those that are to join have their shapes."""
    return (
        not _unheld(resize, array)
        and not any(job.throttle for job in array.tasks.values())
        and all(
            (job := array.tasks[task]).pending and job.held and job.has_shape(shape) and job.kind == resize.new_kind
            for task, shape in resize.added
        )
    )


def _unheld(resize: ResizeRecord, array: Array) -> list[int]:
    tasks = ({*resize.held} | to_join(resize)) & array.tasks.keys()
    return sorted(task for task in tasks if array.tasks[task].pending and not array.tasks[task].held)


def _let_go(array: Array) -> bool:
    """Whether a task that never ran waits in nobody's hold: its owner let it go since this was planned, and it would
    start without us."""
    return any(task and job.pending and not job.held and not job.restart for task, job in array.tasks.items())


def _hold(machine: Machine, resize: ResizeRecord, array: Array) -> Reason | None:
    """Hold what waits; why that cannot be, or None."""
    client, unheld = machine.client, _unheld(resize, array)
    try:
        if len(unheld) > 1:
            # By name: a block that trains and is requeued by Slurm at this moment waits too, and has to start again.
            client.hold_waiting(resize.job_id, unheld)
        else:
            for task in unheld:
                client.hold(array.key(task))
    except Refused as error:
        return reason("hold_refused", answer=str(error))
    return None


def _lift_throttle(machine: Machine, resize: ResizeRecord, array: Array) -> Reason | None:
    """Lift the throttle; why that cannot be, or None. Never before the holds: all tasks would start."""
    if not any(job.throttle for job in array.tasks.values()) or _unheld(resize, array) or _let_go(array):
        return None
    try:
        machine.client.throttle(resize.job_id, 0)
    except Refused as error:
        return reason("throttle_refused", answer=str(error))
    return None


def _give_shape(machine: Machine, resize: ResizeRecord, array: Array, *, task: int) -> Reason | None:
    """Have a block that completed wait again, and give one that is to join its shape; why that cannot be, or None, also
    where something else has to come first."""
    job = array.tasks[task]
    if _unheld(resize, array) or any(one.throttle for one in array.tasks.values()) or job.completing:
        return None
    shape = dict(resize.added)[task]
    try:
        if not job.pending:
            machine.client.reuse(array.key(task))
        machine.client.reshape(array.key(task), shape, kind=resize.new_kind)
    except UnknownJob:
        return reason("block_unknown", task=task)
    except Refused as error:
        return reason("shape_refused", answer=str(error))
    return None
