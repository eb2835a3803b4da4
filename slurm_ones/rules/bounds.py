"""A policy's schedule within the limits that a site has set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_ones.rules.caps import Cap, capped, narrowed
from slurm_ones.rules.reclaim import make_room, tell
from slurm_ones.rules.rigid import Waiting
from slurm_ones.schedule.policy import ClusterView, JobView, Policy, Schedule


@dataclass(frozen=True)
class Bounds:
    """What a policy must decide within, besides the limits of the jobs themselves."""

    waiting: Waiting = field(default_factory=Waiting)
    caps: Sequence[Cap] = ()


def decide_within(
    policy: Policy,
    cluster: ClusterView,
    jobs: Sequence[JobView],
    bounds: Bounds,
    now: float,
    rng: np.random.Generator,
) -> Schedule:
    """The policy's schedule for what is left once rigid jobs have room, with caps kept; its own where nothing binds.

    Pure like the policy. `Schedule.refused` says which jobs a limit kept from something.
    """
    yielded = make_room(cluster, jobs, bounds.waiting)
    views = narrowed(yielded.jobs, bounds.caps)
    schedule = tell(policy.decide(yielded.cluster, views, now, rng), yielded)
    schedule = capped(yielded.cluster, views, schedule, bounds.caps)
    limited = {job.job_id: job.fixed for job in jobs if job.limited and job.fixed}
    return replace(schedule, refused={**schedule.refused, **limited}) if limited else schedule
