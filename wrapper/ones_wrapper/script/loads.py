"""Check for states that the script loads by itself after the job's checkpoint was loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ones_wrapper.script.line import line

OVER = (
    "{name}.load_state_dict was called after job.prepare or job.register{line}: once the job has a checkpoint of its "
    "own, that checkpoint counts. Load weights before job.prepare, and leave out the script's own resume"
)


class Loads:
    """Watches models and optimizers between registration and training."""

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.found: list[str] = []
        """A sentence for each load."""
        found, modules, optimizers = self.found, list(model.modules()), list(optimizers)
        watched = {id(one) for one in (*modules, *optimizers)}

        def loaded(thing: Any, *_: Any) -> None:  # a function, which copies of the model have, too
            text = OVER.format(name=type(thing).__name__, line=line())
            if id(thing) in watched and text not in found:
                found.append(text)

        self._handles: list[Any] = []
        for one in modules:
            self._handles.append(one.register_load_state_dict_post_hook(loaded))  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # classes of scripts may lack them
                self._handles.append(optimizer.register_load_state_dict_post_hook(loaded))

    def close(self) -> None:
        """End the watch."""
        for handle in self._handles:
            handle.remove()
