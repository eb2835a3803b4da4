"""The study: the stretch with more and more of its jobs elastic, under the companion on a simulated Slurm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slurm_ones.schedule.policy import Floats
from slurm_ones.simulate.elasticity.curves import Curves
from slurm_ones.simulate.elasticity.stretch import BEFORE, Stretch, TraceSource, expected_s
from slurm_ones.simulate.engines.outcome import JobOutcome, Outcome
from slurm_ones.simulate.study.figures import Metric
from slurm_ones.simulate.study.kept import kept, run_kept
from slurm_ones.simulate.study.parts import StudyFolder
from slurm_ones.simulate.study.plan import Plan, PolicySpec
from slurm_ones.simulate.study.runs import OnProgress, run_all
from slurm_ones.simulate.training.mechanism import Requeue

SHARES = (0.0, 0.2, 0.5, 1.0)
"""Of the jobs that are drawn to be elastic."""
POLICY = "ones"
INTERVAL_S = (60.0, 300.0)
"""Least and most seconds between two decisions."""
TICKS = 1500
"""Decisions that a run is to take about at most: beyond, they are further apart."""


FIGURES: tuple[Metric, ...] = (
    Metric("elastic_jobs", "elastic jobs", "share", "jobs that were drawn and whose curves and length allow it"),
    Metric("elastic_hours", "their GPU hours", "share", "of all GPU hours that were recorded"),
    Metric("mean_jct_s", "mean JCT", "s", "from submission to end"),
    Metric("median_jct_s", "median JCT", "s", "the job in the middle"),
    Metric("p99_jct_s", "p99 JCT", "s", "99 jobs in a hundred are done sooner"),
    Metric("mean_wait_s", "mean wait", "s", "time without GPUs, between resizes too"),
    Metric("median_wait_s", "median wait", "s", "of the job in the middle"),
    Metric("p99_wait_s", "p99 wait", "s", "99 jobs in a hundred wait for less"),
    Metric("gpu_hours", "GPU hours", "hours", "held by the jobs that are counted"),
    Metric("resizes", "resizes an elastic job", "", "starts after its first one, each by a checkpoint and a requeue"),
    Metric("rigid_jct", "rigid jobs, to 0 %", "", "mean JCT of jobs that stay rigid, over theirs at 0 %"),
    Metric("elastic_jct", "elastic jobs, to 0 %", "", "the same of the jobs that are elastic"),
    Metric("unfinished", "unfinished", "", "jobs that had not ended when the simulation gave up"),
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What was run, and what became of it."""

    stretch: Stretch
    curves: Curves
    seeds: tuple[int, ...]
    interval_s: float
    figures: dict[tuple[float, int], dict[str, float]]
    """By share and seed, by key of `FIGURES`."""
    outcomes: dict[float, Outcome]
    """Of the first seed, by share."""
    jct_s: dict[float, list[float]]
    """Of the jobs of all seeds, by share."""
    recorded: dict[str, float]
    """What the trace itself recorded of the same jobs; empty where it has no starts."""
    errors: tuple[str, ...] = ()


def interval_of(stretch: Stretch) -> float:
    """Seconds between two decisions: Slurm sites have 60, and a long stretch of few jobs is looked at less often."""
    expected = expected_s(stretch.jobs, stretch.nodes * stretch.gpus_per_node)
    least, most = INTERVAL_S
    return min(max(least, least * math.ceil(expected / TICKS / least)), most)


def plan_of(
    name: str, stretch: Stretch, curves: Curves, share: float, seeds: Sequence[int], profiles: Path | None = None
) -> Plan:
    """One share of it. At 0 % nothing depends on the seed, and the first stands for all. `profiles` is the folder that
    the curves are from, so that its files count for what is kept of the runs."""
    return Plan(
        source=TraceSource(name, profiles, stretch=stretch, curves=curves, share=share),
        policies=(PolicySpec(f"{100 * share:g} %", POLICY),),
        seeds=tuple(seeds if share else seeds[:1]),
        nodes=stretch.nodes,
        gpus_per_node=stretch.gpus_per_node,
        interval_s=interval_of(stretch),
        mechanism=Requeue(None),
    )


def runs_of(seeds: int, shares: Sequence[float] = SHARES) -> int:
    """How many simulations a study takes."""
    return sum(seeds if share else 1 for share in shares)


def done_before(
    name: str, stretch: Stretch, curves: Curves, seeds: Sequence[int], folder: StudyFolder, profiles: Path | None
) -> int:
    """How many of its runs the folder has."""
    return sum(len(kept(plan_of(name, stretch, curves, share, seeds, profiles), folder)) for share in SHARES)


def study(
    name: str,
    stretch: Stretch,
    curves: Curves,
    seeds: Sequence[int],
    processes: int,
    on_progress: OnProgress = lambda progress: None,
    shares: Sequence[float] = SHARES,
    folder: StudyFolder | None = None,
    profiles: Path | None = None,
) -> Study:
    """Run it, a share after the other; `shares` begin with 0. With a `folder`, from within `folder.locked()`, runs that
    are done there are taken from it, and others are kept there."""
    figures: dict[tuple[float, int], dict[str, float]] = {}
    outcomes: dict[float, Outcome] = {}
    jct: dict[float, list[float]] = {}
    errors: list[str] = []
    rigid: dict[str, float] = {}
    for share in shares:
        plan = plan_of(name, stretch, curves, share, seeds, profiles)
        most = min(processes, len(plan.seeds))
        found = run_kept(plan, most, folder, on_progress) if folder else run_all(plan, most, on_progress)
        errors += [f"{run.policy}, seed {run.seed}: {run.error}" for run in found if run.outcome is None]
        done = [(run, run.outcome) for run in found if run.outcome is not None]
        if done:
            outcomes[share] = done[0][1]
        jct[share] = [t for _, outcome in done for t in _times(outcome).values()]
        if not share and done:
            rigid = _times(done[0][1])
            found = [replace(done[0][0], seed=seed) for seed in seeds]
            done = [(run, done[0][1]) for run in found]
        figures |= {(share, run.seed): figures_of(outcome, stretch, rigid) for run, outcome in done}
    return Study(
        stretch, curves, tuple(seeds), interval_of(stretch), figures, outcomes, jct, recorded(stretch), tuple(errors)
    )


def _counted(outcome: Outcome) -> list[JobOutcome]:
    return [job for job in outcome.jobs if not job.name.startswith(BEFORE)]


def _times(outcome: Outcome) -> dict[str, float]:
    """JCT of each job that ended."""
    return {job.name: job.jct_s for job in _counted(outcome) if job.ended is not None}


def figures_of(outcome: Outcome, stretch: Stretch, rigid: dict[str, float]) -> dict[str, float]:
    """One run's, by key of `FIGURES`. `rigid` has the JCT of each job where none is elastic."""
    jobs = [job for job in _counted(outcome) if job.ended is not None]
    elastic = {job.name for job in jobs if job.elastic}
    hours = {str(i + 1): job.gpu_hours for i, job in enumerate(stretch.jobs)}

    def against(names: Sequence[str]) -> float:
        both = [name for name in names if name in rigid]
        times = _times(outcome)
        return sum(times[n] for n in both) / sum(rigid[n] for n in both) if both else math.nan

    return {
        **_spread_of(np.array([job.jct_s for job in jobs]), np.array([job.jct_s - job.running_s for job in jobs])),
        "elastic_jobs": len(elastic) / len(stretch.jobs),
        "elastic_hours": sum(hours[name] for name in elastic) / sum(hours.values()),
        "gpu_hours": sum(job.gpu_s for job in jobs) / 3600.0,
        "resizes": sum(job.resizes for job in jobs if job.elastic) / len(elastic) if elastic else math.nan,
        "rigid_jct": against([job.name for job in jobs if not job.elastic]),
        "elastic_jct": against(sorted(elastic)),
        "unfinished": float(len(stretch.jobs) - len(jobs)),
    }


def _spread_of(jct: Floats, waits: Floats) -> dict[str, float]:
    if not len(jct):
        jct = waits = np.array([math.nan])
    waits = np.maximum(waits, 0.0)
    return {
        "mean_jct_s": float(jct.mean()),
        "median_jct_s": float(np.median(jct)),
        "p99_jct_s": float(np.percentile(jct, 99)),
        "mean_wait_s": float(waits.mean()),
        "median_wait_s": float(np.median(waits)),
        "p99_wait_s": float(np.percentile(waits, 99)),
    }


def recorded(stretch: Stretch) -> dict[str, float]:
    """What the trace says of the same jobs; empty where it has no starts."""
    starts = [job.started for job in stretch.jobs if job.started is not None]
    if len(starts) < len(stretch.jobs):
        return {}
    waits = np.array([start - job.submitted for start, job in zip(starts, stretch.jobs, strict=True)])
    found = _spread_of(waits + np.array([job.run_s for job in stretch.jobs]), waits)
    return found | {"gpu_hours": sum(job.gpu_hours for job in stretch.jobs)}
