"""A candidate: one gene per GPU, in node order; a gene holds a job's index, or J where the GPU is idle (ONES §3.1).

A population is (K, GPUs). What counts of a candidate are the GPUs of each job, (K, J): nodes are alike for jobs that
are not placed yet.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.schedule.policy import Ints


def genes(space: Space, counts: Ints) -> Ints:
    """(K, GPUs) from (K, J), with as few occupied GPUs changed as possible: a job keeps those it holds now as far as it
    keeps its count, and its others lie together on those that are left."""
    candidates, jobs = counts.shape
    bound = np.concatenate([counts, np.zeros((candidates, 1), dtype=np.int64)], axis=1)
    kept = space.place < bound[:, space.slots]
    more = np.maximum(counts - space.current, 0)
    idle = len(space.slots) - counts.sum(axis=1, keepdims=True)
    values = np.tile(np.arange(jobs + 1), candidates)
    result = np.where(kept, space.slots, jobs)
    result[~kept] = np.repeat(values, np.concatenate([more, idle], axis=1).ravel())
    return result


def counts(space: Space, population: Ints) -> Ints:
    """(K, J) GPUs that each candidate gives each job."""
    candidates, wide = len(population), len(space.jobs) + 1
    flat = population + wide * np.arange(candidates)[:, None]
    result: Ints = np.bincount(flat.ravel(), minlength=candidates * wide).reshape(candidates, wide)[:, :-1]
    return result
