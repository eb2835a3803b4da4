"""Fingerprint of a dataset, by which a later start checks that each index still has the same sample.

A split without a seed, or classes in the order of a set, may differ at another start. Then samples are used twice or
never, although the dataset's length is the same.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from ones_wrapper.data.randomness import keep_generators, key, seed_all
from ones_wrapper.network import plain

SWITCH = "ONES_FINGERPRINT"
"""Environment variable that switches fingerprints off if its value is 0."""
ITEMS = 16
PATIENCE_S = 2.0
"""Seconds after which no further samples are read."""
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
    """Return indices and digests of at most 16 samples, followed by `order`, a number that identifies the order of all
    epochs. Leaves out samples that differ when read twice with the same seed. `options` are the DataLoader's; if it has
    workers, a worker reads the samples."""
    if os.environ.get(SWITCH) == "0":
        return ""
    wanted = sorted({index * samples // ITEMS for index in range(ITEMS)})
    if options.get("num_workers"):  # a file that the dataset opens must be opened in a worker
        own = {name: options[name] for name in ("multiprocessing_context", "worker_init_fn") if name in options}
        generator = torch.Generator()
        read: Any = DataLoader(_Digests(dataset), None, sampler=wanted, num_workers=1, generator=generator, **own)
    else:
        read = map(_Digests(dataset).__getitem__, wanted)
    found, began = [], time.monotonic()
    for index, digest in zip(wanted, read, strict=True):
        found += [f"{index}:{digest}"] if digest else []
        if time.monotonic() - began > PATIENCE_S:
            break
    return " ".join([*found, f"{ORDER}:{order:x}"])


def check(mine: str, before: str, where: str) -> None:
    """Raise ValueError if a sample or the order differs between the fingerprints `mine` and `before`. The message names
    `where` as the origin of `before`."""
    known = dict(one.split(":") for one in before.split())
    for number, digest in (one.split(":") for one in mine.split()):
        if known.get(number, digest) != digest:
            raise ValueError((OTHER_ORDER if number == ORDER else OTHER).format(number=number, where=where))


class _Digests(Dataset[str]):
    """Dataset whose items are digests of the samples. The digest of a sample that cannot be compared is empty."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> str:
        twice = set()
        for _ in range(2):
            with keep_generators():
                seed_all(key(index))
                sample = tree_map(_comparable, self.dataset[index])
            try:
                twice.add(hashlib.blake2b(plain.encode(sample), digest_size=8).hexdigest())
            except (TypeError, NotImplementedError):  # an object of the script's, a tensor without values
                return ""
        return twice.pop() if len(twice) == 1 else ""


def _comparable(part: Any) -> Any:
    """Return a part of a sample as plain data: shape, type and bytes of an array or image; `repr` of a number or
    text."""
    dtype = getattr(part, "dtype", None)
    if hasattr(part, "tobytes") and not getattr(dtype, "hasobject", False):
        return [str([dtype, *(getattr(part, name, None) for name in ("shape", "size", "mode"))]), part.tobytes()]
    return repr(part) if isinstance(part, (int, float, complex, str)) else part
