"""Check of a node before its block joins. A node that hangs, is slow or has too little memory would delay all ranks.

Each rank multiplies matrices, and the block's ranks all-reduce a tensor. The times are written to the job's folder, and
compared with the times of the job's other nodes. `devices.choice` checks the number of GPUs.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ones_wrapper.devices import streams
from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.group import RankError, TorchGroup
from ones_wrapper.membership.connections import in_time
from ones_wrapper.membership.meeting import is_peer_lost
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.process.log import log
from ones_wrapper.protocol.fields import build, types_of

CHECK_S = 10.0
"""Longest time of a check, in seconds."""
SLOWER = 4.0
"""Ratio of a node's time to the other nodes' median above which the node is unfit, if its time is also above
`NOISE_S`."""
NOISE_S = {"cpu": 0.5, "cuda": 0.02}
"""Longest time in seconds, by type of device, that other work on the host may explain."""
LEAST_FREE = 0.8
"""Smallest free memory of a node's GPUs, relative to the median of the other nodes."""
REPEATS = 5
_PRODUCTS = {"cpu": (256, 4, torch.float32), "cuda": (4096, 50, torch.float16)}
"""(size of the matrices, number of products, dtype) by type of device."""
_SUMMED = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements of the tensor in the all-reduce, by type of device."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", re.ASCII)
_MOST_BYTES, _MOST_NODES = 4096, 1024


@dataclass(frozen=True)
class NodeFigures:
    """Measurements of one node. Times are those of the block's slowest rank, each the best of `REPEATS` repetitions."""

    name: str
    device: str
    """Name of the device; only nodes with the same device are compared."""
    ranks: int
    """Number of ranks in the block, and so in the all-reduce."""
    free: int
    """Free memory in bytes on the node's GPU that has the least; 0 for a CPU."""
    product_s: float
    sum_s: float


def why_unfit(mine: NodeFigures, others: Sequence[NodeFigures]) -> str:
    """Return why a node cannot join the job's other nodes; empty if it can."""
    alike = [one for one in others if one.name != mine.name and one.device == mine.device]
    if alike:
        free = statistics.median(one.free for one in alike)
        if mine.free < LEAST_FREE * free:
            return f"{mine.free / 1e9:.1f} GB of its memory are free, and {free / 1e9:.1f} GB on the job's other nodes"
    noise_s = NOISE_S["cpu" if mine.device == "cpu" else "cuda"]
    summed = [one.sum_s for one in alike if one.ranks == mine.ranks]
    for what, took, theirs in (
        ("a matrix product", mine.product_s, [one.product_s for one in alike]),
        ("a sum over its ranks", mine.sum_s, summed),
    ):
        if theirs and took > max(noise_s, SLOWER * statistics.median(theirs)):
            return f"{what} takes {took:.3g} s, and {statistics.median(theirs):.3g} s on the job's other nodes"
    return ""


class NodeCheck:
    """Check of one block's nodes."""

    def __init__(self, group: TorchGroup, folder: Path, array: int, env: Mapping[str, str] = os.environ) -> None:
        """`folder` is the job's folder, and `array` its id."""
        self._group, self._folder, self._array = group, folder, array
        self._name = env.get("SLURMD_NODENAME") or os.uname().nodename

    def take(self) -> None:
        """Measure this block's nodes, and store the results for comparison with later nodes. Collective."""
        try:
            nodes = self._measured()
            self._group.on_first(lambda: self._write(nodes))
        except (RankError, RuntimeError) as error:
            if is_peer_lost(error):
                raise
            log(f"the times of this node were not stored: {error}"[:300])

    def why_unfit(self) -> str:
        """Return why this block must not join, with the node's name; empty if it may. Collective."""
        try:
            return in_time(self._found, CHECK_S)
        except StoreLostError:
            return f"node {self._name}: a matrix product and a sum over its block's ranks took more than {CHECK_S:g} s"
        except (RankError, RuntimeError) as error:
            if is_peer_lost(error):
                raise
            return f"node {self._name}: {error}"

    def _found(self) -> str:
        nodes = self._measured()
        return self._group.on_first(lambda: self._judged(nodes))

    def _judged(self, nodes: Sequence[NodeFigures]) -> str:
        others = self._read()
        for node in nodes:
            if why := why_unfit(node, others):
                return f"node {node.name}: {why}"
        try:
            self._write(nodes)
        except OSError as error:
            return f"node {self._name}: cannot write into {self._folder} ({error.strerror})"
        return ""

    def _measured(self) -> list[NodeFigures]:
        """Return the measurements of all the block's nodes, on every rank. Collective."""
        group, device = self._group, self._group.device
        free, kind = 0, device.type
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins on the first one
            free, kind = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
        product_s, why = 0.0, ""
        try:
            product = _multiplier(device)
            product_s = min(_took(product, device) for _ in range(REPEATS))
        except RuntimeError as error:
            why = f"a matrix product failed ({type(error).__name__}: {error})".splitlines()[0][:300]
        if group.maximum([int(bool(why))])[0]:  # else other ranks would wait in the sum
            raise RuntimeError(next(filter(None, group.gather(why))))
        sum_s = min(_took(lambda: _sum(group), device) for _ in range(REPEATS)) if group.world > 1 else 0.0
        row: list[Any] = [self._name, free, product_s, sum_s]
        rows = group.gather(row)
        return [
            NodeFigures(name, kind, group.world, min(row[1] for row in mine), *_slowest(mine))
            for name in dict.fromkeys(row[0] for row in rows)
            if (mine := [row for row in rows if row[0] == name])
        ]

    def _write(self, nodes: Sequence[NodeFigures]) -> None:
        for node in nodes:
            if _NAME.fullmatch(node.name):
                text = json.dumps(asdict(node) | {"array": self._array})
                replace_small(self._folder / f"node-{node.name}.json", text.encode(), 0o600, sync=False)

    def _read(self) -> list[NodeFigures]:
        found = []
        for path in islice(self._folder.glob("node-*.json"), _MOST_NODES):
            with suppress(OSError, ValueError):
                data = read_json(path, _MOST_BYTES)
                if data.get("array") == self._array:
                    found.append(build(NodeFigures, types_of(NodeFigures), data))
        return found


def _slowest(rows: Sequence[Sequence[Any]]) -> tuple[float, float]:
    return max(row[2] for row in rows), max(row[3] for row in rows)


def _took(work: Callable[[], None], device: torch.device) -> float:
    began = time.monotonic()
    work()
    streams.wait(device)
    return time.monotonic() - began


def _multiplier(device: torch.device) -> Callable[[], None]:
    """Return a function that multiplies matrices on the device, and draws no random numbers."""
    edge, times, dtype = _PRODUCTS[device.type]
    ones = torch.ones(edge, edge, dtype=dtype, device=device)
    out = torch.empty_like(ones)

    def multiply() -> None:
        for _ in range(times):
            torch.mm(ones, ones, out=out)

    return multiply


def _sum(group: TorchGroup) -> None:
    """All-reduce a tensor over the ranks, by torch.distributed if it is set up."""
    device = group.device if dist.is_initialized() else torch.device("cpu")
    ones = torch.ones(_SUMMED[device.type], device=device)
    if device.type == "cuda":
        dist.all_reduce(ones)
    else:
        group.control.allreduce([ones]).wait()
