"""A dummy step of a rank that is about to join others: device, libraries and kernels are ready for the
first true one.

Its input are zeros in the shapes that the script gave the model elsewhere, told as JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.gradients.exchange import Exchange

_PLAIN = (int, float, bool, str, type(None))
MOST_TEXT = 100_000


class Shapes:
    """Looks at the input of the model's next forward pass in training, once."""

    def __init__(self, exchange: Exchange | None) -> None:
        self.text = ""
        """What was seen, as JSON; empty before, and where it cannot be told."""
        if exchange is not None and exchange.model is not None:
            self._handle = exchange.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not model.training:
            return
        self._handle.remove()
        try:
            text = json.dumps([_describe(list(args)), _describe(dict(kwargs))])
        except (TypeError, ValueError):  # of types of the script's own
            return
        self.text = text if len(text) <= MOST_TEXT else ""


def run(exchange: Exchange, text: str, device: torch.device) -> None:
    """A forward and backward pass on zeros. Collective. The model's gradients are gone afterwards."""
    model = exchange.model
    assert model is not None
    args, kwargs = (_zeros(value, device) for value in json.loads(text))
    part = AccumulationStep(Share(0, 1, 1), 0, 1, 0, 1, 1)
    with exchange.during(part):
        outputs = [value.float().sum() for value in _tensors(model(*args, **kwargs)) if value.requires_grad]
        if outputs:
            torch.stack(outputs).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def _describe(value: Any) -> Any:
    """As JSON. Raises TypeError for a type that is not told."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in (list, tuple):
        return {"list" if type(value) is list else "tuple": [_describe(item) for item in value]}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: _describe(item) for key, item in value.items()}}
    if type(value) in _PLAIN:
        return {"plain": value}
    raise TypeError(f"{type(value).__name__} has no description")


def _zeros(told: Any, device: torch.device) -> Any:
    ((kind, value),) = told.items()
    if kind == "tensor":
        dtype = getattr(torch, value[0])
        return torch.zeros(value[1], dtype=dtype, device=device)
    if kind == "dict":
        return {key: _zeros(item, device) for key, item in value.items()}
    if kind in ("list", "tuple"):
        found = [_zeros(item, device) for item in value]
        return found if kind == "list" else tuple(found)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a model's output."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []
