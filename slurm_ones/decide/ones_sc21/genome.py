"""A candidate: one gene per GPU slot, in node order; a gene holds a job's index, or -1 (ONES §3.1).

A population is (K, slots). For placing, the same candidates are seen as a grid (K, J, N): GPUs of each job on
each node; slots of one node are alike, so both say the same.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.decide.policy import Ints

IDLE = -1


def genes(space: Space, grid: Ints) -> Ints:
    """(K, slots) from (K, J, N): each node's slots in job order, idle ones last."""
    candidates, jobs, nodes = grid.shape
    per_node = grid.transpose(0, 2, 1)
    idle = space.capacity[None, :, None] - per_node.sum(axis=2, keepdims=True)
    lengths = np.concatenate([per_node, idle], axis=2)
    values = np.tile(np.append(np.arange(jobs), IDLE), candidates * nodes)
    return np.repeat(values, lengths.ravel()).reshape(candidates, -1)


def counts(space: Space, population: Ints) -> Ints:
    """(K, J) slots that each candidate gives each job."""
    candidates, jobs = len(population), len(space.jobs)
    flat = population + 1 + (jobs + 1) * np.arange(candidates)[:, None]
    filled = np.bincount(flat.ravel(), minlength=candidates * (jobs + 1)).reshape(candidates, jobs + 1)
    result: Ints = filled[:, 1:]
    return result
