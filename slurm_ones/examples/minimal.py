"""The whole idea of slurm-ones in one file: observe → learn → decide → act, against a simulated cluster.

    python -m slurm_ones.examples.minimal [--seed N]

The same training jobs run twice on 16 GPUs. Rigid: each job gets the GPUs that its user asked for, first come, first
served. Elastic: every minute a companion learns how fast each job trains at each size. It searches for the best GPUs
and batch of every job, and changes jobs by checkpoint → requeue. The real companion adds what a real cluster needs:
nodes, limits, failures, and jobs that did not opt in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GPUS = 16
STEP_S, TICK_S = 5.0, 60.0  # how finely time is simulated; how often the companion looks
PAUSE_S, PAYS_WITHIN_S = 30.0, 600.0  # what a resize costs; how soon it has to pay
POPULATION, GENERATIONS = 32, 40


def throughput(gpus: Any, batch: Any, compute_s: float, network_s: float) -> Any:
    """Samples per second: each GPU computes its part of the batch, then gradients are exchanged."""
    return batch / (compute_s * batch / gpus + network_s * np.log2(gpus))


def efficiency(batch: Any, base: int, noise: float) -> Any:
    """Progress per sample relative to the base batch; `noise` is the gradient noise scale (McCandlish et al. 2018)."""
    return (noise + base) / (noise + batch)


# The simulated cluster: jobs that train and report


@dataclass
class Job:
    """A training job. The companion cannot see `hidden`; it must learn these values from the job's reports."""

    submitted: float
    asked: int  # GPUs
    base: int  # the batch that its user trains with; up to eight times that is allowed
    samples: float  # how far it has to get, in samples at the base batch
    hidden: tuple[float, float, float]  # seconds per sample, seconds per exchange, noise scale
    gpus: int = 0
    batch: int = 0
    progress: float = 0.0
    trains_from: float = 0.0
    ended: float | None = None
    resizes: int = 0
    reports: list[tuple[int, int, float, float]] = field(default_factory=list)  # GPUs, batch, samples/s, noise scale


class Cluster:
    """Slurm as the companion sees it: the queue, and a way to start or requeue a job at a size."""

    def __init__(self, jobs: list[Job], seed: int) -> None:
        self.jobs, self.now, self._rng = jobs, 0.0, np.random.default_rng(seed)

    def active(self) -> list[Job]:
        """Jobs that wait or run, in the order of their submission."""
        return [job for job in self.jobs if job.submitted <= self.now and job.ended is None]

    def free(self) -> int:
        return GPUS - sum(job.gpus for job in self.jobs)

    def place(self, job: Job, gpus: int, batch: int) -> None:
        """Start a job, or requeue it from its checkpoint at another size."""
        if gpus > self.free() + job.gpus:
            raise ValueError(f"{gpus} GPUs for a job, but {self.free() + job.gpus} are free")
        if job.gpus:
            job.resizes, job.trains_from = job.resizes + 1, self.now + PAUSE_S
        job.gpus, job.batch = gpus, batch

    def advance(self) -> None:
        """Let `STEP_S` seconds pass: jobs train, and report their speed with measurement noise."""
        self.now += STEP_S
        for job in self.active():
            if job.gpus and self.now > job.trains_from:
                compute_s, network_s, noise = job.hidden
                speed = float(throughput(job.gpus, job.batch, compute_s, network_s))
                job.progress += speed * STEP_S * efficiency(job.batch, job.base, noise)
                measured = speed * self._rng.normal(1, 0.03), noise * self._rng.normal(1, 0.1)
                job.reports.append((job.gpus, job.batch, *measured))
                if job.progress >= job.samples:
                    job.ended, job.gpus = self.now, 0


def first_come_first_served(cluster: Cluster, rng: np.random.Generator) -> None:
    """Do what Slurm does by itself: start jobs in order, with the GPUs that they asked for."""
    for job in cluster.active():
        if not job.gpus:
            if job.asked > cluster.free():
                return
            cluster.place(job, job.asked, job.base)


# The companion


def observe(cluster: Cluster) -> list[Job]:
    """Return the active jobs. (The real companion takes an immutable snapshot.)"""
    return cluster.active()


def learn(job: Job) -> tuple[float, float, float]:
    """Fit compute and exchange time to the job's reports by least squares, with two rows as a prior."""
    seen = job.reports[-100:]
    rows = [(1.0, 0.0), (0.0, 1.0), *((batch / gpus, np.log2(gpus)) for gpus, batch, _, _ in seen)]
    times = [0.01, 0.05, *(batch / speed for _, batch, speed, _ in seen)]
    compute_s, network_s = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0]
    noise = float(np.mean([noise for *_, noise in seen])) if seen else float(job.base)
    return max(compute_s, 1e-6), max(network_s, 0.0), noise


def worth(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Return, for 0 to 16 GPUs, the fraction of its remaining work that the job does per second, and its best batch."""
    compute_s, network_s, noise = learn(job)
    gpus, batches = np.arange(1, GPUS + 1)[:, None], job.base * np.array([1, 2, 4, 8])
    goodput = throughput(gpus, batches, compute_s, network_s) * efficiency(batches, job.base, noise)
    rates = np.concatenate([[0.0], goodput.max(axis=1) / (job.samples - job.progress)])
    if job.gpus:  # any other size costs a pause
        rates[np.arange(GPUS + 1) != job.gpus] *= 1 - PAUSE_S / PAYS_WITHIN_S
    return rates, np.concatenate([[0], batches[goodput.argmax(axis=1)]])


def decide(rates: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Search for the GPUs of every job that make the sum of `rates` largest.

    `rates` (jobs × GPU counts) is from `worth`; `held` (jobs) has each job's present GPUs. The search is evolutionary:
    schedules are crossed and mutated, and the best survive. A running job keeps at least one GPU.
    """
    jobs, least, rows = np.arange(len(held)), np.minimum(held, 1), np.arange(POPULATION)
    population = np.tile(held, (POPULATION, 1))
    for _ in range(GENERATIONS):
        mothers, fathers = population[rng.integers(POPULATION, size=(2, POPULATION))]
        children = np.where(rng.random(mothers.shape) < 0.5, mothers, fathers)
        children = np.where(children.sum(axis=1, keepdims=True) <= GPUS, children, mothers)
        loser, winner = rng.integers(len(held), size=(2, POPULATION))
        children[rows, loser] = rng.integers(least[loser], children[rows, loser] + 1)
        children[rows, winner] += rng.integers(0, GPUS - children.sum(axis=1) + 1)
        population = np.concatenate([population, children])
        score = rates[jobs, population].sum(axis=1)
        population = population[np.argsort(-score, kind="stable")[:POPULATION]]
    return np.asarray(population[0])


def act(cluster: Cluster, jobs: list[Job], gpus: np.ndarray, batches: list[np.ndarray]) -> None:
    """Carry out the schedule, first for jobs that give GPUs back."""
    for i in np.argsort([count - job.gpus for count, job in zip(gpus, jobs, strict=True)]):
        if gpus[i] != jobs[i].gpus:
            cluster.place(jobs[i], int(gpus[i]), int(batches[i][gpus[i]]))


def companion(cluster: Cluster, rng: np.random.Generator) -> None:
    """Observe → learn → decide → act, once a tick."""
    jobs = observe(cluster)
    if jobs and cluster.now % TICK_S == 0:
        rates, batches = zip(*map(worth, jobs), strict=True)
        gpus = decide(np.array(rates), np.array([job.gpus for job in jobs]), rng)
        act(cluster, jobs, gpus, list(batches))


def workload(count: int, seed: int) -> list[Job]:
    """Return `count` jobs of 6 minutes to 2 hours at their requested size, one every 7 minutes on average."""
    rng, now, jobs = np.random.default_rng(seed), 0.0, []
    for _ in range(count):
        asked, base = int(rng.choice([1, 2, 4, 8])), int(rng.choice([64, 128, 256]))
        compute_s, network_s = float(10 ** rng.uniform(-2.5, -1.5)), rng.uniform(0.01, 0.1)
        samples = 3600 * 10 ** rng.uniform(-1, 0.3) * throughput(asked, base, compute_s, network_s)
        jobs.append(Job(now, asked, base, samples, (compute_s, network_s, base * rng.uniform(1, 20))))
        now += rng.exponential(420)
    return jobs


def simulate(jobs: list[Job], schedule: Callable[[Cluster, np.random.Generator], None], seed: int) -> float:
    """Let time pass until all jobs have ended. Return the mean JCT (submission to end) in seconds."""
    cluster, rng = Cluster(jobs, seed), np.random.default_rng(seed)
    while any(job.ended is None for job in jobs):
        schedule(cluster, rng)
        cluster.advance()
    return float(np.mean([job.ended - job.submitted for job in jobs if job.ended is not None]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, schedule in (("rigid", first_come_first_served), ("elastic", companion)):
        jobs = workload(30, options.seed)
        jct_s = simulate(jobs, schedule, options.seed)
        print(f"{name:8} mean JCT {jct_s / 60:.1f} min, {len(jobs)} jobs, {sum(job.resizes for job in jobs)} resizes")


if __name__ == "__main__":
    main()
