"""Contract of all Slurm clients, the reshape of a pending job, and a guard that lets only the leading companion change
jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, cast

from ones_db.shape import Shape
from slurm_ones.slurm.model import GpuUse, JobKey, Queue, Quotas, SlurmJob, Snapshot, Task

log = logging.getLogger(__name__)


SHOWS_SWITCHES = (23, 2)
"""First release whose `SlurmClient.details` shows how many leaf switches a job asks for."""
GIVES_TYPES = (26, 5)
"""First release that runs a job after a change of its GPU type. 22.05 accepts the change, but never starts the job."""
SWITCH_WAIT_S = 60.0
"""Seconds for which Slurm waits for few leaf switches: whole minutes. 0 would mean the site's longest wait."""
READS = frozenset({"name", "version", "config", "snapshot", "job", "tasks", "details", "quotas", "gpu_use"})
"""Members of `SlurmClient` that change nothing; all others need leadership (`leader_only`)."""


class SlurmError(Exception):
    """Failure of a request to Slurm; the message names the request and Slurm's answer.

    Only subclasses are raised.
    """


class Refused(SlurmError):
    """Slurm refused a request or failed, or its answer cannot be parsed."""


class NotPermitted(Refused):
    """The caller may not make this request: it is for another user's job, or only for operators."""


class NotResizable(Refused):
    """Slurm refused the new shape or took only a part of it; the job has its old shape again."""


class SlurmMissing(Refused):
    """The machine has no Slurm."""


class UnknownJob(Refused):
    """Job that Slurm does not know: never submitted, or ended longer than MinJobAge ago."""


class Unreachable(SlurmError):
    """The controller did not answer, even after retries with back-off."""


class SlurmClient(Protocol):
    """Contract of all clients: PySlurm, the command line, the simulated Slurm.

    Consistency: nothing is cached; each call answers from the controller's present state. A call that raised
    `Unreachable` may have taken effect: check before repeating it. Calls come from one thread at a time.

    Raises: only the errors above. `UnknownJob` is for a job or array that Slurm does not know, `NotPermitted` for
    another user's job, `Unreachable` for a controller that does not answer.
    """

    @property
    def name(self) -> str: ...

    def version(self) -> tuple[int, int]:
        """Return Slurm's release, such as (26, 5) for 26.05.3."""

    def config(self) -> dict[str, str]:
        """Return the controller's settings, as `scontrol show config` prints them."""

    def snapshot(self) -> Snapshot:
        """Read all jobs, nodes, partitions and reservations in a constant number of calls."""

    def job(self, job_id: JobKey) -> SlurmJob:
        """Read one job or array task. For a task that shares a record with other waiting tasks, the result is for this
        task only."""

    def tasks(self, array_id: int) -> tuple[SlurmJob, ...]:
        """Read the tasks of a job array that Slurm still knows, one record for each task, ascending.

        Consistency: waiting tasks that were cancelled together may be missing.
        """

    def details(self, job_ids: Collection[int]) -> dict[int, SlurmJob]:
        """Read these jobs in one call; jobs that Slurm does not know are left out.

        Consistency: the result has all fields. A snapshot lacks fields that cost too much, such as whether the user
        gave an exact task count.
        """

    def quotas(self, users: Collection[str]) -> Quotas:
        """Read the limits of these users' associations, of their accounts, of all parent accounts and of all QOS.

        Consistency: the usage factors are missing if slurmdbd does not answer at once.
        """

    def gpu_use(self, job_ids: Collection[int]) -> dict[int, GpuUse]:
        """Return the GPU use of running jobs, without jobs that Slurm does not measure (AutoDetect=nvml,
        JobAcctGatherType).

        Consistency: a call starts a measurement without waiting for it. It returns the result of the previous call's
        measurement, for the jobs of that call.
        """

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        """Submit a batch script with further sbatch options; return the job's id."""

    def requeue_hold(self, job_id: JobKey) -> None:
        """Requeue a running job into a *user* hold, which its owner can always release.

        Consistency: returns once Slurm has accepted the request; the job becomes PENDING when its processes are gone. A
        job that has ended stays ended, without an error.
        """

    def hold(self, job_id: JobKey) -> None:
        """Put a pending job into a user hold."""

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        """Put an array's waiting tasks into a user hold: all of them, or only those in `tasks`.

        Consistency: running tasks are not held. (Slurm's own hold of an array includes running tasks, which then do not
        start after a requeue.)
        """

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None, queue: Queue = Queue()) -> None:
        """Give a pending job another shape, GPU type and queue in one update, and read the job back to verify it.
        `kind` is the GPU type: "" for any type, None for the type that the job asks for now.

        Consistency: an operator may move a job to a QOS that its owner may not use. Slurm accepts an account only if
        the job's owner has an association with it. An owner may raise the time limit of his waiting task up to the
        partition's limit.
        Raises: `NotResizable` if Slurm took none or only part of the change; the job has its old shape and queue again.
        """

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        """Release a held job; `start_now` skips the delay after a requeue (StartTime=now)."""

    def defer(self, job_id: JobKey, until: float) -> None:
        """Delay a pending job's start to `until` (Unix seconds) at the earliest; a past time lets it start at once.

        Consistency: the delay is no hold. It ends by itself even if the caller fails; a hold or its release does not
        end it. The job's `eligible_time` shows the delay, rounded up to the whole second. Raises: `Refused` for a job
        that is not pending.
        """

    def few_switches(self, job_id: JobKey, most: int) -> None:
        """Ask Slurm to place a pending job below at most `most` leaf switches, if possible; 0 removes this
        preference.

        Consistency: Slurm drops the preference after the job has waited `SWITCH_WAIT_S`. Without a topology it has no
        effect. `details` shows it in the job's `switches`.
        """

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        """Send a signal, such as USR1, to the job's steps; with `batch` also to its batch script. An array's id means
        all its running tasks.

        Raises: `Refused` for a task that waits, and for an array without a running task.
        """

    def reuse(self, task: Task) -> None:
        """Requeue an ended array task into a user hold. A task that waits is not changed.

        Raises: `UnknownJob` if the task ended longer than MinJobAge ago; `Refused` for a running, completing or
        cancelled task.
        """

    def throttle(self, array_id: int, most: int) -> None:
        """Limit the number of an array's tasks that run at once to `most`; 0 removes the limit."""

    def cancel_waiting(self, array_id: int) -> None:
        """Cancel an array's waiting tasks, held ones included; no error if none waits."""


class _LeaderOnly:
    """Proxy of a client that checks leadership before and after each method that is not in `READS`."""

    def __init__(self, client: SlurmClient, check: Callable[[], None]) -> None:
        self._client = client
        self._check = check

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._client, name)
        if name in READS:
            return member

        @wraps(member)
        def change(*arguments: Any, **options: Any) -> Any:
            self._check()
            try:
                return member(*arguments, **options)
            finally:
                try:
                    self._check()
                except Exception:
                    what = ", ".join([*map(str, arguments), *(f"{key}={value}" for key, value in options.items())])
                    log.error("the lead was lost during %s(%s): check that this is what the job needs", name, what)
                    raise

        return change


def leader_only(client: SlurmClient, check: Callable[[], None]) -> SlurmClient:
    """Return the client with its changes guarded: if `check` raises `NotLeader`, nothing is sent to Slurm.

    Slurm does not know which companion leads, so a gap remains. A companion may be stopped (SIGSTOP, a frozen virtual
    machine) between `check` and its command to Slurm. Once it continues it sends this command, even if another
    companion leads by then. The next call checks again, and so does each write to the database.

    Such a late command is mostly harmless, since the new leader reads the job from Slurm before each action. Two
    commands do harm. A requeue of a job that has restarted meanwhile loses the work since its last checkpoint, and
    leaves the job in a user hold. A hold of a running job takes effect at its next requeue. In both cases the job's
    owner or an operator can release the job. So leadership is checked after each call as well; if it was lost, the log
    names the call.
    """
    return cast(SlurmClient, _LeaderOnly(client, check))


def _fault(job: SlurmJob, shape: Shape, kind: str, queue: Queue, before: SlurmJob) -> str:
    """Describe how the job that Slurm shows differs from the request; "" if it does not."""
    if any(queue.other_than(job)):
        partition, qos, account, limit_s, licenses = Queue.of(job)
        where = f"partition {partition}, QOS {qos or '-'}, account {account or '-'}"
        return f"Slurm holds {where}, {limit_s:.0f} s, licenses {licenses}"
    if not job.has_shape(shape) or bool(job.gpus_per_node) != bool(before.gpus_per_node):
        return f"Slurm holds {job.nodes}-{job.max_nodes} nodes with {job.gpus_per_node} GPUs each"
    if job.kind != kind:
        return f"Slurm holds GPUs of {f'type {job.kind}' if job.kind else 'any type'}"
    if 0 < job.tasks < shape.nodes:
        return f"it was submitted with a task count ({job.tasks}), which is less than {shape.nodes} nodes"
    # Until Slurm has tried again, the pending reason is still that of the old shape.
    if job.never_starts and not before.never_starts:
        return f"Slurm says {job.reason}"
    return ""


def _is(job: SlurmJob, shape: Shape, kind: str, queue: Queue) -> bool:
    return job.has_shape(shape) and job.kind == kind and not any(queue.other_than(job))


def reshape(
    read: Callable[[JobKey], SlurmJob],
    tasks: Callable[[int], Sequence[SlurmJob]],
    update: Callable[[SlurmJob, Shape, Queue], None],
    job_id: JobKey,
    shape: Shape,
    kind: str | None = None,
    queue: Queue = Queue(),
) -> None:
    """Implement `SlurmClient.reshape` for a pending job, or for an array whose tasks all wait.

    `scontrol update` is not atomic. A failed update may have changed some fields, and a successful one may leave a job
    that can never start. So the job is read back, and a partial change is undone. `tasks` reads an array's tasks.
    `update` sends one update. It gets the job with the wanted GPU type, the shape, and the changes of the queue.
    """
    before = read(job_id)
    if not before.pending:
        raise NotResizable(f"job {job_id} is {before.state.value}; only a pending job can be reshaped")
    if len(before.array_tasks) > 1 and not all(task.pending for task in tasks(before.array_id)):
        # An update by the array's id would also change its running tasks, and take nodes from them.
        raise NotResizable(f"job {job_id}: not all of its tasks wait; only one of them can be reshaped, by its own id")
    if before.task_counts:
        raise NotResizable(f"job {job_id} was submitted with task counts, which its user cannot change: it keeps them")
    if before.gpus_total and not before.gpus_per_node:
        raise NotResizable(f"job {job_id} asks for GPUs per job (--gpus), and Slurm does not let that form change")
    if not before.of_one_kind:
        raise NotResizable(f"job {job_id} asks for GPUs of several types ({before.kind!r}): give it one, or none")
    if shape.nodes < 1 or (before.gpus_per_node and shape.gpus_per_node < 1):
        raise NotResizable(f"job {job_id}: {shape} is no shape of a job that runs")
    if kind is None:
        kind = before.kind
    elif not before.gpus_per_node and kind != before.kind:
        raise NotResizable(f"job {job_id} gets whole nodes: Slurm is not asked for a type of GPU")
    wanted = replace(before, kind=kind)
    if not wanted.of_one_kind:
        raise NotResizable(f"job {job_id}: {kind!r} is no type of GPU")
    move = queue.other_than(before)
    if before.has_shape(shape) and kind == before.kind and not any(move):
        return
    old, home = Shape(before.nodes, before.gpus_per_node), Queue.of(before) if any(move) else Queue()
    refused: Refused | None = None
    try:
        update(wanted, shape, move)
    except Refused as error:
        refused = error
    after = read(job_id)
    fault = _fault(after, shape, kind, queue, before)
    if not fault and refused is None:
        return
    if not _is(after, old, before.kind, home):
        try:
            update(before, old, home.other_than(after))
        except Refused as error:
            raise NotResizable(f"job {job_id}: {refused or fault}; and {old} could not be put back: {error}") from None
        back = read(job_id)
        if not _is(back, old, before.kind, home):
            raise NotResizable(f"job {job_id}: {refused or fault}; and Slurm did not take {old} back")
    if refused is not None:
        raise refused
    raise NotResizable(f"job {job_id} does not take shape {shape}: {fault}; it has {old} again")
