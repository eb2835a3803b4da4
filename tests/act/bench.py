"""An actor at work: a machine that notes what it is asked for, a client that defers, and jobs made up."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ones_db import JobHistory, JobRecord, ResizeRecord, Store
from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from ones_wrapper.protocol import ORDERS, decode_order, directory_name
from slurm_ones.act.actor import Actor
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.orders import OrderWriter
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, Observation
from slurm_ones.policy.contract import Allocation, JobView, Promise, Schedule
from slurm_ones.rules.gate import PartitionRules, Round, under_way
from slurm_ones.rules.plan import PartitionSchedule, plans
from slurm_ones.slurm.client import NotResizable, SlurmError, UnknownJob
from slurm_ones.slurm.model import Node, Partition, SlurmJob, Snapshot
from tests.act.make import NOW, changed, elastic, history

LEASE_S = 900.0


class Machine:
    """Notes which resizes it was asked to advance; says of some what a broken one would."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.broken: dict[int, Exception] = {}
        self.new: set[int] = set()
        self.gains: dict[int, float] = {}

    def advance(self, resize: ResizeRecord) -> ResizeRecord:
        self.asked.append(resize.job_id)
        if resize.job_id in self.broken:
            raise self.broken[resize.job_id]
        return resize


class Slurm:
    """Defers the jobs of a bench, unless it refuses."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.deferred: list[tuple[int, float]] = []
        """Job and seconds from NOW of each call."""
        self.refuses: dict[int, SlurmError] = {}

    def job(self, job_id: int) -> SlurmJob:
        if job_id not in self._bench.jobs:
            raise UnknownJob(f"job {job_id}")
        return self._bench.jobs[job_id].job.first

    def defer(self, job_id: int, until: float) -> None:
        if job_id in self.refuses:
            raise self.refuses[job_id]
        if not self.job(job_id).pending:
            raise NotResizable("Job is no longer pending execution")
        self.deferred.append((job_id, round(until - NOW)))
        self._bench.change(job_id, eligible_time=float(math.ceil(until)))


class Bench:
    """An actor for one cluster of two nodes, and what it did."""

    def __init__(self, store: Store, folder: Path, **settings: Any) -> None:
        self.store = store
        self.now = NOW
        self.said: list[str] = []
        self.machine = Machine()
        self.slurm = Slurm(self)
        self.jobs: dict[int, Elastic] = {}
        self.histories: dict[int, JobHistory] = {}
        """Histories of jobs that have reported more than those of `make.history`."""
        self.views: dict[int, JobView] = {}
        """What the policy was shown."""
        self.reasons: dict[int, Reason] = {}
        """What it gives as reason; of other jobs the network's."""
        self.promises: dict[int, Promise] = {}
        """What it says of deadlines."""
        self.folder = folder
        settings = {"mode": "act", "stop_file": folder / "stop"} | settings
        self.settings = Settings(**settings)
        self.machine.store, self.machine.clock = store, self.clock
        self.machine.deferrals = Deferrals(self.slurm, store, LEASE_S, self.clock)  # type: ignore[arg-type]
        self.machine.orders = OrderWriter(self.slurm, self.settings.spool, self.clock)  # type: ignore[arg-type]
        self.actor = Actor(self.machine, self.settings, say=self.said.append)  # type: ignore[arg-type]

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def add(self, job_id: int, shape: Shape, *nodes: str, **changes: Any) -> Elastic:
        """A job with a directory of this user's."""
        (self.folder / directory_name(job_id)).mkdir()
        job = elastic(job_id, shape, *nodes, uid=os.geteuid(), work_dir=str(self.folder), **changes)
        self.jobs[job_id] = job
        self.store.record_jobs([JobRecord(job_id, "job", "alice", 1.0, Shape(1, 1))])
        return job

    def act(self, wanted: dict[int, Allocation], *parked: int) -> list[int]:
        """Act on a schedule for all partitions; the ids of the jobs that something was begun for."""
        return self.act_on(wanted, {id_: e.job.first for id_, e in self.jobs.items()}, self.jobs, *parked)

    def act_on(
        self, wanted: dict[int, Allocation], jobs: dict[int, SlurmJob], elastic: dict[int, Elastic], *parked: int
    ) -> list[int]:
        """The same where Slurm has these jobs, of which those have opted in."""
        nodes = {name: Node(name, "IDLE", True, 4, 1, ("gpu",), False) for name in ("n1", "n2")}
        partitions = {job.partition for job in jobs.values()}
        parts = {name: Partition(name, True, ("n1", "n2"), 0.0, 0, False) for name in partitions}
        reasons = dict.fromkeys(wanted, reason("network")) | self.reasons
        schedule = Schedule(wanted, reasons, parked=frozenset(parked), promises=self.promises)
        seen = Observation(Snapshot(NOW, jobs, nodes, parts), dict(elastic))
        histories = {id_: history(id_) for id_ in elastic} | self.histories
        round_ = Round(seen, histories, self.settings, under_way(self.store.open_resizes()), self.clock())

        def decide(_: Round, rules: PartitionRules) -> PartitionSchedule:
            return PartitionSchedule(rules.name, schedule, 0.1, self.views)

        planned = plans(round_, decide, begins=self.actor.acting)
        return [change.job_id for change in self.actor.act(planned, seen)]

    def change(self, job_id: int, **changes: Any) -> None:
        """The job as Slurm has it from now on."""
        self.jobs[job_id] = changed(self.jobs[job_id], **changes)

    def order(self, job_id: int) -> Any:
        """The order in force in the job's directory, None where there is none."""
        path = self.folder / directory_name(job_id) / ORDERS
        return decode_order(path.read_bytes()) if path.exists() else None
