"""The plain simulator against the published figures of Pollux's study.

    python benchmarks/validation.py --data DIR --json validation.json --markdown validation.md

Runs the policies of that study, and four more that were added to its simulator later, on two of its workloads: 16 nodes
of 4 GPUs, a decision every 60 s, 30 s for every start and resize. DIR holds `profiles/` and `workloads/` in the common
layout; without it there is nothing to compare, and the command says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from slurm_ones.simulate.oracle import Placement
from slurm_ones.simulate.run import run as simulate
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Requeue
from slurm_ones.simulate.workloads.profiles import BadInput, Workload, read_profiles, read_workload

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "adaptdl"
WORKLOADS = ("workload-1", "workload-6")


@dataclass(frozen=True)
class Case:
    """A policy as the study ran it, and what it found on each workload."""

    name: str
    policy: str
    jct_s: tuple[float, float]
    """Mean JCT."""
    options: Mapping[str, Any] = field(default_factory=dict)
    makespan_s: tuple[float, float] = (float("nan"), float("nan"))
    placement: Placement = "spread"


CASES = (
    Case("fifo", "fifo", (9211.8, 15050.8), {"backfill": False}),
    Case("fifo + backfill", "fifo", (5020.7, 6261.8)),
    Case("srtf", "srtf", (2445.8, 2917.7)),
    Case("srsf", "srsf", (2323.3, 2819.7)),
    Case("tiresias", "tiresias", (2473.7, 3469.7), {}, (83644, 78556)),
    Case("optimus", "optimus", (4087.1, 5301.9), {"interval_s": 0.0, "told": True}, (72315, 66246)),
    Case("pollux", "pollux", (2088.8, 2446.1), {}, (64923, 58798), placement="pack"),
)


@dataclass(frozen=True)
class Figure:
    """One policy on one workload. Seconds of simulated time, but for `wall_s`."""

    policy: str
    workload: str
    mean_jct_s: float
    known_jct_s: float
    ratio: float
    makespan_s: float
    known_makespan_s: float | None
    resizes_per_job: float
    wall_s: float


def run(case: Case, workload: Workload, number: int) -> Figure:
    """The study's run of it."""
    began = time.perf_counter()
    outcome = simulate(
        case.policy, case.options, workload, ClusterSpec(16, 4), oracle=case.placement, mechanism=Requeue(30.0)
    )
    mean = float(np.mean([job.jct_s for job in outcome.jobs]))
    known = case.makespan_s[number]
    return Figure(
        policy=case.name,
        workload=workload.name,
        mean_jct_s=mean,
        known_jct_s=case.jct_s[number],
        ratio=mean / case.jct_s[number],
        makespan_s=max(job.ended or float("nan") for job in outcome.jobs),
        known_makespan_s=None if np.isnan(known) else known,
        resizes_per_job=float(np.mean([job.resizes for job in outcome.jobs])),
        wall_s=time.perf_counter() - began,
    )


COLUMNS = ("policy", "workload", "mean JCT, s", "published", "ratio", "makespan, s", "published", "resizes a job")


def cells(figure: Figure) -> tuple[str, ...]:
    """A row of the table."""
    known = figure.known_makespan_s
    return (
        figure.policy,
        figure.workload,
        f"{figure.mean_jct_s:.0f}",
        f"{figure.known_jct_s:.0f}",
        f"{figure.ratio:.3f}",
        f"{figure.makespan_s:.0f}",
        "" if known is None else f"{known:.0f}",
        f"{figure.resizes_per_job:.1f}",
    )


def markdown(figures: list[Figure]) -> str:
    """The table, for a terminal and for a page."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " ---: |" * (len(COLUMNS) - 2)]
    return "\n".join([*lines, *("| " + " | ".join(cells(figure)) + " |" for figure in figures)]) + "\n"


def main() -> None:
    """Run all cases and print them beside the published figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="profiles and workloads of the study")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    parser.add_argument("--markdown", type=Path, metavar="F", help="write the table there")
    options = parser.parse_args()
    if not (options.data / "profiles").is_dir():
        print(f"{options.data}: no data of Pollux's study there, so nothing to compare with (--data DIR)")
        return
    try:
        applications = read_profiles(options.data / "profiles")
        workloads = [read_workload(options.data / "workloads" / f"{name}.csv", applications) for name in WORKLOADS]
    except BadInput as error:
        raise SystemExit(f"error: {error}") from None
    todo = [(case, workload, number) for case in CASES for number, workload in enumerate(workloads)]
    figures = [run(*each) for each in track(todo, "simulating", console=Console(stderr=True), transient=True)]
    print(markdown(figures))
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
