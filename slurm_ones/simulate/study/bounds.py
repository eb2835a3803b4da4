"""How far each policy is from the bound, and on what its jobs' time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slurm_ones.simulate.engines.outcome import JobOutcome, Outcome
from slurm_ones.simulate.study.figures import completion_times


@dataclass(frozen=True)
class Bound:
    """Mean JCTs in seconds."""

    mean_jct_s: float
    """That no schedule can beat."""
    fluid_mean_jct_s: float
    """Of the fluid schedule: the prices of `ones` without costs, fractions or lack of knowledge of the jobs."""
    alone_mean_jct_s: float
    """Of each job alone on the cluster from its submission."""


def mean_bound(bounds: Mapping[int, Bound]) -> Bound:
    """The mean over seeds."""
    each = np.array([list(asdict(bound).values()) for bound in bounds.values()])
    return Bound(*each.mean(axis=0).tolist())


def as_json(bounds: Mapping[int, Bound]) -> dict[str, Any]:
    """`bound` has the means over seeds, `bounds` those of each seed."""
    each = [{"seed": seed, **asdict(bound)} for seed, bound in bounds.items()]
    return {"bound": asdict(mean_bound(bounds)), "bounds": each}


def against_bound(outcome: Outcome, bound: Bound, interval_s: float) -> dict[str, float]:
    """Mean JCT over the bound, and the parts that add up to it, in seconds a job.

    A job alone on the cluster; what sharing costs in the fluid schedule besides; the time for which jobs hold GPUs
    without training, and wait for the next decision when they come; and the rest: whole GPUs, placement, changes that
    were not worth their cost, and what the policy does not know or does not do well.
    """
    mean = float(completion_times(outcome).mean())
    pauses = float(np.mean([_paused_s(job) + _until_tick_s(job, interval_s) for job in outcome.jobs]))
    sharing = bound.fluid_mean_jct_s - bound.alone_mean_jct_s
    return {
        "bound_s": bound.mean_jct_s,
        "over_bound": mean / bound.mean_jct_s,
        "alone_s": bound.alone_mean_jct_s,
        "sharing_s": sharing,
        "pauses_s": pauses,
        "rest_s": mean - bound.fluid_mean_jct_s - pauses,
    }


def _paused_s(job: JobOutcome) -> float:
    """Seconds of its GPUs that were lost, over those that it held on average."""
    return job.lost_gpu_s * job.running_s / job.gpu_s if job.gpu_s > 0 else 0.0


def _until_tick_s(job: JobOutcome, interval_s: float) -> float:
    return math.ceil(job.submitted / interval_s) * interval_s - job.submitted
