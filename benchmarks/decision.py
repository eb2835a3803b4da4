"""What one decision costs: all generations until the schedule is there, on one core, at three sizes of cluster.

Half of the jobs run and half wait. Their throughput is learned from a few noisy measurements, as the companion learns
it, and jobs that have not run know only what others of their kind taught. The first decision is a cold one; the second,
after each waiting job that was started has started, has the memory of the first. Then comes a tick in which nothing has
changed. All are timed, from views to schedule, in seconds of the clock and of the processor: on a busy machine only the
second say something.

    OMP_NUM_THREADS=1 python benchmarks/decision.py --json decision.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ones_db import ThroughputPoint
from ones_db.shape import Shape
from slurm_ones.learn.hierarchy import GroupPath, JobEvidence, Tree
from slurm_ones.learn.histories import NoiseEfficiency
from slurm_ones.learn.step_time import CAUTIOUS, StepLayout, fit_all
from slurm_ones.learn.throughput import MeasuredThroughput, points_of
from slurm_ones.policies import POLICIES, make_policy
from slurm_ones.policy.contract import ClusterView, JobView, Limits, Policy, Progress, Schedule
from slurm_ones.policy.shapes import shape_of, valid_counts
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.generate import generate

PER_NODE = 4
CASES = ((64, 50), (2048, 1000), (10240, 5000))
"""GPUs and jobs."""
TARGETS = (0.02, 0.5, 5.0)
"""Seconds that a decision may take in each."""
NOISE = 0.05
"""Standard deviation of a measurement."""
NOW = 4 * 3600.0
WAITED_S = 60.0
"""From the first decision to the second."""
TICK_S = 15.0
"""From there to the tick in which nothing has changed."""

Placement = tuple[Shape, dict[str, int]]


def views(gpus: int, jobs: int, seed: int) -> tuple[ClusterView, list[JobView]]:
    """A cluster in the midst of its work."""
    rng = np.random.default_rng(seed)
    cluster = ClusterSpec(gpus // PER_NODE, PER_NODE, any_shape=False).view
    work = generate("philly", jobs=jobs, seed=seed, gpus=gpus, gpus_per_node=PER_NODE)
    free = {node.name: node.gpus for node in cluster.nodes}
    runs = rng.permutation(jobs) < jobs // 2
    apps = [work.applications[submission.application] for submission in work.submissions]
    held = [
        _place(cluster, free, min(submission.gpus, app.max_gpus)) if run else None
        for submission, app, run in zip(work.submissions, apps, runs, strict=True)
    ]
    measured = [
        _measured(cluster, app, submission, place, rng)
        for app, submission, place in zip(apps, work.submissions, held, strict=True)
    ]
    models = _learned(work.submissions, apps, measured)
    made = [
        _view(i, submission, app, cluster, place, model, rng)
        for i, (submission, app, place, model) in enumerate(zip(work.submissions, apps, held, models, strict=True))
    ]
    return cluster, made


def _place(cluster: ClusterView, free: dict[str, int], gpus: int) -> Placement | None:
    """Room for a job of so many GPUs, taken from `free`; None where there is none."""
    shape = shape_of(cluster, gpus)
    if shape is None:
        return None
    roomy = [name for name, room in free.items() if room >= shape.gpus_per_node]
    tight = sorted(roomy, key=free.__getitem__)[: shape.nodes]
    if len(tight) < shape.nodes:
        return None
    for name in tight:
        free[name] -= shape.gpus_per_node
    return shape, dict.fromkeys(tight, shape.gpus_per_node)


def _measured(
    cluster: ClusterView, app: Application, asked: Submission, place: Placement | None, rng: np.random.Generator
) -> list[ThroughputPoint]:
    """What it measured at the size that it holds and at up to two others."""
    if place is None:
        return []
    counts = valid_counts(cluster, 1, min(app.max_gpus, 4 * place[0].gpus))
    sizes = {place[0].gpus, *rng.choice(counts, rng.integers(0, 3)).tolist()}
    found = []
    for gpus in sorted(sizes):
        shape = shape_of(cluster, gpus)
        batch = max(_batch(app, asked), gpus)
        if shape is None:
            continue
        speed = float(app.throughput(np.array([shape.nodes]), np.array([gpus]), np.array([batch]))[0])
        for factor in np.exp(rng.normal(0.0, NOISE, 3)):
            found.append(ThroughputPoint(shape, batch, speed * factor, float(len(found))))
    return found


def _learned(
    submissions: Sequence[Submission], apps: Sequence[Application], measured: Sequence[Sequence[ThroughputPoint]]
) -> list[MeasuredThroughput]:
    """The models of all jobs, where what others of the same kind measured is the prior."""
    told = [
        (points_of(points, float(app.base_batch), StepLayout(float(app.max_local_batch))), float(app.base_batch))
        for points, app in zip(measured, apps, strict=True)
    ]
    alone = fit_all([(*each, CAUTIOUS) for each in told])
    kin = [GroupPath(s.application, s.application, "all") for s in submissions]
    tree = Tree([(one, JobEvidence.of(fit)) for one, fit in zip(kin, alone, strict=True) if len(fit.misfit)], CAUTIOUS)
    priors = {one.family: tree.expect(one) for one in set(kin)}
    fits = fit_all([(*each, priors[s.application]) for each, s in zip(told, submissions, strict=True)])
    return [
        MeasuredThroughput(fit, StepLayout(float(app.max_local_batch))) for fit, app in zip(fits, apps, strict=True)
    ]


def _view(
    i: int,
    asked: Submission,
    app: Application,
    cluster: ClusterView,
    place: Placement | None,
    model: MeasuredThroughput,
    rng: np.random.Generator,
) -> JobView:
    shape, nodes = place if place is not None else (None, {})
    share = float(rng.uniform(0.05, 0.95)) if shape else 0.0
    epochs = app.total / app.dataset
    batch = max(_batch(app, asked), shape.gpus if shape else 1)
    age = float(rng.uniform(60.0, NOW))
    return JobView(
        job_id=i + 1,
        submitted=NOW - age,
        requested=asked.gpus,
        requested_batch=batch,
        shape=shape,
        nodes=nodes,
        batch=batch,
        base_batch=app.base_batch,
        limits=Limits(
            valid_counts(cluster, 1, min(app.max_gpus, cluster.gpus)),
            app.min_batch or app.base_batch,
            app.max_batch,
            app.max_batch,
        ),
        model=model,
        efficiency=NoiseEfficiency(app.base_batch, app.noise(share * app.total, batch)),
        progress=Progress(max(share * epochs, 0.5), max((1.0 - share) * epochs, 0.1)),
        samples=share * app.total,
        dataset=app.dataset,
        epochs=int(share * epochs),
        epochs_since_change=int(share * epochs),
        running_s=float(rng.uniform(0.0, age)) if shape else 0.0,
        resizes=int(rng.integers(0, 4)) if shape else 0,
        resize_s=app.resize_s,
    )


def _batch(app: Application, asked: Submission) -> int:
    return min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch)


def later(cluster: ClusterView, jobs: Sequence[JobView], schedule: Schedule) -> list[JobView]:
    """The jobs once the schedule is in force."""
    free = {node.name: node.gpus for node in cluster.nodes}
    unchanged = {job.job_id for job in jobs if (got := schedule.allocations.get(job.job_id)) and got.shape == job.shape}
    for job in jobs:
        for name, gpus in job.nodes.items():
            free[name] -= gpus if job.job_id in unchanged else 0
    changed = {i: got for i, got in schedule.allocations.items() if i not in unchanged}
    places = {
        i: _place(cluster, free, changed[i].shape.gpus) for i in sorted(changed, key=lambda i: -changed[i].shape.gpus)
    }
    found = []
    for job in jobs:
        got, place = schedule.allocations.get(job.job_id), places.get(job.job_id)
        if job.job_id not in unchanged:
            shape, nodes = place if place is not None else (None, {})
            job = replace(job, shape=shape, nodes=nodes, resizes=job.resizes + (job.shape is not None))
        found.append(replace(job, batch=got.batch) if got is not None else job)
    return found


def timed(
    policy: Policy, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator
) -> tuple[Schedule, float, float]:
    """A decision, the seconds of the clock, and those of the processor."""
    clock, cpu = time.perf_counter(), time.process_time()
    schedule = policy.decide(cluster, jobs, now, rng)
    return schedule, time.perf_counter() - clock, time.process_time() - cpu


def measure(name: str, gpus: int, jobs: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` seeds, and the least and the most."""
    wall: dict[str, list[float]] = {"cold": [], "warm": []}
    cpu: dict[str, list[float]] = {"cold": [], "warm": []}
    policy = make_policy(name)
    running, unchanged = [], []
    for seed in range(repeats):
        cluster, waiting = views(gpus, jobs, seed)
        running.append(sum(job.shape is not None for job in waiting))
        policy, rng, now = make_policy(name), np.random.default_rng(seed), NOW
        for kind in ("cold", "warm"):
            schedule, clock, used = timed(policy, cluster, waiting, now, rng)
            wall[kind].append(clock)
            cpu[kind].append(used)
            if kind == "warm":
                unchanged.append(timed(policy, cluster, waiting, now + TICK_S, rng)[2])
            waiting, now = later(cluster, waiting, schedule), now + WAITED_S
    every = [*cpu["cold"], *cpu["warm"]]
    return {
        "seconds": statistics.median([*wall["cold"], *wall["warm"]]),
        "cpu_s": statistics.median(every),
        "cpu_least_s": min(every),
        "cpu_most_s": max(every),
        **{f"{kind}_s": statistics.median(found) for kind, found in wall.items()},
        **{f"{kind}_cpu_s": statistics.median(found) for kind, found in cpu.items()},
        "unchanged_cpu_s": statistics.median(unchanged),
        "generations": getattr(getattr(policy, "options", None), "generations", None),
        "running": statistics.median(running),
    }


def growth(found: Mapping[str, Mapping[str, float]], key: str) -> dict[str, float]:
    """How the cost grows from each case to the next: over GPUs × log GPUs, and as the power of the GPUs."""
    steps = {}
    for (small, fewer), (large, more) in itertools.pairwise(CASES):
        times = found[f"{large}x{more}"][key] / found[f"{small}x{fewer}"][key]
        expected = large * math.log(large) / (small * math.log(small))
        steps[f"{small}->{large} over n log n"] = times / expected
        steps[f"{small}->{large} power"] = math.log(times) / math.log(large / small)
    return steps


def main() -> None:
    """Time every case and print it beside its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    print("| GPUs × jobs | clock, s | processor, s | least – most | cold | warm | unchanged | target |")
    print("| --- |" + " ---: |" * 7)
    for (gpus, jobs), target in zip(CASES, TARGETS, strict=True):
        case = found[f"{gpus}x{jobs}"] = measure(options.policy, gpus, jobs, options.repeats)
        spread = f"{case['cpu_least_s']:.3f} – {case['cpu_most_s']:.3f}"
        cells = (f"{case[key]:.3f}" for key in ("seconds", "cpu_s"))
        both = (f"{case[key]:.3f}" for key in ("cold_cpu_s", "warm_cpu_s", "unchanged_cpu_s"))
        print(f"| {gpus} × {jobs} | {' | '.join(cells)} | {spread} | {' | '.join(both)} | {target} |", flush=True)
    found["growth"] = growth(found, "cpu_s")
    for name, value in found["growth"].items():
        print(f"growth {name}: {value:.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
