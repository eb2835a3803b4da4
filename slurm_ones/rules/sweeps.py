"""Which waiting jobs of a sweep may be trained within one of them: by what Slurm shows of them, and their owners said.

All of one user, who opted in with the same `fuse=NAME`; one GPU, and no more wanted; alike in everything that Slurm
knows of them but the values of their arguments.
"""

from __future__ import annotations

from collections.abc import Collection

from ones_wrapper.protocol import MAX_LINE, FusedMember
from slurm_ones.jobs.eligibility import Elastic
from slurm_ones.slurm.model import Job

MOST = 64
"""Most members of one job, itself included."""
QUOTES = "\"'\\"
LONGEST = MAX_LINE // 2
"""Most characters of all their arguments: an order must hold them."""


def carries(elastic: Elastic) -> bool:
    """Whether a job may train others within itself. One that waits for a restart goes on with those that it has."""
    job, optin = elastic.job, elastic.optin
    if optin is None or not optin.fuse or elastic.refusal is not None:
        return False
    if not (job.running or (job.pending and job.restart and not job.held)):
        return False
    return not (job.array or elastic.blocks) and elastic.shape.gpus == 1 and elastic.gpu_range == (1, 1)


def candidates(carrier: Elastic, others: Collection[Elastic], ours: Collection[int], now: float) -> list[Elastic]:
    """Those of `others` that wait, have never run, and are alike, the oldest first. `ours` are jobs that wait for a
    time that we set; another's own start time (which Slurm's reason need not show), dependency or hold is left
    alone."""
    found = []
    for other in others:
        job = other.job
        if other.refusal is not None or not job.pending or job.held or job.restart or job.completing:
            continue
        if job.reason in ("Dependency", "DependencyNeverSatisfied") or (
            job.eligible_time > now and job.job_id not in ours
        ):
            continue
        if job.job_id != carrier.job.job_id and _kind(other) == _kind(carrier):
            found.append(other)
    return sorted(found, key=lambda other: other.job.job_id)


def _kind(elastic: Elastic) -> tuple[object, ...]:
    """What must be the same of all members."""
    job = elastic.job
    return (
        *(job.uid, job.account, job.partitions, job.work_dir, job.time_limit_s, job.requeue, job.batch, job.array),
        *(elastic.shape, elastic.gpu_range, elastic.optin),
    )


def members(carrier: Job, others: Collection[Job]) -> tuple[FusedMember, ...]:
    """The carrier and those that may join it, by the lines that they were submitted by.

    All up to the script is the same; its arguments stand in the same places, with the same names of options. No two are
    equal in all: what sets them apart would be nowhere to be seen. Empty where there is nobody but the carrier.
    """
    first = _line(carrier)
    if first is None:
        return ()
    options, own = first
    found, seen, length = [FusedMember(carrier.job_id, own)], {own}, 0
    for job in sorted(others, key=lambda job: job.job_id):
        line = _line(job)
        if job.job_id == carrier.job_id or line is None or line[0] != options:
            continue
        words = line[1]
        if words in seen or [*map(_option, words)] != [*map(_option, own)]:
            continue
        length += sum(len(word) + 8 for word in words)
        if len(found) >= MOST or length > LONGEST:
            break
        seen.add(words)
        found.append(FusedMember(job.job_id, words))
    return tuple(found) if len(found) > 1 else ()


def _line(job: Job) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The submit line up to the script, and its arguments; None for one that cannot be taken apart and handed on as it
    was: Slurm joins words by spaces. (The job itself compares what it is given with its own arguments.)"""
    line = job.submit_line
    if (
        not line.isascii()
        or not line.isprintable()
        or "  " in line
        or len(line) >= LONGEST
        or any(c in line for c in QUOTES)
    ):
        return None
    words, script = line.split(" "), job.command.rpartition("/")[2]
    place = next((i for i, word in enumerate(words) if i and word.rpartition("/")[2] == script), 0)
    return (tuple(words[: place + 1]), tuple(words[place + 1 :])) if place and script else None


def _option(word: str) -> str:
    """The name of an option; empty for a value, such as -0.5."""
    return word.partition("=")[0] if word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "." else ""


def parked(job: Job) -> bool:
    """Whether a member still waits as it should."""
    return job.pending and not job.restart
