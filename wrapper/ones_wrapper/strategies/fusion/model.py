"""Fused model: each parameter and buffer has the tensors of all members, stacked in a new first dimension. One
vectorised call (`torch.func.vmap`) makes the forward passes of all members.

A member's loss depends only on the member's own row. So in the gradient of the sum of all losses, each row is the
gradient of a member. An ordinary backward pass, gradient exchange and optimizer train all members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.func import functional_call, stack_module_state, vmap

from ones_wrapper.strategies.fusion.alike import difference

Loss = Callable[..., torch.Tensor]


class FusedModel(torch.nn.Module):
    """B models of one architecture as one module, which `fuse` returns.

    `fused(x, *targets)` returns the losses, of shape [B], with 0 for stopped members. `fused(x)` returns the outputs of
    all members, of shape [B, …]. All members get the same `x`. If `x` is a tuple, it has the model's positional
    arguments; if it is a dict, the named ones.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        loss: Loss | Sequence[Loss],
        values: Mapping[str, Sequence[float]],
        randomness: str,
    ) -> None:
        super().__init__()
        self.members = list(models)
        self._randomness = randomness
        self._losses = _losses(loss, self.members)
        given = list(models.values())
        self.stack = _stacked(given)
        """Copy of the first model, with the stacked tensors of all members in place of its own."""
        for name, of_each in values.items():
            if len(of_each) != len(self.members):
                raise ValueError(
                    f"fuse: values[{name!r}] has {len(of_each)} numbers for {len(self.members)} members; give each one"
                )
        self._values = {name: torch.tensor(list(of_each), dtype=torch.float64) for name, of_each in values.items()}
        if self._values and len(self._losses) > 1:
            raise ValueError("fuse: values are for a loss that all members share; give a list of losses none")
        self.active = [True] * len(self.members)
        """True, by row, while the member is trained. This is no buffer, since DDP would send a buffer to all ranks in
        each step. The optimizer's state saves it."""
        self.train(given[0].training)

    def __len__(self) -> int:
        """Return B, the number of members."""
        return len(self.members)

    def row(self, name: str) -> int:
        """Return the row of a member. Raises KeyError, with all names, if there is no such member."""
        try:
            return self.members.index(name)
        except ValueError:
            raise KeyError(f"no member {name!r}; there are {', '.join(self.members)}") from None

    def rows(self) -> list[int]:
        """Return the rows of the members that are still trained, in order."""
        return [row for row, active in enumerate(self.active) if active]

    def stop(self, name: str) -> None:
        """Stop training this member: its tensors and optimizer state no longer change, and it takes no time. All ranks
        must stop the same members in the same step. The member stays stopped after a checkpoint is loaded."""
        self.active[self.row(name)] = False

    def forward(self, x: Any, *targets: Any) -> torch.Tensor:
        if not targets:
            outputs: torch.Tensor = self._call(None, x)
            return outputs
        rows = self.rows()
        if not rows:
            # A backward pass must reach every parameter, since ranks exchange their gradients.
            nothing = torch.stack([p.flatten()[0] * 0 for p in self.stack.parameters() if p.requires_grad]).sum()
            none: torch.Tensor = nothing.nan_to_num().expand(len(self))
            return none
        device = next(self.stack.parameters()).device
        partly = None if len(rows) == len(self) else torch.tensor(rows).to(device, non_blocking=True)
        losses: torch.Tensor = self._call(partly, x, *targets)
        if partly is None:
            return losses
        return losses.new_zeros(len(self)).index_copy(0, partly, losses)

    def _call(self, rows: torch.Tensor | None, x: Any, *targets: Any) -> Any:
        """Return the outputs of the members in these rows (None for all); with targets, return their losses."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if rows is None else tensor.index_select(0, rows)

        kept = dict(self.stack.named_buffers())
        parameters = {name: chosen(tensor) for name, tensor in self.stack.named_parameters()}
        # Copies, since a pass may change buffers in place that this or another graph still needs.
        buffers = {name: chosen(tensor).clone() for name, tensor in kept.items()}
        shared = len(self._losses) == 1
        like = next(iter(parameters.values()))
        values = {
            name: chosen(value.to(like.device, like.dtype, non_blocking=True)) for name, value in self._values.items()
        }

        def one(
            weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor], own: dict[str, torch.Tensor]
        ) -> tuple[Any, dict[str, torch.Tensor]]:
            output = functional_call(self.stack, (weights, state), *arguments(x))
            return (self._losses[0](output, *targets, **own) if targets and shared else output), state

        found, after = vmap(one, randomness=self._randomness)(parameters, buffers, values)
        if self.training:
            with torch.no_grad():
                for name, tensor in kept.items():
                    if rows is None:
                        tensor.copy_(after[name])
                    else:
                        tensor.index_copy_(0, rows, after[name])
        if targets and not shared:
            its = range(len(self)) if rows is None else self.rows()
            return torch.stack([self._losses[row](_member(found, index), *targets) for index, row in enumerate(its)])
        return found

    def clip_grad_norm_(self, most: float) -> torch.Tensor:
        """Clip the gradient of each member to a norm of at most `most`; return the norms before clipping, of shape [B].
        `torch.nn.utils.clip_grad_norm_` would clip by the norm of all members together."""
        gradients = [p.grad for p in self.stack.parameters() if p.grad is not None]
        each = [torch.linalg.vector_norm(g.flatten(1), dim=1) if g.dim() > 1 else g.abs() for g in gradients]
        norms: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
        factors: torch.Tensor = (most / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
        return norms

    def member(self, name: str) -> dict[str, Any]:
        """Return the `state_dict` of this member's own model, copied to the CPU."""
        row = self.row(name)
        return {
            key: value[row].detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.stack.state_dict().items()
        }

    def load_member(self, name: str, state: Mapping[str, Any]) -> None:
        """Load the `state_dict` of an ordinary model into this member. Raises ValueError if the state does not fit."""
        row, mine = self.row(name), self.stack.state_dict()
        shapes = {key: tuple(value.shape[1:]) for key, value in mine.items() if isinstance(value, torch.Tensor)}
        theirs = {key: tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor)}
        if why := difference(shapes, theirs, name):
            raise ValueError(f"fuse: member {name!r} cannot be loaded: {why}")
        with torch.no_grad():
            for key, value in mine.items():
                if isinstance(value, torch.Tensor):
                    value[row].copy_(state[key])


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments of a model's call for input `x`."""
    return ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})


def _stacked(models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return a copy of the first model, with all models' parameters and buffers stacked in a new first dimension."""
    parameters, buffers = stack_module_state(list(models))
    frame = copy.deepcopy(models[0])
    frame.zero_grad()
    # A tensor that layers share has one name here, and stays shared, since the object stays.
    for name, tensor in chain(frame.named_parameters(), frame.named_buffers()):
        tensor.data = parameters[name].detach() if name in parameters else buffers[name]
    return frame


def _losses(loss: Loss | Sequence[Loss], members: Sequence[str]) -> list[Loss]:
    if callable(loss):
        return [loss]
    if len(loss) != len(members):
        raise ValueError(f"fuse: {len(loss)} losses for {len(members)} members; give one, or one for each")
    return list(loss)


def _member(output: Any, index: int) -> Any:
    if isinstance(output, torch.Tensor):
        return output[index]
    if isinstance(output, dict):
        return {key: _member(value, index) for key, value in output.items()}
    return type(output)(_member(value, index) for value in output)
