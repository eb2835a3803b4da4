"""`slurm-ones resize`, `pin` and `release`: an owner chooses a job's size.

The wish is a word in the job's comment (`size=8`), which Slurm lets the job's owner change, at every site that has a
companion and whoever runs it. The companion carries it out as it carries out its own decisions.
"""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from slurm_ones.cli.common import command, console, job_number
from slurm_ones.observe.blocks import arrays, block_job
from slurm_ones.observe.optin import MAX_GPUS, BadComment, parse_comment, with_size
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.model import Job

POLL_S = 2.0
SHOWN_S = 30.0
"""Between two lines of progress."""

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id.")]
SizeArgument = Annotated[str, typer.Argument(metavar="SIZE", help="GPUs, such as 8, or nodes × GPUs, such as 2x4.")]


def gpus_of(size: str) -> int:
    """GPUs of a size that a person wrote; raises `BadInput`."""
    match = re.fullmatch(r"(?:([0-9]{1,5})[x×])?([0-9]{1,6})", size.strip())
    gpus = int(match[1] or 1) * int(match[2]) if match else 0
    if not 1 <= gpus <= MAX_GPUS:
        raise BadInput(f"{size!r} is no size: write GPUs, such as 8, or nodes x GPUs of each, such as 2x4")
    return gpus


def look(client: CommandClient, job_id: int) -> Job:
    """The job as it is now; of one of blocks the whole of it. Raises `SlurmError`."""
    found = arrays(tasks) if (tasks := _tasks(client, job_id)) else {}
    return block_job(job_id, found[job_id]).job if job_id in found else client.job(job_id)


def _tasks(client: CommandClient, job_id: int) -> tuple[Job, ...]:
    try:
        return client.tasks(job_id)
    except SlurmError:
        return ()


def opted_in(job: Job) -> str:
    """The comment of a job that may be resized; raises `BadInput` for one that may not."""
    try:
        optin = parse_comment(job.comment)
    except BadComment as error:
        raise BadInput(f"job {job.job_id}: its comment is not understood: {error}") from None
    if optin is None:
        wanted = f"scontrol update JobId={job.job_id} Comment='ones: gpus=1-16'"
        raise BadInput(f"job {job.job_id} did not opt in, so nothing resizes it: allow sizes by {wanted}")
    if not optin.resize:
        raise BadInput(f"job {job.job_id} says resize=off in its comment: take that out first")
    if job.ended:
        raise BadInput(f"job {job.job_id} is {job.state.value}: it has ended")
    return job.comment


def ask(client: CommandClient, job: Job, gpus: int | None) -> None:
    """Write the wish into the job's comment, or take it back. Raises `BadInput` for a size that it does not allow, and
    `SlurmError` where Slurm does not let the comment be changed."""
    comment = with_size(opted_in(job), gpus)
    try:
        parse_comment(comment)
    except BadComment as error:
        raise BadInput(f"job {job.job_id}: {error}; change the range in its comment first") from None
    if comment != job.comment:
        client.run(["scontrol", "update", f"JobId={job.job_id}", f"Comment={comment}"])


def size_of(job: Job) -> int:
    """GPUs that it has; 0 where it does not run."""
    return (job.gpus_total or job.nodes * job.gpus_per_node) if job.running else 0


@command
def resize(
    job: JobArgument,
    size: SizeArgument,
    timeout: Annotated[float, typer.Option(help="Seconds after which the wish is taken back.")] = 600.0,
) -> None:
    """Ask for a size, wait until the job has it, and leave the job to the companion again."""
    client, job_id, gpus = CommandClient(), job_number(job), gpus_of(size)
    now = look(client, job_id)
    ask(client, now, gpus)
    console.print(f"job {job_id}: asked for {gpus} GPUs; it has {size_of(now)}. Ctrl-C takes the wish back.")
    begun = shown = time.monotonic()
    try:
        while size_of(now) != gpus:
            if time.monotonic() - begun > timeout:
                raise BadInput(
                    f"job {job_id}: it has {size_of(now)} GPUs after {timeout:.0f} s, and the wish was taken back: "
                    f"see slurm-ones why {job_id}"
                )
            if time.monotonic() - shown > SHOWN_S:
                shown = time.monotonic()
                console.print(f"{shown - begun:5.0f} s: {now.state.value.lower()}, {size_of(now)} GPUs")
            time.sleep(POLL_S)
            now = look(client, job_id)
            if now.ended:
                raise BadInput(f"job {job_id}: it ended ({now.state.value}) before it was resized")
    except KeyboardInterrupt:
        raise BadInput(f"job {job_id}: the wish was taken back; it has {size_of(now)} GPUs") from None
    finally:
        if not now.ended:
            ask(client, look(client, job_id), None)
    console.print(f"job {job_id}: {gpus} GPUs after {time.monotonic() - begun:.0f} s")


@command
def pin(
    job: JobArgument,
    size: Annotated[
        str, typer.Argument(metavar="[SIZE]", help="GPUs, or nodes × GPUs; its present size if left out.")
    ] = "",
) -> None:
    """Have a job stay at a size until `slurm-ones release`."""
    client, job_id = CommandClient(), job_number(job)
    now = look(client, job_id)
    if not size and not size_of(now):
        raise BadInput(f"job {job_id} does not run: say the size, such as slurm-ones pin {job_id} 4")
    gpus = gpus_of(size) if size else size_of(now)
    ask(client, now, gpus)
    console.print(f"job {job_id}: stays at {gpus} GPUs until slurm-ones release {job_id}")


@command
def release(job: JobArgument) -> None:
    """Leave a job's size to the companion again."""
    client, job_id = CommandClient(), job_number(job)
    ask(client, look(client, job_id), None)
    console.print(f"job {job_id}: the companion chooses its size again")
