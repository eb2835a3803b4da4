"""Objects that a script registers: each argument is one object or a dict of several, and is returned in the same
form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ones_wrapper.checkpoint.state import CannotSaveError, PlainValues, SavedState, Stateful, pack
from ones_wrapper.gradients.exchanges import Exchanges
from ones_wrapper.script.optimizers import is_plain, plain_state


def named(what: str, given: Any) -> dict[str, Any]:
    """Return objects by name: a dict as it is, a single object under the empty name. Raises ValueError for names that a
    checkpoint cannot contain."""
    if not isinstance(given, dict):
        return {"": given}
    if not given:
        raise ValueError(f"register: {what} is an empty dict")
    for name in given:
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"register: {what} has the name {name!r}; name each by a text without dots")
    return given


def mapped(given: Any, change: Callable[[Any], Any]) -> Any:
    """Return `change` of an object, or of each object in a dict. A dict of plain values is returned as it is."""
    if isinstance(given, dict):
        return {name: change(thing) for name, thing in given.items()} if _of_things(given) else given
    return change(given)


def state_of(model: Any, optimizer: Any, others: Mapping[str, Any], own: dict[str, Stateful]) -> SavedState:
    """Return the state for checkpoints: the script's objects, and `own`, which is the job's. Raises ValueError or
    TypeError, with a remedy, for an object that cannot be saved."""
    models, optimizers = _models(model), _all("optimizer", optimizer, torch.optim.Optimizer)
    whole = models[""] if "" in models else torch.nn.ModuleDict(models)
    known = {id(parameter) for parameter in whole.parameters()}
    for name, one in optimizers.items():
        if any(id(parameter) not in known for group in one.param_groups for parameter in group["params"]):
            raise ValueError(
                f"register: {_called('optimizer', name)} has parameters that are in no registered model; register all "
                "models that are trained: model={'g': G, 'd': D}"
            )
        if is_plain(one):
            try:
                pack(plain_state(one), _called("optimizer", name))
            except CannotSaveError as error:
                raise TypeError(
                    f"register: the state_dict of {_called('optimizer', name)}, a {type(one).__name__}, is not as that "
                    f"of torch's optimizers, and cannot be carried: {error}"
                ) from None
    extras: dict[str, Stateful] = {}
    for name, other in others.items():
        extras |= _stateful(name, other)
    return SavedState(whole, optimizers, extras, own)


def check_exchanged(model: Any, exchanges: Exchanges, alone: bool) -> None:
    """Raise ValueError if a trained model has no gradient exchange, or if an exchange's model is not registered. A job
    of one rank (`alone`) needs no exchange."""
    models = _models(model)
    for name, one in models.items():
        trained = any(parameter.requires_grad for parameter in one.parameters())
        if trained and not alone and not exchanges.owns(one):
            raise ValueError(
                f"register: {_called('model', name)} is not the one that job.ddp, job.fsdp or job.exchange returned; "
                "its gradients would not be averaged"
            )
    if any(all(exchange.model is not one for one in models.values()) for exchange in exchanges):
        raise ValueError(
            "register: a model was given to job.ddp, job.fsdp or job.exchange and is not registered, so no checkpoint "
            "would hold it; register all: model={'g': G, 'd': D}"
        )


def normalizes_batches(model: torch.nn.Module) -> bool:
    """Return True if the model computes statistics over its local batch (BatchNorm), which may fail for a single
    sample."""
    kinds = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(one, kinds) and not isinstance(one, torch.nn.SyncBatchNorm) for one in model.modules())


def _all(kind: str, given: Any, wanted: type[Any]) -> dict[str, Any]:
    found = named(kind, given)
    for name, thing in found.items():
        if not isinstance(thing, wanted):
            raise TypeError(f"register: {_called(kind, name)} is a {type(thing).__name__}, not a {wanted.__name__}")
    return found


def _models(given: Any) -> dict[str, torch.nn.Module]:
    return _all("model", given, torch.nn.Module)


def _called(kind: str, name: str) -> str:
    return f"{kind}[{name!r}]" if name else kind


def _of_things(given: Mapping[Any, Any]) -> bool:
    return any(hasattr(value, "state_dict") for value in given.values())


def _stateful(name: str, other: Any) -> dict[str, Stateful]:
    """Return objects with a state by name. `other` is one such object, a dict of several, or a dict of plain values."""
    if isinstance(other, Stateful):
        return {name: other}
    if not isinstance(other, dict):
        raise TypeError(
            f"register: {name} is a {type(other).__name__}; give an object with state_dict and load_state_dict, or a "
            f"dict of plain values: {name}={{'best': 0.0}}"
        )
    if _of_things(other):
        for key, thing in named(name, other).items():
            if not isinstance(thing, Stateful):
                raise TypeError(
                    f"register: {_called(name, key)} is a {type(thing).__name__} next to objects with state_dict"
                )
        return {f"{name}.{key}": thing for key, thing in other.items()}
    for key, value in other.items():
        try:
            pack({key: value}, name)
        except CannotSaveError:
            raise TypeError(
                f"register: {name}[{key!r}] is a {type(value).__module__}.{type(value).__qualname__}; a dict that is "
                "carried holds plain values: numbers, strings, tensors, NumPy arrays, and lists and dicts of these"
            ) from None
    return {name: PlainValues(other)}
