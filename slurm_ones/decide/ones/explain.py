"""Why each job gets what it gets, in words for its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_ones.decide.policy import Allocation, JobView
from slurm_ones.decide.tables import Tables


def reasons(
    jobs: Sequence[JobView], staying: Mapping[int, str], tables: Tables, allocations: Mapping[int, Allocation]
) -> dict[int, str]:
    """For each job of the round, `staying` ones included."""
    row = {job.job_id: j for j, job in enumerate(tables.jobs)}
    column = {int(size): u for u, size in enumerate(tables.sizes)}
    found = {}
    for job in jobs:
        got = allocations.get(job.job_id)
        if job.job_id in staying:
            found[job.job_id] = f"{'waits' if got is None else 'keeps ' + _gpus(got.shape.gpus)}: {staying[job.job_id]}"
        elif got is None:
            found[job.job_id] = _left_out(job, tables, row[job.job_id])
        else:
            found[job.job_id] = _given(job, got, tables, row[job.job_id], column)
    return found


def _left_out(job: JobView, tables: Tables, j: int) -> str:
    if not tables.allowed[j].any():
        valid = ", ".join(map(str, job.limits.gpus)) or "none"
        return f"waits: none of the GPU counts it takes ({valid}) and their batches fit this cluster"
    verb = "waits" if job.shape is None else "gives its GPUs up for a while"
    return f"{verb}: they shorten others' time more"


def _given(job: JobView, got: Allocation, tables: Tables, j: int, column: Mapping[int, int]) -> str:
    gpus, before = got.shape.gpus, job.shape.gpus if job.shape else 0
    if not before:
        return f"starts on {_gpus(gpus)}, where they shorten the time of all jobs most"
    if gpus == before:
        more = "" if got.batch == job.batch else f" with batch {got.batch}, which trains faster"
        return f"keeps {_gpus(gpus)}{more}: no change would repay its interruption of {job.resize_s:.0f} s"
    faster = tables.goodput[j, column[gpus]] / max(tables.goodput[j, column[before]], 1e-300)
    if gpus > before:
        return f"grows from {before} to {_gpus(gpus)}: it is expected to train {faster:.1f} times as fast"
    return f"shrinks from {before} to {_gpus(gpus)} ({faster:.1f} times the speed): they shorten others' time more"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
