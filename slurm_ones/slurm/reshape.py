"""Reshaping a job and believing only what Slurm holds afterwards.

`scontrol update` is not atomic: one that failed may have changed some fields, and one that succeeded may have left
a job that can never start. So the job is read back, and what is not whole is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ones_db.shape import Shape
from slurm_ones.slurm.client import NotResizable, Refused
from slurm_ones.slurm.model import Job, JobKey


def has_shape(job: Job, shape: Shape) -> bool:
    """Whether Slurm holds exactly this shape for a pending job; a job without GRES is its nodes."""
    right = job.nodes == shape.nodes and job.max_nodes in (0, shape.nodes)
    if job.gpus_per_node:
        right = right and job.gpus_per_node == shape.gpus_per_node
    return right


def never_starts(job: Job) -> bool:
    """Whether Slurm says of a waiting job that it will not start at the shape it has: a shape that it took, beyond what
    the partition has or one job may have."""
    return job.reason in ("BadConstraints", "PartitionNodeLimit") or "PerJob" in job.reason


def _fault(job: Job, shape: Shape, kind: str, before: Job) -> str:
    """What is wrong with the job as read back, empty when nothing."""
    if not has_shape(job, shape) or bool(job.gpus_per_node) != bool(before.gpus_per_node):
        return f"Slurm holds {job.nodes}-{job.max_nodes} nodes with {job.gpus_per_node} GPUs each"
    if job.kind != kind:
        return f"Slurm holds GPUs of {f'type {job.kind}' if job.kind else 'any type'}"
    if 0 < job.tasks < shape.nodes:
        return f"it was submitted with a task count ({job.tasks}), which is less than {shape.nodes} nodes"
    # What Slurm said before is about the shape before, until it has looked again.
    if never_starts(job) and not never_starts(before):
        return f"Slurm says {job.reason}"
    return ""


def reshape(
    read: Callable[[JobKey], Job],
    tasks: Callable[[int], Sequence[Job]],
    update: Callable[[Job, Shape], None],
    job_id: JobKey,
    shape: Shape,
    kind: str | None = None,
) -> None:
    """Give a pending job, or all tasks of an array that wait together, another shape through `update`, verify it, and
    put the old one back when it is not whole. Of this `kind` of GPU, empty for any; None leaves it the one that it asks
    for.

    `tasks` reads those of an array; `update` is called with the job as it is to be asked for, its kind included.
    Raises `NotResizable` (the old shape is in force again), `NotPermitted`, `UnknownJob`, `Unreachable`.
    """
    before = read(job_id)
    if not before.pending:
        raise NotResizable(f"job {job_id} is {before.state.value}; only a pending job can be reshaped")
    if len(before.array_tasks) > 1 and not all(task.pending for task in tasks(before.array_id)):
        # An update by the array's id changes those too, and takes nodes from what runs.
        raise NotResizable(f"job {job_id}: not all of its tasks wait; only one of them can be reshaped, by its own id")
    if before.task_counts:
        raise NotResizable(f"job {job_id} was submitted with task counts, which its user cannot change: it keeps them")
    if before.gpus_total and not before.gpus_per_node:
        raise NotResizable(f"job {job_id} asks for GPUs per job (--gpus), and Slurm does not let that form change")
    if not before.of_one_kind:
        raise NotResizable(f"job {job_id} asks for GPUs of several types ({before.kind!r}): give it one, or none")
    if shape.nodes < 1 or (before.gpus_per_node and shape.gpus_per_node < 1):
        raise NotResizable(f"job {job_id}: {shape} is no shape of a job that runs")
    if kind is None:
        kind = before.kind
    elif not before.gpus_per_node and kind != before.kind:
        raise NotResizable(f"job {job_id} gets whole nodes: Slurm is not asked for a type of GPU")
    wanted = replace(before, kind=kind)
    if not wanted.of_one_kind:
        raise NotResizable(f"job {job_id}: {kind!r} is no type of GPU")
    if has_shape(before, shape) and kind == before.kind:
        return
    old = Shape(before.nodes, before.gpus_per_node)
    refused: Refused | None = None
    try:
        update(wanted, shape)
    except Refused as error:
        refused = error
    after = read(job_id)
    fault = _fault(after, shape, kind, before)
    if not fault and refused is None:
        return
    if not has_shape(after, old) or after.kind != before.kind:
        try:
            update(before, old)
        except Refused as error:
            raise NotResizable(f"job {job_id}: {refused or fault}; and {old} could not be put back: {error}") from None
        back = read(job_id)
        if not has_shape(back, old) or back.kind != before.kind:
            raise NotResizable(f"job {job_id}: {refused or fault}; and Slurm did not take {old} back")
    if refused is not None:
        raise refused
    raise NotResizable(f"job {job_id} does not take shape {shape}: {fault}; it has {old} again")
