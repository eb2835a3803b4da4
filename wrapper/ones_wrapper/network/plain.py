"""Serialization without code: JSON, and arrays and tensors as their bytes with type and shape.

Ranks read messages of other ranks only in this form, so that no sender can run code in a rank.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from ones_wrapper.network.frames import FrameError, fields, parts_of

_ATOMS = (type(None), bool, int, float, str)


def encode(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError, with the type's name, for a type that is not plain data."""
    blobs: list[bytes] = []
    return fields(json.dumps(_packed(value, blobs)).encode(), *blobs)


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given; tuples stay tuples. Raises ValueError for malformed bytes."""
    try:
        text, *blobs = parts_of(data)
        return _unpacked(json.loads(text), blobs)
    except (FrameError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SyntaxError) as error:
        # numpy raises SyntaxError for the name of some data types.
        raise ValueError(f"not plain data: {type(error).__name__}: {error}"[:300]) from None


def _packed(value: Any, blobs: list[bytes]) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, list):
        return [_packed(item, blobs) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(item, blobs) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_packed(key, blobs), _packed(item, blobs)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": _kept(value, blobs)}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": _kept(data, blobs), "dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape]}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject and not value.dtype.names:
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: _kept(value.tobytes(), blobs), "dtype": value.dtype.str, "shape": [*value.shape]}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks")


def _kept(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(blobs) - 1


def _unpacked(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("an empty object")
    kind, inner = next(iter(value.items()))
    if kind == "tuple":
        return tuple(_unpacked(item, blobs) for item in inner)
    if kind == "dict":
        return {_unpacked(key, blobs): _unpacked(item, blobs) for key, item in inner}
    if type(inner) is not int or inner < 0:
        raise ValueError("no such bytes")
    data = blobs[inner]
    if kind == "bytes":
        return data
    shape = value["shape"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an invalid shape")
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype) or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor of another size")
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    if kind not in ("array", "number") or not isinstance(value["dtype"], str):
        raise ValueError("no such kind")
    found = np.frombuffer(data, np.dtype(value["dtype"])).reshape(shape)
    return found.copy() if kind == "array" else found[()]
