"""`SlurmClient` of a simulated Slurm, with the protocol and the answers of the real clients."""

from __future__ import annotations

import argparse
import math
import os
import pwd
import re
import shlex
import signal as signals
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

from ones_db.shape import Shape
from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.simulated_job import Idle, Program, Request, SimulatedJob
from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, reshape
from slurm_ones.slurm.fields import LICENCES, hosts
from slurm_ones.slurm.model import GpuUse, JobKey, Queue, Quotas, SlurmJob, Snapshot, Task

MAX_ARRAY_SIZE = 1001
"""First task number that Slurm refuses, by default."""
UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"sbatch: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    for name in ("--nodes", "--gres", "--partition", "--time", "--comment", "--job-name", "--begin", "--array"):
        parser.add_argument(name, default="")
    for name in ("--qos", "--account", "--licenses", "--nodelist", "--exclude", "--reservation"):
        parser.add_argument(name, default="")
    for name in ("--ntasks", "--ntasks-per-node", "--gpus", "--mem", "--cpus-per-gpu"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--output", "--cpus-per-task", "--open-mode", "--signal"):
        parser.add_argument(name)
    for name in ("--hold", "--requeue", "--no-requeue", "--exclusive"):
        parser.add_argument(name, action="store_true")
    return parser


def read_request(text: str, arguments: Sequence[str], *, now: float, work_dir: str, user: str, uid: int) -> Request:
    """Return the request in a batch script and in options, which take precedence. Raises `Refused`."""
    try:
        return _request(text, arguments, now=now, work_dir=work_dir, user=user, uid=uid)
    except (ValueError, OverflowError) as error:  # a quote without its end, a number that is none
        raise Refused(f"sbatch: {error}") from None


def _request(text: str, arguments: Sequence[str], *, now: float, work_dir: str, user: str, uid: int) -> Request:
    lines = [line.removeprefix("#SBATCH").strip() for line in text.splitlines() if line.startswith("#SBATCH")]
    inside = [word for line in lines for word in shlex.split(line, comments=True)]
    given = _parser().parse_args([*inside, *arguments])
    low, _, high = (given.nodes or "1").partition("-")
    gpus = re.fullmatch(r"gpu(?::\w*[a-z]\w*)?:(\d+)", given.gres) if given.gres else None
    if given.gres and gpus is None:
        raise Refused(f"sbatch: Invalid generic resource (gres) specification: {given.gres}")
    nodes = int(low)
    tasks = given.ntasks or given.ntasks_per_node * nodes
    array_tasks, throttle = _tasks(given.array)
    return Request(
        nodes=nodes,
        max_nodes=int(high or low),
        gpus_per_node=int(gpus[1]) if gpus else 0,
        gpus_total=given.gpus,
        tasks=tasks,
        cpus_per_node=max(math.ceil(tasks / max(nodes, 1)), 1),
        cpus_per_gpu=given.cpus_per_gpu,
        memory_mb=given.mem,
        licenses=LICENCES.text(given.licenses),
        node_names=hosts(given.nodelist),
        excluded=hosts(given.exclude),
        exclusive=given.exclusive,
        reservation=given.reservation,
        qos=given.qos,
        account=given.account,
        partition=given.partition,
        name=given.job_name or "script",
        comment=given.comment,
        work_dir=work_dir,
        time_limit_s=_limit(given.time),
        begin=_begin(given.begin, now),
        hold=given.hold,
        requeue=not given.no_requeue,
        array_tasks=array_tasks,
        throttle=throttle,
        user=user,
        uid=uid,
    )


def _limit(text: str) -> float:
    if not text:
        return 0.0
    parts = [int(part) for part in text.split(":")]
    return 60.0 * parts[0] if len(parts) == 1 else float(sum(p * 60**i for i, p in enumerate(reversed(parts))))


def _begin(text: str, now: float) -> float:
    match = re.fullmatch(r"now(?:\+(\d+)(second|minute|hour|day)?s?)?", text or "now")
    if match is None:
        raise Refused(f"sbatch: Invalid --begin specification: {text}")
    return now + int(match[1]) * UNITS[match[2] or "second"] if match[1] else 0.0


def _tasks(text: str) -> tuple[tuple[int, ...], int]:
    """Return the tasks and the throttle of a text such as `0-7%1` or `1,3,5-9:2`; none of an empty text."""
    if not text:
        return (), 0
    numbers, _, most = text.partition("%")
    tasks: set[int] = set()
    for part in numbers.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None or int(match[2] or match[1]) >= MAX_ARRAY_SIZE:
            raise Refused(f"sbatch: Invalid job array specification: {text}")
        tasks |= {*range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))}
    if not tasks:
        raise Refused(f"sbatch: Invalid job array specification: {text}")
    return tuple(sorted(tasks)), int(most or 0)


class SimulatedClient:
    """`SlurmClient` of a simulated cluster, for one user.

    An operator may change all users' jobs. `programs` makes a job's program from its script's text. `faults` replaces
    the cluster's faults at this client.
    """

    name = "simulated"

    def __init__(
        self,
        cluster: SimulatedCluster,
        *,
        uid: int | None = None,
        user: str = "",
        operator: bool = True,
        programs: Callable[[str], Callable[[JobKey], Program]] = lambda text: lambda job_id: Idle(),
        faults: Faults | None = None,
    ) -> None:
        self._cluster = cluster
        self._uid = os.geteuid() if uid is None else uid
        self._user = user or pwd.getpwuid(self._uid).pw_name
        self._operator = operator
        self._programs = programs
        self._faults = faults or cluster.faults
        self.uses: dict[int, GpuUse] = {}
        """Measured GPU use by job id, as tests or the demo set it."""

    # -- what is read --------------------------------------------------------------------------------------------

    def version(self) -> tuple[int, int]:
        return 26, 5

    def config(self) -> dict[str, str]:
        self._faults.ask("config")
        conf = self._cluster.conf
        return {
            "ClusterName": "simulated",
            "SlurmUser": "slurm(64030)",
            "MinJobAge": "300 sec",
            "PreemptType": "preempt/qos" if any(qos.mode for qos in conf.qos) else "preempt/partition_prio",
            "PreemptMode": "CANCEL",
            "RequeueExit": conf.requeue_exit or "(null)",
        }

    def snapshot(self) -> Snapshot:
        self._faults.ask("snapshot")
        return self._cluster.snapshot()

    def quotas(self, users: Collection[str]) -> Quotas:
        self._faults.ask("quotas")
        return self._cluster.quotas(users)

    def gpu_use(self, job_ids: Collection[int]) -> dict[int, GpuUse]:
        self._faults.ask("gpu_use")
        return {job_id: self.uses[job_id] for job_id in job_ids if job_id in self.uses}

    def job(self, job_id: JobKey) -> SlurmJob:
        self._faults.ask(f"job {job_id}")
        return self._cluster.records.look(job_id)

    def tasks(self, array_id: int) -> tuple[SlurmJob, ...]:
        self._faults.ask(f"tasks of {array_id}")
        return self._cluster.records.tasks(array_id)

    def details(self, job_ids: Collection[int]) -> dict[int, SlurmJob]:
        self._faults.ask("details")
        return {job_id: job for job_id, job in self._cluster.snapshot().jobs.items() if job_id in set(job_ids)}

    # -- what is changed -----------------------------------------------------------------------------------------

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        try:
            text = script.read_text()
        except OSError as error:
            raise Refused(f"sbatch: Unable to open file {script}: {error.strerror}") from None
        request = read_request(
            text,
            arguments,
            now=self._cluster.timeline.now,
            work_dir=str(directory or Path.cwd()),
            user=self._user,
            uid=self._uid,
        )
        return self._cluster.submit(request, self._programs(text))

    def requeue_hold(self, job_id: JobKey) -> None:
        self._changeable(job_id)
        self._faults.change("requeuehold", job_id, lambda: self._cluster.requeue(job_id, hold=True))

    def hold(self, job_id: JobKey) -> None:
        self._changeable(job_id)
        self._faults.change("uhold", job_id, lambda: self._cluster.hold(job_id))

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None, queue: Queue = Queue()) -> None:
        reshape(self.job, self.tasks, self._update_shape, job_id, shape, kind, queue)

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        job = self._changeable(job_id)
        if job.held_by in ("admin", "exit") and not self._operator:
            raise NotPermitted(f"release {job_id}: Access/permission denied")
        if start_now:
            self.defer(job_id, 0.0)
        self._faults.change("release", job_id, lambda: self._cluster.release(job_id))

    def defer(self, job_id: JobKey, until: float) -> None:
        self._changeable(job_id)
        self._faults.change("StartTime", job_id, lambda: self._cluster.set_begin(job_id, until))

    def few_switches(self, job_id: JobKey, most: int) -> None:
        self._changeable(job_id)

        def ask() -> None:
            for job in self._cluster.records.waiting(job_id):
                job.switches = most

        self._faults.change("Switches", job_id, ask)

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        if f"SIG{signal}" not in signals.Signals.__members__:
            raise Refused(f"scancel: error: Unknown job signal: {signal}")
        job = self._changeable(job_id)
        if job.pending and isinstance(job_id, Task) and signal != "KILL":
            raise Refused(f"task {job_id} waits: there is nothing that could be sent {signal}")
        if signal in ("KILL", "TERM"):
            code = 128 + signals.Signals[f"SIG{signal}"]
            self._faults.change("signal", job_id, lambda: self._cluster.kill(job_id, code))

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        self._changeable_array(array_id)
        self._faults.change("uhold", array_id, lambda: self._cluster.hold_waiting(array_id, tasks))

    def reuse(self, task: Task) -> None:
        self._changeable(task)
        self._faults.change("reuse", task, lambda: self._cluster.reuse(task))

    def throttle(self, array_id: int, most: int) -> None:
        self._changeable_array(array_id)
        self._faults.change("throttle", array_id, lambda: self._cluster.throttle(array_id, most))

    def cancel_waiting(self, array_id: int) -> None:
        if not self._cluster.records.known_of(array_id):
            return
        self._changeable_array(array_id)
        self._faults.change("cancel", array_id, lambda: self._cluster.cancel_waiting(array_id))

    # -- inside --------------------------------------------------------------------------------------------------

    def _update_shape(self, job: SlurmJob, shape: Shape, queue: Queue) -> None:
        key = job.key
        self._changeable(key)
        if job.kind:  # its nodes have GPUs of no type
            raise NotResizable(f"job {key}: Requested node configuration is not available")

        partition = self._cluster.nodes.partitions.get(queue.partition or job.partition)
        if partition is not None and not self._operator and 0.0 < partition.max_time_s < queue.time_limit_s:
            raise NotPermitted(f"job {key}: Access/permission denied")
        if why := self._cluster.conf.refusal(job.user, queue.account, queue.qos, operator=self._operator):
            raise NotResizable(f"job {key}: {why}")

        def make(nodes_alone: bool) -> None:
            if any(queue) and not nodes_alone:
                self._cluster.move(key, queue)
            self._cluster.reshape(key, shape, nodes_alone=nodes_alone)

        self._faults.reshape(job, shape, make)

    def _changeable(self, job_id: JobKey) -> SimulatedJob:
        job = self._cluster.records.get(job_id)
        if not self._operator and job.request.uid != self._uid:
            raise NotPermitted(f"job {job_id}: Access/permission denied")
        return job

    def _changeable_array(self, array_id: int) -> None:
        records = self._cluster.records.known_of(array_id)
        self._changeable(records[0].job_id if records else array_id)
