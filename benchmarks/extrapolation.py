"""How far predicted speeds are from measured ones at sizes beyond those that a job has tried.

    python benchmarks/extrapolation.py --profiles DIRECTORY --growth 0.05 --growth 0.01

`DIRECTORY` holds profiles in Pollux's format, measured on real GPUs. A job has tried some sizes of at most 16 GPUs,
five times each with 2 % noise, at its base batch on each GPU. It is asked about more GPUs, at as many samples a GPU and
at a quarter of them, which it has not tried at any size. What is believed before any measured is `CAUTIOUS`, and the
same with other growths beside it: what each GPU beyond the second adds to the exchange, relative to it.

They are predicted from the bytes of their gradients too (`WIRED`): as the first job of a site, and held out, once the
site's other applications have taught what they can.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ones_db.shape import Shape

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db.records import ThroughputPoint
from slurm_ones.learn.hierarchy import GroupPath, JobEvidence, Tree
from slurm_ones.learn.step_time import (
    ACROSS_EACH,
    ANY_LOCAL,
    CAUTIOUS,
    GIGABYTE,
    INSIDE_EACH,
    WIRED,
    Fit,
    Prior,
    StepLayout,
    fit_all,
)
from slurm_ones.learn.throughput import MeasuredThroughput, points_of
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.workloads.profiles import read_profiles

TRIED = ((1,), (1, 2), (2, 4), (4, 8), (1, 2, 4, 8), (8,), (8, 16), (16,))
"""Sizes that a job has tried, in GPUs."""
ASKED = (16, 32, 64)
SHARES = (1.0, 0.25)
"""Of the samples a GPU that it has tried."""
TAUGHT, TAUGHT_SHARES = (1, 2, 4, 8, 16), (1.0, 0.5)
"""What the other applications have tried."""
PER_NODE = 4
TIMES = 5
NOISE = 0.02
GRADIENT_BYTES = 4
"""Of each parameter."""


def with_growth(growth: float) -> Prior:
    """What is believed of a job, but for how its exchange grows."""
    mean = CAUTIOUS.mean.copy()
    mean[[INSIDE_EACH, ACROSS_EACH]] = np.log(growth)
    return Prior(mean, CAUTIOUS.deviation)


def speed(app: Application, gpus: int, share: float = 1.0) -> tuple[int, int, float] | None:
    """Nodes, batch and measured samples/s there; None where nothing was measured."""
    nodes, local = -(-gpus // PER_NODE), max(min(app.base_batch, app.max_local_batch) * share, 1.0)
    batch = int(min(local * gpus, app.max_batch))
    try:
        found = app.throughput(np.array([nodes]), np.array([gpus]), np.array([batch]))
    except ValueError:
        return None
    return (nodes, batch, float(found[0])) if found[0] > 0 else None


def layout_of(app: Application, told: bool) -> StepLayout:
    """What it tells of its step: the bytes of its gradients, or nothing."""
    return StepLayout(ANY_LOCAL, gradient_gb=app.parameters * GRADIENT_BYTES / GIGABYTE if told else 0.0)


def fitted(
    app: Application, tried: Sequence[int], shares: Sequence[float], prior: Prior, told: bool, rng: np.random.Generator
) -> Fit:
    """What is known of it once it has tried these."""
    points = [
        ThroughputPoint(Shape(there[0], gpus // there[0]), there[1], there[2] * rng.lognormal(0.0, NOISE), float(time))
        for gpus in tried
        for share in shares
        if (there := speed(app, gpus, share)) is not None
        for time in range(TIMES)
    ]
    reference = float(min(app.base_batch, app.max_local_batch))
    return fit_all([(points_of(points, reference, layout_of(app, told)), reference, prior)])[0]


def always(prior: Prior) -> Callable[[Application], Prior]:
    """The same is believed of each application."""
    return lambda app: prior


def taught(apps: Sequence[Application], first: Prior, told: bool) -> Callable[[Application], Prior]:
    """What is believed of each application once the others of the site have taught what they can."""

    def prior_of(app: Application) -> Prior:
        rng, others = np.random.default_rng(1), [other for other in apps if other is not app]
        fits = [fitted(other, TAUGHT, TAUGHT_SHARES, first, told, rng) for other in others]
        kin = [GroupPath(other.name, other.name, other.name) for other in others]
        heard = [JobEvidence.of(fit) for fit in fits]
        return Tree(list(zip(kin, heard, strict=True)), first).expect(GroupPath(app.name, app.name, app.name))

    return prior_of


def errors(
    apps: Sequence[Application], prior_of: Callable[[Application], Prior], told: bool = False
) -> dict[tuple[int, float], list[float]]:
    """Logs of predicted over measured speed, by the GPUs that were asked about and the share of samples on each."""
    rng, found = np.random.default_rng(0), defaultdict[tuple[int, float], list[float]](list)
    for app in apps:
        prior = prior_of(app)
        for tried in TRIED:
            model = MeasuredThroughput(fitted(app, tried, (1.0,), prior, told, rng), layout_of(app, told))
            for gpus in ASKED:
                for share in SHARES:
                    there = speed(app, gpus, share)
                    if there is not None and gpus > max(tried):
                        nodes, batch, measured = there
                        said = model.throughput(np.array([nodes]), np.array([gpus]), np.array([batch]))
                        found[gpus, share].append(float(np.log(said[0] / measured)))
    return found


def show(label: str, found: dict[tuple[int, float], list[float]]) -> None:
    """A line for each number of GPUs and share of samples."""
    for (gpus, share), off in sorted(found.items()):
        typical, rms = np.median(np.abs(off)), np.sqrt(np.mean(np.square(off)))
        at = f"{label:>16} {gpus:3} GPUs, {share:4g} of the samples on each"
        print(f"{at}: mean {np.mean(off):+.3f}, median error {typical:.3f}, rms {rms:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--growth", type=float, action="append", default=[])
    given = parser.parse_args()
    if not given.profiles.is_dir():
        parser.error(f"--profiles: {given.profiles} is no directory; profiles in Pollux's format belong there")
    apps = list(read_profiles(given.profiles).values())
    for label, prior in [("as shipped", CAUTIOUS), *((f"{one:g}", with_growth(one)) for one in given.growth)]:
        show(label, errors(apps, always(prior)))
    for told, first in ((False, CAUTIOUS), (True, WIRED)):
        bytes_ = "bytes" if told else "no bytes"
        show(f"first, {bytes_}", errors(apps, always(first), told))
        show(f"held out, {bytes_}", errors(apps, taught(apps, first, told), told))


if __name__ == "__main__":
    main()
