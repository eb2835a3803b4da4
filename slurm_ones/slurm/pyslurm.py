"""The PySlurm client: reads and releases through libslurm, without a process per call.

PySlurm must fit Slurm's release; importing this module where it does not raises ImportError, so only `connect` does.
What PySlurm cannot do goes through the command line: tasks of arrays, which it has no names for, shapes
(`Job.modify` never sends node counts), nodes (it loads them without their GPUs in use, and
`Job.get_resource_layout_per_node` crashes under 26.05), signals (`send_signal` judges a stale errno), requeues
(`requeue` takes jobs that ended, too), user holds (`hold(mode="user")` dereferences NULL), and submission, which is
sbatch's since sites hook into it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyslurm

from ones_db.shape import Shape
from slurm_ones.slurm.command import CommandClient, error_of, with_retries
from slurm_ones.slurm.model import Job, JobKey, Partition, Reservation, Snapshot, Task
from slurm_ones.slurm.parse import BITSTR, gpu_kind, gpus, hosts, job_of, tasks_of
from slurm_ones.slurm.scontrol import nodes_of

# libslurm, too, looks there, when it reads the first array.
os.environ.update(BITSTR)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except pyslurm.PyslurmError as error:
        raise error_of(what, str(error)) from None


def _count(value: Any) -> int:
    """A count as PySlurm gives it: a number, None, or a word such as UNLIMITED."""
    return value if isinstance(value, int) else 0


def _gpus(gres: Any) -> int:
    """GPUs of a dict such as {'gres/gpu': 4} or {'gpu:a100': 2}."""
    return sum(gpus(f"{name}:{count}") for name, count in (gres or {}).items())


def _kind(gres: Any) -> str:
    """Type of the GPUs of such a dict."""
    return gpu_kind(",".join(f"{name}:{count}" for name, count in (gres or {}).items()))


def _job(raw: Any) -> Job:
    options = str(raw.submit_line or "").split()
    return job_of(
        job_id=raw.id,
        name=raw.name,
        user=raw.user_name or raw.user_id,
        uid=raw.user_id,
        account=raw.account,
        partition=raw.partition,
        states=[raw.state],
        # In words where Slurm has some, else the name of the reason.
        reason=str(raw.state_reason or ""),
        priority=raw.priority,
        restart=_count(raw.requeue_count),
        requeue=bool(raw.is_requeueable),
        nodes=_count(raw.num_nodes),
        max_nodes=_count(raw.max_nodes),
        gpus_per_node=_gpus(raw.gres_per_node),
        kind=_kind(raw.gres_per_node),
        tasks=_count(raw.ntasks),
        tasks_per_node=_count(raw.ntasks_per_node),
        # PySlurm does not show the flag of an exact task count.
        exact_tasks=any(option.startswith(("--ntasks", "-n")) for option in options[:-1]),
        node_list=raw.allocated_nodes,
        submit_time=float(raw.submit_time or 0),
        start_time=float(raw.start_time or 0),
        end_time=float(raw.end_time or 0),
        eligible_time=float(raw.eligible_time or 0),
        time_limit_s=60.0 * _count(raw.time_limit),
        work_dir=raw.working_directory,
        comment=raw.comment,
        part=bool(raw.array_id or raw.heterogeneous_id),
        array_id=_count(raw.array_id),
        # Of task 0 PySlurm has no number.
        array_tasks=tasks_of(raw.array_tasks_waiting) or (_count(raw.array_task_id),),
        throttle=_count(raw.array_tasks_parallel),
        batch=bool(raw.is_batch_job),
        exit_code=(_count(raw.exit_code), _count(raw.exit_code_signal)),
    )


def _partition(raw: Any) -> Partition:
    return Partition(
        name=raw.name,
        up=raw.state == "UP",
        node_names=hosts(raw.nodes),
        max_time_s=60.0 * _count(raw.max_time),
        max_nodes=_count(raw.max_nodes),
        whole_nodes=raw.oversubscribe == "EXCLUSIVE",
        default=bool(raw.is_default),
    )


def _reservation(raw: Any) -> Reservation:
    nodes = raw.nodes or ""
    return Reservation(
        name=raw.name,
        node_names=hosts(nodes if isinstance(nodes, str) else ",".join(nodes)),
        start_time=float(raw.start_time or 0),
        end_time=float(raw.end_time or 0),
    )


class PySlurmClient:
    """Slurm through PySlurm. `Jobs.load()` is always a full load, so a tick makes one."""

    name = "pyslurm"

    def __init__(self, *, timeout_s: float = 30.0, keepalive: Callable[[], None] = lambda: None) -> None:
        """`keepalive` is called before each question: as long as it is called, the caller does not hang."""
        self._command = CommandClient(timeout_s=timeout_s, keepalive=keepalive)
        self._keepalive = keepalive

    def version(self) -> tuple[int, int]:
        return self._command.version()

    def config(self) -> dict[str, str]:
        return self._command.config()

    def _load(self, what: str, load: Callable[[], Any]) -> Any:
        def once() -> Any:
            self._keepalive()
            with _errors(what):
                return load()

        return with_retries(once)

    def snapshot(self) -> Snapshot:
        jobs = {raw.id: _job(raw) for raw in self._load("jobs", pyslurm.Jobs.load).values()}
        partitions = {raw.name: _partition(raw) for raw in self._load("partitions", pyslurm.Partitions.load).values()}
        found = self._load("reservations", pyslurm.Reservations.load).values()
        reservations = tuple(_reservation(raw) for raw in found)
        now = time.time()
        nodes = self._command.nodes()
        # PySlurm has no names for topologies.
        found_nodes = nodes_of(nodes, jobs, reservations, now, self._command.leaves())
        return Snapshot(now, jobs, found_nodes, partitions, reservations)

    def job(self, job_id: JobKey) -> Job:
        if isinstance(job_id, Task):
            return self._command.job(job_id)
        try:
            job = _job(self._load(f"job {job_id}", lambda: pyslurm.Job.load(job_id)))
        except KeyError:
            # Of an array it looks for the steps of one task among those of another.
            return self._command.job(job_id)
        # Of an array it takes the first task, whichever was meant. Of a job requeued into a hold it has words in place
        # of the reason, and they stay when an operator holds the job as well.
        held = job.pending and job.held and (job.requeue_held or not job.reason.startswith("JobHeld"))
        return self._command.job(job_id) if job.array or held else job

    def tasks(self, array_id: int) -> tuple[Job, ...]:
        return self._command.tasks(array_id)

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        # PySlurm does not show exact task counts.
        return self._command.details(job_ids)

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        return self._command.submit(script, arguments, directory=directory)

    def requeue_hold(self, job_id: JobKey) -> None:
        self._command.requeue_hold(job_id)

    def hold(self, job_id: JobKey) -> None:
        self._command.hold(job_id)

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        self._command.hold_waiting(array_id, tasks)

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None) -> None:
        # Read back by the command line, too: PySlurm shows neither GPUs asked for per job nor exact task counts.
        self._command.reshape(job_id, shape, kind=kind)

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        if isinstance(job_id, Task):
            self._command.release(job_id, start_now=start_now)
            return
        with _errors(f"release job {job_id}"):
            if start_now:
                pyslurm.Job(job_id).modify(pyslurm.JobSubmitDescription(begin_time="now"))
            pyslurm.Job(job_id).release()

    def defer(self, job_id: JobKey, until: float) -> None:
        if isinstance(job_id, Task):
            self._command.defer(job_id, until)
            return
        when = math.ceil(until) if until > time.time() else "now"
        with _errors(f"defer job {job_id}"):
            pyslurm.Job(job_id).modify(pyslurm.JobSubmitDescription(begin_time=when))

    def few_switches(self, job_id: JobKey, most: int) -> None:
        self._command.few_switches(job_id, most)

    def exclude_nodes(self, job_id: JobKey, names: Collection[str]) -> None:
        self._command.exclude_nodes(job_id, names)

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        self._command.signal(job_id, signal, batch=batch)

    def reuse(self, task: Task) -> None:
        self._command.reuse(task)

    def throttle(self, array_id: int, most: int) -> None:
        self._command.throttle(array_id, most)

    def cancel_waiting(self, array_id: int) -> None:
        self._command.cancel_waiting(array_id)
