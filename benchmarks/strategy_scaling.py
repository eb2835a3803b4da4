"""How simulated jobs with training strategies scale, on links of several speeds: what a scheduler should give whom.

All of it is simulated (`slurm_ones.simulate.training.strategies`): nothing is measured.

    python benchmarks/strategy_scaling.py --json scaling.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.training.strategies import Links, StrategySpeed
from slurm_ones.simulate.workloads.catalogue import PLAIN, STRATEGY_KINDS, Kind, build

PER_NODE = 4
SIZES = (1, 4, 8, 16, 32)
SLOWER = (1.0, 4.0)
"""How many times as slow the links between nodes are."""


def applications() -> dict[str, tuple[Kind, Application]]:
    """By name, with the plain form of the compressed one."""
    onebit = STRATEGY_KINDS["onebit-bert"]
    assert isinstance(onebit.speed, StrategySpeed)
    plain = replace(onebit, name="the same, plain", by=PLAIN, speed=replace(onebit.speed, by=PLAIN))
    return {kind.name: (kind, build(kind)) for kind in (*STRATEGY_KINDS.values(), plain)}


def efficiency(kind: Kind, app: Application, gpus: int, slower: float) -> float | None:
    """Samples/s of each GPU over those at the least size, at an eighth of the largest batch; None below that."""
    least = app.by.degree if app.by is not None else 1
    if gpus < least:
        return None
    assert isinstance(app.speed, StrategySpeed)
    links = Links(across=Links().across / slower)
    timed = build(replace(kind, speed=replace(app.speed, links=links)))
    timed = timed.later or timed
    batch = np.array([kind.max_batch / 8.0])
    each = [batch / timed.step_seconds(-(-n // PER_NODE), n, batch) / n for n in (least, gpus)]
    return float(each[1][0] / each[0][0])


def measure() -> dict[str, dict[str, float | None]]:
    """Efficiency of each kind by links and GPUs."""
    return {
        name: {
            f"{gpus} GPUs, links /{slower:g}": efficiency(kind, app, gpus, slower)
            for slower in SLOWER
            for gpus in SIZES
        }
        for name, (kind, app) in applications().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure()
    for name, row in found.items():
        print(
            f"{name:16}", *(f"{key}: {value:.2f}" if value is not None else f"{key}: –" for key, value in row.items())
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
