"""Optimus: each GPU goes to the job whose remaining time it shortens most (Peng et al., EuroSys 2018, §3-4.1).

Every job gets one worker, in order of arrival. Each further GPU goes to the job whose predicted completion time it
shortens most. This ends when no GPU is left, or when no job would end sooner. A job's remaining epochs come from its
loss curve (§3.1, `LossCurve`) if it has reported enough losses, otherwise from the progress model. The speed at each
size comes from the caller's throughput model, not from the paper's model of parameter servers (§3.2). Each job keeps
the batch that its user asked for.

Running jobs are changed only every `interval_s` seconds, ten minutes by default as in §6, since each change is a
restart. In between, running jobs keep their size, and waiting jobs start at their smallest size if GPUs are free.
Pollux's study (OSDI 2021, §5) re-allocates every minute and gives Optimus the true remaining steps: `interval_s=0,
told=True`.

The placement of parameter servers (§4.2) is left out. On Slurm a job may have to grow by several GPUs at once, to its
next size. The time that this saves is divided by the number of these GPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import reason
from slurm_ones.policy.build import build_schedule, fixed_jobs, free_after_fixed
from slurm_ones.policy.contract import ClusterView, Floats, JobView, Schedule, check_options
from slurm_ones.policy.tables import LONGEST, Tables, build_tables, to_come

Losses = tuple[tuple[float, float], ...]
"""Losses that a job reported, in order of time, as pairs (epochs done, loss)."""

ENOUGH = 5
"""Fewest reported losses for a fit."""
MOST = 64
"""Largest number of losses in a fit. Of more losses, this many are used, evenly spread."""
FLOORS = 24
"""Number of values for the floor, the loss after infinitely many epochs, that a fit tries."""


@dataclass(frozen=True)
class LossCurve:
    """Loss after k epochs, divided by the largest reported loss: 1/(slope · k + offset) + floor."""

    slope: float
    offset: float
    floor: float

    def loss(self, epochs: Floats) -> Floats:
        """Return the predicted loss after `epochs` epochs."""
        return 1.0 / np.maximum(self.slope * epochs + self.offset, 1e-12) + self.floor

    def converged(self, drop: float) -> float:
        """Return the number of epochs after which one more epoch lowers the loss by less than `drop`."""
        if self.slope <= 0.0:
            return 0.0
        # slope / (slope · k + offset)² is the fall of the loss in an epoch after k epochs.
        return max((math.sqrt(self.slope / drop) - self.offset) / self.slope, 0.0)


def fit(losses: Losses) -> LossCurve | None:
    """Return the loss curve fitted to `losses`; None if fewer than `ENOUGH` losses are valid.

    A running median over three losses removes outliers. For each of several floors, nonnegative least squares then fits
    slope and offset. The curve with the smallest error is returned.
    """
    points = np.array([p for p in losses if all(map(math.isfinite, p)) and p[0] >= 0 and 0 < p[1] < 1e12])
    if len(points) < ENOUGH:
        return None
    if len(points) > MOST:
        points = points[np.linspace(0, len(points) - 1, MOST).round().astype(int)]
    epochs, loss = points[:, 0], points[:, 1] / points[:, 1].max()
    loss = np.concatenate([loss[:1], np.median([loss[:-2], loss[1:-1], loss[2:]], axis=0), loss[-1:]])
    floors = loss.min() * np.linspace(0.0, 0.99, FLOORS)[:, None]
    above = loss[None] - floors
    slope, offset = _nonnegative(epochs[None], 1.0 / above, above**4)
    error = ((1.0 / np.maximum(slope * epochs + offset, 1e-12) + floors - loss) ** 2).sum(axis=1)
    best = int(np.argmin(error))
    return LossCurve(float(slope[best, 0]), float(offset[best, 0]), float(floors[best, 0]))


def _nonnegative(x: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return a, b ≥ 0, (F, 1) each, that minimise Σ weight · (a·x + b − y)² for each of the F rows of y."""
    w, wx, wxx = weight.sum(axis=1), (weight * x).sum(axis=1), (weight * x * x).sum(axis=1)
    wy, wxy = (weight * y).sum(axis=1), (weight * x * y).sum(axis=1)
    det = w * wxx - wx * wx
    safe = np.where(det > 1e-12 * w * wxx, det, 1.0)
    inside = det > 1e-12 * w * wxx
    a = np.where(inside, (w * wxy - wx * wy) / safe, 0.0)
    b = np.where(inside, (wxx * wy - wx * wxy) / safe, wy / w)
    # If one of the two unknowns would be negative, it is set to 0 and the other is fitted by itself.
    b = np.where(a < 0, wy / w, b)
    a = np.where(b < 0, wxy / np.maximum(wxx, 1e-300), np.maximum(a, 0.0))
    return a[:, None], np.maximum(b, 0.0)[:, None]


@dataclass(frozen=True)
class OptimusOptions:
    """Options of Optimus."""

    interval_s: float = 600.0
    """Seconds between two changes of running jobs."""
    converged: float = 0.01
    """Decrease of the loss in one more epoch, relative to its largest value, below which a job counts as done."""
    told: bool = False
    """True to use the true remaining time of a job, if a simulator provides it."""

    def __post_init__(self) -> None:
        check_options(self, {}, {})
        if not 0 < self.converged < 1:
            raise ValueError(f"converged must be between 0 and 1, not {self.converged}")


class Optimus:
    """Optimus, which gives each GPU to the job of largest marginal gain."""

    name = "optimus"

    options_type = OptimusOptions

    def __init__(self, options: OptimusOptions = OptimusOptions()) -> None:
        self.options = options
        self._last = -math.inf
        self._fits: dict[int, tuple[Losses, LossCurve | None]] = {}
        """Last fit of each job, with the losses to which it was fitted, by job id."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        fixed = fixed_jobs(cluster, jobs)
        self._fits = {job.job_id: self._fits[job.job_id] for job in jobs if job.job_id in self._fits}
        between = self._last <= now < self._last + self.options.interval_s
        if between:
            unchanged = reason("between_changes", seconds=self.options.interval_s)
            fixed = {job.job_id: unchanged for job in jobs if job.shape is not None} | fixed
        else:
            self._last = now
        queue = sorted(jobs, key=lambda job: (job.submitted, job.job_id))
        moving = [job for job in queue if job.job_id not in fixed]
        table = build_tables(cluster, moving, "requested")
        free = int(free_after_fixed(cluster, jobs, fixed).sum())
        columns = _greedy(table, np.inf if between else self._seconds(table), free)
        wanted = {j.job_id: int(table.sizes[u]) for j, u in zip(moving, columns, strict=True) if u}
        return build_schedule(cluster, queue, fixed, table, wanted, reason("shortens_most"))

    def _seconds(self, table: Tables) -> Floats:
        """Return the remaining seconds (J, U) of each job at each size; infinite at a size that is not allowed."""
        work = np.array([self._work(job, table, j) for j, job in enumerate(table.jobs)])
        return np.where(table.allowed, work[:, None] / np.where(table.allowed, table.goodput, 1.0), np.inf)

    def _work(self, job: JobView, table: Tables, j: int) -> float:
        """Return a job's remaining progress in samples of the base batch."""
        epoch = max(job.dataset, 1)
        at = np.flatnonzero(table.allowed[j])
        if self.options.told and not math.isnan(job.true_remaining_s) and len(at):
            asked = at[max(int(np.searchsorted(table.sizes[at], job.requested, side="right")) - 1, 0)]
            work = min(max(job.true_remaining_s, 0.0), LONGEST) * float(table.goodput[j, asked])
        elif (curve := self._curve(job)) is not None:
            work = (curve.converged(self.options.converged) - max(epochs for epochs, _ in job.losses)) * epoch
        else:
            work = to_come(job)
        return max(math.ceil(min(work / epoch, 1e9) - 1e-9), 1) * epoch

    def _curve(self, job: JobView) -> LossCurve | None:
        known = self._fits.get(job.job_id)
        if known is None or known[0] != job.losses:
            known = (job.losses, fit(job.losses))
        self._fits[job.job_id] = known
        return known[1]


def _greedy(table: Tables, seconds: Floats | float, gpus: int) -> list[int]:
    """Return the column of each job's size, 0 for no GPUs. Each job first gets its smallest size. Further GPUs go to
    the job that saves the most time per GPU.

    `table.jobs` are in order of arrival. If `seconds` are infinite, every job stays at its smallest size.
    """
    sizes = table.sizes.tolist()
    chains = [np.flatnonzero(row).tolist() for row in table.allowed]
    place = [-1] * len(chains)
    for j, chain in enumerate(chains):
        if chain and sizes[chain[0]] <= gpus:
            place[j] = 0
            gpus -= sizes[chain[0]]
    if isinstance(seconds, np.ndarray):
        gains = [_gains(row[chain], table.sizes[chain]) for row, chain in zip(seconds, chains, strict=True)]
        heap = [(-gains[j][0], j) for j, at in enumerate(place) if at == 0 and gains[j]]
        heapq.heapify(heap)
        while heap and gpus > 0 and heap[0][0] < 0:
            _, j = heapq.heappop(heap)
            at, chain = place[j], chains[j]
            more = sizes[chain[at + 1]] - sizes[chain[at]]
            if more > gpus:
                continue
            gpus -= more
            place[j] = at + 1
            if at + 1 < len(gains[j]):
                heapq.heappush(heap, (-gains[j][at + 1], j))
    return [chain[at] if at >= 0 else 0 for chain, at in zip(chains, place, strict=True)]


def _gains(seconds: Floats, sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[float]:
    found: list[float] = (-np.diff(seconds) / np.diff(sizes)).tolist()
    return found
