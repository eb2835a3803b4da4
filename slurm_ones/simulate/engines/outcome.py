"""What became of a simulated workload: plain data, from which all figures follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_ones.simulate.training.application import Application


@dataclass(frozen=True)
class Segment:
    """A stretch in which a job held the same GPUs."""

    job: str
    start: float
    end: float
    gpus: int
    nodes: int
    batch: int


@dataclass(frozen=True)
class JobOutcome:
    """One job from submission to end. Times in seconds after the start."""

    name: str
    application: str
    submitted: float
    started: float | None
    """Its first start; None where it never ran."""
    ended: float | None
    """None where it had not ended when the simulation stopped."""
    running_s: float
    """Seconds in which it held GPUs."""
    gpu_s: float
    """GPU-seconds that it held."""
    lost_gpu_s: float
    """Of them those in which it did not train: starting, stopping, resizing."""
    resizes: int
    """Interruptions after its first start."""
    fair_s: float
    """Seconds it would take alone on its share of the cluster: GPUs over the jobs that were in the system meanwhile."""
    metric: float
    target: float
    """NaN where it has none."""
    elastic: bool = True
    deadline: float | None = None
    """When it was to have ended; None where its user does not say."""
    promised: bool | None = None
    """Whether that was promised; None where nothing was said of it."""

    @property
    def in_time(self) -> bool | None:
        """Whether it met its deadline; None where it has none."""
        return None if self.deadline is None else self.ended is not None and self.ended <= self.deadline

    @property
    def jct_s(self) -> float:
        """Job completion time: submission to end; NaN while it has not ended."""
        return float("nan") if self.ended is None else self.ended - self.submitted

    @property
    def missed(self) -> bool:
        """It ended (or did not) without the accuracy that its user wants."""
        return self.ended is None or self.metric < self.target - 1e-9


@dataclass(frozen=True)
class Outcome:
    """One policy on one workload with one seed."""

    policy: str
    workload: str
    seed: int
    gpus: int
    """GPUs of the cluster."""
    jobs: tuple[JobOutcome, ...]
    segments: tuple[Segment, ...] = ()
    decision_s: tuple[float, ...] = ()
    """Real seconds of each decision."""
    goodput: tuple[tuple[float, float], ...] = ()
    """(time, goodput of all jobs over that of the whole cluster used at perfect efficiency)."""
    wall_s: float = 0.0
    """Real seconds of the whole simulation."""
    notes: tuple[str, ...] = field(default=())


def fair_seconds(
    application: Application,
    epochs: float,
    submitted: float,
    ended: float | None,
    presence: Sequence[tuple[float, int]],
    gpus: int,
    per_node: int,
) -> float:
    """Seconds alone on 1/n of the cluster, n the mean number of jobs in the system between submission and end.

    `presence` is (time, jobs) in order. At its best batch in each epoch, on the most whole GPUs of its share, one at
    least.
    """
    end = presence[-1][0] if ended is None and presence else (ended or submitted)
    inside = [jobs for at, jobs in presence if submitted <= at <= end and jobs > 0]
    share = max(1, min(int(gpus / (sum(inside) / len(inside) if inside else 1)), application.max_gpus))
    return alone_seconds(application, epochs, share, per_node)


def alone_seconds(application: Application, epochs: float, gpus: int, per_node: int) -> float:
    """Seconds from the first sample to the last at the best size up to `gpus` GPUs and the best batch of each epoch."""
    sizes = sorted({n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, gpus) if n <= gpus})
    return min(_seconds(application, epochs, n, per_node) for n in sizes)


def _seconds(application: Application, epochs: float, gpus: int, per_node: int) -> float:
    nodes = -(-gpus // per_node)
    low = max(application.min_batch or application.base_batch, gpus)
    batches = np.unique(np.round(np.geomspace(low, max(low, application.max_batch), 16)))
    speed = batches / application.step_seconds(nodes, gpus, batches)
    total = application.total * epochs
    seconds, done = 0.0, 0.0
    for row, end in enumerate(application.ends):
        upto = min(float(end), total)
        if upto <= done:
            break
        rate = (speed * application.efficiency(done, batches)).max()
        seconds += (upto - done) / rate
        done = upto
        if row == len(application.ends) - 1 or done >= total:
            break
    return float(seconds)
