"""The one door to Slurm: what every client can do, and how it fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from slurm_ones.slurm.model import Job, Shape, Snapshot


class SlurmError(Exception):
    """Slurm did not do what was asked; the message says what that was and what Slurm answered.

    Raised as one of its kinds, which are siblings: whoever handles a refusal lets the others pass.
    """


class Refused(SlurmError):
    """Slurm refused or failed, or its answer is not understood."""


class NotPermitted(Refused):
    """The caller may not do this to that job (another user's, or an owner asking for what only operators may)."""


class NotResizable(Refused):
    """Slurm will not take the shape, or took only part of it; the old shape is in force again."""


class SlurmMissing(Refused):
    """There is no Slurm on this machine."""


class UnknownJob(Refused):
    """No such job: never submitted, or ended longer than MinJobAge ago."""


class Unreachable(SlurmError):
    """The controller did not answer, also after retries with back-off."""


class SlurmClient(Protocol):
    """Contract of all clients: PySlurm and the command line.

    Calls may be made from one thread at a time. Every call raises the errors above and no others of Slurm's.
    A call that raised `Unreachable` may have taken effect: look before asking again. Nothing is cached:
    `snapshot` and `job` return what the controller holds at that moment.
    """

    @property
    def name(self) -> str: ...

    def version(self) -> tuple[int, int]:
        """Slurm's release, (26, 5) for 26.05.3."""

    def config(self) -> dict[str, str]:
        """The controller's settings, as `scontrol show config` prints them."""

    def snapshot(self) -> Snapshot:
        """All jobs, nodes, partitions and reservations, in a constant number of calls."""

    def job(self, job_id: int) -> Job:
        """One job as it is now."""

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        """Some jobs as they are now, in one call, without those that Slurm does not know.

        What a snapshot cannot show at a bearable price is told here: whether a job was submitted with an exact count
        of tasks that is that of its nodes.
        """

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        """Submit a batch script with further sbatch options; returns the job's id."""

    def requeue_hold(self, job_id: int) -> None:
        """Requeue a running job into a *user* hold, which its owner can always release.

        Returns when Slurm accepted it; the job becomes PENDING once its processes are gone. A job that has ended
        stays ended, without an error.
        """

    def hold(self, job_id: int) -> None:
        """Put a pending job into a user hold."""

    def reshape(self, job_id: int, shape: Shape) -> None:
        """Give a pending job another shape, verified by reading it back.

        Raises `NotResizable` after the old shape was put back when Slurm took none or only part of it.
        """

    def release(self, job_id: int, *, start_now: bool = True) -> None:
        """Let a held job go; `start_now` skips the delay after a requeue (StartTime=now)."""

    def defer(self, job_id: int, until: float) -> None:
        """Let a pending job start at `until` (Unix seconds) at the earliest; a time that is past lets it start at once.

        Not a hold: it ends by itself, whatever becomes of the caller, and outlives a hold and its release. The job's
        `eligible_time` shows it, to the whole second after `until`. Raises `Refused` for a job that is not pending.
        """

    def signal(self, job_id: int, signal: str, *, batch: bool = False) -> None:
        """Send a signal, such as USR1, to the job's steps, or to its batch script too."""
