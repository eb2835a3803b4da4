"""Fingerprint of a dataset, to check that a later start has the same samples under the same numbers.

A split without a seed, or classes numbered by a set, may differ at another start. Then samples are used twice or never,
although the dataset's length is unchanged.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ones_wrapper.data.randomness import WorkerInit, keep_generators, key, seed_all

SWITCH = "ONES_FINGERPRINT"
"""Environment variable that switches fingerprints off if it is 0."""
ITEMS = 16
PATIENCE_S = 2.0
"""Seconds after which no further items are read."""
OTHER = (
    "loader: sample {number} is another one than {where}, so samples would be used twice or never: what the script "
    "chooses at its start (a split, classes from a set, the order of files) came out otherwise. Give it a seed or sort "
    f"it, and give all ranks the whole dataset; {SWITCH}=0 if the data is meant to change"
)
ORDER = "order"
OTHER_ORDER = (
    "loader: the seed or shuffle is another than {where}, so samples would be used twice or never: give job.loader, or "
    f"the DataLoader's generator, one fixed seed, the same on all ranks and at all starts; {SWITCH}=0 if it is meant"
)


def fingerprint(dataset: Dataset[Any], samples: int, options: dict[str, Any], order: int) -> str:
    """Return the numbers and digests of at most 16 samples that are equal when read twice under one seed. `order`, a
    number that stands for the order of all epochs, follows. `options` are the DataLoader's; samples are read in its
    workers if it has any."""
    if os.environ.get(SWITCH) == "0":
        return ""
    wanted = sorted({index * samples // ITEMS for index in range(ITEMS)})
    if options.get("num_workers"):  # a file that the dataset opens must be opened in a worker
        own = {name: options[name] for name in ("multiprocessing_context",) if name in options}
        init = WorkerInit(options.get("worker_init_fn"))
        read: Any = DataLoader(
            _Digests(dataset), None, sampler=wanted, num_workers=1, worker_init_fn=init,
            generator=torch.Generator(), **own,
        )  # fmt: skip
    else:
        read = map(_Digests(dataset).__getitem__, wanted)
    found, began = [], time.monotonic()
    for index, digest in zip(wanted, read, strict=True):
        found += [f"{index}:{digest}"] if digest else []
        if time.monotonic() - began > PATIENCE_S:
            break
    return " ".join([*found, f"{ORDER}:{order:x}"])


def check(mine: str, before: str, where: str) -> None:
    """Raises ValueError if a sample, or the order, has another digest in `before`, which is from the place `where`."""
    known = dict(one.split(":") for one in before.split())
    for number, digest in (one.split(":") for one in mine.split()):
        if known.get(number, digest) != digest:
            raise ValueError((OTHER_ORDER if number == ORDER else OTHER).format(number=number, where=where))


class _Digests(Dataset[str]):
    """Dataset of each sample's digest; empty for a sample that cannot be compared."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> str:
        twice = set()
        for _ in range(2):
            with keep_generators():
                seed_all(key(index))
                digest = hashlib.blake2b(digest_size=8)
                try:
                    for part in _parts(self.dataset[index]):
                        digest.update(part)
                except _Unknown:
                    return ""
            twice.add(digest.hexdigest())
        return twice.pop() if len(twice) == 1 else ""


class _Unknown(Exception):
    """A sample holds an object that has no digest."""


def _parts(thing: Any) -> Iterator[bytes]:
    yield type(thing).__name__.encode()
    if isinstance(thing, torch.Tensor):
        yield f"{thing.dtype}{tuple(thing.shape)}".encode()
        if thing.layout != torch.strided or thing.device.type == "meta":
            raise _Unknown
        yield thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if thing.numel() else b""
    elif isinstance(thing, (np.ndarray, np.generic)):
        if thing.dtype.hasobject:
            raise _Unknown
        yield f"{thing.dtype}{thing.shape}".encode() + thing.tobytes()
    elif isinstance(thing, (bool, int, float, complex, str, bytes, type(None))):
        yield repr(thing).encode()
    elif isinstance(thing, dict):
        for name in thing:
            yield from _parts(name)
            yield from _parts(thing[name])
    elif isinstance(thing, (list, tuple)):
        for one in thing:
            yield from _parts(one)
    elif hasattr(thing, "tobytes") and hasattr(thing, "size"):  # an image
        yield repr((thing.size, getattr(thing, "mode", ""))).encode() + thing.tobytes()
    else:
        raise _Unknown
