"""The files of a checkpoint: written with their checksum on the way, read where a plan points."""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import Future as Hashing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

INDEX = "tensors.json"
BLOCK = 2 << 20
"""Bytes written, and hashed, at a time."""
PIECES = 512
"""Most pieces of memory that one system call writes; Linux takes 1024."""


@dataclass(frozen=True)
class Sum:
    """A file's size in bytes and CRC-32."""

    size: int
    crc: int


def tensor_file(rank: int) -> str:
    """Name of the file that holds a rank's part."""
    return f"tensors-{rank:05d}"


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def checksum(path: Path) -> Sum:
    """Of a regular file of ours; raises OSError for anything else."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise OSError(f"{path.name} is not a regular file of this user")
        crc, block = 0, memoryview(bytearray(1 << 20))
        while read := file.readinto(block):
            crc = zlib.crc32(block[:read], crc)
    return Sum(state.st_size, crc)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _pieces(tensors: list[torch.Tensor]) -> Iterator[list[memoryview]]:
    """The tensors' bytes in order, in lists of at most `PIECES` and about `BLOCK` bytes."""
    pieces: list[memoryview] = []
    size = 0
    for tensor in tensors:
        data = as_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        for start in range(0, len(data), BLOCK):
            pieces.append(data[start : start + BLOCK])
            size += len(pieces[-1])
            if size >= BLOCK or len(pieces) == PIECES:
                yield pieces
                pieces, size = [], 0
    if pieces:
        yield pieces


def write_tensors(path: Path, tensors: list[torch.Tensor]) -> Sum:
    """Make a file of the tensors' bytes, durable when this returns. A thread hashes beside the writing."""
    size = crc = 0

    def add(pieces: list[memoryview]) -> None:
        nonlocal crc
        for piece in pieces:
            crc = zlib.crc32(piece, crc)

    handle = _create(path)
    try:
        with ThreadPoolExecutor(1, "ones-checksum") as hasher:
            hashing: Hashing[None] | None = None
            for pieces in _pieces(tensors):
                before, hashing = hashing, hasher.submit(add, pieces)
                written = _write(handle, pieces)
                # The disk begins now and not at the fsync; nobody reads these pages soon.
                os.posix_fadvise(handle, size, written, os.POSIX_FADV_DONTNEED)
                size += written
                if before is not None:  # no more than two blocks that are copies from a GPU are held
                    before.result()
        os.fsync(handle)
    finally:
        os.close(handle)
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
    """A file for `torch.save` that hashes what passes."""

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
        """Nothing is kept back."""


def write_plain(path: Path, value: Any) -> Sum:
    """Make a file of plain data with `torch.save`, durable when this returns."""
    handle = _create(path)
    try:
        file = _Summing(handle)
        torch.save(value, file)  # type: ignore[arg-type]
        os.fsync(handle)
    finally:
        os.close(handle)
    return Sum(file.size, file.crc)


def write_json(path: Path, value: Any, indent: int | None = None) -> Sum:
    """Make a file of JSON, durable when this returns."""
    data = json.dumps(value, indent=indent).encode()
    handle = _create(path)
    try:
        _write(handle, [memoryview(data)])
        os.fsync(handle)
    finally:
        os.close(handle)
    return Sum(len(data), zlib.crc32(data))


class Reader(StorageReader):
    """Opens a checkpoint's tensors to `torch.distributed.checkpoint.load`, which then needs no pickle.

    Paths are `model.<name>` and `optimizer.state.<name>.<quantity>`, in a flat dictionary.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._places: dict[MetadataIndex, tuple[str, int, tuple[int, ...], torch.dtype]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is there, from the index. Raises ValueError or KeyError where that is none."""
        tensors = {}
        for path, entry in json.loads((self._path / INDEX).read_text()).items():
            dtype = getattr(torch, entry["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{INDEX}: {entry['dtype']!r} is no dtype of this torch")
            chunks = []
            for offsets, sizes, file, start in entry["parts"]:
                if file != Path(file).name:
                    raise ValueError(f"{INDEX} names {file!r}")
                self._places[MetadataIndex(path, offsets)] = (file, start, tuple(sizes), dtype)
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            tensors[path] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)
        return Metadata(tensors)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that the plan asks for."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self._places[item.storage_index][0], []).append(item)
        for name, items in files.items():
            with (self._path / name).open("rb", buffering=0) as file:
                for item in sorted(items, key=lambda item: self._places[item.storage_index][1]):
                    target = planner.resolve_tensor(item)
                    self._read(file, item, target.detach())
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: IO[bytes], item: ReadItem, target: torch.Tensor) -> None:
        """One part of a chunk: of its first dimension only the rows that are wanted are read."""
        _, start, sizes, dtype = self._places[item.storage_index]
        first, rows = 0, sizes
        if sizes:
            first, rows = item.storage_offsets[0], (item.lengths[0], *sizes[1:])
        start += first * math.prod(sizes[1:]) * dtype.itemsize
        direct = (
            target.device.type == "cpu" and target.is_contiguous() and (target.dtype, target.shape) == (dtype, rows)
        )
        block = target if direct else torch.empty(rows, dtype=dtype)
        file.seek(start)
        left = as_bytes(block)
        while left:
            read = file.readinto(left)  # type: ignore[attr-defined]
            if not read:
                raise OSError(f"{file.name} ends too early")
            left = left[read:]
        if not direct:
            for dimension in range(1, len(sizes)):
                block = block.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
            target.copy_(block.reshape(target.shape))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Look into another directory, where one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
        self._places = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be a checkpoint's directory."""
        return Path(checkpoint_id).is_dir()
