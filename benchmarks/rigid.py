"""How long rigid jobs wait beside elastic ones, in simulations of the whole companion.

    python benchmarks/rigid.py --seeds 5 --json rigid.json

Each seed is a generated workload like Philly's, of which a share never opted in. Rigid jobs come with a higher priority
than the elastic ones, or with the same (`--same-priority`). The same workload runs

- with elastic jobs, which give back what they grew by, under the default policy,
- as everybody asked, without elastic jobs,
- and with the elastic jobs as rigid ones of one GPU, their minimum: what rigid jobs could at best have beside them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload


@dataclass(frozen=True)
class Case:
    """One way in which a workload runs."""

    name: str
    elastic: bool = True
    smallest: bool = False


CASES = (
    Case("elastic"),
    Case("all as they asked", elastic=False),
    Case("elastic ones at their minimum", elastic=False, smallest=True),
)


def variant(workload: Workload, case: Case, priority: int) -> Workload:
    """The workload as it runs in this case, rigid jobs with their priority."""
    found = []
    for one in workload.submissions:
        if not one.elastic:
            found.append(replace(one, priority=priority))
        else:
            found.append(replace(one, elastic=case.elastic, gpus=1 if case.smallest else one.gpus))
    return replace(workload, submissions=tuple(found))


def figures(workload: Workload, outcome: Outcome) -> dict[str, float]:
    """Waits of the jobs that are rigid in every case, and what became of the others. Seconds."""
    rigid = {one.name for one in workload.submissions if not one.elastic}
    waits = np.array([job.started - job.submitted for job in outcome.jobs if job.name in rigid and job.started])
    others = [job for job in outcome.jobs if job.name not in rigid]
    return {
        "rigid": len(waits),
        "wait_s": float(waits.mean()),
        "p90_wait_s": float(np.quantile(waits, 0.9)),
        "longest_wait_s": float(waits.max()),
        "elastic_jct_s": float(np.mean([job.jct_s for job in others])),
        "resizes_per_job": float(np.mean([job.resizes for job in others])),
    }


def main() -> None:
    """Run the cases on each seed and print their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rigid", type=float, default=0.3)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--dwell-s", type=float, default=300.0)
    parser.add_argument("--same-priority", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cluster = ClusterSpec(given.nodes, 4)
    priority = 1 if given.same_priority else 10
    rows: list[dict[str, Any]] = []
    seeds = range(given.first, given.first + given.seeds)
    for seed, case in track([(s, c) for s in seeds for c in CASES], console=Console(stderr=True)):
        workload = generate("philly", jobs=given.jobs, seed=seed, load=given.load, gpus=cluster.gpus, rigid=given.rigid)
        settings = {"resize.dwell_s": given.dwell_s}
        outcome = run("ones", {}, variant(workload, case, priority), cluster, seed=seed, settings=settings)
        rows.append({"case": case.name, "seed": seed, **figures(workload, outcome), "notes": outcome.notes})
        if given.json:
            saved = {"arguments": vars(given) | {"json": str(given.json)}, "runs": rows}
            given.json.write_text(json.dumps(saved, indent=1))
    for case in CASES:
        mine = [row for row in rows if row["case"] == case.name]
        means = {key: float(np.mean([row[key] for row in mine])) for key in mine[0] if key not in ("case", "notes")}
        told = ", ".join(f"{key} {value:.1f}" for key, value in means.items() if key not in ("seed", "rigid"))
        print(f"{case.name:30} {told}")


if __name__ == "__main__":
    main()
