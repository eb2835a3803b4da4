"""Page-locked host memory, from and to which a GPU copies at the full speed of its bus.

torch's own allocator rounds each page-locked buffer up to a power of two and keeps it. That wastes memory for a whole
state, but not for `CHUNK` bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

CHUNK = 64 << 20
"""Bytes in one copy from or to a device."""


def memory_of(row: torch.Tensor) -> memoryview:
    """Return a view of the memory of a CPU tensor of bytes."""
    return memoryview(row.numpy())  # type: ignore[arg-type]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as a flat tensor of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def fill(row: torch.Tensor, read: Callable[[memoryview], object]) -> None:
    """Fill a flat tensor of bytes by calls of `read`, each with a buffer to fill. While `read` fills a chunk for a
    tensor on a GPU, the previous chunk is copied."""
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
    """Host memory for copies of tensors: exactly as large as the tensors, and page-locked if they are on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """`tensors` must be sorted by element size, largest first, so that each copy is aligned."""
        self._memory = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        self._cuda: Any = torch.cuda.cudart() if device.type == "cuda" and len(self._memory) else None  # type: ignore[no-untyped-call]
        if self._cuda is not None and int(self._cuda.cudaHostRegister(self._memory.data_ptr(), len(self._memory), 0)):
            self._cuda = None  # copies are only slower
        self.copies: list[torch.Tensor] = []
        """Buffers for the copies, in the tensors' order."""
        at = 0
        for tensor in tensors:
            self.copies.append(self._memory[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
            at += tensor.nbytes

    def free(self) -> None:
        """Release the page lock and drop the buffers. The copies must not be used afterwards."""
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self._memory.data_ptr())
            self._cuda = None
        self.copies.clear()
