"""How far predicted speeds are from measured ones at sizes beyond those that a job has tried.

    python benchmarks/extrapolation.py --profiles DIRECTORY --growth 0.05 --growth 0.01

`DIRECTORY` holds profiles in Pollux's format, measured on real GPUs. A job has tried some sizes of at most 16 GPUs,
five times each with 2 % noise, at its base batch on each GPU. What is believed before any measured is `CAUTIOUS`, and
the same with other growths beside it: what each GPU beyond the second adds to the exchange, relative to it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db.records import ThroughputPoint
from slurm_ones.learn.step_time import ACROSS_EACH, CAUTIOUS, INSIDE_EACH, Prior, fit_all
from slurm_ones.learn.throughput import MeasuredThroughput, points_of
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.workloads.profiles import read_profiles

TRIED = ((1,), (1, 2), (2, 4), (4, 8), (1, 2, 4, 8), (8,), (8, 16), (16,))
"""Sizes that a job has tried, in GPUs."""
ASKED = (16, 32, 64)
PER_NODE = 4
TIMES = 5
NOISE = 0.02


def with_growth(growth: float) -> Prior:
    """What is believed of a job, but for how its exchange grows."""
    mean = CAUTIOUS.mean.copy()
    mean[[INSIDE_EACH, ACROSS_EACH]] = np.log(growth)
    return Prior(mean, CAUTIOUS.deviation)


def speed(app: Application, gpus: int) -> tuple[int, int, float] | None:
    """Nodes, batch and measured samples/s there; None where nothing was measured."""
    nodes, local = -(-gpus // PER_NODE), min(app.base_batch, app.max_local_batch)
    batch = int(min(local * gpus, app.max_batch))
    try:
        found = app.throughput(np.array([nodes]), np.array([gpus]), np.array([batch]))
    except ValueError:
        return None
    return (nodes, batch, float(found[0])) if found[0] > 0 else None


def errors(apps: Sequence[Application], prior: Prior) -> dict[int, list[float]]:
    """Logs of predicted over measured speed, by the GPUs that were asked about."""
    rng, found = np.random.default_rng(0), defaultdict[int, list[float]](list)
    for app in apps:
        reference = float(min(app.base_batch, app.max_local_batch))
        for tried in TRIED:
            here = {gpus: speed(app, gpus) for gpus in {*tried, *ASKED}}
            points = [
                ThroughputPoint(there[0], gpus // there[0], there[1], there[2] * rng.lognormal(0.0, NOISE), float(time))
                for gpus in tried
                if (there := here[gpus]) is not None
                for time in range(TIMES)
            ]
            model = MeasuredThroughput(fit_all([(points_of(points, reference), reference, prior)])[0])
            for gpus in ASKED:
                there = here[gpus]
                if there is not None and gpus > max(tried):
                    nodes, batch, measured = there
                    said = model.throughput(np.array([nodes]), np.array([gpus]), np.array([batch]))
                    found[gpus].append(float(np.log(said[0] / measured)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--growth", type=float, action="append", default=[])
    given = parser.parse_args()
    if not given.profiles.is_dir():
        parser.error(f"--profiles: {given.profiles} is no directory; profiles in Pollux's format belong there")
    apps = list(read_profiles(given.profiles).values())
    for label, prior in [("as shipped", CAUTIOUS), *((f"{one:g}", with_growth(one)) for one in given.growth)]:
        for gpus, off in sorted(errors(apps, prior).items()):
            typical, rms = np.median(np.abs(off)), np.sqrt(np.mean(np.square(off)))
            print(f"{label:>10} {gpus:3} GPUs: mean {np.mean(off):+.3f}, median error {typical:.3f}, rms {rms:.3f}")


if __name__ == "__main__":
    main()
