"""What some elastic jobs bring to all, on a real Slurm: the demo's ten jobs with 0, 20, 50 and 100 % of them elastic.

    python -m benchmarks.elastic_share --rounds 2 --json elastic_share.json

All parts run under the companion, on a cluster each; jobs, sizes and times of submission are the same. Which jobs are
elastic is drawn by the round's number, and a larger share contains the smaller. GPUs are emulated: each rank sleeps in
proportion to its local batch. A round takes some 12 minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slurm_ones.demo.jobs import ON_CLUSTER, DemoJob
from slurm_ones.slurm.model import SlurmJob
from tests.cluster.cluster import Cluster
from tests.demo.results import EMULATED
from tests.demo.scenario import Outcome, companion, run

SHARES = (0, 20, 50, 100)
"""Per cent."""


def elastic_jobs(share: int, round_: int) -> Collection[DemoJob]:
    """This share of the jobs, in per cent."""
    drawn = random.Random(round_).sample(ON_CLUSTER, len(ON_CLUSTER))
    return drawn[: len(ON_CLUSTER) * share // 100]


def silent(outcomes: list[Outcome], jobs: dict[int, SlurmJob]) -> None:
    """Show nothing while it runs."""


def mean(jcts: list[float]) -> float | None:
    return round(statistics.mean(jcts), 1) if jcts else None


def one(share: int, round_: int) -> dict[str, Any]:
    """A part: mean JCT in seconds, of all jobs and of each kind.

    Raises:
        SystemExit: A job did not finish.
    """
    elastic = elastic_jobs(share, round_)
    with Cluster("gres") as cluster, companion(cluster):
        outcomes = run(cluster, elastic=elastic, show=silent)
    unfinished = [f"{o.job.name} is {o.state}" for o in outcomes if not o.finished]
    if unfinished:
        raise SystemExit(f"{share} % of round {round_}: {', '.join(unfinished)}; look at its job's log")
    return {
        "round": round_,
        "share": share,
        "mean_jct_s": mean([o.jct_s for o in outcomes]),
        "elastic_jct_s": mean([o.jct_s for o in outcomes if o.job in elastic]),
        "rigid_jct_s": mean([o.jct_s for o in outcomes if o.job not in elastic]),
        "makespan_s": round(max(o.ended for o in outcomes) - min(o.submitted for o in outcomes), 1),
        "elastic": sorted(job.name for job in elastic),
        "resizes": sum(len(o.sizes) - 1 for o in outcomes if o.job in elastic),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where results go")
    options = parser.parse_args()
    print(EMULATED)
    print("round  elastic, %  mean JCT, s  of elastic jobs  of the others  makespan, s  resizes", flush=True)
    parts = []
    for round_ in range(options.rounds):
        for share in SHARES:
            part = one(share, round_)
            parts.append(part)
            kinds = [f"{part[key]:.0f}" if part[key] is not None else "–" for key in ("elastic_jct_s", "rigid_jct_s")]
            print(
                f"{round_:5} {share:11} {part['mean_jct_s']:12.0f} {kinds[0]:>16} {kinds[1]:>14}"
                f" {part['makespan_s']:12.0f} {part['resizes']:8}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"emulated": EMULATED, "parts": parts}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
