"""A dummy step of a rank that is about to join others, so that device, libraries and kernels are ready for its first
step.

Its input is zeros. Their shapes come as JSON from the ranks that train, and the number of samples is that of this
rank's first pass. Compiled models, cuDNN's search and CUDA graphs are each ready for only one shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.gradients.exchange import Exchange
from ones_wrapper.gradients.exchanges import Exchanges

_PLAIN = (int, float, bool, str, type(None))
MOST_TEXT = 100_000


class Shapes:
    """Shapes of each model's inputs, recorded in one forward pass in training."""

    def __init__(self, exchanges: Exchanges, samples: Callable[[], int]) -> None:
        """`samples` returns the number of samples in the present pass."""
        self._samples = samples
        self.text = ""
        """The recorded shapes as JSON; empty until recorded, or if an input has a type that cannot be described."""
        self._seen: dict[int, Any] = {}
        self._handles: dict[int, Any] = {}
        for number, exchange in enumerate(exchanges):
            if exchange.model is not None:
                look = partial(self._look, number)
                self._handles[number] = exchange.model.register_forward_pre_hook(look, with_kwargs=True)

    def _look(self, number: int, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not model.training:
            return
        self._handles[number].remove()
        with suppress(TypeError, ValueError):  # of the script's own types
            self._seen[number] = [_describe(list(args)), _describe(dict(kwargs)), _autocast(model)]
        if len(self._seen) == len(self._handles):
            text = json.dumps([self._samples(), [self._seen[number] for number in sorted(self._seen)]])
            self.text = text if len(text) <= MOST_TEXT else ""

    def told(self, batch: int, world: int) -> str:
        """Return the message for a block that joins: a line with the present global batch and world size, then `text`.
        Empty if `text` is empty."""
        return f"{batch} {world}\n{self.text}" if self.text else ""


def run(exchanges: Exchanges, told: str, device: torch.device, samples: Callable[[int, int], int]) -> None:
    """Make a forward and a backward pass of each model on zeros, and drop the gradients. Collective. `told` is the
    message of `Shapes.told`. `samples(global batch, world size)` returns the number of samples in this rank's pass."""
    now, _, text = told.partition("\n")
    batch, world = map(int, now.split())
    seen, models = json.loads(text)
    resized = partial(_zeros, device=device, old=seen, new=samples(batch, world))
    for exchange, (args, kwargs, autocast) in zip(exchanges, models, strict=True):
        kind = torch.autocast(device.type, getattr(torch, autocast)) if autocast else nullcontext()
        with kind:
            _pass(exchange, resized(args), resized(kwargs))


def _autocast(model: torch.nn.Module) -> str:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    on = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""


def _pass(exchange: Exchange, args: Any, kwargs: Any) -> None:
    model = exchange.model
    assert model is not None
    part = AccumulationStep(Share(0, 1, 1), 0, 1, 0, 1, 1)
    with exchange.during(part):
        found = (one for one in tree_leaves(model(*args, **kwargs)) if isinstance(one, torch.Tensor))
        outputs = [tensor.float().sum() for tensor in found if tensor.requires_grad]
        if outputs:
            torch.stack(outputs).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def _describe(value: Any) -> Any:
    """Return the type and shape of each tensor in `value`, and other values as they are, for JSON. Raises TypeError for
    unknown types."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in (list, tuple):
        return {"list" if type(value) is list else "tuple": [_describe(item) for item in value]}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: _describe(item) for key, item in value.items()}}
    if type(value) in _PLAIN:
        return {"plain": value}
    raise TypeError(f"{type(value).__name__} has no description")


def _zeros(told: Any, device: torch.device, old: int, new: int) -> Any:
    """Return zeros in the described shapes, with `new` samples in place of `old`."""
    ((kind, value),) = told.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, value[0]), value[1]
        shape[:1] = [new if one == old else one for one in shape[:1]]
        return torch.zeros(shape, dtype=dtype, device=device)
    if kind == "dict":
        return {key: _zeros(item, device, old, new) for key, item in value.items()}
    if kind in ("list", "tuple"):
        found = [_zeros(item, device, old, new) for item in value]
        return found if kind == "list" else tuple(found)
    return value
