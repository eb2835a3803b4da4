"""Page-locked host memory, which copies to and from a GPU at the full speed of its bus.

torch's own allocator rounds each buffer up to a power of two and keeps it, which suits chunks, but not a whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

CHUNK = 64 << 20
"""Bytes copied from or to a device at once."""


def memory_of(row: torch.Tensor) -> memoryview:
    """Return the memory of a CPU tensor of bytes."""
    return memoryview(row.numpy())  # type: ignore[arg-type]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a flat tensor of bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def fill(row: torch.Tensor, read: Callable[[memoryview], object]) -> None:
    """Fill a flat tensor of bytes by `read`, which fills the memory that it is given. On a GPU one chunk is copied
    while the next is read."""
    if row.device.type == "cpu":
        read(memory_of(row))
        return
    with torch.cuda.device(row.device):  # events belong to a GPU, and a new thread uses the first
        chunks = [torch.empty(min(CHUNK, len(row)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copied = [torch.cuda.Event() for _ in chunks]  # type: ignore[no-untyped-call]
        for number, begin in enumerate(range(0, len(row), CHUNK)):
            target = row[begin : begin + CHUNK]
            chunk, event = chunks[number % 2][: len(target)], copied[number % 2]
            event.synchronize()
            read(memory_of(chunk))
            target.copy_(chunk, non_blocking=True)
            event.record()
        for event in copied:
            event.synchronize()


class Arena:
    """Memory for copies of tensors, of exactly their size, page-locked for copies from a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """`tensors` must be sorted by size of their type, widest first, so that each copy is aligned."""
        self._memory = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        self._cuda: Any = torch.cuda.cudart() if device.type == "cuda" and len(self._memory) else None  # type: ignore[no-untyped-call]
        if self._cuda is not None and int(self._cuda.cudaHostRegister(self._memory.data_ptr(), len(self._memory), 0)):
            self._cuda = None  # copies are only slower
        self.copies: list[torch.Tensor] = []
        """Buffers for the copies, in the order of the tensors."""
        at = 0
        for tensor in tensors:
            self.copies.append(self._memory[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
            at += tensor.nbytes

    def free(self) -> None:
        """Unpin the memory and drop the buffers; the caller no longer uses the copies."""
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self._memory.data_ptr())
            self._cuda = None
        self.copies.clear()
