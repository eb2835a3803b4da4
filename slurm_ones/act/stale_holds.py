"""Jobs that stand in a hold of ours again after their release, because Slurm went back in time.

slurmctld saves what it knows a few seconds late, and where it dies in the middle of saving it begins again from what
it saved before that, which may be minutes old. A job that stood in our hold then stands in it again, and nobody else
would let it go. (An owner's `scontrol requeuehold` of a job that waits looks the same: `scontrol hold` is what holds
it.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ones_db import ResizeRecord, Store, UnknownRecord
from slurm_ones.act.transitions import State
from slurm_ones.slurm.client import Refused, SlurmClient, UnknownJob
from slurm_ones.slurm.model import Job

log = logging.getLogger(__name__)


def in_our_hold(job: Job, resize: ResizeRecord) -> bool:
    """Whether the job waits in the hold into which the resize requeued it. Any other requeue would have counted as one
    more restart, and a hold put on it later has another reason."""
    return job.pending and not job.completing and job.requeue_held and job.restart == resize.restart + 1 > 0


def release_stale_holds(jobs: Iterable[Job], client: SlurmClient, store: Store) -> None:
    """Release those of the jobs whose resize is over; raises `Unreachable`.

    `jobs` are as a snapshot shows them. Slurm is asked anew about those alone that may be meant.
    """
    for seen in jobs:
        if seen.array_id == seen.job_id or not (seen.pending and seen.requeue_held):
            continue  # blocks, whose resizes are the array's, stand in holds of ours until they are wanted
        try:
            resizes = store.resizes(seen.job_id)
        except UnknownRecord:
            continue  # somebody's who did not opt in, or a task of a job of blocks
        if not resizes or not State(resizes[-1].state).final:
            continue
        # Not only the last: a resize that found the job in this hold gave up. One that gave up before a requeue of ours
        # found another companion's hold.
        ours = [
            resize
            for resize in resizes
            if resize.restart + 1 == seen.restart
            and any(step.state == State.REQUEUING for step in store.resize_steps(resize.id or 0))
        ]
        if not ours:
            continue
        try:
            if in_our_hold(client.job(seen.key), ours[-1]):
                log.warning("job %d: stale hold: Slurm lost its release; it is released again", seen.job_id)
                client.release(seen.key)
        except UnknownJob:
            continue
        except Refused as error:
            log.error("job %d: it could not be released: %s", seen.job_id, error)
