"""What can be said of a job that the database does not have."""

from __future__ import annotations

import getpass

from slurm_ones.config import Settings
from slurm_ones.observe.optin import BadComment, parse_comment
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.connect import connect
from slurm_ones.slurm.model import Job
from slurm_ones.text import plain

HOW = '#SBATCH --comment="ones: gpus=1-16"'


def unknown_job(settings: Settings, job_id: int, place: str, *, own_only: bool) -> str:
    """Why the job is not in the database, `place`, as far as Slurm knows; `own_only` where it has this user's jobs
    alone. Asks Slurm once."""
    head = f"job {job_id} is not {'among your jobs there' if own_only else f'in the database {place}'}"
    try:
        job = connect(settings).details([job_id]).get(job_id)
    except SlurmError:
        return f"{head}, and Slurm cannot be asked: it has not opted in ({HOW}), or the companion has not seen it"
    return f"{head}: {_why(job, settings, own_only)}"


def _why(job: Job | None, settings: Settings, own_only: bool) -> str:
    if job is None:
        also = ", or it is another user's" if own_only else ""
        return (
            "Slurm does not know it. There was no such job, or it has ended: without having opted in "
            f"({HOW}), before a companion saw it, or so long ago that its rows were removed{also}"
        )
    user = getpass.getuser()
    if job.user != user and own_only:
        return f"it belongs to {plain(job.user, 40)}, and is not yours to see"
    if job.user != user and settings.scope == "own":
        return f"it belongs to {plain(job.user, 40)}, and this companion looks after {user}'s own jobs alone"
    try:
        opted_in = parse_comment(job.comment) is not None
    except BadComment:
        opted_in = True
    if opted_in:
        ended = "it has ended before a companion saw it" if job.ended else "the companion has not seen it yet"
        return f"{ended}, and looks every {settings.interval_s:.0f} s: is it running? (slurm-ones status)"
    comment = f"its comment is {plain(job.comment, 80)!r}" if job.comment else "it has no comment"
    return f"it has not opted in: {comment} ({HOW})"
