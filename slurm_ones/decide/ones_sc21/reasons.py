"""Why each job gets what it gets, in words for its owner."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Ints, JobView


def explain(space: Space, jobs: Sequence[JobView], chosen: Ints, best: Ints, note: str) -> dict[int, str]:
    """A sentence for each job, by job id.

    `chosen` and `best` (J,) are the sizes in force and those of the best candidate, `note` why the best was not
    deployed where it was not.
    """
    reasons = {job.job_id: _pinned(job, space.pinned[job.job_id]) for job in jobs if job.job_id in space.pinned}
    left_out = [j for j in range(len(space.jobs)) if not space.current[j] and not chosen[j]]
    waiting = len(left_out) + space.waiting_pinned
    for j, job in enumerate(space.jobs):
        before, after = int(space.current[j]), int(chosen[j])
        if not before and not after:
            reasons[job.job_id] = _waits(space, j, left_out.index(j) + 1, waiting)
        elif not before:
            why = "its smallest size" if after == space.start[j] else f"{_speed(space, j, after)} predicted"
            reasons[job.job_id] = f"starts on {_gpus(after)}: {why}"
        elif after == before:
            weighed = f"; {before} → {int(best[j])} was weighed: {note}" if best[j] != before else ""
            reasons[job.job_id] = f"keeps {_gpus(before)}: {_speed(space, j, before)}, {_done(job)}{weighed}"
        elif not after:
            reasons[job.job_id] = f"stops at a checkpoint, {_done(job)}: others' GPUs bring more now"
        else:
            verb, tail = ("grows", "") if after > before else ("shrinks", ", which makes room for other jobs")
            reasons[job.job_id] = (
                f"{verb} {before} → {_gpus(after)}: {_speed(space, j, before)} → "
                f"{_speed(space, j, after)} predicted, {_done(job)}{tail}"
            )
    return reasons


def _pinned(job: JobView, why: str) -> str:
    return f"waits: {why}" if job.shape is None else f"keeps {_gpus(job.shape.gpus)}: {why}"


def _waits(space: Space, j: int, place: int, waiting: int) -> str:
    if not space.start[j]:
        valid = ", ".join(map(str, space.jobs[j].limits.gpus)) or "none"
        return f"waits: none of the GPU counts it takes ({valid}) and their batches fit this cluster"
    return f"waits: no room for its {_gpus(int(space.start[j]))}; {_ordinal(place)} of {waiting} waiting"


def _speed(space: Space, j: int, gpus: int) -> str:
    speed = float(space.tables.speed[j, space.column[gpus]])
    return f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.2g} samples/s"


def _done(job: JobView) -> str:
    mean = job.progress.mean if job.progress.alpha + job.progress.beta > 0 else float("nan")
    return f"{100 * mean:.0f} % complete" if 0 <= mean <= 1 else "progress unknown"


def _gpus(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
