"""Samples lost or repeated over random histories of resizes.

Each history trains some epochs of a dataset of 1 to 400 samples with the wrapper's own data feed, at world sizes,
batches, largest local batches and interruptions drawn at random: a run ends after any number of steps, with a
checkpoint or killed, so that the next one goes on from the last checkpoint. What killed runs did after it does not
count. A share of the histories fetches with worker processes. Ranks take turns in one process; nothing is emulated but
their exchange of gradients, which data does not depend on.

    python benchmarks/exactly_once.py --histories 1000 --seed 0 --json exactly_once.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch.utils.data import TensorDataset

from ones_wrapper.data.feed import Cut, Feed

WITH_WORKERS = 0.02
"""Share of the histories that fetch with worker processes, which take long to start."""


def history(rng: np.random.Generator) -> tuple[int, int, int]:
    """(resizes, samples lost, samples repeated) of one history."""
    samples, epochs = int(rng.integers(1, 401)), int(rng.integers(1, 4))
    workers = 2 if rng.random() < WITH_WORKERS else 0
    feed = Feed(
        TensorDataset(torch.arange(samples)),
        shuffle=bool(rng.random() < 0.8),
        seed=int(rng.integers(1000)),
        collate_fn=None,
        num_workers=workers,
        options={},
    )
    used: list[Counter[int]] = [Counter() for _ in range(epochs)]
    pending: list[tuple[int, int]] = []
    """(epoch, sample) since the last checkpoint."""
    epoch, cursor, saved, runs = 0, 0, (0, 0), 0
    while epoch < epochs:
        runs += 1
        world, batch, steps = int(rng.integers(1, 10)), int(rng.integers(1, 80)), int(rng.integers(0, 12))
        max_local = int(rng.integers(1, 40))
        while steps > 0 and epoch < epochs:
            ranks = (feed.batches(epoch, cursor, Cut(batch, world, rank, max_local)) for rank in range(world))
            for together in zip(*ranks, strict=True):
                for part, (indices,) in together:
                    pending += [(epoch, sample) for sample in indices[: part.samples].tolist()]
                first = together[0][0]
                if not first.last:
                    continue
                cursor, steps = cursor + first.share.total, steps - 1
                if steps == 0:
                    break
            if cursor >= samples:
                epoch, cursor = epoch + 1, 0
        if epoch == epochs or rng.random() < 0.7:
            for number, sample in pending:
                used[number][sample] += 1
            saved = epoch, cursor
        pending = []
        epoch, cursor = saved
    lost = sum(samples - len(counter) for counter in used)
    return runs - 1, lost, sum(n - 1 for counter in used for n in counter.values())


def main() -> None:
    """Draw the histories and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    options = parser.parse_args()
    found = [
        history(np.random.default_rng([options.seed, number]))
        for number in track(range(options.histories), description="histories")
    ]
    resizes, lost, repeated = (sum(column) for column in zip(*found, strict=True))
    print(f"{options.histories} histories, {resizes} resizes: {lost} samples lost, {repeated} repeated")
    if options.json:
        figures = {"histories": options.histories, "resizes": resizes, "lost": lost, "repeated": repeated}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
