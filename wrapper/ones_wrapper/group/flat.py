"""Packing of tensors into vectors, to send many in one message. A sharded tensor is packed as this rank's shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

T = TypeVar("T", bound=torch.Tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor; any other tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def together(tensors: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of tensors to pack together, of one type and device each. A list has at most `size` bytes, or is a
    single larger tensor."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for tensor in tensors:
        some = by_kind.setdefault((tensor.dtype, tensor.device), [])
        if some and sum(local(one).nbytes for one in (*some, tensor)) > size:
            yield some
            some = by_kind[tensor.dtype, tensor.device] = []
        some.append(tensor)
    yield from by_kind.values()


def flattened(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return one vector with copies of all tensors."""
    return torch.cat([local(tensor).detach().reshape(-1).to(device or tensor.device) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the values of a vector from `flattened` back into its tensors."""
    for tensor, piece in zip(tensors, pieces(flat, tensors), strict=True):
        local(tensor).detach().copy_(piece)


def pieces(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the vector in the shapes of the tensors."""
    shapes = [local(tensor).shape for tensor in tensors]
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
