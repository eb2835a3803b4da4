"""PySlurm client: reads the queue and single jobs through libslurm, without a process per call.

Importing this module raises ImportError if PySlurm does not fit Slurm's release, so only `connect` imports it.

`CommandClient` does everything else, because of gaps in PySlurm. It cannot name array tasks or set shapes (`Job.modify`
never sends node counts). Its nodes do not show how many GPUs are in use, and `Job.get_resource_layout_per_node` crashes
under 26.05. `send_signal` fails on a stale errno, `requeue` also takes ended jobs, and `hold(mode="user")` dereferences
NULL. Jobs are submitted with sbatch, because sites add plugins to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import pyslurm

from slurm_ones.slurm.command import CommandClient, error_of, with_retries
from slurm_ones.slurm.model import JobKey, SlurmJob, Task
from slurm_ones.slurm.parse import BITSTR, job_of, rows

# libslurm reads the same variable when it reads the first array.
os.environ.update(BITSTR)


def _plain(value: Any) -> Any:
    """Return text for a dict such as {'gres/gpu': 4} or {'gpu:a100': 2}, or a list such as ['matlab:1']."""
    if isinstance(value, dict):
        return ",".join(f"{name}:{count}" for name, count in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _requested(raw: Any) -> str:
    """Return the nodes that a job requests, as Slurm writes them in its TRES; empty if it runs, or names none."""
    node = getattr(raw.requested_tres, "node", None) if raw.state != "RUNNING" else None
    return f"node={node.count}" if node is not None else ""


def _column(raws: Sequence[Any], name: str) -> list[Any]:
    if name == "requested_tres":
        return [*map(_requested, raws)]
    values = [*map(attrgetter(name), raws)]
    nested = any(issubclass(kind, (dict, list)) for kind in {*map(type, values)})
    return [*map(_plain, values)] if nested else values


def jobs_of(raws: Iterable[Any]) -> dict[int, SlurmJob]:
    """Convert PySlurm's jobs to `SlurmJob`, by job id."""
    raws = list(raws)
    found = rows("pyslurm", len(raws), partial(_column, raws))
    return {row[0]: job_of(row) for row in found}


class PySlurmClient(CommandClient):
    """Client of Slurm through PySlurm. `Jobs.load()` always loads all jobs, so a tick calls it once."""

    name = "pyslurm"

    def _load(self, what: str, load: Callable[[], Any]) -> Any:
        def once() -> Any:
            self._keepalive()
            try:
                return load()
            except pyslurm.PyslurmError as error:
                raise error_of(what, str(error)) from None

        return with_retries(once)

    def _queue(self) -> dict[int, SlurmJob]:
        return jobs_of(self._load("jobs", pyslurm.Jobs.load).values())

    def job(self, job_id: JobKey) -> SlurmJob:
        if isinstance(job_id, Task):
            return super().job(job_id)
        try:
            (job,) = jobs_of([self._load(f"job {job_id}", lambda: pyslurm.Job.load(job_id))]).values()
        except KeyError:
            # For an array, PySlurm looks for the steps of one task among those of another.
            return super().job(job_id)
        # For an array, PySlurm returns the first task, whichever was asked for. The reason of a job that was requeued
        # into a hold is a text. It stays when an operator holds the job too.
        held = job.pending and job.held and (job.requeue_held or not job.reason.startswith("JobHeld"))
        return super().job(job_id) if job.array or held else job
