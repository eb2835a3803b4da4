"""What the scripts of the contract share: they pace themselves, and write what they ended with."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ones_wrapper.api import Job
from ones_wrapper.data.feed import permutation

HURRY, HOLD, PACE_MS, LATER_MS, OUT = "HURRY", "HOLD", "PACE_MS", "LATER_MS", "OUT"
"""Names in the environment."""
FIRST = 3
_steps = itertools.count()


def pace() -> None:
    """Call it in each step: it takes PACE_MS, and after the first ones of a start LATER_MS where there is such a time,
    until there is the file HURRY. A test that stands still for seconds must not find that training has ended."""
    if HURRY in os.environ and not Path(os.environ[HURRY]).exists():
        name = LATER_MS if next(_steps) >= FIRST and LATER_MS in os.environ else PACE_MS
        time.sleep(float(os.environ.get(name, "0")) / 1000)


def hold() -> None:
    """Wait while there is the file HOLD."""
    while HOLD in os.environ and Path(os.environ[HOLD]).exists():
        time.sleep(0.02)


def end(job: Job, tensors: Iterable[torch.Tensor]) -> None:
    """Rank 0 writes these numbers to OUT: the parameters, say. Whole ones, where they are sharded."""
    if job.rank == 0 and OUT in os.environ:
        Path(os.environ[OUT]).write_text(json.dumps(flat(tensors)))


def flat(tensors: Iterable[torch.Tensor]) -> list[float]:
    found: list[float] = torch.cat([one.detach().double().flatten() for one in tensors]).tolist()
    return found


def steps(samples: int, batch: int, epochs: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """The samples of each step of an undisturbed run over `job.loader(..., seed=seed)` at a fixed batch."""
    for epoch in range(epochs):
        order = permutation(samples, seed, epoch, True)
        for cursor in range(0, samples, batch):
            yield order[cursor : cursor + batch]
