"""Grafana dashboard of the metrics in `metrics`: the definitions of its panels, and the JSON that Grafana imports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

NAME = "slurm-ones-dashboard.json"
"""File name of the dashboard."""
WIDTH = 24
"""Width of Grafana's grid in columns."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WORDS = {"WHOSE": 'partition=~"$partition",account=~"$account"', "[RATE]": "[$__rate_interval]"}
"""Placeholders in the panels' queries, with the PromQL that replaces each."""
GRAPH_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom"},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


class Panel(NamedTuple):
    """Panel of the dashboard: a single number or a graph."""

    title: str
    text: str
    """Description that Grafana shows as the panel's tooltip."""
    queries: Mapping[str, str]
    """PromQL query of each line in the graph, by the line's legend."""
    unit: str = "short"
    stacked: bool = False
    red_from: float | None = None
    """Value from which a single number is shown in red."""


def phases_of(way: str) -> Panel:
    """Return the panel with the phases of resizes by this mechanism."""
    only = f'WHOSE,way="{way}",phase!="total"'
    sums, counts = (
        f"sum by (phase) (rate(slurm_ones_resize_phase_seconds_{part}{{{only}}}[RATE]))" for part in ("sum", "count")
    )
    text = "Mean duration of each phase of a resize, in seconds."
    return Panel(f"Phases by {way}: mean", text, {"{{phase}}": f"{sums} / {counts}"}, "s")


def quantile(share: float, phase: str) -> str:
    """Return the query of a quantile of one phase's duration, for each mechanism of resizing."""
    rate = f'rate(slurm_ones_resize_phase_seconds_bucket{{WHOSE,phase="{phase}"}}[RATE])'
    return f"histogram_quantile({share}, sum by (le, way) ({rate}))"


RATIOS = "sum by (learned_from) (increase(slurm_ones_throughput_ratio"
ROWS: Mapping[str, tuple[int, tuple[Panel, ...]]] = {
    "Now": (4, (
        Panel(
            "Last tick", "Seconds since the companion's last tick.",
            {"": "time() - max(slurm_ones_last_tick_timestamp_seconds)"}, "s", red_from=300,
        ),
        Panel("Running", "Elastic jobs that run.", {"": "sum(slurm_ones_running_jobs{WHOSE}) or vector(0)"}),
        Panel("Waiting", "Elastic jobs that wait.", {"": "sum(slurm_ones_waiting_jobs{WHOSE}) or vector(0)"}),
        Panel("GPUs", "GPUs that elastic jobs hold.", {"": "sum(slurm_ones_gpus{WHOSE}) or vector(0)"}),
        Panel(
            "Resizes, last hour", "Resizes that ended within an hour, with or without effect.",
            {"": "sum(increase(slurm_ones_resizes_total{WHOSE}[1h]))"},
        ),
        Panel(
            "Errors, last hour", "Errors in the companion's log.",
            {"": "sum(increase(slurm_ones_errors_total[1h]))"},
        ),
    )),
    "Who has what": (8, (
        Panel(
            "GPUs by partition", "GPUs on which elastic jobs run.",
            {"{{partition}}": "sum by (partition) (slurm_ones_gpus{WHOSE})"}, stacked=True,
        ),
        Panel(
            "GPUs by account", "GPUs on which elastic jobs run; the ten accounts with most.",
            {"{{account}}": "topk(10, sum by (account) (slurm_ones_gpus{WHOSE}))"}, stacked=True,
        ),
        Panel(
            "Jobs", "Elastic jobs that run and wait.",
            {"run": "sum(slurm_ones_running_jobs{WHOSE})", "wait": "sum(slurm_ones_waiting_jobs{WHOSE})"},
        ),
    )),
    "What resizing brings and costs": (8, (
        Panel(
            "GPUs gained and given up",
            "Mean number of GPUs that jobs hold beyond what they asked for, and that they asked for but run without.",
            {
                "gained": "sum(rate(slurm_ones_gpu_seconds_gained_total{WHOSE}[RATE]))",
                "given up": "sum(rate(slurm_ones_gpu_seconds_given_up_total{WHOSE}[RATE]))",
            },
        ),
        Panel(
            "GPUs lost to resizes",
            "Mean number of GPUs held while a resize paused training, by the mechanism of the resize.",
            {"{{way}}": "sum by (way) (rate(slurm_ones_gpu_seconds_lost_total{WHOSE}[RATE]))"},
        ),
        Panel(
            "Share of GPU time lost", "GPU-seconds lost to resizes, divided by all that elastic jobs held.",
            {
                "lost": "sum(rate(slurm_ones_gpu_seconds_lost_total{WHOSE}[RATE]))"
                " / (sum(rate(slurm_ones_gpu_seconds_total{WHOSE}[RATE])) > 0)"
            },
            "percentunit",
        ),
        Panel(
            "Resizes", "Resizes per hour, by the state in which they ended.",
            {"{{state}}": "3600 * sum by (state) (rate(slurm_ones_resizes_total{WHOSE}[RATE]))"}, stacked=True,
        ),
        Panel(
            "Resizes without effect", "Resizes per hour that had no effect, by reason.",
            {
                "{{reason}}": "3600 * sum by (reason) (rate(slurm_ones_resize_failures_total{WHOSE}[RATE]))"
                " or vector(0)"
            },
            stacked=True,
        ),
        Panel(
            "Resizes begun", "Resizes begun per hour, by account.",
            {"{{account}}": "3600 * sum by (account) (rate(slurm_ones_resizes_begun_total{WHOSE}[RATE]))"},
            stacked=True,
        ),
    )),
    "Where the time of resizes goes": (12, (
        phases_of("requeue"),
        phases_of("blocks"),
        Panel(
            "Pause, median and 95 %", "How long training pauses for a resize.",
            {"{{way}}, median": quantile(0.5, "pause"), "{{way}}, 95 %": quantile(0.95, "pause")}, "s",
        ),
        Panel(
            "From decision to end, 95 %", "From the decision on a resize to its end.",
            {"{{way}}": quantile(0.95, "total")}, "s",
        ),
    )),
    "Why jobs stay as they are": (12, (
        Panel(
            "Jobs that keep their size", "Elastic jobs that keep their size now, by reason.",
            {"{{reason}}": "sum by (reason) (slurm_ones_refused_jobs{WHOSE})"}, stacked=True,
        ),
        Panel(
            "Refusals", "Times per hour that a job got a new reason for keeping its size, by reason.",
            {"{{reason}}": "3600 * sum by (reason) (rate(slurm_ones_refusals_total{WHOSE}[RATE]))"}, stacked=True,
        ),
    )),
    "How good models are": (12, (
        Panel(
            "Predictions that came true to a tenth",
            "Share of new sizes whose first measurement was within a tenth of the prediction, over a day.",
            {
                "learned from {{learned_from}}": f'({RATIOS}_bucket{{WHOSE,le="1.1"}}[1d]))'
                f' - {RATIOS}_bucket{{WHOSE,le="0.9"}}[1d]))) / {RATIOS}_count{{WHOSE}}[1d]))'
            },
            "percentunit",
        ),
        Panel(
            "Measured over predicted",
            "First throughput measured at a new size, divided by its prediction: median over a day; 1 is right.",
            {
                "learned from {{learned_from}}": "histogram_quantile(0.5, sum by (le, learned_from) "
                "(increase(slurm_ones_throughput_ratio_bucket{WHOSE}[1d])))"
            },
        ),
    )),
    "The companion and Slurm": (8, (
        Panel(
            "Time of a tick", "Duration of a tick, and the time between ticks.",
            {"takes": "max(slurm_ones_last_tick_seconds)", "between two": "max(slurm_ones_tick_interval_seconds)"}, "s",
        ),
        Panel(
            "Errors", "Errors per hour in the companion's log.",
            {"errors": "3600 * sum(rate(slurm_ones_errors_total[RATE]))"},
        ),
        Panel(
            "All jobs and GPUs, by Slurm",
            "Slurm's own figures, next to ours: 25.11 or newer, with MetricsType=metrics/openmetrics.",
            {
                "jobs run": "sum(slurm_jobs_running)",
                "jobs wait": "sum(slurm_jobs_pending)",
                "GPUs allocated": "sum(slurm_jobs_gpus_alloc)",
            },
        ),
    )),
}  # fmt: skip
"""Rows of the dashboard: for each title, the width of its panels, and the panels. The first row has single numbers."""


def text() -> str:
    """Return the dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, (width, row) in ROWS.items():
        where = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": where, "panels": []})
        height, y = (4 if title == "Now" else 8), y + 1
        for start in range(0, len(row), WIDTH // width):
            for column, panel in enumerate(row[start : start + WIDTH // width]):
                made = _figure(panel) if title == "Now" else _graph(panel)
                panels.append(made | {"gridPos": {"h": height, "w": width, "x": column * width, "y": y}})
            y += height
    for number, one in enumerate(panels, 1):
        one["id"] = number
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    whole = {
        "title": "slurm-ones",
        "uid": "slurm-ones",
        "description": "Dashboard for Grafana: elastic jobs, what resizes cost and bring, why jobs stay as they are",
        "tags": ["slurm"],
        "editable": True,
        "schemaVersion": 38,
        "version": 1,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source, _choice("partition"), _choice("account")]},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _choice(label: str) -> dict[str, Any]:
    """Return the dashboard variable by which a reader chooses values of this label."""
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values(slurm_ones_gpu_seconds_total, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _panel(kind: str, panel: Panel, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    targets = []
    for letter, (legend, query) in zip("ABC", panel.queries.items(), strict=False):
        for word, meant in WORDS.items():
            query = query.replace(word, meant)
        targets.append({"refId": letter, "expr": query, "legendFormat": legend})
    return {
        "type": kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **defaults}, "overrides": []},
        "targets": targets,
        "options": options,
    }


def _figure(panel: Panel) -> dict[str, Any]:
    red = panel.red_from
    steps = [{"color": "green", "value": None}, {"color": "red", "value": red}]
    defaults = {} if red is None else {"thresholds": {"mode": "absolute", "steps": steps}}
    colour = "none" if red is None else "value"
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": colour, "graphMode": "none"}
    return _panel("stat", panel, defaults, options)


def _graph(panel: Panel) -> dict[str, Any]:
    fill, mode = (30, "normal") if panel.stacked else (0, "none")
    drawn = {"drawStyle": "line", "fillOpacity": fill, "showPoints": "never", "stacking": {"mode": mode}}
    return _panel("timeseries", panel, {"min": 0, "custom": drawn}, GRAPH_OPTIONS)
