"""What a user gains whose jobs lie to the companion, and what the others lose.

    OMP_NUM_THREADS=1 python benchmarks/liars.py --json liars.json

The companion drives generated jobs on a simulated cluster with its defaults; a quarter of the jobs, chosen by chance,
belong to a user whose wrapper lies about each of them in the same way. The same work is simulated with every lie, with
the bounds of claims (in learn/) and without. All is relative to the same jobs, seed and bounds where everybody tells
the truth. The share is of the GPUs held while both the liar and others have jobs in the system.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bounds_off import Off, without
from benchmarks.generated import parser_of
from ones_wrapper.protocol import Epoch, Hello, Report, Spec, Throughput
from slurm_ones.learn import hierarchy, histories, learner, progress, throughput
from slurm_ones.simulate.outcome import RunFigures
from slurm_ones.simulate.run import WarningLog, companion_settings, over, run_companion
from slurm_ones.simulate.slurm.simulated_job import Request
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.training.reports import JobFiles
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World

PER_NODE, TICK_S = 4, 60.0
LIAR = "liar"
SHARE = 4
"""One job in so many is the liar's."""
BY = 10
"""What is multiplied or divided is so by this."""


class Liar:
    """What one job's wrapper makes of the truth before it is written; this one is honest."""

    def __init__(self) -> None:
        self.gpus = 1
        self.dataset = 1
        self.said = 0

    def spec(self, true: Spec) -> Spec:
        """What it says it can do."""
        self.dataset = true.dataset
        return true

    def reports(self, true: Report) -> Sequence[Report]:
        """What it says in place of a report."""
        if isinstance(true, Hello):
            self.gpus = true.nodes * true.gpus_per_node
        self.said += isinstance(true, Throughput)
        return (self.throughput(true),) if isinstance(true, Throughput) else (true,)

    def throughput(self, true: Throughput) -> Throughput:
        """What it says in place of a stretch."""
        return true


class MoreSamples(Liar):
    """More samples than its cursor moved by."""

    def throughput(self, true: Throughput) -> Throughput:
        return replace(true, samples=BY * true.samples)


class FewerSeconds(Liar):
    """Less time than its stretches took."""

    def throughput(self, true: Throughput) -> Throughput:
        return replace(true, seconds=true.seconds / BY)


class Everything(Liar):
    """Samples, cursor, epochs and progress alike: a lie that agrees with itself."""

    def reports(self, true: Report) -> Sequence[Report]:
        if isinstance(true, Epoch):
            return [replace(true, epoch=BY * true.epoch + i) for i in range(BY)]
        if isinstance(true, (Hello, Throughput)):
            epoch, cursor = divmod(BY * (true.epoch * self.dataset + true.cursor), self.dataset)
            worth = None if true.progress is None else BY * true.progress
            if isinstance(true, Throughput):
                true = replace(true, samples=BY * true.samples)
            return super().reports(replace(true, epoch=epoch, cursor=cursor, progress=worth))
        return (true,)


class Scaling(Liar):
    """Ever faster on more GPUs: n^0.5 times the truth on n."""

    def throughput(self, true: Throughput) -> Throughput:
        return replace(true, seconds=true.seconds / math.sqrt(self.gpus))


class Noise(Liar):
    """A gradient so noisy that no batch is too large."""

    def throughput(self, true: Throughput) -> Throughput:
        return replace(true, noise=1e9)


class NoiseAndProgress(Liar):
    """The same, with the progress that would follow: every sample counts whole."""

    def reports(self, true: Report) -> Sequence[Report]:
        if isinstance(true, (Hello, Throughput)):
            worth = float(true.epoch * self.dataset + true.cursor)
            return super().reports(replace(true, noise=1e9, progress=worth))
        return (true,)


class Short(Liar):
    """Hardly any work: a tenth of its epochs."""

    def spec(self, true: Spec) -> Spec:
        return replace(super().spec(true), epochs=max(1, true.epochs // BY))


class ShortAndSilent(Short):
    """The same, and after a few reports not another one: so it is always nearly done."""

    def reports(self, true: Report) -> Sequence[Report]:
        return () if self.said >= 3 and isinstance(true, (Throughput, Epoch)) else super().reports(true)


class Endless(Liar):
    """Ten times the work."""

    def spec(self, true: Spec) -> Spec:
        return replace(super().spec(true), epochs=BY * true.epochs)


TRUTH = "the truth"
LIES: dict[str, type[Liar]] = {
    TRUTH: Liar,
    "samples x 10": MoreSamples,
    "seconds / 10": FewerSeconds,
    "samples, cursor and epochs x 10": Everything,
    "speed x sqrt(GPUs)": Scaling,
    "noise scale 1e9": Noise,
    "noise scale 1e9, progress to match": NoiseAndProgress,
    "epochs / 10": Short,
    "epochs / 10, then silence": ShortAndSilent,
    "epochs x 10": Endless,
}


class LyingFiles(JobFiles):
    """A job's directory, into which its wrapper writes what it likes."""

    def __init__(self, work_dir: Path, job_id: int, liar: Liar) -> None:
        super().__init__(work_dir, job_id)
        self._liar = liar

    def open(self, restart: int, spec: Spec) -> None:
        super().open(restart, self._liar.spec(spec))

    def report(self, time: float, report: Report) -> None:
        for said in self._liar.reports(report):
            super().report(time, said)


class LyingWorld(World):
    """A world in which some submissions are one user's, who lies."""

    def __init__(
        self, workload: Workload, spec: ClusterSpec, directory: Path, seed: int, mine: frozenset[str], lie: type[Liar]
    ) -> None:
        self._mine = mine
        self._lie = lie
        super().__init__(workload, spec, directory, ClusterSettings(), seed=seed)

    def _request(self, submission: Submission, app: Application) -> Request:
        asked = super()._request(submission, app)
        return replace(asked, user=LIAR) if submission.name in self._mine else asked

    def _files(self, submission: Submission, job_id: int) -> JobFiles:
        lie = self._lie if submission.name in self._mine else Liar
        return LyingFiles(self.directory, job_id, lie())


UNCHECKED: tuple[Off, ...] = (
    (progress, "OVERRUN", 0.0),
    (throughput, "UNPROVEN", 0.0),
    (throughput, "LINEAR", math.inf),
    (histories, "SILENT_S", math.inf),
    (learner, "PEERS", math.inf),
    (hierarchy, "_shares", lambda parents, users: [np.ones(len(above)) for above in parents]),
    (hierarchy, "FAR", math.inf),
    (hierarchy, "MOVES", math.inf),
)
"""Everything is believed, as it was before there were bounds."""


@dataclass(frozen=True)
class Figures:
    """One simulation."""

    liar_jct_s: float
    """Mean completion time of the liar's jobs …"""
    others_jct_s: float
    """… and of all others."""
    share: float
    """Of the GPUs held while both have jobs, the liar's."""


def simulate(work: Workload, gpus: int, seed: int, lie: type[Liar], settings: Mapping[str, Any]) -> Figures:
    """One workload to its end, with the companion and its defaults."""
    spec = ClusterSpec(gpus // PER_NODE, PER_NODE)
    drawn = np.random.default_rng([seed, 17]).permutation(len(work.submissions))[: len(work.submissions) // SHARE]
    mine = frozenset(work.submissions[i].name for i in drawn)
    with tempfile.TemporaryDirectory(prefix="slurm-ones-") as name, WarningLog().recording() as log:
        directory = Path(name)
        own = companion_settings(spec, directory, settings, tick_s=TICK_S, policy="ones", seed=seed)
        world = LyingWorld(work, spec, directory, seed, mine, lie)
        with run_companion(world, own, log, lambda tick: over(world, tick)):
            pass
        outcome = RunFigures(world).outcome("ones", seed)
    jobs = outcome.jobs
    spans = {job.name: (job.submitted, job.submitted + job.jct_s) for job in jobs}
    both = _overlap([spans[n] for n in spans if n in mine], [spans[n] for n in spans if n not in mine])
    held = {True: 0.0, False: 0.0}
    for held_by in outcome.segments:
        for low, high in both:
            held[held_by.job in mine] += held_by.gpus * max(min(held_by.end, high) - max(held_by.start, low), 0.0)
    return Figures(
        float(np.mean([job.jct_s for job in jobs if job.name in mine])),
        float(np.mean([job.jct_s for job in jobs if job.name not in mine])),
        held[True] / max(sum(held.values()), 1e-9),
    )


def _overlap(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time that lie in a span of each."""
    ends = sorted({end for span in (*one, *other) for end in span})

    def inside(spans: Sequence[tuple[float, float]], at: float) -> bool:
        return any(low <= at < high for low, high in spans)

    return [(low, high) for low, high in pairwise(ends) if inside(one, low) and inside(other, low)]


@dataclass(frozen=True)
class Row:
    """One lie, over all seeds; ratios are geometric means against the truth under the same checks."""

    lie: str
    checks: bool
    share: float
    true_share: float
    liar_jct: float
    others_jct: float
    seeds: int


def table(rows: Sequence[Row]) -> str:
    """For a terminal and for a page."""
    lines = [
        "| lie | checks | liar's share of GPUs | honest | liar's JCT | others' JCT |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for r in rows:
        shown = f"{r.share:.2f} | {r.true_share:.2f} | x {r.liar_jct:.2f} | x {r.others_jct:.2f}"
        lines.append(f"| {r.lie} | {'on' if r.checks else 'off'} | {shown} |")
    return "\n".join(lines) + "\n"


def row(lie: str, checks: bool, lied: Sequence[Figures], honest: Sequence[Figures]) -> Row:
    """One line of the table."""

    def ratio(figure: Callable[[Figures], float]) -> float:
        return float(np.exp(np.mean([math.log(figure(a) / figure(b)) for a, b in zip(lied, honest, strict=True)])))

    return Row(
        lie,
        checks,
        float(np.mean([figures.share for figures in lied])),
        float(np.mean([figures.share for figures in honest])),
        ratio(lambda figures: figures.liar_jct_s),
        ratio(lambda figures: figures.others_jct_s),
        len(lied),
    )


def attempt(
    mix: str, jobs: int, load: float, gpus: int, settings: Mapping[str, Any], task: tuple[int, str, bool]
) -> Figures:
    """One seed, lie, and with or without checks."""
    seed, name, checks = task
    work = generate(mix, jobs=jobs, seed=seed, load=load, gpus=gpus, gpus_per_node=PER_NODE)
    with nullcontext() if checks else without(UNCHECKED):
        return simulate(work, gpus, seed, LIES[name], settings)


def main() -> None:
    """Simulate, compare and print."""
    parser = parser_of(__doc__, seeds=3, jobs=16, gpus=16)
    parser.add_argument("--load", type=float, default=4.0, metavar="X", help="rate of arrival: how scarce GPUs are")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="simulations side by side")
    parser.add_argument("--lie", action="append", choices=sorted(LIES), help="these lies alone; all of them by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the companion")
    options = parser.parse_args()
    settings = {key: json.loads(value) for key, _, value in (text.partition("=") for text in options.set)}
    lies = [TRUTH, *(options.lie or (name for name in LIES if name != TRUTH))]
    tasks = [(seed, name, checks) for seed in range(options.seeds) for name in lies for checks in (True, False)]
    found: dict[tuple[str, bool], list[Figures]] = {}
    one = partial(attempt, options.mix, options.jobs, options.load, options.gpus, settings)
    with ProcessPoolExecutor(options.processes) as pool:
        for (seed, name, checks), figures in zip(tasks, pool.map(one, tasks), strict=True):
            found.setdefault((name, checks), []).append(figures)
            print(f"seed {seed}, {name}, checks {'on' if checks else 'off'}: {figures}", file=sys.stderr, flush=True)
    rows = [row(name, checks, each, found[TRUTH, checks]) for (name, checks), each in found.items()]
    # What the checks cost where nobody lies.
    rows.append(row(f"{TRUTH}, checks against none", True, found[TRUTH, True], found[TRUTH, False]))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
