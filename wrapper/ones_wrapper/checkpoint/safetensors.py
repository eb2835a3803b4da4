"""The safetensors files of a checkpoint: their headers, and a reader for `torch.distributed.checkpoint`.

The format is that of the safetensors library. A file begins with the header's length in 8 bytes (little endian). The
header is JSON, padded with spaces to a multiple of 8 bytes: dtype, shape and range of bytes for each path. The tensors
follow without gaps. Of a sharded tensor, each rank's file contains the rank's block under the same path. `__metadata__`
holds the index of each block's first element in the whole tensor, as in the safetensors files of
`torch.distributed.checkpoint`.

The reader checks a header completely, since it may be damaged, or written by another user.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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

from ones_wrapper.devices.host_memory import bytes_of, fill
from ones_wrapper.protocol import MANIFEST

MOST = 100_000_000
"""Longest header in bytes; the safetensors library has the same limit."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes that the safetensors library reads as torch tensors."""
MOST_DIMENSIONS = 64
"""Largest number of dimensions of a tensor; torch has the same limit."""
_METADATA = "__metadata__"
_BLOCKS, _BEGINS = "DCP_SHARDING_INFO", "saved_offsets"
_KIND = {"format": "pt", "DCP_VERSION": "1.0"}
_NAMED = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class TensorPart:
    """A tensor, or a rank's block of a sharded tensor."""

    path: str
    offsets: tuple[int, ...]
    """Index of the block's first element in the whole tensor."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def refusal(path: str, dtype: torch.dtype) -> str:
    """Return why a file cannot contain a tensor with this path and dtype; empty if it can."""
    if dtype not in DTYPES:
        return f"{path} is of {dtype}, which safetensors files cannot hold; keep it as another dtype"
    return f"{path} is a name that safetensors files need for something else" if path == _METADATA else ""


def encode(parts: Sequence[TensorPart]) -> bytes:
    """Return the header, with its length, of a file with these parts in order. Raises ValueError if the header would be
    too long, or if two parts belong to the same tensor."""
    blocks = {part.path: {_BEGINS: part.offsets} for part in parts}
    if len(blocks) < len(parts):
        raise ValueError("a rank holds two blocks of one tensor, where a file has a place for one")
    entries: dict[str, Any] = {_METADATA: _KIND | {_BLOCKS: json.dumps(blocks)}}
    start = 0
    for part in parts:
        end = start + part.bytes
        entries[part.path] = {"dtype": DTYPES[part.dtype], "shape": part.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST:
        raise ValueError(f"the names of {len(parts)} tensors take {len(text)} bytes, and {MOST} is the most")
    return len(text).to_bytes(8, "little") + text


def decode(path: Path) -> list[tuple[TensorPart, int]]:
    """Return (part, position of its first byte) for each part in a file, in the file's order. Raises ValueError for a
    malformed header, for tensors beyond the end of the file, and for tensors that overlap or leave gaps."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MOST, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
        return _parts(json.loads(text), 8 + length, size)
    except (ValueError, RecursionError) as error:  # of JSON, too
        raise ValueError(f"{path.name} is no sound safetensors file: {error}") from None


def _parts(entries: Any, first: int, size: int) -> list[tuple[TensorPart, int]]:
    """Return the parts in a header. `first` is the position of the first tensor in the file, which has `size` bytes."""
    if not isinstance(entries, dict):
        raise ValueError("the header is no JSON object")
    blocks = _blocks(entries.pop(_METADATA, {}))
    found, ranges = [], []
    for key, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{key!r} has not dtype, shape and data_offsets")
        dtype = _NAMED.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise ValueError(f"{key!r} has the unknown dtype {entry['dtype']!r}")
        shape = _counts(key, entry["shape"])
        part = TensorPart(key, blocks.get(key, (0,) * len(shape)), shape, dtype)
        if len(part.offsets) != len(shape):
            raise ValueError(f"{key!r} of shape {shape} begins at {part.offsets}")
        ends = _counts(key, entry["data_offsets"])
        if len(ends) != 2 or ends[1] - ends[0] != part.bytes:
            raise ValueError(f"{key!r} is {part.bytes} bytes by shape and dtype, not those from {list(ends)}")
        ranges.append(ends)
        found.append((part, first + ends[0]))
    end = 0
    for one, other in sorted(ranges):
        if one != end:
            raise ValueError(
                f"bytes {min(one, end)} to {max(one, end)} belong to {'two' if one < end else 'no'} tensors"
            )
        end = other
    if first + end != size:
        raise ValueError(f"its tensors take {end} bytes, and {size - first} are there")
    return sorted(found, key=lambda item: item[1])


def _blocks(metadata: Any) -> dict[str, tuple[int, ...]]:
    """Return the index of each block's first element, by path; empty for a file with whole tensors only."""
    text = metadata.get(_BLOCKS, "{}") if isinstance(metadata, dict) else None
    blocks = json.loads(text) if isinstance(text, str) else None
    if not isinstance(blocks, dict) or any(not isinstance(block, dict) for block in blocks.values()):
        raise ValueError(f"its {_METADATA} is not as it should be")
    return {path: _counts(path, block.get(_BEGINS)) for path, block in blocks.items()}


def _counts(key: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        raise ValueError(f"{key!r:.60} has no list of at most {MOST_DIMENSIONS} whole numbers")
    if any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise ValueError(f"{key!r} has {values!r:.60} where whole numbers should be")
    return tuple(values)


def whole(parts: Iterable[TensorPart]) -> tuple[int, ...]:
    """Return the shape of the tensor that these parts form. Raises ValueError if an element is missing or present
    twice."""
    ordered = sorted(parts, key=lambda part: part.offsets)
    first = ordered[0]
    for part in ordered:
        if (part.dtype, len(part.shape)) != (first.dtype, len(first.shape)):
            raise ValueError(f"{part.path} is of two dtypes or dimensions")
    ends = [tuple(map(int.__add__, part.offsets, part.shape)) for part in ordered]
    size = tuple(map(max, zip(*ends, strict=True)))
    near: list[TensorPart] = []
    for part in ordered:
        # Only parts whose rows reach down to this part's can overlap it: few, if ranks hold blocks of rows.
        near = [other for other in near if not part.offsets or other.offsets[0] + other.shape[0] > part.offsets[0]]
        if any(_overlap(part, other) for other in near):
            raise ValueError(f"a part of {part.path} is there twice")
        near.append(part)
    if sum(math.prod(part.shape) for part in ordered) != math.prod(size):
        raise ValueError(f"{first.path} is there only in part")
    return size


def _overlap(one: TensorPart, other: TensorPart) -> bool:
    return all(
        max(a, b) < min(a + n, b + m)
        for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )


_TENSORS = re.compile(r"tensors-\d{5,}\.safetensors")


class PartReader(StorageReader):
    """Reader for `torch.distributed.checkpoint.load`, without pickle. Paths are `model.<name>` and
    `optimizer.state.<name>.<quantity>`, in a flat dictionary."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._places: dict[MetadataIndex, tuple[str, int, TensorPart]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return shapes and blocks of the tensors, from the headers of the files in the manifest. Raises ValueError if
        a header is damaged, or if blocks of a tensor are missing."""
        found: dict[str, list[TensorPart]] = {}
        for name in json.loads((self._path / MANIFEST).read_text())["files"]:
            if _TENSORS.fullmatch(name):
                for part, start in decode(self._path / name):
                    self._places[MetadataIndex(part.path, part.offsets)] = (name, start, part)
                    found.setdefault(part.path, []).append(part)
        tensors = {}
        for path, parts in found.items():
            chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in parts]
            properties, size = TensorProperties(parts[0].dtype), torch.Size(whole(parts))
            tensors[path] = TensorStorageMetadata(properties, size, chunks)
        return Metadata(tensors)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no set-up is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the data for all tensors of the plan."""
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
        """Fill `target` with a part of a block, reading only the needed rows of the first dimension."""
        _, start, part = self._places[item.storage_index]
        sizes, dtype = part.shape, part.dtype
        first, rows = 0, sizes
        if sizes:
            first, rows = item.storage_offsets[0], (item.lengths[0], *sizes[1:])
        start += first * math.prod(sizes[1:]) * dtype.itemsize
        direct = target.is_contiguous() and (target.dtype, target.shape) == (dtype, rows)
        block = target if direct else torch.empty(rows, dtype=dtype)
        file.seek(start)
        fill(bytes_of(block), partial(_into, file))
        if not direct:
            for dimension in range(1, len(sizes)):
                block = block.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
            target.copy_(block.reshape(target.shape))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Drop the headers. If `checkpoint_id` is given, read from that directory from now on."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
        self._places = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this path may be a checkpoint's directory."""
        return Path(checkpoint_id).is_dir()


def _into(file: IO[bytes], left: memoryview) -> None:
    while left:
        read = file.readinto(left)  # type: ignore[attr-defined]
        if not read:
            raise OSError(f"{file.name} ends too early")
        left = left[read:]
