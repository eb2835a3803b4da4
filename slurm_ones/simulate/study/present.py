"""What a study found, as a table's cells and as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from slurm_ones.show.charts import Bar, Lane
from slurm_ones.show.page import StudyText
from slurm_ones.simulate.bound.bound import Bound
from slurm_ones.simulate.study.bounds import as_json as bounds_as_json
from slurm_ones.simulate.study.figures import BOUND_METRICS, METRICS, Estimate, completion_times
from slurm_ones.simulate.study.plan import Plan
from slurm_ones.simulate.study.runs import NO_BOUNDS, PolicySummary, Run
from slurm_ones.simulate.training.mechanism import Mechanism, Requeue
from slurm_ones.simulate.workloads.generate import MIXES

VARIANT = re.compile(r"-[a-h]$")
"""What sets generated applications of one kind apart."""

Row = tuple[str, list[str]]
"""Title, and a cell for each policy."""

UNITS = {"s": ", s", "ms": ", ms", "share": ", %", "": ""}
"""How a title names the unit of its row."""


def value(number: float, unit: str) -> str:
    """A figure as people read it."""
    if not math.isfinite(number):
        return "–"
    if unit == "s":
        return f"{number:,.0f}"
    if unit == "ms":
        return f"{number * 1e3:.3g}"
    if unit == "share":
        return f"{number * 100:.1f}"
    return f"{number:.2f}"


def estimated(found: Estimate | None, unit: str, *, interval: bool = True) -> str:
    """The mean, and its interval where there are several seeds."""
    if found is None or not math.isfinite(found.mean):
        return "–"
    if not interval or not math.isfinite(found.low) or found.low == found.high:
        return value(found.mean, unit)
    return f"{value(found.mean, unit)} ({value(found.low, unit)} – {value(found.high, unit)})"


def rows(summaries: Sequence[PolicySummary], *, intervals: bool = True) -> list[Row]:
    """All metrics, then each policy against the first. Figures that no policy has are left out."""

    def cell(found: Estimate | None, unit: str) -> str:
        return estimated(found, unit, interval=intervals)

    found: list[Row] = []
    for metric in (*METRICS, *BOUND_METRICS):
        cells = [cell(summary.metrics.get(metric.key), metric.unit) for summary in summaries]
        nothing_wrong = metric.key == "unfinished" and all(c in ("0.00", "–") for c in cells)
        if any(c != "–" for c in cells) and not nothing_wrong:
            found.append((metric.title + UNITS[metric.unit], cells))
    if len(summaries) > 1:
        first = summaries[0].label
        pairs = [summary.against_first for summary in summaries]
        found += [
            (f"mean JCT less {first}'s, s", [cell(p.difference if p else None, "s") for p in pairs]),
            (f"mean JCT over {first}'s", [cell(p.ratio if p else None, "") for p in pairs]),
            (f"jobs sooner than with {first}, %", [value(p.sooner, "share") if p else "–" for p in pairs]),
            ("Wilcoxon p, paired by job", [probability(p.p_value) if p else "–" for p in pairs]),
        ]
    return found


def probability(p: float) -> str:
    """A p-value."""
    return "–" if math.isnan(p) else f"{p:.1e}" if p < 0.001 else f"{p:.3f}"


def as_json(
    plan: Plan, summaries: Sequence[PolicySummary], runs: Sequence[Run], bounds: Mapping[int, Bound] = NO_BOUNDS
) -> dict[str, Any]:
    """What was run and all that was found. Means over seeds are under their own names, intervals beside them."""
    policies = {
        summary.label: {
            **{key: number(found.mean) for key, found in summary.metrics.items()},
            "intervals": {key: [number(found.low), number(found.high)] for key, found in summary.metrics.items()},
            "seeds": list(summary.seeds),
            "against_first": _finite(asdict(summary.against_first)) if summary.against_first else None,
            "errors": list(summary.errors),
        }
        for summary in summaries
    }
    return {
        "run": {
            **_finite(asdict(plan.source)),
            "profiles": str(plan.source.profiles) if plan.source.profiles else None,
            "cluster": plan.nodes_and_gpus,
            "network": asdict(plan.network) if plan.network else None,
            "slow_nodes": list(plan.slow_nodes),
            "seeds": list(plan.seeds),
            "interval_s": plan.interval_s,
            **_mechanism(plan.mechanism),
            "engine": "idealized" if plan.idealized else "companion",
            "settings": dict(plan.settings),
            "policies": {c.label: {"policy": c.name, "options": dict(c.options)} for c in plan.policies},
            "wall_s": {
                c.label: sum(r.outcome.wall_s for r in runs if r.outcome is not None and r.policy == c.label)
                for c in plan.policies
            },
            "notes": sorted({note for run in runs if run.outcome is not None for note in run.outcome.notes}),
        },
        **(bounds_as_json(bounds) if bounds else {}),
        "policies": policies,
        "jobs": [job for run in runs for job in _jobs(run)],
    }


def _mechanism(mechanism: Mechanism) -> dict[str, Any]:
    """How jobs were resized. `resize_cost_s` is there for a requeue, `hot` for the other."""
    if isinstance(mechanism, Requeue):
        return {"resize": "requeue", "resize_cost_s": "measured" if mechanism.seconds is None else mechanism.seconds}
    return {"resize": "hot", "hot": asdict(mechanism)}


def _jobs(run: Run) -> list[dict[str, Any]]:
    if run.outcome is None:
        return []
    times = completion_times(run.outcome)
    return [
        {"policy": run.policy, "seed": run.seed, **_finite(asdict(job)), "jct_s": float(jct), "missed": job.missed}
        for job, jct in zip(run.outcome.jobs, times, strict=True)
    ]


def page(
    plan: Plan, summaries: Sequence[PolicySummary], runs: Sequence[Run]
) -> tuple[StudyText, list[Lane], dict[str, str]]:
    """What `report.page.write_study` takes."""
    seed = plan.seeds[0]
    lanes = []
    for summary in summaries:
        own = [run.outcome for run in runs if run.policy == summary.label and run.outcome is not None]
        drawn = [run for run in runs if (run.policy, run.seed) == (summary.label, seed) and run.outcome is not None]
        outcome = drawn[0].outcome if drawn else None
        bars = [Bar(s.job, s.start, s.end, s.gpus) for s in outcome.segments] if outcome else []
        jct = [float(t) for found in own for t in completion_times(found)]
        lanes.append(Lane(summary.label, jct, bars, outcome.goodput if outcome else (), plan.gpus))
    work = plan.workload(seed).submissions
    generated = plan.source.workload in MIXES
    groups = {s.name: VARIANT.sub("", s.application) if generated else s.application for s in work}
    with_bound = any("bound_s" in summary.metrics for summary in summaries)
    text = StudyText(
        title=f"Policies compared: {plan.source.workload}",
        run=tuple(plan.description().items()),
        rows=rows(summaries),
        meanings=[(metric.title, metric.meaning) for metric in (*METRICS, *(BOUND_METRICS if with_bound else ()))],
        errors=[f"{summary.label}: {error}" for summary in summaries for error in summary.errors],
    )
    return text, lanes, groups


def number(found: float) -> float | None:
    """A number as JSON has it: none that are not finite."""
    return found if math.isfinite(found) else None


def _finite(found: Any) -> Any:
    if isinstance(found, float):
        return number(found)
    if isinstance(found, dict):
        return {key: _finite(item) for key, item in found.items()}
    return found
