"""A study's figures as cells of a table, as JSON, and as the data of its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurm_ones.show.charts import Bar, Lane
from slurm_ones.simulate.study.bounds import Bound
from slurm_ones.simulate.study.bounds import as_json as bounds_as_json
from slurm_ones.simulate.study.figures import Comparison, Estimate, Metric, completion_times, metrics_of
from slurm_ones.simulate.study.plan import StudyPlan
from slurm_ones.simulate.study.runs import NO_BOUNDS, ContenderSummary, StudyRun
from slurm_ones.simulate.training.mechanism import Requeue
from slurm_ones.text import seconds

UNITS = {"s": ", s", "ms": ", ms", "share": ", %"}
"""Unit in the title of a row that compares policies."""


def value(found: float, unit: str) -> str:
    """A figure of the comparison of policies, whose unit stands in its row's title."""
    if not math.isfinite(found):
        return "–"
    if unit == "s":
        return f"{found:,.0f}"
    if unit == "ms":
        return f"{found * 1e3:.3g}"
    return f"{found * 100:.1f}" if unit == "share" else f"{found:.2f}"


def value_and_unit(found: float, unit: str) -> str:
    """A figure of a study of shares, with its unit."""
    if not math.isfinite(found):
        return "–"
    if unit == "s":
        return seconds(found)
    if unit == "hours":
        return f"{found:,.1f}"
    return f"{100 * found:.0f} %" if unit == "share" else f"{found:.2f}"


def probability(p: float) -> str:
    """A p-value."""
    return "–" if math.isnan(p) else f"{p:.1e}" if p < 0.001 else f"{p:.3f}"


@dataclass(frozen=True)
class TableRow:
    """A row of a study's table: a title, and a figure for each contender."""

    title: str
    cells: Sequence[tuple[str, str]]
    """Mean, and its interval; nothing if that is unknown or of no width."""
    recorded: str = ""
    """The figure that a trace recorded."""


def rows(
    plan: StudyPlan, summaries: Sequence[ContenderSummary], recorded: Mapping[str, float] | None = None
) -> list[TableRow]:
    """All metrics, without those that no contender has; then each policy against the first."""
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
    """Mean and 95 % confidence interval; of shares, whose seeds are a few assignments, the lowest and the highest."""
    if not shares:
        return estimated(summary.metrics.get(metric.key), metric.unit)
    found = [one.get(metric.key, math.nan) for one in summary.each.values()]
    known = [one for one in found if math.isfinite(one)]
    if not known:
        return "–", ""
    low, high = value_and_unit(min(known), metric.unit), value_and_unit(max(known), metric.unit)
    return value_and_unit(sum(known) / len(known), metric.unit), "" if low == high else f"{low} – {high}"


def estimated(found: Estimate | None, unit: str) -> tuple[str, str]:
    """A mean and its interval."""
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
    """The plan and all that was found. Means over seeds have their own names, next to their intervals."""
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
        "cluster": plan.nodes_and_gpus,
        "network": asdict(plan.network) if plan.network else None,
        "slow_nodes": list(plan.slow_nodes),
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
        **(bounds_as_json(bounds) if bounds else {}),
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
    """The same with null, as JSON has it, in place of numbers that are not finite."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: finite(item) for key, item in found.items()}
    return [finite(item) for item in found] if isinstance(found, list | tuple) else found


def page(plan: StudyPlan, summaries: Sequence[ContenderSummary]) -> dict[str, Any]:
    """Values of the template `study.html`, pictures apart."""
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


def pictures(plan: StudyPlan, runs: Sequence[StudyRun]) -> tuple[list[Lane], dict[str, str]]:
    """A lane for each contender, and the kind of each bar's job. Bars and goodput are the first seed's."""
    lanes, kinds = [], dict[str, str]()
    for contender in plan.contenders:
        own = [(run, run.outcome) for run in runs if run.label == contender.label and run.outcome is not None]
        drawn = [outcome for run, outcome in own if run.seed == plan.seeds[0]]
        jct = [float(t) for _, outcome in own for t in completion_times(plan.source.counted(outcome))]
        # A trace's job is elastic at one share and rigid at another.
        mark = f"{contender.label} " if contender.elastic is not None else ""
        bars = [Bar(f"{mark}{s.job}", s.start, s.end, s.gpus) for outcome in drawn for s in outcome.segments]
        goodput = drawn[0].goodput if drawn and contender.elastic is None else ()
        lanes.append(Lane(contender.label, jct, bars, goodput, plan.gpus))
        kinds |= {f"{mark}{job.name}": plan.source.kind(job) for outcome in drawn for job in outcome.jobs}
    return lanes, kinds
