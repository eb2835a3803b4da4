"""Which waiting jobs of a sweep may be trained within one of them: by what Slurm shows of them, and their owners said.

All of one user, who opted in with the same `fuse=NAME`; one GPU, and no more wanted; alike in everything that Slurm
knows of them but the values of their arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ones_wrapper.protocol import MAX_LINE, FusedMember
from slurm_ones.observe.eligibility import Elastic
from slurm_ones.slurm.model import Job

MOST = 64
"""Most members of one job, itself included."""
LONGEST = MAX_LINE // 2
"""Most characters of all their arguments: an order must hold them."""


def carries(elastic: Elastic) -> bool:
    """Whether a job may train others within itself."""
    job, optin = elastic.job, elastic.optin
    if optin is None or not optin.fuse or elastic.refusal is not None or not job.running:
        return False
    return not (job.array or elastic.blocks) and elastic.shape.gpus == 1 and elastic.gpu_range == (1, 1)


def candidates(carrier: Elastic, others: Collection[Elastic], ours: Collection[int]) -> list[Elastic]:
    """Those of `others` that wait, have never run, and are alike, the oldest first. `ours` are jobs that wait for a
    time that we set; another's own start time, dependency or hold is left alone."""
    found = []
    for other in others:
        job = other.job
        if other.refusal is not None or not job.pending or job.held or job.restart or job.completing:
            continue
        if job.reason in ("Dependency", "DependencyNeverSatisfied") or (
            job.reason == "BeginTime" and job.job_id not in ours
        ):
            continue
        if job.job_id != carrier.job.job_id and _kind(other) == _kind(carrier):
            found.append(other)
    return sorted(found, key=lambda other: other.job.job_id)


def _kind(elastic: Elastic) -> tuple[object, ...]:
    """What must be the same of all members."""
    job = elastic.job
    return (
        *(job.uid, job.account, job.partition, job.work_dir, job.time_limit_s, job.requeue, job.batch, job.array),
        *(elastic.shape, elastic.gpu_range, elastic.optin),
    )


def members(carrier: int, commands: Mapping[int, str]) -> tuple[FusedMember, ...]:
    """The carrier and those that may join it, by what Slurm says that they run (script and arguments).

    The script is the same; arguments stand in the same places, and the names of options are the same. No two are equal
    in all: what sets them apart would be nowhere to be seen. Empty where there is nobody but the carrier.
    """
    own = _words(commands.get(carrier, ""))
    if own is None:
        return ()
    found, seen, length = [FusedMember(carrier, tuple(own[1:]))], {tuple(own)}, 0
    for job_id in sorted(commands):
        words = _words(commands[job_id])
        if job_id == carrier or words is None or tuple(words) in seen or not _alike(own, words):
            continue
        length += sum(len(word) + 8 for word in words)
        if len(found) >= MOST or length > LONGEST:
            break
        seen.add(tuple(words))
        found.append(FusedMember(job_id, tuple(words[1:])))
    return tuple(found) if len(found) > 1 else ()


def _words(command: str) -> list[str] | None:
    """None for a command that cannot be handed on as it is."""
    if not command or not command.isascii() or not command.isprintable() or any(mark in command for mark in "\"'\\"):
        return None
    return command.split(" ") if "  " not in command else None


def _alike(one: Sequence[str], other: Sequence[str]) -> bool:
    if len(one) != len(other) or one[0] != other[0]:
        return False
    return all(_option(a) == _option(b) for a, b in zip(one[1:], other[1:], strict=True))


def _option(word: str) -> str:
    """The name of an option; empty for a value, such as -0.5."""
    return word.partition("=")[0] if word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "." else ""


def parked(job: Job) -> bool:
    """Whether a member still waits as it should."""
    return job.pending and not job.restart
