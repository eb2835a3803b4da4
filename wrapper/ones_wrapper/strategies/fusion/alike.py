"""Check that models can be fused: they have one architecture, and differ only in the values of their tensors."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.Size, torch.device)


def named(what: str, given: Sequence[_T] | Mapping[str, _T]) -> dict[str, _T]:
    """Return the members by name. Raises ValueError if there are none, or if a name cannot be a file name."""
    found = dict(given) if isinstance(given, Mapping) else {str(index): one for index, one in enumerate(given)}
    if not found:
        raise ValueError(f"fuse: {what} is empty; give one for each member")
    for name in found:
        if not isinstance(name, str) or not name or name.startswith(".") or "/" in name:
            raise ValueError(f"fuse: {name!r} cannot be a member's name; name it by a text that can be a file's")
    return found


def check_models(models: Mapping[str, torch.nn.Module]) -> None:
    """Raise ValueError, with the member's name and the difference, if a member differs from the first one."""
    names = list(models)
    first = dict(_traits(models[names[0]]))
    seen: dict[int, str] = {}
    for name, model in models.items():
        for parameter in model.parameters():
            if seen.setdefault(id(parameter), name) != name:
                raise ValueError(
                    f"fuse: members {seen[id(parameter)]!r} and {name!r} share a parameter; make a model for each"
                )
        if why := difference(first, dict(_traits(model)), names[0]):
            raise ValueError(
                f"fuse: member {name!r} cannot be fused with {names[0]!r}: {why}. Members may differ only in the "
                "values of their tensors and in their optimizers' numbers; train this one by itself"
            )


def difference(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    """Return a text about the first property in which two models differ; empty if there is none. `name` is the name of
    the first model."""
    for trait in [*first, *(trait for trait in other if trait not in first)]:
        if trait not in other:
            return f"it has no {trait}"
        if trait not in first:
            return f"it has {trait}, which {name!r} has not"
        if first[trait] != other[trait]:
            return f"{trait} is {_shown(other[trait])}, and {_shown(first[trait])} there"
    return ""


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _traits(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each property on which a forward pass depends, but not the values of tensors."""
    for path, module in model.named_modules(remove_duplicate=False):
        where = path or "the model"
        yield f"the type of {where}", f"{type(module).__module__}.{type(module).__qualname__}"
        yield f"the setting of {where}", module.extra_repr()
        for key, value in vars(module).items():
            if not key.startswith("_"):
                yield f"{where}.{key}" if path else key, _comparable(value)
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for name, tensor in chain(*named):
        yield f"the shape of {name}", tuple(tensor.shape)
        yield f"the type of {name}", str(tensor.dtype)
        yield f"requires_grad of {name}", tensor.requires_grad


def _comparable(value: Any) -> Any:
    """Return a value that represents a setting in comparisons: a function's code and defaults, an unknown object's
    type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {repr(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, types.FunctionType):
        cells = [_comparable(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__code__, _comparable(value.__defaults__), cells
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__
    return type(value).__qualname__
