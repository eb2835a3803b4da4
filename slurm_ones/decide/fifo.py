"""First in, first out, with or without backfill: what Slurm itself does with rigid jobs.

Backfill is Slurm's without time limits (`sched/backfill` where every job may run for ever): a later job starts
wherever it fits, and nothing is reserved for the first in the queue. That keeps GPUs busy and lets large jobs wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.build import fits_nowhere
from slurm_ones.reasons import reason
from slurm_ones.schedule.fixed import pinned
from slurm_ones.schedule.placement import Room
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, Schedule
from slurm_ones.schedule.tables import asked


@dataclass(frozen=True)
class Options:
    """What can be set."""

    backfill: bool = True
    """Later jobs may start while an earlier one does not fit."""


class Fifo:
    """Every job at the size and batch it asked for, in the order of submission; none is ever interrupted."""

    name = "fifo"

    options_type = Options

    def __init__(self, options: Options = Options()) -> None:
        self.options = options

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        stays = pinned(cluster, jobs)
        allocations, reasons, parked = {}, {}, set()
        for job in jobs:
            if job.shape is not None:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
                reasons[job.job_id] = stays.get(job.job_id) or reason("never_interrupted")
        room = Room(cluster, [job for job in jobs if job.shape is not None])
        blocked = False
        for job in sorted((j for j in jobs if j.shape is None), key=lambda j: (j.submitted, j.job_id)):
            if job.job_id in stays:
                reasons[job.job_id] = stays[job.job_id]
                continue
            wanted = asked(cluster, job)
            if wanted is not None and not blocked and room.take(wanted.shape):
                allocations[job.job_id] = wanted
                reasons[job.job_id] = reason("turn", first="jobs submitted first")
                continue
            parked.add(job.job_id)
            if wanted is None:
                reasons[job.job_id] = fits_nowhere(job)
            else:
                reasons[job.job_id] = reason("no_room", gpus=wanted.shape.gpus)
                blocked = not self.options.backfill
        return Schedule(allocations, reasons, parked=frozenset(parked))
