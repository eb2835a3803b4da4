"""Whether what is learned of jobs comes true: work still to come, and speeds at sizes that were not tried.

    OMP_NUM_THREADS=1 python benchmarks/calibration.py --json calibration.json

The companion drives generated jobs on a simulated cluster, which knows what they truly are. What the policy is told of
each job, once in each tenth of its work, is held against that. Errors are medians of |log(predicted / true)|; an
interval of 80 % should hold the truth in 80 % of the cases, an end within a hundredth.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.generated import parser_of
from benchmarks.progress_calibration import Calibration
from slurm_ones.learn.progress import ENOUGH, LEVELS
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import ClusterView, JobView, Policy, Schedule
from slurm_ones.policy.tables import build_tables
from slurm_ones.simulate.run import WarningLog, companion_settings, over, run_companion
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.world import World

PER_NODE, TICK_S = 4, 60.0
BEYOND = 1.2816
"""Standard deviations of a normal distribution beyond which a tenth of it is on each side."""

NOW, THEN = "work to come", "work to come at the last report"
TRIED, INSIDE, ACROSS = "speed, size tried", "speed, not tried, one node", "speed, not tried, several nodes"
NEW_INSIDE, NEW_ACROSS = "speed, job never measured, one node", "speed, job never measured, several nodes"
QUANTITIES = (NOW, THEN, TRIED, INSIDE, ACROSS, NEW_INSIDE, NEW_ACROSS)
ENDS = (1, ENOUGH, 2 * ENOUGH)
STAGES = ("none", f"1 to {ENOUGH - 1}", f"{ENOUGH} to {2 * ENOUGH - 1}", f"{2 * ENOUGH} or more")
"""Jobs that have finished: β is fitted from the third stage on, and the width of the interval from the last on."""


@dataclass
class Found:
    """Predictions of all simulations beside the truth, by quantity and stage; each with its job in front."""

    rows: dict[tuple[str, str], list[tuple[float, ...]]] = field(default_factory=lambda: defaultdict(list))
    jobs: int = 0
    """Jobs of the simulations before this one."""

    def add(self, quantity: str, stage: str, job_id: int, *values: float) -> None:
        """`values` are predicted, true, low, high."""
        self.rows[quantity, stage].append((self.jobs + job_id, *values))


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    quantity: str
    finished: str
    jobs: int
    predictions: int
    error: float
    coverage: float
    width: float
    """Median of log(high / low)."""


class Watched:
    """A policy whose views are compared with the world before it decides."""

    def __init__(self, policy: Policy, world: World, found: Found) -> None:
        self.name = policy.name
        self.work: list[tuple[str, str, int, float, float, float, float]] = []
        """Quantity, stage, job, epochs to come, epochs done, and the interval: the truth comes with the end."""
        self._policy = policy
        self._world = world
        self._found = found
        self._seen: set[tuple[int, int, bool]] = set()

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `decide.policy.Policy`."""
        stage = STAGES[bisect(ENDS, self._world.ended)]
        for job in jobs:
            training = self._world.trainings[job.job_id]
            progress, total = training.position.progress, training.curve.total
            measured = isinstance(job.model, MeasuredThroughput) and len(job.model.fit.misfit) > 0
            moment = (job.job_id, int(10 * progress / total), measured)
            if moment in self._seen:
                continue
            self._seen.add(moment)
            self._speeds(cluster, job, training.application, stage)
            if job.dataset:
                low, high = (job.progress.to_come(level) for level in LEVELS)
                for quantity, done in ((NOW, progress), (THEN, job.samples)):
                    self.work.append((quantity, stage, job.job_id, job.progress.beta, done / job.dataset, low, high))
        return self._policy.decide(cluster, jobs, now, rng)

    def _speeds(self, cluster: ClusterView, job: JobView, application: Application, stage: str) -> None:
        """At each size with the batch that the search would take there."""
        assert isinstance(job.model, MeasuredThroughput)
        at = job.model.fit.points.at
        tried = {(round(gpus), bool(across)) for gpus, across in zip(at.gpus, at.across, strict=True)}
        tables = build_tables(cluster, [job])
        may = np.flatnonzero(tables.allowed[0])
        nodes, gpus, batch = tables.nodes[may], tables.sizes[may], tables.batch[0, may]
        deviation = np.sqrt(np.log1p(job.model.uncertainty(nodes, gpus, batch) ** 2))
        speeds = job.model.throughput(nodes, gpus, batch)
        for i, true in enumerate(application.throughput(nodes, gpus, batch)):
            across = bool(nodes[i] > 1)
            quantity = (ACROSS if across else INSIDE) if tried else (NEW_ACROSS if across else NEW_INSIDE)
            if (int(gpus[i]), across) in tried:
                quantity = TRIED
            factor, speed = math.exp(BEYOND * float(deviation[i])), float(speeds[i])
            self._found.add(quantity, stage, job.job_id, speed, float(true), speed / factor, speed * factor)


def simulate(mix: str, jobs: int, gpus: int, seed: int, found: Found) -> None:
    """One workload to its end, with the companion and its defaults."""
    work = generate(mix, jobs=jobs, seed=seed, gpus=gpus, gpus_per_node=PER_NODE)
    spec = ClusterSpec(gpus // PER_NODE, PER_NODE)
    with tempfile.TemporaryDirectory(prefix="slurm-ones-") as name, WarningLog().recording() as log:
        directory = Path(name)
        settings = companion_settings(spec, directory, {}, tick_s=TICK_S, policy="ones", seed=seed)
        world = World(work, spec, directory, ClusterSettings(), seed=seed)
        watched = Watched(make_policy("ones"), world, found)
        with run_companion(world, settings, log, lambda tick: over(world, tick), lambda: watched):
            pass
    for quantity, stage, job_id, predicted, done, low, high in watched.work:
        training = world.trainings[job_id]
        true = training.position.progress / training.application.dataset - done
        if training.finished and true > 0:
            found.add(quantity, stage, job_id, predicted, true, low, high)
    found.jobs += 1 + max(world.trainings)


def figures(found: Found) -> list[Figure]:
    """Those quantities and stages of which there are predictions."""
    made = []
    for quantity, stage in sorted(found.rows, key=lambda key: (QUANTITIES.index(key[0]), STAGES.index(key[1]))):
        rows = found.rows[quantity, stage]
        job, *columns = np.array(rows).T
        kept = Calibration(*columns)
        made.append(Figure(quantity, stage, len(set(job)), len(rows), kept.error, kept.coverage, kept.width))
    return made


def table(made: Sequence[Figure]) -> str:
    """The table, for a terminal and for a page."""
    head = "| predicted | jobs finished | jobs | predictions | error | in the interval | width |"
    lines = [head, "| --- | --- |" + " ---: |" * 5]
    for f in made:
        shown = f"{f.error:.3f} | {f.coverage:.2f} | {f.width:.2f}"
        lines.append(f"| {f.quantity} | {f.finished} | {f.jobs} | {f.predictions} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate, compare and print."""
    parser = parser_of(__doc__, seeds=2, jobs=40, gpus=32)
    options = parser.parse_args()
    found = Found()
    for seed in range(options.seeds):
        simulate(options.mix, options.jobs, options.gpus, seed, found)
    made = figures(found)
    print(table(made))
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in made], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
