"""What goes wrong at a simulated Slurm, drawn from a seed: shares of calls, and mean times between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ones_db.shape import Shape
from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.slurm.client import NotResizable, Unreachable
from slurm_ones.slurm.model import Job, JobKey


@dataclass
class RandomFaults(Faults):
    """For one cluster. What is off takes no random number."""

    refused: float = 0.0
    """Share of the updates of a shape that Slurm refuses."""
    partial: float = 0.0
    """Share of those that it takes in part, the nodes without the GPUs, and then refuses."""
    requeue_refused: float = 0.0
    unreachable: float = 0.0
    """Share of the calls that get no answer; half of those have taken effect."""
    node_mtbf_s: float = 0.0
    """Mean time between two failures of a node, 0 for never. Slurm requeues its jobs."""
    node_repair_s: float = 1800.0
    preempt_mtbf_s: float = 0.0
    """Mean time until Slurm requeues a running job by itself, as preemption does; 0 for never."""
    seed: int = 0

    def begin(self, cluster: SimulatedCluster) -> None:
        self.cluster, self.rng = cluster, np.random.default_rng([self.seed, 1])
        for name in cluster.nodes.names() if self.node_mtbf_s else ():
            self._fail_some_time(name)

    def started(self, job: SimulatedJob) -> None:
        if self.preempt_mtbf_s:
            seconds = float(self.rng.exponential(self.preempt_mtbf_s))
            job.events.append(self.cluster.timeline.after(seconds, lambda: self.cluster.preempt(job.to_model().key)))

    def ask(self, what: str) -> None:
        if self._draw(self.unreachable):
            raise Unreachable(f"{what}: Socket timed out on send/recv operation")

    def change(self, what: str, job_id: JobKey, make: Callable[[], None]) -> None:
        if what == "requeuehold" and self._draw(self.requeue_refused):
            raise NotResizable(f"job {job_id}: Requested operation is presently disabled")
        lost = self._draw(self.unreachable)
        if not lost or self._draw(0.5):
            make()
        if lost:
            raise Unreachable(f"{what} {job_id}: Socket timed out on send/recv operation")

    def reshape(self, job: Job, shape: Shape, make: Callable[[bool], None]) -> None:
        refusal = NotResizable(f"job {job.key}: Requested node configuration is not available")
        if self._draw(self.refused):
            raise refusal
        nodes_alone = self._draw(self.partial)
        self.change("update", job.key, lambda: make(nodes_alone))
        if nodes_alone:
            raise refusal

    def _draw(self, share: float) -> bool:
        return share > 0 and float(self.rng.random()) < share

    def _fail_some_time(self, name: str) -> None:
        timeline = self.cluster.timeline

        def fail() -> None:
            self.cluster.fail(name)
            timeline.after(self.node_repair_s, repaired)

        def repaired() -> None:
            self.cluster.resume(name)
            self._fail_some_time(name)

        timeline.after(float(self.rng.exponential(self.node_mtbf_s)), fail)
