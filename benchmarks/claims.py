"""What each bound on claims takes from a liar: GPUs that one decision gives to a job that lies.

    OMP_NUM_THREADS=1 python benchmarks/claims.py --json claims.json

Eleven jobs of as many users on 16 GPUs: speeds, scaling and work are drawn by a seed, and each was measured on one
and two GPUs for ten minutes. The twelfth lies. `ones` decides on what learning makes of it with all bounds, without the
one that is meant for that lie, and where it tells the truth. All wait, so that no cost of a change hides what a lie is
worth. Said are mean GPUs of the liar, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ones_db.shape import Shape

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bounds_off import Off, without
from ones_db import EpochPoint, JobHistory, JobRecord, ThroughputPoint
from ones_wrapper.protocol import Spec
from slurm_ones.learn import histories, learner, progress, throughput
from slurm_ones.learn.learner import Learner
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import JobView
from slurm_ones.testing.rounds import cluster, job

DATASET = 1000
OFTEN = 5
"""Measurements at each size."""
NOW = 600.0
JOBS = 12


@dataclass(frozen=True)
class Told:
    """What a job tells of itself."""

    speed: float
    """Samples/s on one GPU."""
    exponent: float
    """Of its speed on n of them."""
    epochs: int
    """That it declares."""
    done: int
    ran_s: Mapping[tuple[int, int], float]
    user: str
    silent_s: float = 0.0
    spec: int = 0
    """Tells scripts apart."""
    sizes: tuple[int, ...] = (1, 2)
    """GPUs on which it was measured."""

    def history(self, job_id: int) -> JobHistory:
        spec = Spec(32, 256, 64, DATASET + self.spec, self.epochs)
        points = tuple(
            ThroughputPoint(Shape(1, n), 32 * n, self.speed * n**self.exponent, NOW - 60.0 * i)
            for n in self.sizes
            for i in range(OFTEN)
        )
        return JobHistory(
            job=JobRecord(job_id, f"train{self.spec}", self.user, 0.0, Shape(1, 2), elastic=True),
            spec=spec,
            epochs=tuple(EpochPoint(e, 2.0, 0.1, 10.0 * e, 0) for e in range(self.done)),
            throughput=points,
            samples=float((DATASET + self.spec) * self.done),
            batch=64,
            ended_runs_s=0.0,
            running_since=0.0,
            resizes=1,
            last_resize_end=None,
            epochs_since_change=self.done,
            first_loss=2.0,
            ran=tuple((Shape(nodes, each), seconds) for (nodes, each), seconds in self.ran_s.items()),
        )


def draw(rng: np.random.Generator, number: int) -> Told:
    """The truth about a job."""
    epochs = int(rng.integers(20, 200))
    done = int(epochs * rng.uniform(0.3, 0.7))
    ran = {(1, 1): 400.0, (1, 2): 200.0}
    return Told(100.0 * math.exp(rng.normal(0, 0.5)), rng.uniform(0.6, 0.9), epochs, done, ran, f"u{number}", 0, number)


@dataclass(frozen=True)
class Lie:
    """A lie, the bound that is meant for it, and whether others of its kind, or of its user, have finished."""

    tell: Callable[[Told], Told]
    off: tuple[Off, ...]
    peers: str = ""


LIES: dict[str, Lie] = {
    "epochs / 10, and past them": Lie(
        lambda t: replace(t, epochs=max(t.epochs // 10, 1)), ((progress, "OVERRUN", 0.0),)
    ),
    "scales as n^1.5": Lie(lambda t: replace(t, exponent=1.5, sizes=(1, 4)), ((throughput, "LINEAR", math.inf),)),
    "scales as n^3": Lie(lambda t: replace(t, exponent=3.0, sizes=(1, 4)), ((throughput, "LINEAR", math.inf),)),
    "a new size, n^1": Lie(
        lambda t: replace(t, exponent=1.0, ran_s={(1, 1): 600.0, (1, 2): 10.0}), ((throughput, "UNPROVEN", 0.0),)
    ),
    "nearly done, and silent for an hour": Lie(
        lambda t: replace(t, epochs=t.done + 1, silent_s=3600.0), ((histories, "SILENT_S", math.inf),)
    ),
    "10 x as fast, three finished jobs of others tell": Lie(
        lambda t: replace(t, speed=10 * t.speed), ((learner, "PEERS", math.inf),), "others"
    ),
    "30 finished jobs of its own, 10 x as fast, before its first run": Lie(
        lambda t: replace(t, speed=0.0), ((learner, "_shared", lambda fits: [(fit, 1.0) for _, fit in fits]),), "own"
    ),
}


def view(learner: Learner, told: Told, job_id: int) -> JobView:
    """A waiting job as a policy sees it."""
    history = told.history(job_id)
    if not told.speed:
        history = replace(history, throughput=(), epochs=(), samples=0.0, ran=())
    known = learner.about(history, NOW + told.silent_s)
    return job(
        job_id,
        gpus=(1, 2, 4, 8, 16),
        requested=16,
        base_batch=32,
        batch=32,
        requested_batch=32,
        model=known.throughput,
        efficiency=known.efficiency,
        progress=known.progress,
        samples=known.samples,
        dataset=known.dataset or DATASET,
        submitted=0.0,
        epochs=told.done,
    )


def gpus(truths: Sequence[Told], last: Told, finished: Sequence[JobHistory], seed: int) -> int:
    """Of the last job, by one decision."""
    learner = Learner()
    learner.finished(finished)
    views = [view(learner, told, i) for i, told in enumerate([*truths, last], 1)]
    found = make_policy("ones").decide(cluster(4, 4), views, NOW, np.random.default_rng(seed))
    given = found.allocations.get(len(views))
    return given.shape.gpus if given else 0


def finished_before(peers: str, truth: Told) -> list[JobHistory]:
    """Finished jobs of its kind that others truly had, or that were its user's and lied."""
    if peers == "others":
        return [replace(truth, user=f"peer{i}").history(100 + i) for i in range(3)]
    if peers == "own":
        honest = [replace(truth, user=f"peer{i}").history(100 + i) for i in range(3)]
        return [replace(truth, speed=10 * truth.speed).history(200 + i) for i in range(30)] + honest
    return []


def measure(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for name, lie in LIES.items():
        held: dict[str, list[int]] = {"truth": [], "bounded": [], "unbounded": []}
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            truths = [draw(rng, i) for i in range(JOBS)]
            *others, truth = truths
            finished = finished_before(lie.peers, truth)
            honest = finished_before("others", truth) if lie.peers else []
            unknown = replace(truth, speed=0.0) if lie.peers == "own" else truth
            held["truth"].append(gpus(others, unknown, honest, seed))
            held["bounded"].append(gpus(others, lie.tell(truth), finished, seed))
            with without(lie.off):
                held["unbounded"].append(gpus(others, lie.tell(truth), finished, seed))
        means = {key: float(np.mean(values)) for key, values in held.items()}
        error = float(np.std(np.subtract(held["unbounded"], held["bounded"])) / math.sqrt(seeds))
        rows.append({"lie": name, **means, "error": error})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = measure(asked.seeds)
    print("| lie | GPUs, the truth | bounded | without its bound | ± of the difference |\n| --- |" + " ---: |" * 4)
    for row in rows:
        print("| {lie} | {truth:.2f} | {bounded:.2f} | {unbounded:.2f} | {error:.2f} |".format_map(row))
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
