"""Presentation of a study's results: tables, JSON, CSV and a page; for a trace also sentences."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ones_db import TimelineRow
from ones_db.shape import Shape
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.study.figures import (
    Bound,
    Comparison,
    Estimate,
    Metric,
    bounds_json,
    completion_times,
    metrics_of,
)
from slurm_ones.simulate.study.plan import StudyPlan
from slurm_ones.simulate.study.runs import NO_BOUNDS, ContenderSummary, StudyRun
from slurm_ones.simulate.study.stretch import PATIENCE, RESIZE_S, RULE, SLACK_S, Curves, Stretch, picked, recorded
from slurm_ones.simulate.training.application import Requeue
from slurm_ones.simulate.workloads.trace import Trace
from slurm_ones.text import seconds

UNITS = {"s": ", s", "ms": ", ms", "share": ", %"}
"""Text that is added to a row's title for each unit, in a comparison of policies."""


def value(found: float, unit: str) -> str:
    """Format a figure without its unit, for a comparison of policies, whose row titles have the unit."""
    if not math.isfinite(found):
        return "–"
    if unit == "s":
        return f"{found:,.0f}"
    if unit == "ms":
        return f"{found * 1e3:.3g}"
    return f"{found * 100:.1f}" if unit == "share" else f"{found:.2f}"


def value_and_unit(found: float, unit: str) -> str:
    """Format a figure with its unit, for a study of elasticity."""
    if not math.isfinite(found):
        return "–"
    if unit == "s":
        return seconds(found)
    if unit == "hours":
        return f"{found:,.1f}"
    return f"{100 * found:.0f} %" if unit == "share" else f"{found:.2f}"


def probability(p: float) -> str:
    """Format a p-value."""
    return "–" if math.isnan(p) else f"{p:.1e}" if p < 0.001 else f"{p:.3f}"


@dataclass(frozen=True)
class TableRow:
    """Row of a study's table: a title, and a figure for each contender."""

    title: str
    cells: Sequence[tuple[str, str]]
    """(mean, interval) of each contender, as texts. The interval is empty if it is unknown or has no width."""
    recorded: str = ""
    """The figure as recorded in the trace, as text."""


def rows(
    plan: StudyPlan, summaries: Sequence[ContenderSummary], recorded: Mapping[str, float] | None = None
) -> list[TableRow]:
    """Return a row for each metric that any contender has, then rows that compare each policy with the first."""
    shares = plan.source.table == "shares"
    found = []
    for metric in metrics_of(plan.source.table, "bound"):
        cells = [_cell(summary, metric, shares) for summary in summaries]
        means = {mean for mean, _ in cells}
        if means - {"–"} and not (metric.key == "unfinished" and means <= {"0.00", "–"}):
            was = value_and_unit((recorded or {}).get(metric.key, math.nan), metric.unit)
            found.append(TableRow(metric.title + ("" if shares else UNITS.get(metric.unit, "")), cells, was))
    if shares or len(summaries) < 2:
        return found
    first, pairs = summaries[0].label, [summary.against_first for summary in summaries]

    def row(title: str, cell: Callable[[Comparison], tuple[str, str]]) -> TableRow:
        return TableRow(title, [("–", "") if pair is None else cell(pair) for pair in pairs])

    return [
        *found,
        row(f"mean JCT less {first}'s, s", lambda pair: estimated(pair.difference, "s")),
        row(f"mean JCT over {first}'s", lambda pair: estimated(pair.ratio, "")),
        row(f"jobs sooner than with {first}, %", lambda pair: (value(pair.sooner, "share"), "")),
        row("Wilcoxon p, paired by job", lambda pair: (probability(pair.p_value), "")),
    ]


def _cell(summary: ContenderSummary, metric: Metric, shares: bool) -> tuple[str, str]:
    """Return the mean and its 95 % confidence interval, as texts.

    A study of elasticity has few seeds. Its interval is from the lowest to the highest value of a seed.
    """
    if not shares:
        return estimated(summary.metrics.get(metric.key), metric.unit)
    found = [one.get(metric.key, math.nan) for one in summary.each.values()]
    known = [one for one in found if math.isfinite(one)]
    if not known:
        return "–", ""
    low, high = value_and_unit(min(known), metric.unit), value_and_unit(max(known), metric.unit)
    return value_and_unit(sum(known) / len(known), metric.unit), "" if low == high else f"{low} – {high}"


def estimated(found: Estimate | None, unit: str) -> tuple[str, str]:
    """Return a mean and its interval, as texts."""
    if found is None or not math.isfinite(found.mean):
        return "–", ""
    if not math.isfinite(found.low) or found.low == found.high:
        return value(found.mean, unit), ""
    return value(found.mean, unit), f"{value(found.low, unit)} – {value(found.high, unit)}"


def as_json(
    plan: StudyPlan,
    summaries: Sequence[ContenderSummary],
    runs: Sequence[StudyRun],
    bounds: Mapping[int, Bound] = NO_BOUNDS,
) -> dict[str, Any]:
    """Return the plan and all results, for JSON.

    Means over seeds have the metric's name as key. Their intervals are under "intervals".
    """
    mechanism = plan.mechanism
    policies = {
        summary.label: {
            **{key: found.mean for key, found in summary.metrics.items()},
            "intervals": {key: [found.low, found.high] for key, found in summary.metrics.items()},
            "seeds": list(summary.each),
            "of_seeds": list(summary.each.values()),
            "against_first": asdict(summary.against_first) if summary.against_first else None,
            "errors": list(summary.errors),
        }
        for summary in summaries
    }
    ended = [(run, run.outcome) for run in runs if run.outcome is not None]
    run = {
        **plan.source.described(),
        "cluster": str(plan.cluster),
        "network": asdict(plan.cluster.network) if plan.cluster.network else None,
        "slow_nodes": list(plan.cluster.slow_nodes),
        "seeds": list(plan.seeds),
        "interval_s": plan.interval_s,
        **(
            {"resize": "requeue", "resize_cost_s": "measured" if mechanism.seconds is None else mechanism.seconds}
            if isinstance(mechanism, Requeue)
            else {"resize": "hot", "hot": asdict(mechanism)}
        ),
        "engine": "idealized" if plan.idealized else "companion",
        "settings": dict(plan.settings),
        "policies": {c.label: {"policy": c.policy, "options": dict(c.options)} for c in plan.contenders},
        "wall_s": {c.label: sum(o.wall_s for r, o in ended if r.label == c.label) for c in plan.contenders},
        "notes": sorted({note for _, outcome in ended for note in outcome.notes}),
    }
    found = {
        "run": run,
        **(bounds_json(bounds) if bounds else {}),
        "policies": policies,
        "jobs": [
            {"policy": run.label, "seed": run.seed, **asdict(job), "jct_s": float(jct), "missed": job.missed}
            for run, outcome in ended
            for job, jct in zip(outcome.jobs, completion_times(outcome), strict=True)
        ],
    }
    known: dict[str, Any] = finite(found)
    return known


def finite(found: Any) -> Any:
    """Replace infinite numbers and NaN, at any depth, by None, since JSON has neither."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: finite(item) for key, item in found.items()}
    return [finite(item) for item in found] if isinstance(found, list | tuple) else found


def as_csv(summaries: Sequence[ContenderSummary]) -> str:
    """Return CSV with a line for each metric of each policy: its mean over seeds, and the interval."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("policy", "figure", "mean", "low", "high"))
    table.writerows(
        (summary.label, key, found.mean, found.low, found.high)
        for summary in summaries for key, found in summary.metrics.items()
    )  # fmt: skip
    return text.getvalue()


def page(plan: StudyPlan, summaries: Sequence[ContenderSummary]) -> dict[str, Any]:
    """Return the values of the template `study.html`, except the pictures."""
    return {
        "title": f"Policies compared: {plan.source.workload}",
        "run": plan.description(),
        "columns": [summary.label for summary in summaries],
        "rows": rows(plan, summaries),
        "meanings": [
            (metric.title, metric.meaning)
            for metric in metrics_of(plan.source.table, "bound")
            if any(metric.key in summary.metrics for summary in summaries) or metric.tables != "bound"
        ],
        "errors": [f"{summary.label}: {error}" for summary in summaries for error in summary.errors],
    }


def pictures(plan: StudyPlan, runs: Sequence[StudyRun]) -> dict[str, Any]:
    """Return the pictures of the page, by name; empty if no run of the first seed succeeded.

    "jct" shows the completion times of all seeds. "gpus" (by contender) and "goodput" show the first seed only.
    """
    from slurm_ones.show.pictures import gpus_over_time, lines, thinned

    jct, goodput, held = {}, {}, dict[str, list[TimelineRow]]()
    for contender in plan.contenders:
        own = [(run.seed, run.outcome) for run in runs if run.label == contender.label and run.outcome is not None]
        drawn = [outcome for seed, outcome in own if seed == plan.seeds[0]]
        times = [completion_times(plan.source.counted(outcome)) for _, outcome in own]
        hours = np.sort(np.concatenate([*times, np.zeros(0)])) / 3600.0
        hours, share = hours[hours > 0], np.linspace(0.0, 1.0, (hours > 0).sum() + 1)
        jct[contender.label] = hours.repeat(2)[1:], share.repeat(2)[2:-1]
        at, of_cluster = thinned(drawn[0].goodput if drawn and contender.elastic is None else ())
        goodput[contender.label] = at / 3600.0, 100.0 * of_cluster
        held[contender.label] = [row for outcome in drawn for row in _timeline(plan, outcome)]
    end = max((row.end or 0.0 for rows in held.values() for row in rows), default=0.0)
    if not end:
        return {}
    return {
        "jct": lines(jct, "job completion time, hours", "share of jobs", log=True),
        "gpus": {
            label: gpus_over_time(rows, plan.cluster.gpus, 0.0, end, by="partition", elapsed=True)
            for label, rows in held.items()
        },
        "goodput": lines(goodput, "hours since the start", "goodput, % of the cluster"),
    }


def _timeline(plan: StudyPlan, outcome: Outcome) -> list[TimelineRow]:
    """Return the outcome's segments as rows of a timeline, with the kind of each job as its partition."""
    kinds = {job.name: plan.source.kind(job) for job in outcome.jobs}
    numbers = {name: number for number, name in enumerate(kinds, 1)}
    of_cluster = plan.cluster.gpus
    return [
        TimelineRow(numbers[s.job], s.job, "", kinds[s.job], of_cluster, 0, Shape(1, s.gpus), s.start, s.end)
        for s in outcome.segments
    ]


FAR = 2.0
"""Ratio of recorded to simulated mean wait, or its inverse, above which a trace counts as badly reproduced. `FAR_S`
must be exceeded too."""
FAR_S = 60.0
"""Difference between recorded and simulated mean wait, in seconds, up to which a trace counts as well reproduced."""
MOST_LISTED = 1000
"""Largest number of jobs whose applications the page lists."""
RIGID = "stays rigid"


@dataclass(frozen=True)
class ElasticityStudy:
    """Study of a stretch of a trace with growing shares of elastic jobs, and its results."""

    trace: Trace
    stretch: Stretch
    curves: Curves
    plan: StudyPlan
    summaries: Sequence[ContenderSummary]
    runs: Sequence[StudyRun]

    def verdict(self) -> list[str]:
        """Return sentences for an admin: what each share of elastic jobs changes, and whether the seeds agree."""
        none, *others = self.summaries
        found = []
        for one in others:
            jct, hours = _changes(one, none, "mean_jct_s"), _changes(one, none, "gpu_hours")
            if not jct:
                continue
            undecided = "; the seeds do not agree on whether it is shorter" if min(jct) < 0 < max(jct) else ""
            missing = max(each["unfinished"] for summary in (none, one) for each in summary.each.values())
            if missing:
                undecided += (
                    f"; up to {missing:.0f} jobs had not ended when the simulation was stopped, and do not count"
                )
            found.append(
                f"With {one.label} of the jobs elastic the mean JCT changes by {_between(jct)}, and the GPU hours that "
                f"jobs hold by {_between(hours)}{undecided}{'; one seed only' if len(jct) == 1 else ''}."
            )
        return found

    def fidelity(self) -> str:
        """Return sentences that compare recorded waits with simulated waits without elastic jobs."""
        each = list(self.summaries[0].each.values())
        if not each:
            return ""
        was = recorded(self.stretch).get("mean_wait_s")
        if was is None:
            return (
                "The trace records no starts, so the simulated waits at 0 % cannot be compared with real ones. "
                "Use only the differences between the shares, and only as a hint."
            )
        now = each[0]["mean_wait_s"]
        if math.isnan(now):
            return "No job had ended when the simulation was stopped, so nothing can be compared with the trace."
        text = (
            f"On average jobs waited for {seconds(was)} in the trace, and for {seconds(now)} in the simulation without "
            "elastic jobs."
        )
        if max(was, now) > FAR * min(was, now) and abs(was - now) > FAR_S:
            return text + (
                " So the simulation is far from your cluster. Priorities, reservations, other partitions, nodes that "
                "were down and jobs that are missing in the trace are not simulated. Do not expect the figures below "
                "on your cluster."
            )
        return text + " In its waits the simulation is close to your cluster."

    def assumptions(self) -> list[str]:
        """Return sentences that state the study's assumptions."""
        s = self.stretch
        cluster = f"{s.nodes} nodes of {s.gpus_per_node} GPUs"
        cluster += ", as named. Jobs" if s.given else ", because jobs"
        cluster += f" of the trace held at most {s.most_held} GPUs at one time"
        kind = (
            "measured profiles"
            if self.curves.measured
            else "the package's own catalogue, with round figures that were not measured"
        )
        sampled = "" if s.sample >= 1 else f" that a sample of {100 * s.sample:g} % left"
        jobs = f"{len(s.jobs)} of the {s.of_all} jobs with GPUs{sampled}"
        if len(s.jobs) + s.left_out < s.of_all:
            jobs += ", all those of one stretch, whose load is the median of all stretches with as many jobs"
        return [
            f"Cluster: one partition of {cluster}. There are no limits of users or accounts, and no reservations.",
            f"Jobs: {jobs}. They are submitted within {seconds(s.hours * 3600)}.",
            *([f"{s.left_out} jobs asked for more GPUs than the cluster has, and are left out."] if s.left_out else []),
            f"{len(s.before)} earlier jobs still run or wait when the first job is submitted. They are not counted, "
            f"and run for at most {PATIENCE:g} times as long as the counted jobs are expected to take together.",
            "A rigid job is submitted at its recorded time with its recorded request. It holds its GPUs for the "
            "recorded run time, even if it failed or was cancelled.",
            "Slurm starts jobs in the order of their submission, with backfill by time limits. If no limit was "
            f"recorded, it is the job's run time. {SLACK_S:g} s are added to each limit.",
            f"Curves of speed and efficiency are from {kind} ({len(self.curves.applications)} applications).",
            *RULE,
            "An elastic job may run on one GPU up to the most that its application can use, and has no time limit.",
            f"A resize by checkpoint and requeue pauses the job for {RESIZE_S:g} s. A start takes half of that in "
            "addition to the recorded time.",
            f"The real companion decides every {seconds(self.plan.interval_s)}, with the policy ones and its default "
            "settings. Slurm, the jobs and their reports are simulated.",
            *self.trace.notes,
        ]

    def picks(self) -> list[list[str]]:
        """Return, for each job, the application that it gets with each seed if all jobs are elastic."""
        each = [picked(self.stretch, self.curves, 1.0, seed) for seed in self.plan.seeds]
        return [[pick or RIGID for pick in picks] for picks in zip(*each, strict=True)]

    def listed(self) -> list[tuple[str, int, str, list[str]]]:
        """Return name, GPUs, run time and applications (one for each seed) of each job that the page lists."""
        jobs = self.stretch.jobs[:MOST_LISTED]
        return [(job.name, job.gpus, seconds(job.run_s), picks) for job, picks in zip(jobs, self.picks(), strict=False)]

    def as_json(self) -> dict[str, Any]:
        """Return all results and the study's assumptions, for JSON."""
        s = self.stretch
        left_out = dict(self.trace.left_out)
        curves = [
            {"job": name, "gpus": gpus, "run": run, "curves": dict(zip(map(str, self.plan.seeds), picks, strict=True))}
            for name, gpus, run, picks in self.listed()
        ]
        return {
            **as_json(self.plan, self.summaries, self.runs),
            "trace": {"name": self.trace.name, "format": self.trace.format, "jobs": s.of_all, "left_out": left_out},
            "stretch": {"sample": s.sample, "jobs": len(s.jobs), "before": len(s.before), "hours": s.hours},
            "assumed": self.assumptions(),
            "recorded": finite(recorded(s)),
            "curves": curves,
        }

    def page(self) -> dict[str, Any]:
        """Return the values of the template `study.html`, except the pictures."""
        by_seed = [
            [seed, *(value_and_unit(one.each.get(seed, {}).get("mean_jct_s", math.nan), "s") for one in self.summaries)]
            for seed in self.plan.seeds
        ]
        counts = [Counter(picks) for picks in zip(*self.picks(), strict=True)]
        names = sorted(set().union(*counts), key=lambda name: (name == RIGID, name))
        return {
            **page(self.plan, self.summaries),
            "title": f"What would elasticity bring? {self.trace.name}",
            "run": {},
            "rows": rows(self.plan, self.summaries, recorded(self.stretch)),
            "elasticity": {
                "said": [*self.verdict(), self.fidelity()],
                "seeds": [f"seed {seed}" for seed in self.plan.seeds],
                "by_seed": by_seed,
                "assigned": [[name, *(count[name] for count in counts)] for name in names],
                "listed": [[name, gpus, ran, *picks] for name, gpus, ran, picks in self.listed()],
                "more": max(len(self.stretch.jobs) - MOST_LISTED, 0),
                "assumptions": self.assumptions(),
                "left_out": self.trace.left_out,
                "doubts": self.trace.doubts,
            },
        }


def _changes(summary: ContenderSummary, none: ContenderSummary, key: str) -> list[float]:
    pairs = [(each[key], none.each[seed][key]) for seed, each in summary.each.items() if seed in none.each]
    return [now / was - 1.0 for now, was in pairs if was > 0 and math.isfinite(now)]


def _between(changes: Sequence[float]) -> str:
    mean, low, high = (f"{100 * one:+.0f} %" for one in (sum(changes) / len(changes), min(changes), max(changes)))
    return mean if low == high else f"{mean} ({low} to {high})"
