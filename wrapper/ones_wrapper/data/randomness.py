"""Random numbers that depend neither on the process that fetches a sample nor on restarts of the job.

Numbers drawn while a sample is fetched (augmentation) follow from (seed, epoch, sample). They are the same on every
rank, in every worker process, at every world size and after every restart. All other numbers that a step draws
(dropout) follow from (seed, step, rank), or for some strategies from (seed, step, replica). They are the same after a
restart at the same world size. At another world size a rank has other samples, so that no seed gives each sample its
old dropout mask.

The generators are the global ones of `random`, numpy and torch, since transforms draw from these. For samples only
torch's CPU generator is seeded: a `__getitem__` that draws on a GPU is not reproducible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, get_worker_info

from ones_wrapper.process.workers import leave_signals_to_rank

_WORD = 2**64
_STEP = 0x9E3779B97F4A7C15
"""Difference between neighbouring keys before they are mixed: the increment of SplitMix64."""
_STEPS = 0x5354455053
"""Constant that makes the keys of steps differ from the keys of samples."""


def _mix(key: int) -> int:
    """Return the key mixed over 64 bits by SplitMix64's finaliser (Steele et al., OOPSLA 2014, Fig. 13)."""
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB % _WORD
    return key ^ (key >> 31)


def key(*parts: int) -> int:
    """Return one 64-bit key for several numbers; their order matters."""
    found = 0
    for part in parts:
        found = _mix((found + part + _STEP) % _WORD)
    return found


def seed_all(value: int) -> None:
    """Seed the generators of `random`, numpy and torch's CPU with 64 bits. torch.manual_seed is not used, because it
    also searches for GPUs, which takes 0.2 ms."""
    random.seed(value)
    np.random.seed(value >> 32)
    torch.default_generator.manual_seed(value)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators, also this process's GPU, for one step on one rank. Takes about 10 μs."""
    value = key(_STEPS, seed, step, rank)
    seed_all(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


@contextmanager
def keep_generators() -> Iterator[None]:
    """Context that restores the generators at its end, in about 0.1 ms. It does nothing in a worker process, where no
    other code draws numbers."""
    if get_worker_info() is not None:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def may_draw(dataset: Dataset[Any]) -> bool:
    """Return False if fetching a sample cannot draw random numbers. This is known only for torch's own datasets."""
    if type(dataset) is TensorDataset:
        return False
    if type(dataset) is Subset:
        return may_draw(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return any(may_draw(part) for part in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(may_draw(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return True


class WorkerInit:
    """Function that a DataLoader's worker calls first. It makes `get_worker_info().dataset` the script's dataset
    instead of our wrapper, and calls the script's own `worker_init_fn`. The worker then ignores the job's signals,
    which the rank handles."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        leave_signals_to_rank()  # not known yet in a worker that was not forked
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # torch guards it
        if self._then is not None:
            self._then(worker)
