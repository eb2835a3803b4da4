"""How long a job is left in peace between two resizes."""

from __future__ import annotations

from ones_db import JobHistory
from slurm_ones.slurm.model import Job

MOST_DOUBLINGS = 6


def rested_at(job: Job, history: JobHistory | None, dwell_s: float) -> float:
    """When the job may be resized (again): the dwell time after its start and its last resize.

    Resizes in a row that did not take effect double it, up to 64 times: what Slurm refused or kept waiting (a limit of
    the user's, say) it will mostly refuse again, and each try costs a running job a restart. A job that waits is
    otherwise free at once, since nothing of it is interrupted.
    """
    failures = history.failures if history is not None else 0
    last = (history.last_resize_end if history is not None else None) or 0.0
    again = last + dwell_s * 2.0 ** min(failures, MOST_DOUBLINGS)
    if job.running:
        return max(job.start_time + dwell_s, again)
    return again if failures else 0.0
