"""Values as plain data, so that reading them back can run no code.

`pack` turns what state dictionaries hold into what `torch.load(weights_only=True)` takes: numbers, strings, bytes,
tensors, and dictionaries, lists, tuples and sets of these. Other types that are common there (NumPy arrays and
numbers, deques, counters …) become a dictionary with the key `KIND`; `unpack` makes them again. What could only be
kept by naming code to run is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

KIND = "ones:kind"

_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
_KEYS = (str, int, float, bool, type(None))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor))
_FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (int, float, complex, bool, str, list, dict, set, tuple, bytes)
}

Take = Callable[[str, torch.Tensor], bool]
"""Is shown each tensor with its path; where it answers True, the tensor is kept elsewhere under that path."""


class CannotSaveError(TypeError):
    """State of a type that a checkpoint does not hold; the message names where it is."""


def pack(value: Any, path: str, take: Take = lambda path, tensor: False) -> Any:
    """`value` as plain data. `path` says where it is, for errors and for `take`. Raises `CannotSaveError`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, path, take)
    if kind in _ATOMS:
        return value
    if kind is dict:
        if KIND in value or any(type(key) not in _KEYS for key in value):
            return _marked("dict", items=_pairs(value, path, take))
        return {key: pack(item, f"{path}.{key}", take) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(pack(item, f"{path}.{index}", take) for index, item in enumerate(value))
    if kind in (set, frozenset):
        return _marked(kind.__name__, items=[pack(item, f"{path}, an element", take) for item in value])
    if kind in (OrderedDict, Counter):
        return _marked(kind.__name__, items=_pairs(value, path, take))
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORIES.values()):
        factory = value.default_factory and value.default_factory.__name__
        return _marked("defaultdict", items=_pairs(value, path, take), factory=factory)
    if kind is deque:
        items = [pack(item, f"{path}.{index}", take) for index, item in enumerate(value)]
        return _marked("deque", items=items, maxlen=value.maxlen)
    if kind in (bytes, bytearray):
        return _marked(kind.__name__, data=_bytes(value))
    if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject and not value.dtype.names:
        name = "ndarray" if kind is np.ndarray else "number"
        return _marked(name, dtype=value.dtype.str, shape=tuple(value.shape), data=_bytes(value.tobytes()))
    raise CannotSaveError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; let its state_dict return "
        "numbers, strings, tensors, NumPy arrays, and dictionaries, lists, tuples or sets of these"
    )


def _pack_tensor(value: torch.Tensor, path: str, take: Take) -> Any:
    if type(value) not in _TENSORS:
        raise CannotSaveError(f"{path} is a {type(value).__qualname__}, a kind of tensor that a checkpoint cannot hold")
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise CannotSaveError(f"{path} is a tensor that is sparse, quantized or has no values (meta)")
    if take(path, value):
        return _marked("tensor", path=path)
    if isinstance(value, DTensor):
        raise CannotSaveError(f"{path} is a sharded tensor, where only whole ones can be held")
    return value.detach()


def _pairs(value: dict[Any, Any], path: str, take: Take) -> list[tuple[Any, Any]]:
    return [(pack(key, f"{path}, a key"), pack(item, f"{path}.{key}", take)) for key, item in value.items()]


def _bytes(data: bytes | bytearray) -> torch.Tensor:
    """As a tensor: empty `bytes` would be pickled as a call."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _marked(kind: str, **parts: Any) -> dict[str, Any]:
    return {KIND: kind, **parts}


def unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What `pack` was given; `tensors` are those that were kept elsewhere. Raises KeyError where one is missing."""
    if type(value) in (list, tuple):
        return type(value)(unpack(item, tensors) for item in value)
    if type(value) is not dict:
        return value
    if KIND not in value:
        return {key: unpack(item, tensors) for key, item in value.items()}
    kind = value[KIND]
    if kind == "tensor":
        return tensors[value["path"]]
    if kind in ("ndarray", "number"):
        array = np.frombuffer(value["data"].numpy().tobytes(), dtype=np.dtype(value["dtype"])).reshape(value["shape"])
        return array.copy() if kind == "ndarray" else array[()]
    if kind in ("bytes", "bytearray"):
        data = value["data"].numpy().tobytes()
        return data if kind == "bytes" else bytearray(data)
    items = unpack(value["items"], tensors)
    if kind == "defaultdict":
        return defaultdict(_FACTORIES[value["factory"]] if value["factory"] else None, items)
    if kind == "deque":
        return deque(items, value["maxlen"])
    if kind == "Counter":
        return Counter(dict(items))
    return {"dict": dict, "OrderedDict": OrderedDict, "set": set, "frozenset": frozenset}[kind](items)
