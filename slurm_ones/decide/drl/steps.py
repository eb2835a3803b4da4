"""The steps by which each job may grow, and the figures that the network weighs of each.

J jobs, S steps, F features. A job that has taken s steps has the GPUs of step s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.schedule.policy import ClusterView, Floats, Ints, JobView
from slurm_ones.schedule.tables import Tables, build_tables

FEATURES = 21
ASKED_LEFT = 11
"""Of them the one that says how long the job would still take at the size asked for."""
CONTEXT = 4
"""Figures that the void action is weighed by."""
LOG_SECONDS = 12.0
"""ln of a hundred days and a half: a time becomes ln(1 + t) over this."""
LOG_SIZE = 6.0
"""A ratio of GPUs becomes its log2 over this."""


@dataclass(frozen=True)
class Steps:
    """What can be given."""

    tables: Tables
    sizes: Ints
    """(J, S) GPUs after each step; 0 where the job has no further one."""
    extra: Ints
    """(J, S) of them those that the step adds."""
    features: Floats
    """(J, S, F), each about within -1 and 1, finite whatever the jobs say."""
    load: float
    """Jobs per GPU, as a ratio above."""

    def context(self, free: float) -> Floats:
        """(C,) inputs of the void action when this share of the GPUs is left."""
        return np.array([1.0, free, free * free, self.load])


def build_steps(cluster: ClusterView, jobs: Sequence[JobView], gpus: int, now: float) -> Steps:
    """Steps of the given jobs, which are to share `gpus` GPUs."""
    tables = build_tables(cluster, [_stepwise(cluster, job) for job in jobs], "requested")
    requested = np.array([max(job.requested, 1) for job in jobs], dtype=np.int64)
    column = _columns(tables)
    sizes = tables.sizes[column]
    before = np.concatenate([np.zeros((len(jobs), 1), dtype=np.int64), sizes[:, :-1]], axis=1)
    extra = np.where(sizes > 0, sizes - before, 0)
    load = float(_ratio(np.array(float(len(jobs))), np.array(float(max(gpus, 1)))))
    features = _features(tables, column, before, requested, gpus, load, now)
    return Steps(tables, sizes, extra, features * (sizes > 0)[:, :, None], load)


def _stepwise(cluster: ClusterView, job: JobView) -> JobView:
    """The job with those sizes alone that steps lead to: the largest up to each power of two, the one it asked for and
    the one it has."""
    sizes = job.limits.gpus[: bisect_right(job.limits.gpus, cluster.gpus)]
    steps = {job.requested, job.shape.gpus if job.shape is not None else 0} & set(sizes)
    for power in range(cluster.gpus.bit_length() + 1):
        up_to = bisect_right(sizes, 2**power)
        steps.update(sizes[up_to - 1 : up_to])
    return replace(job, limits=replace(job.limits, gpus=tuple(sorted(steps))))


def _columns(tables: Tables) -> Ints:
    """(J, S) columns of the tables that each job can have, ascending; 0 beyond the last."""
    most = int(tables.allowed.sum(axis=1).max(initial=0))
    order = np.argsort(~tables.allowed, axis=1, kind="stable")[:, :most]
    found: Ints = np.where(np.take_along_axis(tables.allowed, order, axis=1), order, 0)
    return found


def _features(
    tables: Tables, column: Ints, before: Ints, requested: Ints, gpus: int, load: float, now: float
) -> Floats:
    rows = np.arange(len(tables.jobs))[:, None]
    size, cluster = tables.sizes[column].astype(np.float64), float(max(gpus, 1))
    speed = np.maximum(tables.speed[rows, column], 1e-9)
    current = tables.sizes[tables.current].astype(np.float64)[:, None]
    runs = current > 0

    # Speed-ups: over the first step, per GPU, of the whole and of what this step adds.
    slower = np.concatenate([np.zeros_like(speed[:, :1]), speed[:, :-1]], axis=1)
    single = speed[:, :1] / np.maximum(size[:, :1], 1.0)
    useful = _finite(speed / np.maximum(size, 1.0) / single, 2.0)
    marginal = _finite((speed - slower) / np.maximum(size - before, 1.0) / single, 2.0)

    jobs = tables.jobs
    samples = np.array([max(j.dataset, 1) * _finite(np.float64(j.progress.beta), 1e9) for j in jobs])[:, None]
    left = samples / np.maximum(tables.goodput[rows, column], 1e-9)
    asked = np.abs(size - requested[:, None]).argmin(axis=1) if size.shape[1] else np.zeros(len(jobs), dtype=np.int64)
    asked_left = left[rows[:, 0], asked][:, None] if size.shape[1] else samples
    age = np.array([now - j.submitted for j in jobs])[:, None]
    served = np.array([j.running_s for j in jobs])[:, None]
    done = np.array([j.progress.mean if j.progress.alpha + j.progress.beta > 0 else 0.0 for j in jobs])[:, None]

    share = cluster / max(len(jobs), 1)
    demand = _ratio(np.minimum(requested, cluster).sum()[None], np.array([cluster]))
    of_each_step = [
        np.log2(np.maximum(size, 1.0)) / LOG_SIZE,
        size / cluster,
        _ratio(size, requested[:, None]),
        _ratio(size, np.full_like(size, share)),
        runs & (size == current),
        np.where(runs & (size > current), _ratio(size, np.maximum(current, 1.0)), 0.0),
        np.where(runs & (size < current), _ratio(size, np.maximum(current, 1.0)), 0.0),
        before == 0,
        useful,
        marginal,
        _seconds(left),
        _seconds(asked_left),
        _rank(asked_left),
        _rank(asked_left * np.minimum(requested, cluster)[:, None]),
        runs,
        _seconds(age),
        _rank(age),
        _seconds(served),
        _finite(done, 1.0),
        load,
        demand,
    ]
    wide = [np.broadcast_to(np.asarray(value, dtype=np.float64), size.shape) for value in of_each_step]
    return np.stack(wide, axis=2)


def _finite(value: Floats, most: float) -> Floats:
    found: Floats = np.clip(np.nan_to_num(value, nan=0.0, posinf=most, neginf=0.0), 0.0, most)
    return found


def _seconds(value: Floats) -> Floats:
    found: Floats = np.log1p(_finite(value, 1e9)) / LOG_SECONDS
    return found


def _ratio(value: Floats | Ints, other: Floats | Ints) -> Floats:
    found: Floats = np.clip(np.log2(np.maximum(value, 1e-3) / np.maximum(other, 1e-3)) / LOG_SIZE, -2.0, 2.0)
    return found


def _rank(value: Floats) -> Floats:
    """Place of each job in ascending order, from 0 to 1."""
    flat = np.nan_to_num(value[:, 0], nan=0.0, posinf=1e300, neginf=-1e300)
    place = np.empty(len(flat))
    place[np.argsort(flat, kind="stable")] = np.arange(len(flat))
    return place[:, None] / max(len(flat) - 1, 1)
