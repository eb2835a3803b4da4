"""How long jobs still need: as they are told by an oracle, or as their models and progress say."""

from __future__ import annotations

import math

import numpy as np

from slurm_ones.schedule.policy import Allocation, ClusterView, JobView
from slurm_ones.schedule.shapes import nodes_of
from slurm_ones.schedule.tables import predict

LONGEST = 1e12
"""Seconds beyond which one job is not told from another."""


def to_come(job: JobView) -> float:
    """Progress still to come, in samples of the base batch: positive and finite whatever the job reports."""
    beta = job.progress.beta
    return min(max(beta, 1e-3), 1e9) * max(job.dataset, 1) if math.isfinite(beta) else 1e9 * max(job.dataset, 1)


def remaining_seconds(cluster: ClusterView, job: JobView, asked: Allocation) -> float:
    """Seconds that it still needs at what it asked for: the true ones where the job tells them, else predicted."""
    if not math.isnan(job.true_remaining_s):
        return min(max(job.true_remaining_s, 0.0), LONGEST)
    gpus = np.array([asked.shape.gpus])
    nodes = np.array([nodes_of(cluster, asked.shape.gpus)])
    goodput = float(predict(job, nodes, gpus, np.array([[asked.batch]]))[1][0, 0])
    return min(to_come(job) / goodput, LONGEST)
