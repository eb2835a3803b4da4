"""The figures by which policies are compared, of one outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slurm_ones.schedule.policy import Floats
from slurm_ones.simulate.study.result import JobOutcome, Outcome

UNFAIR = 1.05
"""Finish-time fairness beyond which a job was treated unfairly (Themis, NSDI 2020, §3)."""


@dataclass(frozen=True)
class Metric:
    """One figure, and how it is called in JSON and in tables."""

    key: str
    title: str
    unit: str
    """`s`, `share`, `ms` or nothing."""
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("mean_jct_s", "mean JCT", "s", "job completion time, submission to end"),
    Metric("median_jct_s", "median JCT", "s", "the job in the middle"),
    Metric("p90_jct_s", "p90 JCT", "s", "nine jobs in ten are done sooner"),
    Metric("p99_jct_s", "p99 JCT", "s", "99 jobs in a hundred are done sooner"),
    Metric("longest_tenth_jct_s", "longest tenth", "s", "mean JCT of the tenth of the jobs that have most to do"),
    Metric("makespan_s", "makespan", "s", "first submission to last end"),
    Metric("mean_queueing_s", "queueing", "s", "mean time without GPUs, between resizes too"),
    Metric("mean_running_s", "running", "s", "mean time holding GPUs"),
    Metric("gpu_use", "GPU use", "share", "GPU-seconds held over those there were until the last end"),
    Metric("gpu_seconds_lost", "GPU-s lost", "s", "GPU-seconds held without training: starts, stops, resizes"),
    Metric("resizes_per_job", "resizes a job", "", "interruptions after its first start"),
    Metric(
        "missed_accuracy", "missed accuracy", "share", "jobs that ended short of their target accuracy, or not at all"
    ),
    Metric("worst_unfairness", "worst unfairness", "", "largest JCT over the time alone on its share of the cluster"),
    Metric("unfair_share", "unfair", "share", f"jobs for which that is above {UNFAIR}"),
    Metric("decision_s", "decision", "ms", "mean real time of one decision"),
    Metric("decision_p99_s", "p99 decision", "ms", "its 99th percentile"),
    Metric("unfinished", "unfinished", "", "jobs that had not ended; their JCT counts up to when it was given up"),
)
"""All figures, in the order in which they are shown."""


def end_of(outcome: Outcome) -> float:
    """When the last job ended, or when the simulation was given up."""
    ends = [job.ended for job in outcome.jobs if job.ended is not None]
    if len(ends) < len(outcome.jobs):
        ends += [segment.end for segment in outcome.segments] + [at for at, _ in outcome.goodput]
        ends += [job.submitted for job in outcome.jobs]
    return max(ends, default=0.0)


def completion_times(outcome: Outcome) -> Floats:
    """(J,) JCT of each job in seconds. One that has not ended counts to when the simulation was given up: at least
    that long."""
    last = end_of(outcome)
    return np.array([(last if job.ended is None else job.ended) - job.submitted for job in outcome.jobs])


def unfairness(job: JobOutcome, jct_s: float) -> float:
    """Finish-time fairness ρ: JCT over the time alone on its share of the cluster; NaN where that is unknown."""
    return jct_s / job.fair_s if math.isfinite(job.fair_s) and job.fair_s > 0 else math.nan


def figures(outcome: Outcome, work: Mapping[str, float]) -> dict[str, float]:
    """Each metric by its key. `work` is how much each job has to do, by name, in any unit."""
    jobs, jct = outcome.jobs, completion_times(outcome)
    begin, end = min(job.submitted for job in jobs), end_of(outcome)
    held = sum(job.gpu_s for job in jobs)
    longest = np.argsort([-work[job.name] for job in jobs], kind="stable")[: max(1, round(len(jobs) / 10))]
    rho = np.array([unfairness(job, t) for job, t in zip(jobs, jct, strict=True)])
    rho = rho[np.isfinite(rho)]
    decisions = np.array(outcome.decision_s or (math.nan,))
    running = np.array([job.running_s for job in jobs])
    return {
        "mean_jct_s": float(jct.mean()),
        "median_jct_s": float(np.median(jct)),
        "p90_jct_s": float(np.percentile(jct, 90)),
        "p99_jct_s": float(np.percentile(jct, 99)),
        "longest_tenth_jct_s": float(jct[longest].mean()),
        "makespan_s": end - begin,
        "mean_queueing_s": float((jct - running).mean()),
        "mean_running_s": float(running.mean()),
        "gpu_use": held / (outcome.gpus * (end - begin)) if end > begin else math.nan,
        "gpu_seconds_lost": sum(job.lost_gpu_s for job in jobs),
        "resizes_per_job": sum(job.resizes for job in jobs) / len(jobs),
        "missed_accuracy": sum(job.missed for job in jobs) / len(jobs),
        "worst_unfairness": float(rho.max()) if len(rho) else math.nan,
        "unfair_share": float((rho > UNFAIR).mean()) if len(rho) else math.nan,
        "decision_s": float(decisions.mean()),
        "decision_p99_s": float(np.percentile(decisions, 99)),
        "unfinished": float(sum(job.ended is None for job in jobs)),
    }
