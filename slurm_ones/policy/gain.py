"""How much faster a job is expected to train after a change than before it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ones_db.shape import Shape
from slurm_ones.policy.contract import JobView


def expected_gain(job: JobView | None, new: Shape, batch: int | None, kind: str = "") -> float | None:
    """Useful samples/s at the shape and global batch (None: the one in force), on that kind of GPU (empty: the one that
    it has), over those now, by what the policy was shown of the job; None where it waits, or that is no finite number.
    """
    if job is None or job.shape is None or not new.gpus:
        return None
    before = _useful(job, job.shape, job.batch)
    there = replace(job, model=job.on.get(kind, job.model))
    gain = _useful(there, new, job.batch if batch is None else batch) / before if before > 0 else math.nan
    return gain if math.isfinite(gain) and gain >= 0 else None


def _useful(job: JobView, shape: Shape, batch: int) -> float:
    """Useful samples/s: throughput times statistical efficiency."""
    # No GPU takes more than this: the job lowers such a batch by itself.
    batches = np.array([min(batch, job.limits.at(shape.gpus).most or batch)])
    speed = job.model.throughput(np.array([shape.nodes]), np.array([shape.gpus]), batches)
    return float(speed[0] * job.efficiency.efficiency(batches)[0])
