"""Durable writes of a checkpoint's files, with checksums computed during the write."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import Future as Hashing
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ones_wrapper.devices.host_memory import bytes_of, memory_of
from ones_wrapper.files.checksums import Sum

BLOCK = 2 << 20
"""Bytes that are written and hashed at once."""
PIECES = 512
"""Largest number of buffers in one system call; Linux allows 1024."""


def tensor_file(rank: int) -> str:
    """Return the name of the file with a rank's part of all tensors."""
    return f"tensors-{rank:05d}.safetensors"


@contextmanager
def _created(path: Path, mode: int) -> Iterator[int]:
    """Context with the handle of a new file, which is durable after the context."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        yield handle
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(header: bytes, tensors: list[torch.Tensor]) -> Iterator[list[memoryview]]:
    """Yield the bytes of a file in order, in lists of at most `PIECES` buffers and about `BLOCK` bytes."""
    pieces, size = [memoryview(header)], len(header)
    for tensor in tensors:
        data = memory_of(bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))
        for start in range(0, len(data), BLOCK):
            pieces.append(data[start : start + BLOCK])
            size += len(pieces[-1])
            if size >= BLOCK or len(pieces) == PIECES:
                yield pieces
                pieces, size = [], 0
    if pieces:
        yield pieces


def write_tensors(path: Path, header: bytes, tensors: list[torch.Tensor], mode: int = 0o644) -> Sum:
    """Write a new file of a header and its tensors; return size and checksum when it is durable. A second thread
    computes the checksum meanwhile."""
    size = crc = 0

    def add(pieces: list[memoryview]) -> None:
        nonlocal crc
        for piece in pieces:
            crc = zlib.crc32(piece, crc)

    with _created(path, mode) as handle, ThreadPoolExecutor(1, "ones-checksum") as hasher:
        hashing: Hashing[None] | None = None
        for pieces in _pieces(header, tensors):
            before, hashing = hashing, hasher.submit(add, pieces)
            written = _write(handle, pieces)
            # The disk begins now and not at the fsync; nobody reads these pages soon. macOS takes no such advice.
            if sys.platform != "darwin":
                os.posix_fadvise(handle, size, written, os.POSIX_FADV_DONTNEED)
            size += written
            if before is not None:  # so at most two blocks that are copies from a GPU are held
                before.result()
    return Sum(size, crc)


def _write(handle: int, pieces: list[memoryview]) -> int:
    total = sum(map(len, pieces))
    written = os.writev(handle, pieces)
    if written < total:  # a full disk takes a part first
        for piece in pieces:
            skip = min(written, len(piece))
            written -= skip
            rest = piece[skip:]
            while rest:
                rest = rest[os.write(handle, rest) :]
    return total


class _Summing:
    """File object for `torch.save` that computes the checksum of the written bytes."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.size = self.crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self.size += len(view)
        _write(self._handle, [view])
        return len(view)

    def flush(self) -> None:
        """Do nothing: no byte is buffered."""


def write_plain(path: Path, value: Any, mode: int = 0o644) -> Sum:
    """Write a new file of plain data with `torch.save`; return size and checksum when it is durable."""
    with _created(path, mode) as handle:
        file = _Summing(handle)
        torch.save(value, file)  # type: ignore[arg-type]
    return Sum(file.size, file.crc)
