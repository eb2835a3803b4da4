"""What a job would have had alone on its share of the cluster (finish-time fairness, Themis, NSDI 2020 §3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_ones.simulate.training.application import Application


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
