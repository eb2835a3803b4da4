"""Slurm for one that leads, and for no other: each command that changes something asks first who leads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ones_db import NotLeader
from slurm_ones.slurm.client import SlurmClient
from slurm_ones.slurm.model import Job, Shape, Snapshot

log = logging.getLogger(__name__)


class LeaderOnlyClient:
    """A `SlurmClient` whose changes need the lead: where `check` raises `NotLeader`, Slurm hears nothing.

    Slurm itself knows no terms, so a window is left: a process that is stopped (SIGSTOP, a frozen virtual machine)
    after the answer of `check` and before its command reaches Slurm gives that command when it goes on, whoever leads
    by then. The window is the start of one command, milliseconds; of a reshape and a release, up to four commands in a
    row. It is bounded to one call: the next one asks again, and so does every write to the database.

    What that one call may do: a job that is released or deferred a second time starts at another time than was meant;
    a waiting job gets a shape that it may have (Slurm refuses to reshape one that runs); an order that is older than
    the job's newest is not obeyed. Those are harmless, for whoever leads looks at the job before each action and
    believes what Slurm holds. Two are not: a job that was started again meanwhile and is requeued once more loses the
    work since its last checkpoint and stands in a user hold, and a hold on one that runs strikes when it is requeued
    next. Its owner or an operator can release either. Therefore the lead is looked at once more after each command, and
    where it was lost meanwhile the job and the command are named in the log.
    """

    def __init__(self, client: SlurmClient, check: Callable[[], None]) -> None:
        """`check` raises `NotLeader` unless this companion leads at this moment (`lead.Leadership.check`)."""
        self._client = client
        self._check = check

    @property
    def name(self) -> str:
        return self._client.name

    def version(self) -> tuple[int, int]:
        return self._client.version()

    def config(self) -> dict[str, str]:
        return self._client.config()

    def snapshot(self) -> Snapshot:
        return self._client.snapshot()

    def job(self, job_id: int) -> Job:
        return self._client.job(job_id)

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        return self._client.details(job_ids)

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        self._check()
        return self._client.submit(script, arguments, directory=directory)

    def requeue_hold(self, job_id: int) -> None:
        self._change(f"requeue and hold job {job_id}", lambda: self._client.requeue_hold(job_id))

    def hold(self, job_id: int) -> None:
        self._change(f"hold job {job_id}", lambda: self._client.hold(job_id))

    def reshape(self, job_id: int, shape: Shape) -> None:
        self._change(f"give job {job_id} the shape {shape}", lambda: self._client.reshape(job_id, shape))

    def release(self, job_id: int, *, start_now: bool = True) -> None:
        self._change(f"release job {job_id}", lambda: self._client.release(job_id, start_now=start_now))

    def defer(self, job_id: int, until: float) -> None:
        self._change(f"defer job {job_id}", lambda: self._client.defer(job_id, until))

    def signal(self, job_id: int, signal: str, *, batch: bool = False) -> None:
        self._check()
        self._client.signal(job_id, signal, batch=batch)

    def _change(self, what: str, call: Callable[[], None]) -> None:
        self._check()
        try:
            call()
        finally:
            try:
                self._check()
            except NotLeader:
                log.error("the lead was lost while Slurm was told to %s: see that this is what the job needs", what)
                raise
