"""The policy: every interval from nothing, the trained network's best steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.build import conclude
from slurm_ones.decide.drl.choose import best_steps, gpus_of
from slurm_ones.decide.drl.network import Network, load
from slurm_ones.decide.drl.steps import Steps, build_steps
from slurm_ones.reasons import reason
from slurm_ones.schedule.fixed import pinned
from slurm_ones.schedule.placement import Room
from slurm_ones.schedule.policy import ClusterView, Ints, JobView, Schedule


@dataclass(frozen=True)
class Options:
    """Nothing can be set: what it does was learnt."""


class Drl:
    """Policy gradient, trained in the simulator (see the package). `network` is another one than the trained one."""

    name = "drl"
    options_type = Options

    def __init__(self, options: Options = Options(), network: Network | None = None) -> None:
        self.options = options
        self.network = network or load().network

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        game = Game(cluster, jobs, now)
        return game.schedule(best_steps(self.network, game.steps, game.gpus, game.total))


class Game:
    """One round: the steps that there are, and the schedule that those taken make."""

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], now: float) -> None:
        self.cluster = cluster
        self.jobs = sorted(jobs, key=lambda job: (job.submitted, job.job_id))
        self.pinned = pinned(cluster, jobs)
        self.mobile = [job for job in self.jobs if job.job_id not in self.pinned]
        self.gpus = Room(cluster, [job for job in jobs if job.job_id in self.pinned]).gpus
        """GPUs that they share."""
        self.total = max(cluster.gpus, 1)
        self.steps: Steps = build_steps(cluster, self.mobile, self.gpus, now)

    def schedule(self, taken: Ints) -> Schedule:
        """The schedule of the steps taken (J,), made placeable; whoever is left out is parked."""
        counts = gpus_of(self.steps, taken)
        wanted = {job.job_id: int(n) for job, n in zip(self.mobile, counts, strict=True)}
        return conclude(self.cluster, self.jobs, self.pinned, self.steps.tables, wanted, reason("network"))
