"""What one decision searches over, as arrays: jobs that may change, their sizes, and the GPUs left for them.

J jobs, N nodes, U sizes. A size is a GPU count with its one shape; column 0 of every table is size 0, waiting. A
candidate has one gene per GPU, in node order; a gene holds a job's index, or J where the GPU is idle (ONES §3.1), and a
population is (K, GPUs). What counts of a candidate are the GPUs of each job, (K, J): nodes are alike for jobs that are
not placed yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ones_db.reasons import Reason
from slurm_ones.decide.build import free_after_fixed, mobile_jobs
from slurm_ones.decide.job_figures import within
from slurm_ones.schedule.ledger import held_gpus
from slurm_ones.schedule.policy import Allocation, Bools, ClusterView, Floats, Ints, JobView
from slurm_ones.schedule.shapes import shape_of
from slurm_ones.schedule.tables import Tables, build_tables

LARGEST = 1e15
"""Samples that no job exceeds."""
LEAST_PROGRESS = 1e-3
"""ρ is not believed to be smaller: a draw near 0 would decide a whole generation."""


@dataclass(frozen=True)
class Space:
    """The jobs that may change or start, first come first, and what each can be given."""

    cluster: ClusterView
    tables: Tables
    """Their sizes, batches (in proportion to the GPUs, ONES §3.3) and speeds."""
    fixed: Mapping[int, Reason]
    """Why each other job keeps its place or its wait, by job id."""
    waiting_fixed: int

    free: Ints
    """(N,) GPUs of each node that fixed jobs leave."""
    held: Ints
    """(E, 3) job, node and GPUs of what the jobs hold now."""
    slots: Ints
    """(GPUs,) job that holds each GPU now, in node order; J where it is idle."""
    ordinal: Ints
    """(GPUs,) how many GPUs that job holds before this one."""
    current: Ints
    """(J,) GPUs held now; 0 for a waiting job."""
    smallest: Ints
    """(J,) smallest size, the current one counted; 0 where no size of the job exists on this cluster."""
    below: Ints
    """(J, U) the job's largest size up to each size; 0 where it has none."""
    column: Ints
    """(GPUs + 1,) column of the largest size up to each count."""

    samples: Floats
    """(J,) samples used so far."""
    alpha: Floats
    beta: Floats
    """(J,) parameters of ρ."""

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.tables.jobs

    @property
    def running(self) -> Bools:
        """(J,)"""
        return self.current > 0

    def largest(self, bound: Ints) -> Ints:
        """Each job's largest size up to `bound` (…, J); 0 where there is none."""
        found: Ints = self.below[np.arange(len(self.jobs)), self.column[np.minimum(bound, len(self.column) - 1)]]
        return found

    def speed(self, counts: Ints) -> Floats:
        """(…, J) samples/s at sizes (…, J); 0 at size 0."""
        found: Floats = self.tables.speed[np.arange(len(self.jobs)), self.column[counts]]
        return found

    def allocation(self, j: int, gpus: int) -> Allocation:
        """What job j gets at a size: the current size keeps the current shape."""
        job = self.jobs[j]
        kept = job.shape if gpus == self.current[j] else None
        shape = kept or shape_of(self.cluster, gpus)
        assert shape is not None, f"job {job.job_id}: {gpus} GPUs have no shape here"
        return Allocation(shape, int(self.tables.batch[j, self.column[gpus]]))


def build(cluster: ClusterView, jobs: Sequence[JobView], fixed: Mapping[int, Reason]) -> Space:
    """The space of one decision; jobs named in `fixed` take no part."""
    mobile = mobile_jobs(jobs, fixed)
    tables = build_tables(cluster, mobile, "scaled")
    free, held = free_after_fixed(cluster, jobs, fixed), held_gpus(cluster, mobile)
    on_node = np.zeros((len(mobile), len(free)), dtype=np.int64)
    on_node[held[:, 0], held[:, 1]] = held[:, 2]
    slots = _slots(on_node, free)
    columns = np.arange(len(tables.sizes))
    best = np.maximum.accumulate(np.where(tables.allowed, columns, 0), axis=1)
    return Space(
        cluster=cluster,
        tables=tables,
        fixed=fixed,
        waiting_fixed=sum(job.job_id in fixed and job.shape is None for job in jobs),
        free=free,
        held=held,
        slots=slots,
        ordinal=_ordinal(slots, len(mobile)),
        current=on_node.sum(axis=1),
        smallest=tables.sizes[tables.allowed.argmax(axis=1)],  # column 0, size 0, where there is none
        below=tables.sizes[best],
        column=np.searchsorted(tables.sizes, np.arange(int(tables.sizes[-1]) + 1), side="right") - 1,
        samples=np.array([within(job.samples, 0.0, LARGEST) for job in mobile]),
        alpha=np.array([within(job.progress.alpha, 0.01, LARGEST) for job in mobile]),
        beta=np.array([within(job.progress.beta, 0.01, LARGEST) for job in mobile]),
    )


def _slots(on_node: Ints, free: Ints) -> Ints:
    """The job of each GPU: each node's in job order, idle ones last."""
    jobs, nodes = on_node.shape
    lengths = np.concatenate([on_node.T, (free - on_node.sum(axis=0))[:, None]], axis=1)
    return np.repeat(np.tile(np.arange(jobs + 1), nodes), lengths.ravel())


def _ordinal(slots: Ints, jobs: int) -> Ints:
    """How often each GPU's job comes before it."""
    order = np.argsort(slots, kind="stable")
    first = np.cumsum(np.bincount(slots, minlength=jobs + 1)) - np.bincount(slots, minlength=jobs + 1)
    ordinal = np.empty(len(slots), dtype=np.int64)
    ordinal[order] = np.arange(len(slots)) - first[slots[order]]
    return ordinal


def genes(space: Space, counts: Ints) -> Ints:
    """(K, GPUs) from (K, J), with as few occupied GPUs changed as possible: a job keeps those it holds now as far as it
    keeps its count, and its others lie together on those that are left."""
    candidates, jobs = counts.shape
    bound = np.concatenate([counts, np.zeros((candidates, 1), dtype=np.int64)], axis=1)
    kept = space.ordinal < bound[:, space.slots]
    more = np.maximum(counts - space.current, 0)
    idle = len(space.slots) - counts.sum(axis=1, keepdims=True)
    values = np.tile(np.arange(jobs + 1), candidates)
    result = np.where(kept, space.slots, jobs)
    result[~kept] = np.repeat(values, np.concatenate([more, idle], axis=1).ravel())
    return result


def gpus_of_jobs(space: Space, population: Ints) -> Ints:
    """(K, J) GPUs that each candidate gives each job."""
    candidates, wide = len(population), len(space.jobs) + 1
    flat = population + wide * np.arange(candidates)[:, None]
    result: Ints = np.bincount(flat.ravel(), minlength=candidates * wide).reshape(candidates, wide)[:, :-1]
    return result


def sample_progress(space: Space, rng: np.random.Generator) -> Floats:
    """(J,) one draw of ρ for each job."""
    return np.clip(np.nan_to_num(rng.beta(space.alpha, space.beta), nan=0.5), LEAST_PROGRESS, 1.0)


def remaining_utilisation(space: Space, counts: Ints, rho: Floats) -> Floats:
    """(K,) GPU-seconds to come of each candidate (K, J): Σ_j n_j · Y_j · (1/ρ_j − 1) / X_j(n_j).

    Y are the samples used, X the samples/s. A job left out costs nothing, nor does one that has not begun: the score
    prefers empty schedules, and only filling hides that.
    """
    speed = space.tables.speed
    per_sample = np.divide(space.tables.sizes, speed, out=np.zeros_like(speed), where=speed > 0)
    work = space.samples * (1.0 / rho - 1.0)
    result: Floats = (work * per_sample[np.arange(len(work)), space.column[counts]]).sum(axis=1)
    return result
