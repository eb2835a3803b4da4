"""Tools of simulated Slurms in tests: programs that do nothing, a policy that no good one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_ones.policy.build import place
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.policy.shapes import least_and_most
from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PartitionSpec, SlurmConf
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Program, Request, SimulatedJob
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.slurm.model import JobKey, SlurmJob

OWNER, STRANGER = 1001, 1002
QUIET = ClusterSettings(speed_noise=0.0, gradient_noise=0.0)


@dataclass
class Sleep:
    """A program that exits by itself after so many seconds of a run, and takes its time to be stopped."""

    exit: Callable[[int], None]
    timeline: Timeline
    seconds: float = 1e9
    stop_s: float = 3.0
    batch: int = 0
    runs: list[Mapping[str, int]] = field(default_factory=list)

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        self.runs.append(gpus)
        run = len(self.runs)
        self.timeline.after(self.seconds, lambda: self.exit(0) if run == len(self.runs) else None)

    def stop(self, *, killed: bool = False) -> float:
        return self.stop_s


class Harness:
    """Four nodes of four GPUs, and somebody who submits."""

    def __init__(
        self,
        settings: ClusterSettings = ClusterSettings(),
        *,
        nodes: int = 4,
        whole_nodes: bool = False,
        faults: Faults | None = None,
        partitions: Sequence[PartitionSpec] = (),
        conf: SlurmConf = SlurmConf(),
    ) -> None:
        """`partitions` take the place of the one."""
        self.timeline = Timeline(1000.0)
        names = tuple(f"n{i}" for i in range(1, nodes + 1))
        partitions = partitions or [PartitionSpec("gpu", names, 4, whole_nodes)]
        self.cluster = SimulatedCluster(partitions, settings, self.timeline, faults, conf)
        self.owner = SimulatedClient(self.cluster, uid=OWNER, operator=False)
        self.stranger = SimulatedClient(self.cluster, uid=STRANGER, operator=False)
        self.operator = SimulatedClient(self.cluster, uid=0)

    def submit(
        self, nodes: int = 1, gpus: int = 0, *, runs_s: float = 1e9, stop_s: float = 3.0, **other: object
    ) -> int:
        """A job of `gpus` GPUs on each of `nodes` nodes that runs so long."""
        request = replace(Request(nodes=nodes, gpus_per_node=gpus, uid=OWNER), **other)  # type: ignore[arg-type]

        def program(job_id: JobKey) -> Program:
            return Sleep(lambda code: self.cluster.exited(job_id, code), self.timeline, runs_s, stop_s)

        return self.cluster.submit(request, program)

    def running(self, nodes: int = 1, gpus: int = 0, **other: object) -> int:
        job_id = self.submit(nodes, gpus, **other)  # type: ignore[arg-type]
        self.wait(2)
        assert self.job(job_id).running
        return job_id

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.timeline.run(self.timeline.now + seconds)

    def job(self, job_id: JobKey) -> SlurmJob:
        return self.owner.job(job_id)

    def inside(self, job_id: int) -> SimulatedJob:
        return self.cluster.jobs[job_id]

    def free(self) -> list[int]:
        """Free GPUs of each node."""
        return list(self.cluster.nodes.free("gpu").values())


class ChangingPolicy:
    """Another size and batch for every job at each decision; those that find no room are parked."""

    name = "changing"

    def __init__(self, *, parks: bool = True) -> None:
        self._parks = parks
        self._round = 0

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `policy.contract.Policy`."""
        self._round += 1
        order = sorted(jobs, key=lambda job: (job.job_id + self._round) % 7) if self._parks else jobs
        found = place(cluster, order, {job.job_id: self._size(job) for job in jobs})
        allocations = {}
        for job in jobs:
            if job.job_id in found:
                shape = found[job.job_id]
                least, most = least_and_most(job.limits, shape.gpus)
                batch = job.batch if job.fixed else min(max(least * (1 + self._round % 3), least), most)
                allocations[job.job_id] = Allocation(shape, batch)
            elif job.shape is not None and (job.fixed or not self._parks):
                allocations[job.job_id] = Allocation(job.shape, job.batch)
        parked = {job.job_id for job in jobs if job.job_id not in allocations and not job.fixed}
        return Schedule(allocations, parked=frozenset(parked if self._parks else ()))

    def _size(self, job: JobView) -> int:
        sizes = [n for n in job.limits.gpus if n <= 8]
        return sizes[(self._round + job.job_id) % len(sizes)] if sizes else job.limits.gpus[0]
