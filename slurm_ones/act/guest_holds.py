"""Holds on running guests, at sites that requeue preempted jobs: a guest held while running waits held after its
requeue.

Otherwise Slurm would start the guest again in GPUs that others wanted a moment ago. Each hold is stored before Slurm is
asked for it (`HeldTasks.take`), and owners may release it. Guests are not held in two cases: Slurm starts them again,
and they rejoin. With `RequeueExit` set, Slurm would turn our hold into its own, which owners cannot release. In a job
without a base block, all blocks could end up held.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from slurm_ones.act.arrays import NO_TASKS
from slurm_ones.act.holds import HeldTasks, forgotten
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.rules.blocks import task_of
from slurm_ones.slurm.client import Refused, SlurmClient
from slurm_ones.slurm.model import Partition, SlurmJob, Task
from slurm_ones.slurm.parse import setting

log = logging.getLogger(__name__)

EXITS = ("RequeueExit", "RequeueExitHold")
NOT_SET = {"", "(null)", "n/a"}
ASK_S = 300.0
"""Seconds between two readings of Slurm's preemption settings."""


def comes_back(job: SlurmJob, config: Mapping[str, str], partition: Partition | None, modes: Mapping[str, str]) -> bool:
    """Tell whether Slurm requeues the job on preemption, and leaves a hold on the job for its owner to release. `modes`
    gives each QOS's PreemptMode."""
    if not job.requeue or not {setting(config, name) for name in EXITS} <= NOT_SET:
        return False
    by_qos = setting(config, "PreemptType").endswith("qos")
    mode = modes.get(job.qos, "") if by_qos else partition.preempt_mode if partition is not None else ""
    own = mode.lower() not in ("", "off", "cluster", "disabled")
    return "requeue" in (mode.lower() if own else setting(config, "PreemptMode"))


@dataclass
class GuestHolds:
    """Keeps running guests held, once a tick."""

    client: SlurmClient
    held: HeldTasks
    clock: Callable[[], float]
    _site: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Slurm's settings, and each QOS's PreemptMode."""
    _asked: float = -math.inf
    _put: dict[tuple[Task, int], float] = field(default_factory=dict)
    """Time at which each guest was held, by task and restart: a guest whose owner released it is not held again."""

    def keep(
        self,
        arrays: Mapping[int, Iterable[SlurmJob]],
        jobs: Mapping[int, Elastic],
        partitions: Mapping[str, Partition],
        moving: Mapping[int, Collection[int]] = NO_TASKS,
    ) -> None:
        """Hold the running guests of `jobs`, and lift our holds on all other running blocks of `arrays` (a snapshot's
        tasks). Tasks `moving` join or leave in an open resize and are left out. Raises `Unreachable`."""
        for job_id, tasks in arrays.items():
            wanted = self._wanted(jobs[job_id], partitions) if job_id in jobs else ()
            still = moving.get(job_id, ())
            for job in (job for job in tasks if job.running and task_of(job) not in still):
                task = Task(job_id, task_of(job))
                if task.task in wanted:
                    self._hold(task, job)
                elif job.held and not job.admin_held and task.task in self.held.of(job_id):
                    self._lift(task, job)

    def _wanted(self, one: Elastic, partitions: Mapping[str, Partition]) -> set[int]:
        guests = [job for job in one.job.running_blocks if one.job.is_guest(job)]
        wanted = one.takes_guests and not one.refusal and 0 < len(guests) < len(one.job.running_blocks)
        if not (wanted and self._read_site()):
            return set()
        config, modes = self._site
        return {task_of(job) for job in guests if comes_back(job, config, partitions.get(job.partition), modes)}

    def _read_site(self) -> bool:
        if not 0.0 <= self.clock() - self._asked < ASK_S:
            try:
                self._site = self.client.config(), self.client.quotas(()).modes
            except Refused as error:
                log.warning("what Slurm does with jobs that it preempts is not known: %s", error)
                return False
            self._asked = self.clock()
        return True

    def _hold(self, task: Task, job: SlurmJob) -> None:
        put = self._put.get((task, job.restart))
        if job.held or (put is not None and not forgotten(self.client, put)):
            return
        if not self.held.take(task.array, [task.task]):
            return
        try:
            self.client.hold(task)
            self._put[task, job.restart] = self.clock()
        except Refused as error:
            log.info("block %s: it is not held for its next start: %s", task, error)

    def _lift(self, task: Task, job: SlurmJob) -> None:
        self._put.pop((task, job.restart), None)
        try:
            self.client.release(task, start_now=False)
        except Refused as error:
            log.error("block %s: its hold could not be lifted: %s", task, error)

    def forget(self, alive: Collection[int]) -> None:
        """Drop the memory of jobs that are not in `alive`."""
        self._put = {key: time for key, time in self._put.items() if key[0].array in alive}
