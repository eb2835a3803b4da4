"""Tiresias: discretised two-dimensional least attained service (Gu et al., NSDI 2019, §3.2-3.3).

Nothing is known of how long a job will run. A job's attained service is its GPUs × the seconds it has run; a job
that has attained a threshold goes down one queue. Higher queues are served first, each in order of submission, and
running jobs of lower queues are pre-empted. Each job runs at the size and batch it asked for; those that do not fit
are passed over.

Tuned as in Pollux's study (OSDI 2021, §5 and its public simulator): two queues, the threshold 16 GPU-hours, and no
promotion of starved jobs (PROMOTEKNOB off). A queue's order is that of submission there too, but jobs that went down
follow in the order in which they did; here no such memory is kept. Not taken: placement by a profile of the model,
since Slurm places jobs. A size that was changed under another policy counts at what the job asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.allocate import serve
from slurm_ones.schedule.policy import ClusterView, JobView, Schedule


@dataclass(frozen=True)
class Options:
    """What can be set."""

    thresholds: tuple[float, ...] = (16 * 3600.0,)
    """GPU-seconds of service at which a job goes down a queue, ascending; one queue more than thresholds."""

    def __post_init__(self) -> None:
        found = self.thresholds
        if any(not math.isfinite(t) or t <= 0 for t in found) or list(found) != sorted(set(found)):
            raise ValueError(f"thresholds must be positive and ascending, not {found}")


class Tiresias:
    """Discretised 2D-LAS."""

    name = "tiresias"

    options_type = Options

    def __init__(self, options: Options = Options()) -> None:
        self.options = options

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        order = sorted(jobs, key=lambda job: (self.queue(job), job.submitted, job.job_id))
        return serve(cluster, jobs, order, "jobs that have had fewest GPU-seconds")

    def queue(self, job: JobView) -> int:
        """The queue that the job is in, 0 the first served."""
        service = job.running_s * max(job.requested, 1)
        return bisect_right(self.options.thresholds, service) if math.isfinite(service) else 0
