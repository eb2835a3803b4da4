"""Why each job gets what it gets."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_ones.decide.build import fits_nowhere
from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.reasons import Reason, reason
from slurm_ones.schedule.policy import Ints, JobView


def explain(space: Space, jobs: Sequence[JobView], chosen: Ints, best: Ints, min_epochs: int) -> dict[int, Reason]:
    """The reason of each job, by job id.

    `chosen` and `best` (J,) are the sizes in force and those of the best candidate. Where they differ, a job that the
    best one changes has had its size for less than `min_epochs`.
    """
    reasons = {job.job_id: space.pinned[job.job_id] for job in jobs if job.job_id in space.pinned}
    left_out = [j for j in range(len(space.jobs)) if not space.current[j] and not chosen[j]]
    waiting = len(left_out) + space.waiting_pinned
    for j, job in enumerate(space.jobs):
        before, after = int(space.current[j]), int(chosen[j])
        if not space.start[j]:
            found = fits_nowhere(job)
        elif not before and not after:
            found = reason("in_queue", gpus=int(space.start[j]), place=left_out.index(j) + 1, waiting=waiting)
        elif before == after and best[j] != before:
            found = reason("changed_lately", gpus=int(best[j]), epochs=min_epochs)
        elif not after:
            found = reason("stopped")
        elif not before and after == space.start[j]:
            found = reason("smallest_size")
        else:
            found = reason("least_remaining", speed=float(space.tables.speed[j, space.column[after]]))
        reasons[job.job_id] = found
    return reasons
