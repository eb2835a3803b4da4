"""GPU memory that training must leave free for NCCL. While ranks change, two communicators exist."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

RESERVE = 1 << 30
"""Bytes for one communicator. Users reported 484 to 688 MiB (nccl#964, nccl#2366), 512 MiB in one allocation
(nccl#2363)."""


def reserve_bytes(env: Mapping[str, str]) -> int:
    """Return the bytes to leave free for NCCL: ONES_RESERVE_BYTES if set, else enough for two communicators in a job of
    blocks, and for one in any other job."""
    try:
        return max(0, int(env["ONES_RESERVE_BYTES"]))
    except (KeyError, ValueError):
        return RESERVE * (2 if env.get("ONES_BLOCKS") == "1" else 1)


@contextmanager
def reserved(device: torch.device, world: int) -> Iterator[None]:
    """Context that occupies the memory that NCCL will need, while the largest local batch is tried: NCCL allocates it
    later, at the first collective. A single rank occupies nothing."""
    size = reserve_bytes(os.environ)
    if device.type == "cpu" or (world == 1 and os.environ.get("ONES_BLOCKS") != "1"):
        size = 0
    held = [torch.empty(size, dtype=torch.uint8, device=device)] if size else []
    try:
        yield
    finally:
        held.clear()


def make_room(device: torch.device) -> None:
    """Release torch's cached GPU memory if too little memory is free for NCCL. Call this at a step boundary, while no
    graph is captured: it waits for the device."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < reserve_bytes(os.environ) // 2:
        torch.cuda.empty_cache()
