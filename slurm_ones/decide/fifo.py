"""First in, first out, with or without backfill: what Slurm itself does with rigid jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.policy import Allocation, ClusterView, JobView, Schedule
from slurm_ones.decide.room import Room
from slurm_ones.decide.shapes import shape_of
from slurm_ones.decide.tables import requested_batch


@dataclass(frozen=True)
class Options:
    """What can be set."""

    backfill: bool = True


class Fifo:
    """Every job at the size and batch it asked for, in the order of submission; none is ever interrupted.

    Without backfill a job that does not fit makes all later ones wait. With it they may start where they fit, as long
    as no reservation for the first is kept: times are not known, so this is Slurm's backfill without time limits.
    """

    name = "fifo"

    options_type = Options

    def __init__(self, options: Options = Options()) -> None:
        self.options = options

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.decide.policy.Policy`."""
        allocations = {j.job_id: Allocation(j.shape, j.batch) for j in jobs if j.shape is not None}
        room = Room(cluster, [job for job in jobs if job.shape is not None])
        reasons = {}
        parked = set()
        blocked = False
        for job in sorted((j for j in jobs if j.shape is None), key=lambda j: (j.submitted, j.job_id)):
            shape = shape_of(cluster, job.requested)
            if not job.fixed and not blocked and shape is not None and room.take(shape):
                allocations[job.job_id] = Allocation(shape, requested_batch(job))
                reasons[job.job_id] = "its turn has come"
                continue
            blocked = blocked or not self.options.backfill
            reasons[job.job_id] = job.fixed or "it waits for the GPUs it asked for"
            if not job.fixed:
                parked.add(job.job_id)
        return Schedule(allocations, reasons, parked=frozenset(parked))
