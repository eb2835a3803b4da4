"""The policy: every interval from nothing, the trained network's best steps one after another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ones_db.reasons import reason
from slurm_ones.decide.build import build_schedule, free_after_fixed
from slurm_ones.decide.drl.perceptron import Network, load
from slurm_ones.decide.drl.steps import Steps, build_steps
from slurm_ones.schedule.placement import fixed_jobs
from slurm_ones.schedule.policy import ClusterView, Ints, JobView, Schedule


def best_steps(network: Network, steps: Steps, gpus: int, total: int) -> Ints:
    """(J,) steps that each job takes when the best-scored action is taken each time, of `gpus` GPUs of `total`.

    Each step costs as much as a heap's operation: the scores are had before, all at once.
    """
    scores = network.scores(steps.features).tolist()
    extra = steps.extra.tolist()
    taken = np.zeros(len(scores), dtype=np.int64)
    heap = [(-of_job[0], j, 0) for j, of_job in enumerate(scores) if of_job and extra[j][0] > 0]
    heapq.heapify(heap)
    free, growing = gpus, True
    while heap and free > 0:
        score, j, step = heapq.heappop(heap)
        growing = growing and -score >= network.void(steps.context(free / max(total, 1)))
        if (step > 0 and not growing) or extra[j][step] > free:
            continue
        free -= extra[j][step]
        taken[j] = step + 1
        if step + 1 < len(extra[j]) and extra[j][step + 1] > 0:
            heapq.heappush(heap, (-scores[j][step + 1], j, step + 1))
    return taken


def gpus_after(steps: Steps, taken: Ints) -> Ints:
    """(J,) GPUs after the steps taken; 0 after none."""
    if not steps.sizes.shape[1]:
        return np.zeros(len(taken), dtype=np.int64)
    last = np.maximum(taken - 1, 0)
    found: Ints = np.where(taken > 0, steps.sizes[np.arange(len(taken)), last], 0)
    return found


class Drl:
    """Policy gradient, trained in the simulator (see the package). `network` is another one than the trained one."""

    name = "drl"

    def __init__(self, network: Network | None = None) -> None:
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
        self.fixed = fixed_jobs(cluster, jobs)
        self.mobile = [job for job in self.jobs if job.job_id not in self.fixed]
        self.gpus = int(free_after_fixed(cluster, jobs, self.fixed).sum())
        """GPUs that they share."""
        self.total = max(cluster.gpus, 1)
        self.steps: Steps = build_steps(cluster, self.mobile, self.gpus, now)

    def schedule(self, taken: Ints) -> Schedule:
        """The schedule of the steps taken (J,), made placeable; whoever is left out is parked."""
        counts = gpus_after(self.steps, taken)
        wanted = {job.job_id: int(n) for job, n in zip(self.mobile, counts, strict=True)}
        return build_schedule(self.cluster, self.jobs, self.fixed, self.steps.tables, wanted, reason("network"))
