"""Content of a checkpoint: progress, and the state of model, optimizer and extras as tensors and plain data.

`pack` converts the values in state dictionaries to types that `torch.load(weights_only=True)` accepts, so that reading
a checkpoint runs no code. These are numbers, strings, bytes, tensors, and dictionaries, lists, tuples and sets of
these. Other common types (NumPy arrays and numbers, deques, counters …) become a dictionary with the key `KIND`, which
`unpack` converts back. A value that needs a pickle with code is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ones_wrapper.checkpoint.safetensors import refusal
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.script.optimizers import is_plain, load_plain_state, plain_state, stepping_without_closure


@runtime_checkable
class Stateful(Protocol):
    """Object other than model and optimizers whose state is saved: a scheduler, gradient scaler or moving average."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class PlainValues:
    """A script's dict of plain values (`best`, `step`). It is loaded in place, so that the script's own dict has the
    values."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the values; keys that the checkpoint lacks keep their values."""
        self.values.update(state)


OWN = ("files", "data")
"""Names of the job's own state: sizes of the script's files (`files`), and the coreset's selection (`data`)."""


@dataclass(frozen=True)
class SavedState:
    """Objects whose state, besides the progress, is in checkpoints. The script registers them once."""

    model: torch.nn.Module
    """The model; several models form one `ModuleDict`."""
    optimizers: dict[str, torch.optim.Optimizer]
    """Optimizers by name; a single optimizer has the empty name."""
    extras: dict[str, Stateful]
    own: dict[str, Stateful] = field(default_factory=dict)
    """The job's own state, under the names in `OWN`."""


@dataclass(frozen=True)
class Saved:
    """Result of a checkpoint that was written and is durable."""

    name: str
    bytes: int
    seconds: float
    """Seconds from the beginning of the checkpoint until it was durable."""
    stall_s: float
    """Seconds for which training paused, including the wait for an earlier checkpoint."""
    progress: TrainingProgress


@dataclass(frozen=True)
class Failed:
    """Result of a checkpoint that could not be written. Older checkpoints still exist."""

    name: str
    why: str


@dataclass(frozen=True)
class Loaded:
    """Checkpoint that was loaded, and a note for people. The name is empty if no checkpoint was loaded."""

    name: str
    progress: TrainingProgress
    note: str = ""


KIND = "ones:kind"

_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
_KEYS = (str, int, float, bool, type(None))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor))
_FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (int, float, complex, bool, str, list, dict, set, tuple, bytes)
}

Take = Callable[[str, torch.Tensor], bool]
"""Function of a tensor's path and the tensor. It returns True if it has stored the tensor itself, outside of the plain
data."""


class CannotSaveError(TypeError):
    """Error of state that a checkpoint cannot contain because of its type; the message names its path."""


def pack(value: Any, path: str, take: Take = lambda path, tensor: False) -> Any:
    """Return `value` as plain data. `path` is the place of the value, for errors and for `take`. Raises
    `CannotSaveError`."""
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
        return _marked("deque", items=pack([*value], path, take), maxlen=value.maxlen)
    if kind in (bytes, bytearray):
        return _marked(kind.__name__, data=_bytes(value))
    if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject and not value.dtype.names:
        name = "ndarray" if kind is np.ndarray else "number"
        return _marked(name, dtype=value.dtype.str, shape=tuple(value.shape), data=_bytes(value.tobytes()))
    raise CannotSaveError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; keep numbers, strings, "
        "tensors, NumPy arrays, and dictionaries, lists, tuples or sets of these there"
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
    """Return bytes as a tensor, since `torch.load(weights_only=True)` refuses the pickle of empty `bytes`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _marked(kind: str, **parts: Any) -> dict[str, Any]:
    return {KIND: kind, **parts}


def unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that `pack` was given. `tensors` are those that its `take` stored, by path. Raises KeyError if
    one is missing."""
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


SHOWN = 5
"""Largest number of differences that an error lists."""


@dataclass(frozen=True)
class Content:
    """All saved state of one rank, with references to its tensors."""

    tensors: dict[str, torch.Tensor]
    """Tensors of model and optimizers, and sharded tensors of extras, by path."""
    rest: dict[str, Any]
    """Packed state besides `tensors`: `model`, each optimizer under its path, `extras`, and the names in `OWN`."""
    first: frozenset[str]
    """Paths of the model's buffers. Buffers may differ between ranks; rank 0's are saved, as in DDP."""


def collect(state: SavedState, *, template: bool = False) -> Content:
    """Return this rank's content of a checkpoint of `state`. With `template`, as for loading, it has optimizer state
    even before the first step. Raises `CannotSaveError`."""
    tensors: dict[str, torch.Tensor] = {}

    def every(path: str, tensor: torch.Tensor) -> bool:
        if path in tensors:
            raise CannotSaveError(f"{path} names two tensors; rename one of the modules or extras")
        if why := refusal(path, tensor.dtype):
            raise CannotSaveError(why)
        tensors[path] = tensor.detach()
        return True

    def sharded(path: str, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor) and every(path, tensor)

    model = get_model_state_dict(state.model)
    rest = {"model": {key: pack(value, f"model.{key}", every) for key, value in model.items()}}
    for name, optimizer in state.optimizers.items():
        path = _path_of(name)
        if is_plain(optimizer):
            packed = pack(plain_state(optimizer), path)
            rest[path] = {"state": {}, "param_groups": [{}] * len(optimizer.param_groups), "plain": packed}
            continue
        with _as_it_is(optimizer, not template), stepping_without_closure(optimizer):
            found = get_optimizer_state_dict(state.model, optimizer)
        rest[path] = {
            "state": pack(found["state"], f"{path}.state", every),
            "param_groups": pack(found["param_groups"], f"{path}.param_groups", sharded),
        }
    rest["extras"] = {key: pack(extra.state_dict(), key, sharded) for key, extra in state.extras.items()}
    rest |= {name: pack(one.state_dict(), name) for name, one in state.own.items()}
    places = {buffer.data_ptr() for buffer in state.model.buffers() if not isinstance(buffer, DTensor)} - {0}
    first = frozenset(
        f"model.{key}"
        for key, value in model.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.data_ptr() in places
    )
    return Content(tensors, rest, first)


def _path_of(optimizer: str) -> str:
    return f"optimizer.{optimizer}" if optimizer else "optimizer"


@contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer, wanted: bool) -> Iterator[None]:
    """Context in which torch does not create the state of an empty optimizer, if `wanted`. Torch would create it by a
    step with zero gradients, but only if no gradient exists: so one gradient is set meanwhile."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    bare = wanted and not optimizer.state and bool(parameters) and all(p.grad is None for p in parameters)
    if bare:
        parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        if bare:
            parameters[0].grad = None


def differences(now: Content, rest: dict[str, Any], metadata: Metadata) -> list[str]:
    """Return the reasons why a checkpoint does not fit the present content; empty if it fits."""
    found = []
    saved = metadata.state_dict_metadata
    bare = _without_state(now, rest)
    for path, tensor in now.tensors.items():
        there = saved.get(path)
        if there is None:
            if path not in bare:
                found.append(f"{path} {(*tensor.shape,)} is missing in the checkpoint")
        elif isinstance(there, TensorStorageMetadata) and there.size != tensor.shape:
            found.append(f"{path} is {(*there.size,)} in the checkpoint and {(*tensor.shape,)} here")
    found += [f"{path} is in the checkpoint and not here" for path in saved if path not in now.tensors]
    for key in now.rest["extras"]:
        if key not in rest["extras"]:
            names = ", ".join(sorted(rest["extras"])) or "nothing"
            found.append(f"the checkpoint holds no {key!r} (besides model and optimizer it has {names})")
    for path in _optimizers(now.rest):
        if path not in rest:
            found.append(f"the checkpoint holds no {path}")
            continue
        groups, here = len(rest[path]["param_groups"]), len(now.rest[path]["param_groups"])
        if groups != here:
            found.append(
                f"{path} has {groups} parameter groups in the checkpoint and {here} here: add all of them before "
                "job.register, and freeze those that train later after job.prepare or job.ddp"
            )
    return found[:SHOWN] + ([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])


def _optimizers(rest: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rest.items() if key not in ("model", "extras", *OWN)}


def _without_state(now: Content, rest: dict[str, Any]) -> set[str]:
    """Return the paths of optimizer state for parameters that had no state yet when the checkpoint was written."""
    prefixes = tuple(
        f"{path}.state.{name}."
        for path, optimizer in _optimizers(now.rest).items()
        for name in optimizer["state"]
        if name not in rest.get(path, {"state": ()})["state"]
    )
    return {path for path in now.tensors if path.startswith(prefixes)} if prefixes else set()


def restore(state: SavedState, rest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint into the objects of `state`. `rest` is its packed state, `tensors` are its tensors by path."""
    set_model_state_dict(state.model, unpack(rest["model"], tensors))
    # Parameters that never had a gradient have no state, which strictness would refuse.
    options = StateDictOptions(strict=False)
    for name, optimizer in state.optimizers.items():
        saved = unpack(rest[_path_of(name)], tensors)
        if "plain" in saved:
            load_plain_state(optimizer, saved["plain"])
            continue
        with stepping_without_closure(optimizer):
            set_optimizer_state_dict(state.model, optimizer, saved, options=options)
        if not saved["state"]:
            optimizer.state.clear()
    for key, extra in state.extras.items():
        extra.load_state_dict(unpack(rest["extras"][key], tensors))
    for name, one in state.own.items():
        one.load_state_dict(unpack(rest.get(name, {}), {}))
