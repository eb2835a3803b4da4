"""Figures of a study, their confidence intervals, and the comparison of a policy with the first one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.outcome import JobOutcome, Outcome

UNFAIR = 1.05
"""Finish-time fairness ρ above which a job counts as unfairly treated (Themis, NSDI 2020, §3)."""


@dataclass(frozen=True)
class Metric:
    """One figure of a study: its JSON key, title, unit, meaning and tables."""

    key: str
    title: str
    unit: str
    """Unit: `s`, `ms`, `hours`, `share`, or "" for none."""
    meaning: str
    tables: str = "policies"
    """Names of the tables that show this metric: `policies` compares policies, `bound` compares with a lower bound
    (`--bound`), `shares` compares shares of elastic jobs."""


METRICS: tuple[Metric, ...] = (
    Metric(
        "elastic_jobs",
        "elastic jobs",
        "share",
        "jobs drawn to be elastic that are long enough and have curves",
        "shares",
    ),
    Metric(
        "elastic_hours", "their GPU hours", "share", "share of the recorded GPU hours that elastic jobs took", "shares"
    ),
    Metric("mean_jct_s", "mean JCT", "s", "job completion time, submission to end", "policies shares"),
    Metric("median_jct_s", "median JCT", "s", "the job in the middle", "policies shares"),
    Metric("p90_jct_s", "p90 JCT", "s", "nine jobs in ten are done sooner"),
    Metric("p99_jct_s", "p99 JCT", "s", "99 jobs in a hundred are done sooner", "policies shares"),
    Metric("longest_tenth_jct_s", "longest tenth", "s", "mean JCT of the tenth of the jobs with the most work"),
    Metric("makespan_s", "makespan", "s", "first submission to last end"),
    Metric("mean_queueing_s", "queueing", "s", "mean time without GPUs, requeues included"),
    Metric("mean_wait_s", "mean wait", "s", "time without GPUs, requeues included", "shares"),
    Metric("median_wait_s", "median wait", "s", "of the job in the middle", "shares"),
    Metric("p99_wait_s", "p99 wait", "s", "99 jobs in a hundred wait for less", "shares"),
    Metric("mean_running_s", "running", "s", "mean time holding GPUs"),
    Metric("gpu_use", "GPU use", "share", "GPU-seconds held, divided by those of the cluster until the last end"),
    Metric("gpu_hours", "GPU hours", "hours", "GPU hours that the counted jobs held", "shares"),
    Metric("gpu_seconds_lost", "GPU-s lost", "s", "GPU-seconds held without training: starts, stops, resizes"),
    Metric("resizes_per_job", "resizes a job", "", "changes of its GPUs after the first start"),
    Metric("resizes", "resizes an elastic job", "", "starts after the first, each by a requeue", "shares"),
    Metric("rigid_jct", "rigid jobs, to 0 %", "", "mean JCT of the rigid jobs, divided by theirs at 0 %", "shares"),
    Metric("elastic_jct", "elastic jobs, to 0 %", "", "the same for the elastic jobs", "shares"),
    Metric("missed_accuracy", "missed accuracy", "share", "jobs that ended below their target accuracy, or never"),
    Metric(
        "worst_unfairness", "worst unfairness", "", "largest JCT divided by the time on a fair share of the cluster"
    ),
    Metric("unfair_share", "unfair", "share", f"jobs for which this ratio is above {UNFAIR}"),
    Metric("deadlines_met", "deadlines met", "share", "share of the jobs with a deadline"),
    Metric("deadlines_promised", "promised", "share", "share of the deadlines that were promised"),
    Metric("promises_kept", "promises kept", "share", "share of the promised deadlines that were met"),
    Metric("others_mean_jct_s", "mean JCT, others", "s", "jobs without a deadline, if others have one"),
    Metric("decision_s", "decision", "ms", "mean real time of one decision"),
    Metric("decision_p99_s", "p99 decision", "ms", "99th percentile of the real time of a decision"),
    Metric("unfinished", "unfinished", "", "jobs that had not ended; their JCT counts up to the simulation's end"),
    Metric("unfinished", "unfinished", "", "jobs that had not ended when the simulation was stopped", "shares"),
    Metric("bound_s", "bound", "s", "mean JCT that no schedule can beat (--bound)", "bound"),
    Metric("over_bound", "mean JCT over the bound", "", "mean JCT divided by the bound", "bound"),
    Metric("alone_s", "of it: alone", "s", "mean time of a job with the cluster to itself", "bound"),
    Metric(
        "sharing_s", "of it: sharing", "s", "cost of sharing, if GPUs can be divided and changes cost nothing", "bound"
    ),
    Metric("pauses_s", "of it: pauses", "s", "GPUs held without training, and waits for the first decision", "bound"),
    Metric(
        "rest_s", "of it: the rest", "s", "whole GPUs, placement, changes not worth their cost, uncertainty", "bound"
    ),
)
"""All metrics, in the order of the tables' rows."""


def metrics_of(*tables: str) -> list[Metric]:
    """Return the metrics of the named tables."""
    return [metric for metric in METRICS if set(tables) & set(metric.tables.split())]


def end_of(outcome: Outcome) -> float:
    """Return the time of the last job's end. If some jobs did not end, return the end of the simulation."""
    ends = [job.ended for job in outcome.jobs if job.ended is not None]
    if len(ends) < len(outcome.jobs):
        ends += [segment.end for segment in outcome.segments] + [at for at, _ in outcome.goodput]
        ends += [job.submitted for job in outcome.jobs]
    return max(ends, default=0.0)


def completion_times(outcome: Outcome) -> Floats:
    """Return the JCT of each job in seconds. For a job that did not end, it is the time from submission to the end of
    the simulation."""
    last = end_of(outcome)
    return np.array([(last if job.ended is None else job.ended) - job.submitted for job in outcome.jobs])


def unfairness(job: JobOutcome, jct_s: float) -> float:
    """Return the job's finish-time fairness ρ; NaN if its fair time is unknown.

    ρ is the job's JCT divided by the time that it would take on its fair share of the cluster.
    """
    return jct_s / job.fair_s if math.isfinite(job.fair_s) and job.fair_s > 0 else math.nan


def figures(outcome: Outcome, work: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an outcome by key. `work` is the amount of work of each job, in any unit; it decides which
    jobs are the longest."""
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
        **_deadlines(jobs, jct),
        "decision_s": float(decisions.mean()),
        "decision_p99_s": float(np.percentile(decisions, 99)),
        "unfinished": float(sum(job.ended is None for job in jobs)),
    }


def _deadlines(jobs: Sequence[JobOutcome], jct: Floats) -> dict[str, float]:
    """Return the metrics about deadlines by key; empty if no job has a deadline."""
    due = [job for job in jobs if job.deadline is not None]
    if not due:
        return {}
    promised = [job for job in due if job.promised]
    others = [float(t) for job, t in zip(jobs, jct, strict=True) if job.deadline is None]
    return {
        "deadlines_met": _share(bool(job.in_time) for job in due),
        "deadlines_promised": _share(bool(job.promised) for job in due),
        "promises_kept": _share(bool(job.in_time) for job in promised),
        "others_mean_jct_s": float(np.mean(others)) if others else math.nan,
    }


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def share_figures(
    outcome: Outcome, recorded_hours: Mapping[str, float], rigid: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a simulated trace by key.

    `recorded_hours` are the recorded GPU-hours of each job. `rigid` is each job's JCT, in seconds, in the simulation
    without elastic jobs.
    """
    jobs = [job for job in outcome.jobs if job.ended is not None]
    elastic = [job for job in jobs if job.elastic]
    jct = np.array([job.jct_s for job in jobs])

    def against(some: Iterable[JobOutcome]) -> float:
        both = [job for job in some if job.name in rigid]
        return sum(job.jct_s for job in both) / sum(rigid[job.name] for job in both) if both else math.nan

    return {
        **spread(jct, jct - [job.running_s for job in jobs]),
        "elastic_jobs": len(elastic) / len(recorded_hours),
        "elastic_hours": sum(recorded_hours[job.name] for job in elastic) / sum(recorded_hours.values()),
        "gpu_hours": sum(job.gpu_s for job in jobs) / 3600.0,
        "resizes": sum(job.resizes for job in elastic) / len(elastic) if elastic else math.nan,
        "rigid_jct": against(job for job in jobs if not job.elastic),
        "elastic_jct": against(sorted(elastic, key=lambda job: job.name)),
        "unfinished": float(len(recorded_hours) - len(jobs)),
    }


def spread(jct: Floats, waits: Floats) -> dict[str, float]:
    """Return mean, median and 99th percentile of JCTs and of waits, in seconds; NaN without jobs."""
    found = {}
    for key, times in (("jct_s", jct), ("wait_s", np.maximum(waits, 0.0))):
        some = times if len(times) else np.array([math.nan])
        found[f"mean_{key}"], found[f"median_{key}"] = float(some.mean()), float(np.median(some))
        found[f"p99_{key}"] = float(np.percentile(some, 99))
    return found


CONFIDENCE = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """Mean of a metric over seeds, and the bounds of its 95 % confidence interval: NaN with one seed."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of a policy with the first policy on the same jobs and seeds."""

    difference: Estimate
    """Mean JCT of the policy minus the first policy's, in seconds."""
    ratio: Estimate
    """Mean JCT of the policy divided by the first policy's."""
    p_value: float
    """P-value of the two-sided Wilcoxon signed-rank test on paired JCTs (as in ONES, SC21, §4); NaN if all pairs are
    equal."""
    sooner: float
    """Share of the jobs that end sooner than with the first policy."""


def estimate(values: Sequence[float] | Floats) -> Estimate:
    """Return the mean of the values, with a confidence interval by percentile bootstrap."""
    found = np.array([value for value in values if math.isfinite(value)])
    mean = float(found.mean()) if len(found) else math.nan
    if len(found) < 2:
        return Estimate(mean, math.nan, math.nan)
    if np.ptp(found) == 0:
        return Estimate(mean, mean, mean)
    random = np.random.default_rng(0)
    drawn = stats.bootstrap(
        (found,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=random
    )
    low, high = drawn.confidence_interval
    return Estimate(mean, float(low), float(high))


def compare(jct: Sequence[Floats], first: Sequence[Floats]) -> Comparison:
    """Compare a policy's JCTs with those of the first policy. Each argument has an array of JCTs for each seed; both
    have the same jobs in the same order."""
    means = np.array([float(seed.mean()) for seed in jct])
    others = np.array([float(seed.mean()) for seed in first])
    paired = np.concatenate(list(jct)) - np.concatenate(list(first))
    p_value = float(stats.wilcoxon(paired).pvalue) if len(paired) > 1 and paired.any() else math.nan
    return Comparison(estimate(means - others), estimate(means / others), p_value, float((paired < 0).mean()))


@dataclass(frozen=True)
class Bound:
    """Lower bound on the mean JCT, and two mean JCTs for comparison, in seconds."""

    mean_jct_s: float
    """Mean JCT that no schedule can beat."""
    fluid_mean_jct_s: float
    """Mean JCT of the fluid schedule, an ideal form of `ones`: fractions of GPUs, changes without cost, true curves."""
    alone_mean_jct_s: float
    """Mean JCT if each job had the cluster to itself."""


def bounds_json(bounds: Mapping[int, Bound]) -> dict[str, Any]:
    """Return the bounds as JSON: those of each seed under `bounds`, their means under `bound`."""
    each = {seed: asdict(bound) for seed, bound in bounds.items()}
    mean = {key: float(np.mean([bound[key] for bound in each.values()])) for key in asdict(next(iter(bounds.values())))}
    return {"bound": mean, "bounds": [{"seed": seed, **bound} for seed, bound in each.items()]}


def against_bound(outcome: Outcome, bound: Bound, interval_s: float) -> dict[str, float]:
    """Return the mean JCT divided by the bound, and the four parts of the mean JCT, in seconds per job.

    - `alone_s`: the time that a job takes with the cluster to itself.
    - `sharing_s`: the cost of sharing the cluster, in the fluid schedule.
    - `pauses_s`: time with GPUs but without training, and the wait for the first decision.
    - `rest_s`: all other causes. GPUs cannot be divided, placement matters, some changes are not worth their cost, and
      policies know and decide imperfectly.
    """
    mean = float(completion_times(outcome).mean())
    paused = [job.lost_gpu_s * job.running_s / job.gpu_s if job.gpu_s > 0 else 0.0 for job in outcome.jobs]
    until_tick = [math.ceil(job.submitted / interval_s) * interval_s - job.submitted for job in outcome.jobs]
    pauses = float(np.mean(np.add(paused, until_tick)))
    sharing = bound.fluid_mean_jct_s - bound.alone_mean_jct_s
    return {
        "bound_s": bound.mean_jct_s,
        "over_bound": mean / bound.mean_jct_s,
        "alone_s": bound.alone_mean_jct_s,
        "sharing_s": sharing,
        "pauses_s": pauses,
        "rest_s": mean - bound.fluid_mean_jct_s - pauses,
    }
