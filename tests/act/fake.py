"""A cluster in memory and virtual time behind the protocol of `SlurmClient`, with jobs that speak the wrapper's.

It behaves as Slurm was seen to: a requeue goes through COMPLETING, `uhold` takes a running job's priority too,
StartTime of a job that runs cannot be set, an ended job stays ended under `requeuehold Incomplete`, and an update may
be carried out in part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ones_db.shape import Shape
from ones_wrapper.protocol import DRAIN_WAIT_S, ORDERS, Order, decode_order, directory_name
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, UnknownJob
from slurm_ones.slurm.model import Job, JobState, Node, Partition, Queue, Quotas, Snapshot

Fault = Callable[[str], None]
"""Called with `before NAME` and `after NAME` of each call that changes something, and `NAME` of a look; may raise."""


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Trainer:
    """The wrapper's side of one run: obeys orders and reports, as `ones_wrapper.run.run` does."""

    restart: int
    hello: float | None = None
    batch: int = 0
    obeyed: int = 0
    """Number of the newest order it took."""
    draining: int | None = None
    """Order that it drains for, and when the checkpoint will be durable."""
    durable_at: float = 0.0
    waits_since: float | None = None
    checkpoints: dict[int, float] = field(default_factory=dict)
    """When the checkpoint for each drain order was reported."""


@dataclass
class FakeJob:
    """One job and how it behaves."""

    job_id: int
    directory: Path
    shape: Shape
    comment: str = "ones: gpus=1-16"
    state: JobState = JobState.PENDING
    held_by: str = ""
    """Nobody, or us, owner, operator or Slurm itself."""
    requeue_held: bool = False
    """Slurm says of its hold that it was requeued into it."""
    restart: int = 0
    completing_until: float | None = None
    eligible_at: float = 0.0
    start_time: float = 0.0
    batch: int = 32
    """Global batch that its checkpoint holds."""
    runs: list[Trainer] = field(default_factory=list)
    requeues: list[tuple[int, bool]] = field(default_factory=list)
    """For each requeue of ours the run it ended, and whether that run had answered a drain and still waited."""
    drain_s: float = 2.0
    hello_s: float = 3.0
    completing_s: float = 2.0
    counts_early: bool = False
    """26.05 raises the restart count when it accepts the requeue, not when the processes are gone."""
    begin_time: float = 0.0
    """The owner's own `--begin`."""
    kind: str = ""
    """Type of GPU that it asks for."""

    @property
    def trainer(self) -> Trainer | None:
        return self.runs[-1] if self.runs and self.state is JobState.RUNNING else None

    @property
    def ended(self) -> bool:
        return self.state in (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


class FakeSlurm:
    """In-memory cluster of one partition, `gpu`. Time passes by `pass_time` alone."""

    name = "fake"

    def __init__(self, clock: Clock, gpus: int = 16) -> None:
        self.clock = clock
        self.gpus = gpus
        self.jobs: dict[int, FakeJob] = {}
        self.calls: list[tuple[str, object]] = []
        """Every call that changed something, with its argument."""
        self.fault: Fault = lambda event: None
        self.refuses: Callable[[Shape], str] = lambda shape: ""
        """Slurm's words where it does not take a shape."""
        self.takes_part: Callable[[Shape], bool] = lambda shape: False
        """Whether it changes the nodes of a job, then refuses."""
        self.release_refused: Callable[[Shape], str] = lambda shape: ""
        """Slurm's words where it does not release a job because of a shape that it took."""
        self.impossible: Callable[[Shape], bool] = lambda shape: False
        self.waits_for = "Resources"
        """Why jobs that could start wait."""
        """Whether it takes a shape, and never starts the job."""
        self.booted = 0.0
        """When slurmctld started."""
        self.requeue_refused = self.hold_refused = self.start_now_refused = self.defer_refused = ""

    # -- the protocol --------------------------------------------------------------------------------------------

    def version(self) -> tuple[int, int]:
        return 26, 5

    def config(self) -> dict[str, str]:
        return {"ClusterName": "fake", "BOOT_TIME": f"{self.booted:.0f}"}

    def job(self, job_id: int) -> Job:
        self.fault("job")
        return self._seen(self._get(job_id))

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        return {job_id: self._seen(job) for job_id, job in self.jobs.items() if job_id in job_ids}

    def quotas(self, users: Collection[str]) -> Quotas:
        return Quotas()

    def snapshot(self) -> Snapshot:
        self.fault("snapshot")
        jobs = {job_id: self._seen(job) for job_id, job in self.jobs.items()}
        used = sum(job.shape.gpus for job in self.jobs.values() if job.state is JobState.RUNNING)
        node = Node("n1", "IDLE", True, self.gpus, min(used, self.gpus), ("gpu",), used == 0)
        partition = Partition("gpu", True, ("n1",), 0.0, 0, False, default=True)
        return Snapshot(self.clock(), jobs, {"n1": node}, {"gpu": partition})

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        raise Refused("submit: not part of a resize")

    def requeue_hold(self, job_id: int) -> None:
        self.fault("before requeue_hold")
        if self.requeue_refused:
            raise Refused(self.requeue_refused)
        job = self._get(job_id)
        if job.state is JobState.RUNNING:
            trainer = job.runs[-1]
            job.requeues.append((job.restart, bool(trainer.checkpoints) and trainer.waits_since is not None))
            self._stop(job, by="us")
        self.calls.append(("requeue_hold", job_id))
        self.fault("after requeue_hold")

    def hold(self, job_id: int) -> None:
        self.fault("before hold")
        if self.hold_refused:
            raise Refused(self.hold_refused)
        job = self._get(job_id)
        if not job.held_by and not job.ended:
            job.held_by = "us"
        self.calls.append(("hold", job_id))
        self.fault("after hold")

    def reshape(self, job_id: int, shape: Shape, *, kind: str | None = None, queue: Queue = Queue()) -> None:
        self.fault("before reshape")
        job = self._get(job_id)
        if job.state is not JobState.PENDING:
            raise NotResizable(f"job {job_id} is {job.state.value}")
        if words := self.refuses(shape):
            raise Refused(words)
        if self.takes_part(shape):
            job.shape = Shape(shape.nodes, job.shape.gpus_per_node)
            raise NotResizable("Requested node configuration is not available")
        job.shape = shape
        job.kind = job.kind if kind is None else kind
        self.calls.append(("reshape", shape))
        self.fault("after reshape")

    def release(self, job_id: int, *, start_now: bool = True) -> None:
        self.fault("before release")
        job = self._get(job_id)
        if start_now:
            if job.state is not JobState.PENDING or self.start_now_refused:
                raise NotResizable("Job is no longer pending execution")
            job.eligible_at = job.begin_time = self.clock()
        if job.held_by == "operator":
            raise NotPermitted("Access/permission denied")
        if words := self.release_refused(job.shape):
            raise NotResizable(words)
        job.held_by, job.requeue_held = "", False
        self.calls.append(("release", start_now))
        self.fault("after release")

    def defer(self, job_id: int, until: float) -> None:
        self.fault("before defer")
        job = self._get(job_id)
        if job.state is not JobState.PENDING or self.defer_refused:
            raise NotResizable(self.defer_refused or "Job is no longer pending execution")
        job.eligible_at = job.begin_time = math.ceil(max(until, self.clock()))
        self.calls.append(("defer", job.begin_time))
        self.fault("after defer")

    def signal(self, job_id: int, signal: str, *, batch: bool = False) -> None:
        raise Refused("signal: not part of a resize")

    # -- what others do ------------------------------------------------------------------------------------------

    def add(self, job: FakeJob, *, running: bool = True) -> FakeJob:
        """Put a job into the queue, or let it run already."""
        (job.directory / directory_name(job.job_id)).mkdir(parents=True)
        self.jobs[job.job_id] = job
        if running:
            self._start(job)
            job.runs[-1].hello = self.clock()
        return job

    def end(self, job_id: int, state: JobState) -> None:
        """The job ends by itself or is cancelled."""
        job = self.jobs[job_id]
        if not job.ended:
            job.state, job.completing_until, job.held_by = state, None, ""

    def owner_holds(self, job_id: int, by: str = "owner") -> None:
        """`scontrol hold` by the owner or an operator."""
        job = self.jobs[job_id]
        if job.state in (JobState.PENDING, JobState.RUNNING):
            job.held_by = by

    def forgets_release(self, job_id: int, *, requeued: bool = True) -> None:
        """slurmctld begins again from a state in which the job stood in the hold of its last requeue, or in another of
        ours."""
        self.booted = self.clock()
        job = self.jobs[job_id]
        job.state, job.held_by, job.requeue_held = JobState.PENDING, "us", requeued

    def owner_releases(self, job_id: int) -> None:
        """`scontrol release` by the owner."""
        job = self.jobs[job_id]
        if job.held_by != "operator":
            job.held_by, job.requeue_held = "", False

    def preempt(self, job_id: int) -> None:
        """Slurm requeues the job by itself, not held."""
        job = self.jobs[job_id]
        if job.state is JobState.RUNNING:
            self._stop(job, by=job.held_by)

    def forget(self, job_id: int) -> None:
        """The job ended longer ago than MinJobAge."""
        self.end(job_id, JobState.CANCELLED)
        del self.jobs[job_id]

    def pass_time(self, seconds: float) -> None:
        """Let time pass: jobs complete, start, obey orders and report."""
        self.clock.now += seconds
        for job in self.jobs.values():
            if job.completing_until is not None and self.clock() >= job.completing_until:
                job.completing_until = None
                job.restart += not job.counts_early
            if self._may_start(job):
                self._start(job)
            elif self._holds(job):
                job.held_by = "slurm"
            if job.trainer is not None:
                self._train(job, job.trainer)

    # -- inside --------------------------------------------------------------------------------------------------

    def _get(self, job_id: int) -> FakeJob:
        try:
            return self.jobs[job_id]
        except KeyError:
            raise UnknownJob(f"job {job_id}: Invalid job id specified") from None

    def _may_start(self, job: FakeJob) -> bool:
        waits = job.state is JobState.PENDING and job.completing_until is None and not job.held_by
        waits = waits and not self.impossible(job.shape)
        used = sum(other.shape.gpus for other in self.jobs.values() if other.state is JobState.RUNNING)
        due = self.clock() >= max(job.eligible_at, job.begin_time)
        return waits and due and used + job.shape.gpus <= self.gpus

    def _holds(self, job: FakeJob) -> bool:
        """Whether Slurm looks at the job and finds that it can never start."""
        waits = job.state is JobState.PENDING and job.completing_until is None and not job.held_by
        return waits and self.impossible(job.shape) and self.clock() >= max(job.eligible_at, job.begin_time)

    def _start(self, job: FakeJob) -> None:
        job.state, job.start_time = JobState.RUNNING, self.clock()
        job.runs.append(Trainer(job.restart, batch=job.batch))

    def _stop(self, job: FakeJob, *, by: str) -> None:
        job.state, job.held_by = JobState.PENDING, by
        job.completing_until = self.clock() + job.completing_s
        job.restart += job.counts_early
        job.eligible_at = self.clock() + 121.0  # Slurm's own delay after a requeue

    def _train(self, job: FakeJob, trainer: Trainer) -> None:
        now = self.clock()
        if trainer.hello is None:
            if now < job.start_time + job.hello_s:
                return
            trainer.hello = now
        order = self._order(job)
        if order is not None and order.restart <= trainer.restart and order.number > trainer.obeyed:
            trainer.obeyed = order.number
            trainer.waits_since = trainer.draining = None
            if order.batch is not None:
                job.batch = trainer.batch = order.batch
            if order.drain and order.restart == trainer.restart:
                trainer.draining, trainer.durable_at = order.number, now + job.drain_s
        if trainer.draining is not None and now >= trainer.durable_at:
            trainer.checkpoints[trainer.draining] = now
            trainer.draining, trainer.waits_since = None, now
        if trainer.waits_since is not None and now > trainer.waits_since + DRAIN_WAIT_S:
            trainer.waits_since = None

    @staticmethod
    def _order(job: FakeJob) -> Order | None:
        try:
            return decode_order((job.directory / directory_name(job.job_id) / ORDERS).read_bytes())
        except FileNotFoundError:
            return None

    def _reason(self, job: FakeJob) -> str:
        if job.held_by == "slurm":
            return "BadConstraints"
        if job.state is JobState.PENDING and not job.held_by and self.clock() < max(job.eligible_at, job.begin_time):
            return "BeginTime"
        if job.state is not JobState.PENDING or job.held_by or self.impossible(job.shape):
            return ""
        return self.waits_for

    def _seen(self, job: FakeJob) -> Job:
        running = job.state is JobState.RUNNING
        return Job(
            job_id=job.job_id,
            name="job",
            user="me",
            uid=os.geteuid(),
            account="",
            partitions=("gpu",),
            state=job.state,
            flags=frozenset({"COMPLETING"} if job.completing_until is not None else ()),
            reason=self._reason(job),
            held=bool(job.held_by),
            admin_held=job.held_by == "operator",
            restart=job.restart,
            requeue=True,
            nodes=job.shape.nodes,
            max_nodes=0 if running else job.shape.nodes,
            gpus_per_node=job.shape.gpus_per_node,
            kind=job.kind,
            gpus_total=0,
            tasks=job.shape.nodes,
            task_counts=False,
            node_list=("n1",) if running else (),
            submit_time=1.0,
            start_time=job.start_time if running else 0.0,
            end_time=0.0,
            time_limit_s=0.0,
            work_dir=str(job.directory),
            comment=job.comment,
            eligible_time=float(max(job.eligible_at, job.begin_time)),
            requeue_held=job.requeue_held and bool(job.held_by),
        )


class FakeReports:
    """What the companion reads of the fake jobs' reports."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self._slurm = slurm

    def drained(self, job: WholeJob, restart: int, order: int) -> float | None:
        runs = [run for run in self._slurm.jobs[job.job_id].runs if run.restart == restart]
        return runs[-1].checkpoints.get(order) if runs else None

    def restarted(self, job: WholeJob, after_restart: int) -> float | None:
        fake = self._slurm.jobs[job.job_id]
        later = [run.hello for run in fake.runs if run.restart > after_restart and run.hello is not None]
        return later[0] - 1_000_000.0 if later else None


class Passing:
    """A stop in whose waits a fake cluster's time passes; set after so many seconds."""

    def __init__(self, slurm: FakeSlurm, seconds: float) -> None:
        self.waits: list[float] = []
        self._slurm = slurm
        self._until = slurm.clock() + seconds

    def is_set(self) -> bool:
        return self._slurm.clock() >= self._until

    def wait(self, timeout: float) -> bool:
        self.waits.append(round(timeout, 3))
        self._slurm.pass_time(timeout)
        return self.is_set()
