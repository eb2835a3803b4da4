"""Tell a script that fetches batches ahead from a script that left out a batch.

Both request a second batch before a backward pass. A script that fetches ahead then trains on the first batch; a script
that left out a batch trains on the second. The model's inputs show which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

UNCLEAR = (
    "two batches were requested before the first backward pass{line}, and the model's inputs are from neither of "
    "them: this is taken for fetching ahead. If the script leaves out a batch, it must do so on all ranks: `if "
    "job.any(bad): continue`"
)


class AskedAhead:
    """Hook on the model that finds out on which of two batches the script trains."""

    def __init__(
        self, model: torch.nn.Module, held: Any, asked: Any, trained: Callable[[], bool], left_out: Callable[[], None]
    ) -> None:
        """`held` is the first batch, `asked` the second. `trained` returns True after a backward pass. `left_out` is
        called before a forward pass on `asked`, because the script then has left out `held`."""
        self._held, self._asked = _tensors(held), _tensors(asked)
        self._trained, self._left_out = trained, left_out
        self._known = self._seen = False
        models = [model, *model.children()] if isinstance(model, torch.nn.ModuleDict) else [model]
        self._hooks = [one.register_forward_pre_hook(self._forward, with_kwargs=True) for one in models]

    def _forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._known or self._trained():
            return
        self._seen = True
        given = _tensors((args, kwargs))
        held, asked = _any_equal(given, self._held), _any_equal(given, self._asked)
        if held != asked:
            self._known = True
            if asked:
                self._left_out()

    @property
    def unclear(self) -> bool:
        """True if there was a forward pass, but its inputs were from neither or from both of the batches."""
        return self._seen and not self._known

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._held, self._asked = [], []


def _tensors(thing: Any) -> list[torch.Tensor]:
    return [one.detach() for one in tree_leaves(thing) if isinstance(one, torch.Tensor)]


def _any_equal(given: Iterable[torch.Tensor], batch: list[torch.Tensor]) -> bool:
    return any(
        one.shape == own.shape and one.dtype == own.dtype and torch.equal(one.cpu(), own.cpu())
        for one in given
        for own in batch
    )
