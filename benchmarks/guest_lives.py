"""Gain of discounting guests by their expected life (option `borrowed` of `ones`).

    OMP_NUM_THREADS=1 python -m benchmarks.guest_lives --seeds 10 --json guest_lives.json

Each seed is a few jobs that ask for little on a small cluster, in simulations of the whole companion. Slurm takes each
guest after a random time, of the mean `--life`, and its GPUs are free again at once. Jobs change from memory to memory
(fast), or as slowly as by a checkpoint and a term (slow): training then stands still as long for each change.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slurm_ones.simulate.run import run
from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.spec import PARTITION, ClusterSpec
from slurm_ones.simulate.training.application import Hot, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload

GUEST = "guest"
GRACE_S = 30.0
APPLICATIONS = ("resnet18-cifar10", "bert-glue")


class ShortLives(Faults):
    """Slurm takes each guest after an exponential time."""

    def __init__(self, life_s: float, seed: int) -> None:
        self.taken = 0
        self._life_s = life_s
        self._rng = np.random.default_rng([seed, 74])

    def begin(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def started(self, job: SimulatedJob) -> None:
        if job.qos == GUEST:
            run_of = job.start_time
            self._cluster.timeline.after(float(self._rng.exponential(self._life_s)), lambda: self._take(job, run_of))

    def _take(self, job: SimulatedJob, run_of: float) -> None:
        if job.running and job.start_time == run_of:
            self.taken += 1
            self._cluster.preempt(job.to_model().key, "cancel", GRACE_S)


def workload(seed: int, jobs: int) -> Workload:
    """Jobs that come within ten minutes, each of half an hour to an hour at what it asks for."""
    rng = np.random.default_rng([seed, 31])
    applications = {name: build(replace(KINDS[name], epochs=96)) for name in APPLICATIONS}
    found = []
    for number in range(jobs):
        app = applications[APPLICATIONS[int(rng.integers(len(APPLICATIONS)))]]
        gpus, wanted_s = int(rng.choice((1, 2))), float(rng.uniform(1800.0, 3600.0))
        alone_s = app.seconds(1, gpus, float(app.base_batch), 0.0)
        epochs = min(wanted_s / alone_s, 1.0)
        at = float(rng.uniform(0.0, 600.0))
        found.append(Submission(f"job-{number}", at, app.name, gpus, app.base_batch, epochs=epochs))
    return Workload("guest lives", tuple(sorted(found, key=lambda one: one.time)), applications)


def simulated(seed: int, given: argparse.Namespace, pause_s: float, *, borrowed: bool) -> dict[str, Any]:
    """One run."""
    guest = Qos(GUEST, 0, mode="cancel", grace_s=GRACE_S, usage_factor=0.0)
    lives = ShortLives(given.life, seed)
    slow = {"pause_s": pause_s, "shrink_pause_s": pause_s, "recover_s": pause_s}
    hot = Hot(**slow, terms=True) if pause_s else Hot()
    done = run(
        "ones",
        {"borrowed": borrowed},
        workload(seed, given.jobs),
        ClusterSpec(given.nodes, 4),
        mechanism=hot,
        seed=seed,
        settings={"guests": {PARTITION: {"qos": GUEST, "grace_s": GRACE_S}}},
        faults=lives,
        conf=SlurmConf(qos=(Qos("normal", 10, (GUEST,)), guest), youngest_first=True),
    )
    return {
        "mean_jct_s": round(statistics.mean(job.jct_s for job in done.jobs), 1),
        "gpu_h": round(sum(job.gpu_s for job in done.jobs) / 3600.0, 2),
        "changes": sum(job.resizes for job in done.jobs),
        "taken": lives.taken,
    }


def main() -> None:
    """Run each seed with the discount and without, and print the ratio of their mean JCTs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--life", type=float, default=300.0, help="mean seconds until Slurm takes a guest")
    parser.add_argument("--slow", type=float, default=60.0, help="seconds that a slow change stops training for")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(given.first, given.first + given.seeds):
        for name, pause_s in (("slow", given.slow), ("fast", 0.0)):
            pair = {borrowed: simulated(seed, given, pause_s, borrowed=borrowed) for borrowed in (True, False)}
            ratio = pair[True]["mean_jct_s"] / pair[False]["mean_jct_s"]
            row = {"seed": seed, "changes": name, "ratio": round(ratio, 4), "with": pair[True], "without": pair[False]}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.json:
                arguments = {**vars(given), "json": ""}
                given.json.write_text(json.dumps({"arguments": arguments, "runs": rows}))
    for name in ("slow", "fast"):
        ratios = [row["ratio"] for row in rows if row["changes"] == name]
        deviation = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
        print(f"{name}: mean JCT with the discount over without: {statistics.mean(ratios):.3f}, s.d. {deviation:.3f}")


if __name__ == "__main__":
    main()
