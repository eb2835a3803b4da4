"""Record of a simulated job: all that Slurm stores about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ones_db.shape import Shape
from slurm_ones.policy.ledger import NOTHING, Resources
from slurm_ones.simulate.slurm.timeline import Event
from slurm_ones.slurm.client import NotResizable, UnknownJob
from slurm_ones.slurm.model import ENDED, JobKey, JobState, SlurmJob, Task


class Program(Protocol):
    """Program that a simulated job runs. It calls `SimulatedCluster.exited` if it exits by itself."""

    @property
    def batch(self) -> int:
        """Global batch with which the program trains now."""

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        """Start run number `restart` on these GPUs of each node."""

    def stop(self, *, killed: bool = False) -> float:
        """Stop the run, and return the seconds until its processes end. If `killed`, the program was not notified."""


class Idle:
    """A program that does nothing until it is stopped."""

    batch = 0

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        """See `Program`."""

    def stop(self, *, killed: bool = False) -> float:
        return 0.0


@dataclass(frozen=True)
class Request:
    """Options that a user gives to `sbatch`."""

    nodes: int = 1
    max_nodes: int = 0
    """Largest number of nodes; 0 for exactly `nodes`."""
    gpus_per_node: int = 0
    gpus_total: int = 0
    """GPUs of the whole job (`--gpus`). If set, `gpus_per_node` is 0."""
    tasks: int = 0
    """Number of tasks (`--ntasks`); 0 if it is not given."""
    partition: str = ""
    """Partition, or several joined by commas; empty for the default partition."""
    name: str = "job"
    comment: str = ""
    work_dir: str = "/"
    time_limit_s: float = 0.0
    begin: float = 0.0
    hold: bool = False
    requeue: bool = True
    array: bool = False
    """True if the job is shown as a task of an array or as a part of a heterogeneous job."""
    array_tasks: tuple[int, ...] = ()
    """Task numbers of an array, ascending; empty for a plain job."""
    throttle: int = 0
    """Largest number of the array's tasks that run at the same time; 0 for no limit."""
    batch: bool = True
    priority: int = 1
    """Priority. Jobs of higher priority start first, jobs of equal priority in order of submission."""
    user: str = "user"
    uid: int = 0
    account: str = ""
    qos: str = ""
    """Name of the QOS; empty for the first QOS of the site."""
    licenses: tuple[tuple[str, int], ...] = ()
    cpus_per_node: int = 1
    """CPUs on each node; ignored if Slurm does not count CPUs."""
    cpus_per_gpu: int = 0
    memory_mb: int = 0
    """Memory on each node in MB; ignored if Slurm does not count memory."""
    node_names: tuple[str, ...] = ()
    """Nodes that the job must get (`--nodelist`)."""
    excluded: tuple[str, ...] = ()
    """Nodes that the job must not get (`--exclude`)."""
    exclusive: bool = False
    """True if the job shares its nodes with no other job."""
    reservation: str = ""

    def cpus_on(self, gpus: int) -> int:
        """Return the CPUs that the job requests on a node that gives it `gpus` GPUs."""
        return max(self.cpus_per_node, self.cpus_per_gpu * gpus)


@dataclass(frozen=True)
class HeldGpus:
    """GPUs that one run held, from its start until its last process ended."""

    start: float
    end: float
    gpus: Mapping[str, int]
    batch: int = 0


_HOLDS = {"user": "JobHeldUser", "admin": "JobHeldAdmin", "exit": "NonZeroExitCode"}


@dataclass
class TaskArray:
    """State that all tasks of a job array share."""

    array_id: int
    program: Callable[[JobKey], Program]
    throttle: int
    records: list[SimulatedJob] = field(default_factory=list)
    """Records of the array's tasks. As in Slurm, identical waiting tasks share one record, whose id is the array's."""

    @property
    def room(self) -> int:
        """Number of tasks that may start now in addition to the running tasks."""
        if not self.throttle:
            return len(self.records) + sum(len(record.array_tasks) for record in self.records)
        return self.throttle - sum(record.running or record.ending for record in self.records)


@dataclass
class SimulatedJob:
    """Record of a job, of one task of an array, or of several identical waiting tasks."""

    job_id: int
    request: Request
    program: Program
    partitions: tuple[str, ...]
    """Partition of the run. Before the start, all partitions that the job names."""
    nodes: int
    max_nodes: int
    gpus_per_node: int
    submit_time: float
    qos: str = ""
    account: str = ""
    licenses: tuple[tuple[str, int], ...] = ()
    state: JobState = JobState.PENDING
    reason: str = "None"
    held_by: str = ""
    """Source of the hold: "user", "admin", "slurm", "exit" (Slurm, because of the exit code), or "" for no hold."""
    requeue_held: bool = False
    """True if the hold came with a requeue (`scontrol requeuehold`)."""
    switches: int = 0
    """Number of leaf switches that the user prefers (`--switches`). It has no effect, since all simulated nodes are
    below one switch."""
    restart: int = 0
    begin: float = 0.0
    """Unix time of the earliest start; 0 if the job may start at once."""
    waits_since: float = 0.0
    """Unix time from which the job may start. It decides the job's place in the queue."""
    limit_s: float = 0.0
    start_time: float = 0.0
    end_time: float = 0.0
    exit_code: int = 0
    gpus: dict[str, int] = field(default_factory=dict)
    """GPUs that the job holds on each node, until its last process has ended."""
    resources: Resources = NOTHING
    """CPUs and memory that the job holds on each node."""
    preempted_at: float = 0.0
    node_list: tuple[str, ...] = ()
    """Nodes of the last run."""
    considered: float = 0.0
    """Unix time at which the scheduler last considered the job; 0 if it never did."""
    ending: bool = False
    """True while processes of the last run still exist."""
    forbidden_shapes: frozenset[Shape] = frozenset()
    """Shapes that Slurm accepts for the job although it never starts the job at them."""
    array: TaskArray | None = None
    array_tasks: tuple[int, ...] = ()
    """Task numbers that this record describes: one, or several waiting tasks. Empty for a plain job."""
    events: list[Event] = field(default_factory=list)
    """Scheduled events of the job, to be cancelled if its run or its wait ends."""
    forgotten: Event | None = None
    """Event at which Slurm drops the job's record, MinJobAge after the job's end."""
    allocations: list[HeldGpus] = field(default_factory=list)
    """GPUs that the job held earlier, in this or former runs."""
    since: float = 0.0
    """Unix time since which the job has held its present GPUs."""
    _model: SlurmJob | None = None

    def __setattr__(self, name: str, value: object) -> None:
        # Whatever changes makes what Slurm last showed of it stale.
        super().__setattr__(name, value)
        if name != "_model":
            super().__setattr__("_model", None)

    @property
    def main_id(self) -> int:
        """Id that sbatch printed: the job's or, for a task, the array's."""
        return self.array.array_id if self.array is not None else self.job_id

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def pending(self) -> bool:
        return self.state is JobState.PENDING

    @property
    def running(self) -> bool:
        return self.state is JobState.RUNNING

    @property
    def startable(self) -> bool:
        """True if the job is pending, and no hold, begin time or remaining process prevents its start."""
        return self.pending and not (self.held_by or self.ending or self.begin)

    @property
    def never_starts(self) -> bool:
        """True if Slurm never starts the job at its present shape."""
        return Shape(self.nodes, self.gpus_per_node) in self.forbidden_shapes

    @property
    def partition(self) -> str:
        return self.partitions[0]

    @property
    def holdings(self) -> dict[str, Resources]:
        """Resources that the job holds on each node, GPUs included."""
        return {name: self.resources._replace(gpus=count) for name, count in self.gpus.items()}

    def held(self, now: float) -> list[HeldGpus]:
        """Return the GPUs that the job has held up to `now`, with an entry for each span of time."""
        here = [HeldGpus(self.since, now, self.gpus, self.program.batch)] if self.gpus else []
        return [*self.allocations, *here]

    def cancel_events(self) -> None:
        """Cancel all scheduled events of the job."""
        for event in self.events:
            event.cancel()
        self.events.clear()

    def to_model(self) -> SlurmJob:
        """Return the job as Slurm shows it."""
        if self._model is None:
            self._model = self._build_model()
        return self._model

    def _build_model(self) -> SlurmJob:
        request, running = self.request, self.running
        nodes = len(self.gpus) if running else self.nodes
        expected = self.start_time + self.limit_s if running and self.limit_s else 0.0
        return SlurmJob(
            job_id=self.job_id,
            name=request.name,
            user=request.user,
            uid=request.uid,
            account=self.account,
            partitions=self.partitions,
            state=self.state,
            flags=frozenset({"COMPLETING"} if self.ending else ()),
            reason=_HOLDS.get(self.held_by, self.reason) if self.pending else "None",
            held=bool(self.held_by) and not self.ended,
            admin_held=self.held_by == "admin" and not self.ended,
            requeue_held=self.requeue_held and self.held_by == "user" and not self.ended,
            restart=self.restart,
            requeue=request.requeue,
            nodes=nodes,
            max_nodes=0 if running else max(self.max_nodes, self.nodes),
            gpus_per_node=self.gpus_per_node,
            gpus_total=request.gpus_total,
            tasks=request.tasks or nodes,
            task_counts=bool(request.tasks),
            node_list=() if self.pending else self.node_list,
            submit_time=self.submit_time,
            start_time=self.start_time if not self.pending else 0.0,
            end_time=self.end_time if self.ended else expected,
            time_limit_s=self.limit_s,
            work_dir=request.work_dir,
            comment=request.comment,
            priority=0 if self.held_by else request.priority,
            array=request.array or self.array is not None,
            array_id=self.array.array_id if self.array is not None else 0,
            array_tasks=self.array_tasks,
            considered=self.considered,
            switches=self.switches,
            switch_wait_s=60.0 if self.switches else 0.0,
            throttle=self.array.throttle if self.array is not None else 0,
            batch=request.batch,
            exit_code=self.exit_code,
            eligible_time=float(math.ceil(self.begin)) if self.begin else 0.0 if self.held_by else self.submit_time,
            qos=self.qos,
            cpus=request.cpus_on(self.gpus_per_node) * nodes,
            memory_mb=request.memory_mb,
            licenses=self.licenses,
            requested_nodes=request.node_names,
            excluded_nodes=request.excluded,
            exclusive=request.exclusive,
            reservation=request.reservation,
            preempt_time=self.preempted_at,
        )


class JobRecords:
    """Records of all jobs. Ids start at 1.

    As in Slurm, waiting tasks of an array share a record. A task that starts or is changed gets its own record, with a
    new id. The last task left in the shared record keeps the array's id.
    """

    def __init__(self, wait: Callable[[SimulatedJob], None]) -> None:
        """Create empty records. `wait` is called for a task that gets its own record before its earliest start."""
        self.jobs: dict[int, SimulatedJob] = {}
        """All records ever created, by job id."""
        self.arrays: dict[int, TaskArray] = {}
        """All job arrays ever submitted, by array id."""
        self.known: dict[int, SimulatedJob] = {}
        """Records that Slurm has not dropped yet, by job id."""
        self._wait = wait

    def add(self, job: SimulatedJob) -> None:
        """Add a submitted job."""
        self.jobs[job.job_id] = self.known[job.job_id] = job
        if job.array is not None:
            self.arrays[job.job_id] = job.array
            job.array.records.append(job)
            _give_program(job)

    def get(self, job_id: JobKey) -> SimulatedJob:
        """Return the record of a job or task. Raises `UnknownJob` if there is none, or Slurm has dropped it."""
        if isinstance(job_id, Task):
            for record in self.known_of(job_id.array):
                if job_id.task in record.array_tasks:
                    return record
        elif job_id in self.known:
            return self.known[job_id]
        raise UnknownJob(f"job {job_id}: Invalid job id specified")

    def look(self, job_id: JobKey) -> SlurmJob:
        """Return a job or a single task as Slurm shows it. Raises `UnknownJob`."""
        record = self.get(job_id)
        return record.to_model().of_task(job_id.task) if isinstance(job_id, Task) else record.to_model()

    def tasks(self, array_id: int) -> tuple[SlurmJob, ...]:
        """Return the tasks of an array that Slurm still knows, each as a job. Raises `UnknownJob` for an unknown array.

        Tasks that were cancelled while they shared a record are left out.
        """
        records = self.known_of(array_id)
        if not records:
            self.get(array_id)
        shown = [record for record in records if len(record.array_tasks) == 1 or not record.ended]
        found = {task: record for record in shown for task in record.array_tasks}
        return tuple(found[task].to_model().of_task(task) for task in sorted(found))

    def of(self, job_id: int) -> list[SimulatedJob]:
        """Return all records of a job, or of an array in order of task numbers; empty for an unknown id."""
        array = self.arrays.get(job_id)
        if array is not None:
            return sorted(array.records, key=lambda r: r.array_tasks)
        return [self.jobs[job_id]] if job_id in self.jobs else []

    def known_of(self, array_id: int) -> list[SimulatedJob]:
        """Return the records of an array that Slurm has not dropped, in order of task numbers; empty for any other
        id."""
        known = self.of(array_id) if array_id in self.arrays else []
        return [record for record in known if record.job_id in self.known]

    def named(self, job_id: JobKey) -> list[SimulatedJob]:
        """Return the records that a command with this id changes.

        An array's id stands for all its tasks. A single task gets its own record first.
        """
        if isinstance(job_id, Task):
            return [self.set_apart(self.get(job_id), job_id.task)]
        return self.known_of(job_id) or [self.get(job_id)]

    def waiting(self, job_id: JobKey) -> list[SimulatedJob]:
        """Return the pending records that a command with this id changes. Raises `NotResizable` if no record is
        pending."""
        waiting = [job for job in self.named(job_id) if job.pending]
        if not waiting:
            raise NotResizable(f"job {job_id}: Job is no longer pending execution")
        return waiting

    def set_apart(self, job: SimulatedJob, task: int) -> SimulatedJob:
        """Give a task its own record with a new id, and return it. If it is the only task of its record, nothing
        changes."""
        array = job.array
        if array is None or len(job.array_tasks) < 2:
            return job
        apart = replace(
            job, job_id=len(self.jobs) + 1, array_tasks=(task,), gpus={}, events=[], allocations=[], _model=None
        )
        job.array_tasks = tuple(other for other in job.array_tasks if other != task)
        self.jobs[apart.job_id] = self.known[apart.job_id] = apart
        array.records.append(apart)
        if apart.begin:
            self._wait(apart)
        _give_program(apart)
        _give_program(job)
        return apart

    def live_ids(self) -> dict[int, None]:
        """Return the ids of jobs and arrays that have not ended, in order of submission."""
        return dict.fromkeys(job.main_id for job in self.known.values() if not job.ended)


def _give_program(job: SimulatedJob) -> None:
    if job.array is not None and len(job.array_tasks) == 1:
        job.program = job.array.program(Task(job.array.array_id, job.array_tasks[0]))
