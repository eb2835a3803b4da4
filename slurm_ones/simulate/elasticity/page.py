"""What a study of elasticity found, as cells of tables, as JSON, and as what its page says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_ones.show.charts import Bar, Lane
from slurm_ones.simulate.elasticity.curves import RESIZE_S, RULE
from slurm_ones.simulate.elasticity.stretch import PATIENCE, SLACK_S, picked
from slurm_ones.simulate.elasticity.study import FIGURES, SHARES, Study
from slurm_ones.simulate.study.figures import Metric
from slurm_ones.simulate.study.present import number
from slurm_ones.simulate.traces.trace import Trace
from slurm_ones.text import seconds

FAR = 2.0
"""Recorded and simulated mean waits that differ by more than this factor are called far apart …"""
FAR_S = 60.0
"""… where they differ by so many seconds besides."""
MOST_LISTED = 1000
"""Jobs whose curves the page lists."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a title, the recorded figure, and one for each share."""

    title: str
    recorded: str
    cells: Sequence[tuple[str, str]]
    """The mean over the seeds, and the lowest and highest of them; nothing where those are equal."""


def value(found: float, unit: str) -> str:
    """A figure as people read it."""
    if not math.isfinite(found):
        return "–"
    if unit == "s":
        return seconds(found)
    if unit == "hours":
        return f"{found:,.1f}"
    return f"{100 * found:.0f} %" if unit == "share" else f"{found:.2f}"


def _cell(study: Study, figure: Metric, share: float) -> tuple[str, str]:
    """See `Row.cells`."""
    found = [
        study.figures[share, seed].get(figure.key, math.nan) for seed in study.seeds if (share, seed) in study.figures
    ]
    known = [one for one in found if math.isfinite(one)]
    if not known:
        return "–", ""
    mean = value(sum(known) / len(known), figure.unit)
    low, high = value(min(known), figure.unit), value(max(known), figure.unit)
    return mean, "" if low == high else f"{low} – {high}"


def rows(study: Study) -> list[Row]:
    """The table. Figures that are nowhere, and those that are 0 everywhere, are left out."""
    found = []
    for figure in FIGURES:
        cells = [_cell(study, figure, share) for share in shares(study)]
        was = value(study.recorded.get(figure.key, math.nan), figure.unit)
        means = {mean for mean, _ in cells}
        if means != {"–"} and not (figure.key == "unfinished" and means == {"0.00"}):
            found.append(Row(figure.title, was, cells))
    return found


def shares(study: Study) -> list[float]:
    """Those that came through with one seed at least."""
    return sorted(study.outcomes)


def label(share: float) -> str:
    """`20 %`."""
    return f"{100 * share:g} %"


def verdict(study: Study) -> list[str]:
    """What an admin who decides reads first: what each share changes and costs, and how sure that is."""
    found = []
    for share in shares(study):
        jct, hours = _changes(study, share, "mean_jct_s"), _changes(study, share, "gpu_hours")
        if not share or not jct:
            continue
        undecided = "; the seeds do not agree on whether it is shorter" if min(jct) < 0 < max(jct) else ""
        missing = max(study.figures[one].get("unfinished", 0.0) for one in study.figures if one[0] in (0.0, share))
        if missing:
            undecided += f"; up to {missing:.0f} jobs had not ended when the simulation gave up, and do not count"
        found.append(
            f"With {label(share)} of the jobs elastic the mean JCT changes by {_between(jct)}, and the GPU hours that "
            f"jobs hold by {_between(hours)}{undecided}{'; one seed alone' if len(jct) == 1 else ''}."
        )
    return found


def _changes(study: Study, share: float, key: str) -> list[float]:
    """By how much of it a figure differs from that at 0 %, with each seed."""
    pairs = [
        (study.figures[share, seed][key], study.figures[0.0, seed][key])
        for seed in study.seeds
        if (share, seed) in study.figures and (0.0, seed) in study.figures
    ]
    return [now / was - 1.0 for now, was in pairs if was > 0 and math.isfinite(now)]


def _between(changes: Sequence[float]) -> str:
    """`-11 % (-16 % to -3 %)`."""
    mean, low, high = (f"{100 * one:+.0f} %" for one in (sum(changes) / len(changes), min(changes), max(changes)))
    return mean if low == high else f"{mean} ({low} to {high})"


def fidelity(study: Study) -> str:
    """How far the simulation without any elastic job is from what was recorded."""
    outcome = study.figures.get((0.0, study.seeds[0]))
    if outcome is None:
        return ""
    if not study.recorded:
        return (
            "The trace records no starts, so that the simulated waits at 0 % cannot be compared with real ones: take "
            "the differences between the shares as a hint, and no figure for itself."
        )
    was, now = study.recorded["mean_wait_s"], outcome["mean_wait_s"]
    text = f"Recorded, jobs waited for {seconds(was)} on average; simulated with no elastic job, for {seconds(now)}."
    apart = max(was, now) > FAR * min(was, now) and abs(was - now) > FAR_S
    far = (
        " That is far from this cluster: priorities, reservations, other partitions, nodes that were down or jobs that "
        "are missing in the trace are not simulated. Do not take the figures below for those of your cluster."
    )
    return text + (far if apart else " The simulation is near this cluster in that.")


def assumptions(study: Study, trace: Trace) -> list[str]:
    """What was taken for granted."""
    s = study.stretch
    cluster = f"{s.nodes} nodes of {s.gpus_per_node} GPUs"
    cluster += ", as named; jobs" if s.given else ", since jobs"
    cluster += f" held {s.most_held} at once at most, by the trace"
    kind = (
        "measured profiles"
        if study.curves.measured
        else "the package's own catalogue, by round figures that nobody measured"
    )
    sampled = "" if s.sample >= 1 else f" that a sample of {100 * s.sample:g} % left"
    jobs = f"{len(s.jobs)} of the {s.of_all} jobs with GPUs{sampled}"
    if len(s.jobs) + s.left_out < s.of_all:
        jobs += ", those that follow each other in the stretch whose load is the median of all stretches of that many"
    return [
        f"Cluster: one partition of {cluster}. Limits of users, accounts and reservations are not there.",
        f"Jobs: {jobs}. They are submitted within {seconds(s.hours * 3600)}.",
        *([f"{s.left_out} jobs asked for more GPUs than the cluster has, and are left out."] if s.left_out else []),
        f"{len(s.before)} earlier jobs that still ran or waited are there when the first one comes, uncounted, "
        f"and for at most {PATIENCE:g} times as long as the counted ones take.",
        "A job that is not elastic comes when it came, asks for what it asked for, and holds it for as long as it did, "
        "whether it then ended well, failed or was cancelled.",
        "Slurm starts jobs in the order of their submission, with backfill by time limits; where none was recorded, "
        f"the limit is the time that the job ran. {SLACK_S:g} s are added to each.",
        f"Curves of speed and efficiency are those of {kind}; {len(study.curves.applications)} applications.",
        *RULE,
        "An elastic job may run on one GPU up to what its application can use, and has no time limit.",
        f"A resize is a checkpoint and a requeue that stop the job for {RESIZE_S:g} s; a start costs half of that "
        "besides what was recorded.",
        f"The companion itself decides by the policy ones every {seconds(study.interval_s)}, with its default "
        "settings; Slurm below it, the jobs and their reports are simulated.",
        *trace.notes,
    ]


def assigned(study: Study) -> list[tuple[str, list[int]]]:
    """Each application, and how many jobs have it with each seed where all are elastic."""
    counts = [Counter(one or "stays rigid" for one in _picks(study, seed)) for seed in study.seeds]
    names = sorted(set().union(*counts), key=lambda name: (name == "stays rigid", name))
    return [(name, [count[name] for count in counts]) for name in names]


def _picks(study: Study, seed: int) -> list[str | None]:
    return picked(study.stretch, study.curves, 1.0, seed)


def listed(study: Study) -> list[tuple[str, int, str, list[str]]]:
    """Each job: its number, GPUs, run time, and its application with each seed where all are elastic."""
    each = [_picks(study, seed) for seed in study.seeds]
    jobs = study.stretch.jobs[:MOST_LISTED]
    return [
        (job.name, job.gpus, seconds(job.run_s), [picks[i] or "stays rigid" for picks in each])
        for i, job in enumerate(jobs)
    ]


def by_seed(study: Study) -> list[tuple[int, list[str]]]:
    """Mean JCT of each seed at each share."""
    return [
        (
            seed,
            [value(study.figures.get((share, seed), {}).get("mean_jct_s", math.nan), "s") for share in shares(study)],
        )
        for seed in study.seeds
    ]


def lanes(study: Study) -> tuple[list[Lane], dict[str, str]]:
    """The pictures' data, and to which of three groups each job belongs."""
    made, groups = [], dict[str, str]()
    capacity = study.stretch.nodes * study.stretch.gpus_per_node
    for share in shares(study):
        outcome = study.outcomes[share]
        elastic = {job.name for job in outcome.jobs if job.elastic}
        kinds = {job.name: _group(job.name, job.name in elastic) for job in outcome.jobs}
        # A job may be elastic at one share and rigid at another.
        groups |= {f"{label(share)} {name}": group for name, group in kinds.items()}
        bars = [Bar(f"{label(share)} {s.job}", s.start, s.end, s.gpus) for s in outcome.segments]
        made.append(Lane(label(share), study.jct_s[share], bars, (), capacity))
    return made, groups


def _group(name: str, elastic: bool) -> str:
    return "elastic" if elastic else "rigid" if name[0].isdigit() else "there before"


def as_json(study: Study, trace: Trace) -> dict[str, Any]:
    """All figures, and what they rest on."""
    s = study.stretch
    return {
        "trace": {"name": trace.name, "format": trace.format, "jobs": s.of_all, "left_out": dict(trace.left_out)},
        "stretch": {
            "sample": s.sample,
            "jobs": len(s.jobs),
            "before": len(s.before),
            "hours": s.hours,
            "cluster": f"{s.nodes}x{s.gpus_per_node}",
        },
        "assumed": assumptions(study, trace),
        "interval_s": study.interval_s,
        "recorded": {key: number(found) for key, found in study.recorded.items()},
        "shares": {
            label(share): {
                str(seed): {key: number(found) for key, found in study.figures[share, seed].items()}
                for seed in study.seeds
                if (share, seed) in study.figures
            }
            for share in SHARES
        },
        "curves": [
            {"job": name, "gpus": gpus, "run": run, "curves": dict(zip(map(str, study.seeds), picks, strict=True))}
            for name, gpus, run, picks in listed(study)
        ],
        "errors": list(study.errors),
    }


def page(study: Study, trace: Trace) -> dict[str, Any]:
    """What the template takes, but for the pictures."""
    return {
        "title": f"What would elasticity bring? {trace.name}",
        "verdict": verdict(study),
        "fidelity": fidelity(study),
        "shares": [label(share) for share in shares(study)],
        "rows": rows(study),
        "seeds": study.seeds,
        "by_seed": by_seed(study),
        "assigned": assigned(study),
        "listed": listed(study),
        "more": max(len(study.stretch.jobs) - MOST_LISTED, 0),
        "assumptions": assumptions(study, trace),
        "left_out": trace.left_out,
        "doubts": trace.doubts,
        "meanings": [(figure.title, figure.meaning) for figure in FIGURES],
        "errors": study.errors,
    }
