"""`SlurmClient` of a simulated Slurm. It answers as the clients of a real Slurm do."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Collection, Sequence
from pathlib import Path

from ones_db.shape import Shape
from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, reshape
from slurm_ones.slurm.model import GpuUse, JobKey, Queue, Quotas, SlurmJob, Snapshot, Task


class SimulatedClient:
    """`SlurmClient` of a simulated cluster, for one user.

    An operator may change the jobs of all users. `faults` replaces the cluster's faults for this client.
    """

    name = "simulated"

    def __init__(
        self,
        cluster: SimulatedCluster,
        *,
        uid: int | None = None,
        operator: bool = True,
        faults: Faults | None = None,
    ) -> None:
        self._cluster = cluster
        self._uid = os.geteuid() if uid is None else uid
        self._operator = operator
        self._faults = faults or cluster.faults
        self.uses: dict[int, GpuUse] = {}
        """GPU use of each job as measured by Slurm, by job id. Tests and the demo set it."""

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
        raise Refused("sbatch: jobs of a simulated Slurm are submitted to its cluster")

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
