"""A checkpoint's tensors, read where a plan points."""

from __future__ import annotations

import json
import math
import os
import re
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

from ones_wrapper.checkpoint.files import as_bytes
from ones_wrapper.checkpoint.header import Part, decode, whole
from ones_wrapper.protocol import MANIFEST

_TENSORS = re.compile(r"tensors-\d{5,}\.safetensors")


class Reader(StorageReader):
    """Opens a checkpoint's tensors to `torch.distributed.checkpoint.load`, which then needs no pickle.

    Paths are `model.<name>` and `optimizer.state.<name>.<quantity>`, in a flat dictionary.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._places: dict[MetadataIndex, tuple[str, int, Part]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is there, from the headers of the manifest's files.

        Raises ValueError where these are damaged, or do not make up every tensor they name.
        """
        found: dict[str, list[Part]] = {}
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
        _, start, part = self._places[item.storage_index]
        sizes, dtype = part.shape, part.dtype
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
