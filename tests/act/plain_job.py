"""Plain jobs on the simulated Slurm that speak the wrapper's protocol, and a client that notes what is asked of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ones_db.shape import Shape
from ones_wrapper.protocol import DRAIN_WAIT_S, ORDERS, Order, decode_order, directory_name
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PartitionSpec
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Request, SimulatedJob
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.slurm.client import NotResizable, Refused
from slurm_ones.slurm.model import JobKey, JobState, Queue, SlurmJob

EPOCH = 1_000_000.0
NAMES, EACH = ("n1", "n2", "n3", "n4"), 4
"""The nodes, and the GPUs of each."""
AT_ONCE = ClusterSettings(schedule_s=0.0, backfill_s=1.0, ending_s=0.0, min_job_age_s=1e9)
HOLDERS = {"user": "us", "admin": "operator"}
"""Who holds a job, by Slurm's word; its owner's holds are marked as such here."""

Fault = Callable[[str], None]
"""Called with `before NAME` and `after NAME` of each call that changes something, and `NAME` of a look; may raise."""


class Clock:
    """A companion's: Slurm's, unless it was set."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._ahead = timeline, 0.0

    def __call__(self) -> float:
        return self.now

    @property
    def now(self) -> float:
        return self._timeline.now + self._ahead

    @now.setter
    def now(self, time: float) -> None:
        self._ahead = time - self._timeline.now


@dataclass
class PlainRun:
    """The wrapper's side of one run: obeys orders and reports, as `ones_wrapper.run.run` does."""

    restart: int
    batch: int
    hello: float | None = None
    obeyed: int = 0
    """Number of the newest order it took."""
    draining: int | None = None
    """Order that it drains for, and when the checkpoint will be durable."""
    durable_at: float = 0.0
    waits_since: float | None = None
    over: bool = False
    """Its processes have ended, and said so."""
    checkpoints: dict[int, float] = field(default_factory=dict)
    """When the checkpoint for each drain order was reported."""


@dataclass(eq=False)
class PlainJob:
    """One job and how it behaves. Slurm runs it as a program; what else is asked of it is what Slurm has."""

    directory: Path
    asked: Shape
    kind: str = ""
    """Type of GPU that it asks for."""
    batch: int = 32
    """Global batch that its checkpoint holds."""
    runs: list[PlainRun] = field(default_factory=list)
    requeues: list[tuple[int, bool]] = field(default_factory=list)
    """For each requeue of ours the run it ended, and whether that run had answered a drain and still waited."""
    drain_s: float = 2.0
    hello_s: float = 3.0
    completing_s: float = 2.0
    counts_early: bool = False
    """26.05 raises the restart count when it accepts the requeue, not when the processes are gone."""
    record: SimulatedJob = field(init=False)
    """What Slurm has of it."""

    # -- as Slurm has it -----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "record":
            raise AttributeError(name)
        return getattr(self.record, name)

    @property
    def shape(self) -> Shape:
        return Shape(self.record.nodes, self.record.gpus_per_node)

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self.record.nodes = self.record.max_nodes = shape.nodes
        self.record.gpus_per_node = shape.gpus_per_node

    @property
    def held_by(self) -> str:
        """Nobody, or us, owner, operator or Slurm itself."""
        return HOLDERS.get(self.record.held_by, self.record.held_by)

    @held_by.setter
    def held_by(self, who: str) -> None:
        self.record.held_by = {ours: slurms for slurms, ours in HOLDERS.items()}.get(who, who)

    # -- as a program --------------------------------------------------------------------------------------------

    @property
    def run(self) -> PlainRun | None:
        """The run that is under way."""
        return self.runs[-1] if self.runs and self.record.running and not self.runs[-1].over else None

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        self.runs.append(PlainRun(restart, self.batch))

    def stop(self, *, killed: bool = False) -> float:
        self.runs[-1].over = True
        return self.completing_s

    def train(self, now: float) -> None:
        """Look for orders and report, if it runs."""
        run = self.run
        if run is None or (run.hello is None and now < self.start_time + self.hello_s):
            return
        run.hello = now if run.hello is None else run.hello
        order = self._order()
        if order is not None and order.restart <= run.restart and order.number > run.obeyed:
            run.obeyed = order.number
            run.waits_since = run.draining = None
            if order.batch is not None:
                self.batch = run.batch = order.batch
            if order.drain and order.restart == run.restart:
                run.draining, run.durable_at = order.number, now + self.drain_s
        if run.draining is not None and now >= run.durable_at:
            run.checkpoints[run.draining] = now
            run.draining, run.waits_since = None, now
        if run.waits_since is not None and now > run.waits_since + DRAIN_WAIT_S:
            run.waits_since = None

    def _order(self) -> Order | None:
        try:
            return decode_order((self.directory / directory_name(self.job_id) / ORDERS).read_bytes())
        except FileNotFoundError:
            return None


class Slurm(SimulatedClient):
    """A simulated Slurm of one partition, and its client. Time passes by `pass_time` alone.

    It starts jobs as soon as it may. What it refuses is set by a test.
    """

    def __init__(self) -> None:
        self.timeline = Timeline(EPOCH)
        self.cluster = SimulatedCluster([PartitionSpec("gpu", NAMES, EACH)], AT_ONCE, self.timeline)
        super().__init__(self.cluster, operator=False)
        self.clock = Clock(self.timeline)
        self.jobs: dict[int, PlainJob] = {}
        self.calls: list[tuple[str, object]] = []
        """Every call that changed something, with its argument."""
        self.fault: Fault = lambda event: None
        self.refuses: Callable[[Shape], str] = lambda shape: ""
        """Slurm's words where it does not take a shape."""
        self.takes_part: Callable[[Shape], bool] = lambda shape: False
        """Whether it changes the nodes of a job, then refuses."""
        self.release_refused: Callable[[Shape], str] = lambda shape: ""
        """Slurm's words where it does not release a job because of a shape that it took."""
        self.requeue_refused = self.hold_refused = self.start_now_refused = self.defer_refused = ""
        self.booted = 0.0
        """When slurmctld started."""
        self._within = False

    # -- the protocol --------------------------------------------------------------------------------------------

    def config(self) -> dict[str, str]:
        return {**super().config(), "BOOT_TIME": f"{self.booted:.0f}"}

    def job(self, job_id: JobKey) -> SlurmJob:
        if not self._within:
            self.fault("job")
        seen = super().job(job_id)
        plain = self.jobs[seen.job_id]
        late = seen.pending and seen.completing and not plain.counts_early
        return replace(seen, kind=plain.kind, restart=seen.restart - late)

    @contextmanager
    def _between(self, what: str, argument: object) -> Iterator[None]:
        """A change, between two events; those that it is made of are none."""
        if self._within:
            yield
            return
        self.fault(f"before {what}")
        self._within = True
        try:
            yield
        finally:
            self._within = False
        self.calls.append((what, argument))
        self.fault(f"after {what}")

    def requeue_hold(self, job_id: JobKey) -> None:
        with self._between("requeue_hold", job_id):
            if self.requeue_refused:
                raise Refused(self.requeue_refused)
            job = self.jobs[self.cluster.records.get(job_id).job_id]
            if (run := job.run) is not None:
                job.requeues.append((job.restart, bool(run.checkpoints) and run.waits_since is not None))
            super().requeue_hold(job_id)

    def hold(self, job_id: JobKey) -> None:
        with self._between("hold", job_id):
            if self.hold_refused:
                raise Refused(self.hold_refused)
            if not self.cluster.records.get(job_id).held_by:  # else it stays as it is marked
                super().hold(job_id)

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None, queue: Queue = Queue()) -> None:
        with self._between("reshape", shape):
            self.cluster.records.waiting(job_id)
            if words := self.refuses(shape):
                raise Refused(words)
            if self.takes_part(shape):
                self.cluster.reshape(job_id, shape, nodes_alone=True)
                raise NotResizable("Requested node configuration is not available")
            super().reshape(job_id, shape, kind=kind, queue=queue)

    def _update_shape(self, job: SlurmJob, shape: Shape, queue: Queue) -> None:
        # Nodes of the simulated Slurm have GPUs of no type.
        self.jobs[job.job_id].kind = job.kind
        super()._update_shape(replace(job, kind=""), shape, queue)

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        with self._between("release", start_now):
            if start_now and self.start_now_refused:
                raise NotResizable("Job is no longer pending execution")
            if words := self.release_refused(self.jobs[self.cluster.records.get(job_id).job_id].shape):
                raise NotResizable(words)
            super().release(job_id, start_now=start_now)

    def defer(self, job_id: JobKey, until: float) -> None:
        within = self._within
        with self._between("defer", math.ceil(max(until, self.timeline.now))):
            if self.defer_refused and not within:
                raise NotResizable(self.defer_refused)
            super().defer(job_id, until)

    # -- what others do ------------------------------------------------------------------------------------------

    def add(self, job: PlainJob, *, running: bool = True, comment: str = "ones: gpus=1-16") -> PlainJob:
        """Put a job into the queue, or let it run already, on the last nodes that have room."""
        shape = job.asked
        job_id = self.cluster.submit(
            Request(
                shape.nodes, 0, shape.gpus_per_node, comment=comment, work_dir=str(job.directory), uid=os.geteuid()
            ),
            lambda job_id: job,
        )
        self.jobs[job_id] = job
        job.record = self.cluster.records.get(job_id)
        (job.directory / directory_name(job_id)).mkdir(parents=True)
        if running:
            free = [name for name in NAMES if self.cluster.nodes[name].free.gpus >= shape.gpus_per_node]
            self.cluster.place(job_id, dict.fromkeys(free[-shape.nodes :], shape.gpus_per_node))
            job.runs[-1].hello = self.timeline.now
        return job

    def leave(self, gpus: int) -> None:
        """Drain nodes but for so many GPUs; what runs there stays."""
        for number, name in enumerate(NAMES):
            (self.cluster.resume if gpus >= EACH * (number + 1) else self.cluster.drain)(name)

    def end(self, job_id: int, state: JobState) -> None:
        """The job ends by itself or is cancelled."""
        if state is JobState.COMPLETED and self.jobs[job_id].record.running:
            self.cluster.exited(job_id, 0)
        else:
            self.cluster.cancel(job_id)

    def owner_holds(self, job_id: int, by: str = "owner") -> None:
        """`scontrol hold` by the owner or an operator."""
        if not self.jobs[job_id].ended:
            self.jobs[job_id].held_by = by

    def owner_releases(self, job_id: int) -> None:
        """`scontrol release` by the owner."""
        if self.jobs[job_id].held_by != "operator":
            self.cluster.release(job_id)

    def forgets_release(self, job_id: int, *, requeued: bool = True) -> None:
        """slurmctld begins again from a state in which the job stood in the hold of its last requeue, or in another of
        ours."""
        self.booted = self.timeline.now
        record = self.jobs[job_id].record
        record.cancel_events()
        self.cluster.nodes.give_back(job_id, record.gpus)
        record.gpus, record.node_list, record.start_time = {}, (), 0.0
        record.state, record.held_by, record.requeue_held = JobState.PENDING, "user", requeued
        record.considered = 0.0

    def forgets_requeue(self, job_id: int, *, lives: bool) -> None:
        """slurmctld begins again from a state before a requeue of ours: the job runs, without a process. Or, if it
        `lives`, from a state before that run, which Slurm begins again."""
        job, self.booted = self.jobs[job_id], self.timeline.now
        job.record.cancel_events()
        self.cluster.nodes.give_back(job_id, job.record.gpus)
        job.record.gpus, job.record.state, job.held_by, job.record.requeue_held = {}, JobState.PENDING, "", False
        job.shape, job.record.restart, job.record.submit_time = job.asked, job.runs[0].restart, EPOCH
        job.runs[-1].over = True
        free = (name for name in NAMES if self.cluster.nodes[name].free.gpus >= job.asked.gpus_per_node)
        self.cluster.place(job_id, {next(free): job.asked.gpus_per_node})
        if not lives:
            job.record.start_time, job.runs[-1].over = EPOCH, True

    def forget(self, job_id: int) -> None:
        """The job ended longer ago than MinJobAge."""
        self.cluster.cancel(job_id)
        record = self.jobs[job_id].record
        if record.forgotten is not None:
            record.forgotten.cancel()
        del self.cluster.records.known[job_id]

    def pass_time(self, seconds: float) -> None:
        """Let time pass: jobs complete, start, obey orders and report."""
        self.timeline.run(self.timeline.now + seconds)
        for job in self.jobs.values():
            job.train(self.timeline.now)


class PlainReports:
    """What a companion reads of such jobs' reports."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def drained(self, job: WholeJob, restart: int, order: int) -> float | None:
        runs = [run for run in self._slurm.jobs[job.job_id].runs if run.restart == restart]
        return runs[-1].checkpoints.get(order) if runs and not runs[-1].over else None

    def gone(self, job: WholeJob, restart: int) -> bool:
        return any(run.over for run in self._slurm.jobs[job.job_id].runs if run.restart == restart)

    def restarted(self, job: WholeJob, after_restart: int) -> float | None:
        runs = self._slurm.jobs[job.job_id].runs
        return next((run.hello - EPOCH for run in runs if run.restart > after_restart and run.hello is not None), None)


class Passing:
    """A stop in whose waits a simulated Slurm's time passes; set after so many seconds."""

    def __init__(self, slurm: Slurm, seconds: float) -> None:
        self.waits: list[float] = []
        self._slurm = slurm
        self._until = slurm.clock() + seconds

    def is_set(self) -> bool:
        return self._slurm.clock() >= self._until

    def wait(self, timeout: float) -> bool:
        self.waits.append(round(timeout, 3))
        self._slurm.pass_time(timeout)
        return self.is_set()
