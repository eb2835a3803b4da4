"""The one door to Slurm: what every client can do, how it fails, and a guard by which the leader alone acts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from ones_db.shape import Shape
from slurm_ones.slurm.model import Job, JobKey, Snapshot, Task

log = logging.getLogger(__name__)


SHOWS_SWITCHES = (23, 2)
"""The first release in which `SlurmClient.details` shows how few switches a job asks for."""
GIVES_TYPES = (26, 5)
"""The first release on which jobs were seen to run on another type of GPU than they were submitted for. 22.05 takes
another type, and then starts the job never."""
SWITCH_WAIT_S = 60.0
"""For which Slurm lets a job wait for few switches: it counts in minutes, and 0 would be the site's longest wait."""


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

    def job(self, job_id: JobKey) -> Job:
        """One job, or task of an array, as it is now. A task that waits with others comes as a job of its own."""

    def tasks(self, array_id: int) -> tuple[Job, ...]:
        """The tasks of a job array as they are now, each a job of its own, ascending: those that Slurm still knows.
        Of tasks that were cancelled while they waited together it may know none. Raises `UnknownJob` where it knows no
        such array."""

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        """Some jobs as they are now, in one call, without those that Slurm does not know.

        This shows what would cost a snapshot too much: whether a job was submitted with an exact count
        of tasks that is that of its nodes.
        """

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        """Submit a batch script with further sbatch options; returns the job's id."""

    def requeue_hold(self, job_id: JobKey) -> None:
        """Requeue a running job into a *user* hold, which its owner can always release.

        Returns when Slurm accepted it; the job becomes PENDING once its processes are gone. A job that has ended
        stays ended, without an error.
        """

    def hold(self, job_id: JobKey) -> None:
        """Put a pending job into a user hold."""

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        """Put those tasks of an array that wait into a user hold, and of these the named ones where some are named;
        those that run are not touched. A hold of the array by its id would hold what runs as well, and so keep it from
        coming back after a requeue."""

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None) -> None:
        """Give a pending job another shape, verified by reading it back, with GPUs of this `kind`: empty for any, None
        for the one that it asks for.

        Raises `NotResizable` after the old shape was put back when Slurm took none or only part of it.
        """

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        """Release a held job; `start_now` skips the delay after a requeue (StartTime=now)."""

    def defer(self, job_id: JobKey, until: float) -> None:
        """Let a pending job start at `until` (Unix seconds) at the earliest; a time that is past lets it start at once.

        Not a hold: it ends by itself, whatever becomes of the caller, and outlives a hold and its release. The job's
        `eligible_time` shows it, to the whole second after `until`. Raises `Refused` for a job that is not pending.
        """

    def few_switches(self, job_id: JobKey, most: int) -> None:
        """Ask that a pending job be below at most so many leaf switches; 0 takes the wish back.

        A wish, which Slurm drops by itself once the job has waited a minute for it alone, and has no effect where Slurm
        knows no topology. The job's `switches` show it in `details`.
        """

    def exclude_nodes(self, job_id: JobKey, names: Collection[str]) -> None:
        """Keep a pending job off these nodes, in place of those before; off none where none is named.

        It outlives the start: Slurm refuses to change it until the job waits again. The job's `excluded` show it in
        `details`. Raises `Refused` for a job that is not pending.
        """

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        """Send a signal, such as USR1, to the job's steps, or to its batch script too; to those of each task that runs
        where the id is an array's. Raises `Refused` where only tasks that wait are meant."""

    def reuse(self, task: Task) -> None:
        """Have an array's task that has ended wait again, in a user hold: within MinJobAge of its end.

        One that waits already stays as it is. Raises `UnknownJob` once Slurm has forgotten it, and `Refused` for one
        that runs, whose last processes are not gone yet, or that somebody cancelled.
        """

    def throttle(self, array_id: int, most: int) -> None:
        """Let at most so many tasks of an array run at once; 0 for no limit."""

    def cancel_waiting(self, array_id: int) -> None:
        """Cancel those tasks of an array that wait, held ones too; without an error where none does."""


class LeaderOnlyClient:
    """A `SlurmClient` whose changes need the lead: where `check` raises `NotLeader`, nothing is sent to Slurm.

    Slurm knows no terms, so a window is left: a process that is stopped (SIGSTOP, a frozen virtual machine)
    after the answer of `check` and before its command reaches Slurm gives that command when it goes on, whoever leads
    by then. The window is the start of one command, milliseconds; of a reshape and a release, up to four commands in a
    row. It is bounded to one call: the next one asks again, and so does every write to the database.

    What that one call may do: a job that is released or deferred a second time starts at another time than was meant;
    a waiting job gets a shape that it may have (Slurm refuses to reshape one that runs); an order that is older than
    the job's newest is not obeyed. Those are harmless, for whoever leads looks at the job before each action and
    believes what Slurm holds. Two are not: a job that was started again meanwhile and is requeued once more loses the
    work since its last checkpoint and stands in a user hold, and a hold on one that runs takes effect when it is
    requeued next. Its owner or an operator can release either. Therefore the lead is checked once more after each
    command, and where it was lost meanwhile the log names the job and the command.
    """

    def __init__(self, client: SlurmClient, check: Callable[[], None]) -> None:
        """`check` raises `NotLeader` unless this companion leads at this moment (`leadership.Leadership.check`)."""
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

    def job(self, job_id: JobKey) -> Job:
        return self._client.job(job_id)

    def tasks(self, array_id: int) -> tuple[Job, ...]:
        return self._client.tasks(array_id)

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        return self._client.details(job_ids)

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        self._check()
        return self._client.submit(script, arguments, directory=directory)

    def requeue_hold(self, job_id: JobKey) -> None:
        self._change(f"requeue and hold job {job_id}", lambda: self._client.requeue_hold(job_id))

    def hold(self, job_id: JobKey) -> None:
        self._change(f"hold job {job_id}", lambda: self._client.hold(job_id))

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        self._change(f"hold the waiting tasks of {array_id}", lambda: self._client.hold_waiting(array_id, tasks))

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None) -> None:
        what = f"give job {job_id} the shape {shape}"
        self._change(what, lambda: self._client.reshape(job_id, shape, **({} if kind is None else {"kind": kind})))

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        self._change(f"release job {job_id}", lambda: self._client.release(job_id, start_now=start_now))

    def defer(self, job_id: JobKey, until: float) -> None:
        self._change(f"defer job {job_id}", lambda: self._client.defer(job_id, until))

    def few_switches(self, job_id: JobKey, most: int) -> None:
        self._change(
            f"ask for {most or 'any'} switches for job {job_id}", lambda: self._client.few_switches(job_id, most)
        )

    def exclude_nodes(self, job_id: JobKey, names: Collection[str]) -> None:
        what = f"keep job {job_id} off {', '.join(names) or 'no node'}"
        self._change(what, lambda: self._client.exclude_nodes(job_id, names))

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        self._check()
        self._client.signal(job_id, signal, batch=batch)

    def reuse(self, task: Task) -> None:
        self._change(f"have task {task} wait again", lambda: self._client.reuse(task))

    def throttle(self, array_id: int, most: int) -> None:
        self._change(f"let {most or 'all'} tasks of {array_id} run", lambda: self._client.throttle(array_id, most))

    def cancel_waiting(self, array_id: int) -> None:
        self._change(f"cancel the waiting tasks of {array_id}", lambda: self._client.cancel_waiting(array_id))

    def _change(self, what: str, call: Callable[[], None]) -> None:
        self._check()
        try:
            call()
        finally:
            try:
                self._check()
            except Exception:
                log.error("the lead was lost during the command to %s: check that this is what the job needs", what)
                raise
