"""Harm of growth to rigid jobs, and the cost of guests to elastic ones, on a recorded trace of which a half is elastic.

    python -m benchmarks.traces philly.csv --cluster 8x8 --sample 0.03 --jobs 40 --seeds 2 --json traces.json

Traces are those that `slurm-ones study` reads; none is part of this project. The same stretch runs in simulations of
the whole companion, elastic jobs being jobs of blocks, with the shipped settings:

- elastic jobs stay at the size that they asked for,
- they grow where there is no queue for guests, and nobody counts GPU-hours,
- they grow by guests in a QOS that counts nothing,
- they grow by guests that are charged as all other jobs,
- they grow without guests, and GPU-hours are counted.

A rigid job is late if it starts more than a minute later than in the first run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run
from slurm_ones.simulate.slurm.cluster import Faults
from slurm_ones.simulate.slurm.nodes import PreemptMode, Qos, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.spec import PARTITION, ClusterSpec
from slurm_ones.simulate.study.stretch import BEFORE, TraceSource, catalogue, stretch_of
from slurm_ones.simulate.training.application import Hot
from slurm_ones.simulate.workloads.formats import read_trace

LATE_S = 60.0
GRACE_S = 30.0
GUEST = "guest"


@dataclass(frozen=True)
class Way:
    """A way in which elastic jobs run."""

    name: str
    grow: bool = True
    guests: bool = False
    charged: bool = False

    @property
    def conf(self) -> SlurmConf:
        """What the site's admin sets."""
        if not self.guests:
            return SlurmConf()
        factor = 1.0 if self.charged else 0.0
        guest = Qos(GUEST, 0, mode="cancel", grace_s=GRACE_S, usage_factor=factor)
        return SlurmConf(qos=(Qos("normal", 10, (GUEST,)), guest), youngest_first=True)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the companion is told of it; all else is as shipped."""
        return {"guests": {PARTITION: {"qos": GUEST, "grace_s": GRACE_S}}} if self.guests else {}


WAYS = (
    Way("as asked", grow=False),
    Way("growth"),
    Way("free guests", guests=True),
    Way("charged guests", guests=True, charged=True),
    Way("charged growth", charged=True),
)


class Preemptions(Faults):
    """Counts the guests that start, and those that Slurm takes."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def started(self, job: SimulatedJob) -> None:
        self.count["guests"] += job.qos == GUEST

    def preempted(self, job: SimulatedJob, mode: PreemptMode, winner: int) -> None:
        self.count["taken"] += 1


def simulated(
    source: TraceSource, way: Way, seed: int, elastic: float, interval_s: float
) -> tuple[Outcome, Counter[str]]:
    """One run, without the jobs that were there before."""
    stretch = source.stretch
    cluster = ClusterSpec(stretch.nodes, stretch.gpus_per_node, charged=way.charged)
    workload = source.load_workload(seed, cluster.gpus, cluster.gpus_per_node, elastic)
    if not way.grow:
        workload = replace(workload, submissions=tuple(replace(one, elastic=False) for one in workload.submissions))
    taken = Preemptions()
    done = run(
        "ones",
        {},
        workload,
        cluster,
        interval_s=interval_s,
        mechanism=Hot(),
        seed=seed,
        settings=way.settings,
        conf=way.conf,
        faults=taken,
    )
    return source.counted(done), taken.count


def late(outcome: Outcome, asked: Outcome, rigid: set[str]) -> dict[str, float]:
    """Rigid jobs that started more than `LATE_S` later, and by how much."""
    before = {job.name: job.started for job in asked.jobs}
    found = {}
    for job in outcome.jobs:
        was = before[job.name]
        if job.name in rigid and was is not None and (job.started is None or job.started - was > LATE_S):
            found[job.name] = float("inf") if job.started is None else round(job.started - was, 1)
    return found


def row_of(outcome: Outcome, asked: Outcome, rigid: set[str]) -> dict[str, Any]:
    """Figures of one run."""
    jcts = [job.jct_s for job in outcome.jobs]
    elastic = [job.jct_s for job in outcome.jobs if job.name not in rigid]
    return {
        "mean_jct_s": round(sum(jcts) / len(jcts), 1),
        "elastic_jct_s": round(sum(elastic) / max(len(elastic), 1), 1),
        "gpu_h": round(sum(job.gpu_s for job in outcome.jobs) / 3600.0, 2),
        "late": late(outcome, asked, rigid),
        "resizes": sum(job.resizes for job in outcome.jobs),
        "notes": outcome.notes,
    }


def rows(source: TraceSource, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every run, one after the other."""
    for seed in range(given.first, given.first + given.seeds):
        asked: Outcome | None = None
        for way in (way for way in WAYS if not way.grow or way.name in given.ways):
            outcome, taken = simulated(source, way, seed, given.elastic, given.interval)
            asked = asked or outcome
            submitted = source.load_workload(seed, 0, source.stretch.gpus_per_node, given.elastic).submissions
            rigid = {one.name for one in submitted if not (one.elastic or one.name.startswith(BEFORE))}
            yield {
                "seed": seed,
                "way": way.name,
                "jobs": len(outcome.jobs),
                "rigid": len(rigid),
                **row_of(outcome, asked, rigid),
                **taken,
                "wall_s": round(outcome.wall_s, 1),
            }


def main() -> None:
    """Run the ways on each seed's choice of elastic jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--cluster", default="", help="nodes x GPUs per node (default: the most jobs held at once)")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the jobs to use")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--elastic", type=float, default=0.5)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between two decisions")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], default=[way.name for way in WAYS])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.trace.exists():
        sys.exit(f"{given.trace} is not there: traces are no part of this project")
    nodes, _, gpus = given.cluster.partition("x")
    trace = read_trace(given.trace, "")
    stretch = stretch_of(trace, given.jobs, (int(nodes), int(gpus)) if given.cluster else None, given.sample)
    source = TraceSource(trace.name, None, stretch=stretch, curves=catalogue())
    print(f"{trace.name}: {len(stretch.jobs)} jobs on {stretch.nodes}x{stretch.gpus_per_node}", flush=True)
    found = []
    for row in rows(source, given):
        found.append(row)
        print(json.dumps(row), flush=True)
        if given.json:
            given.json.write_text(
                json.dumps({"arguments": {**vars(given), "trace": trace.name, "json": ""}, "runs": found})
            )


if __name__ == "__main__":
    main()
