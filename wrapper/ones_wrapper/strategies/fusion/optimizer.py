"""Fused optimizer: one step updates all members, each as its own optimizer would.

Schedules change the members' optimizers, whose parameter groups are read in each step. The fused optimizer's own
learning rate is a factor on the rates of all members: 1, unless the job's batch rule changes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ones_wrapper.checkpoint.files import write_plain
from ones_wrapper.files.checksums import sync
from ones_wrapper.gradients.lamb import called
from ones_wrapper.strategies.fusion.alike import difference
from ones_wrapper.strategies.fusion.model import FusedModel
from ones_wrapper.strategies.fusion.updates import STEP, Update, update_for

MEMBERS, ACTIVE = "members", "active"
"""Keys in a parameter group: the members' hyper-parameters (learning rate, betas, …), and flags of the members that are
still trained."""


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer of all members of a fused model, which `fuse` returns. State tensors have the members as their first
    dimension; `step`, of shape [B], counts each member's steps."""

    def __init__(
        self,
        model: FusedModel,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self.model = model
        self.optimizers = dict(optimizers)
        """Each member's own optimizer, by name. Schedulers change these."""
        self._update = _same_update(optimizers)
        names = _partitions(models, optimizers)
        _check_groups(self._update, optimizers)
        stacks = dict(model.stack.named_parameters())
        super().__init__([{"params": [stacks[name] for name in group]} for group in names], {"lr": 1.0})
        self._kept = [
            self._update.keeps([one.param_groups[g] for one in optimizers.values()]) for g in range(len(names))
        ]
        self._refresh()

    def _refresh(self) -> None:
        """Copy the members' hyper-parameters into the parameter groups, so that checkpoints have them."""
        for index, group in enumerate(self.param_groups):
            group[MEMBERS] = {
                name: [_plain(one.param_groups[index][name]) for one in self.optimizers.values()]
                for name in self._update.numbers
            }
            group[ACTIVE] = list(self.model.active)

    def state_dict(self) -> dict[str, Any]:
        self._refresh()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`, and set the hyper-parameters of the members' optimizers from it."""
        super().load_state_dict(state_dict)
        for index, group in enumerate(self.param_groups):
            for name, values in group[MEMBERS].items():
                for one, value in zip(self.optimizers.values(), values, strict=True):
                    one.param_groups[index][name] = tuple(value) if isinstance(value, list) else value
            self.model.active = [bool(active) for active in group[ACTIVE]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step of every member still trained. A parameter without a gradient does not change."""
        found = called(closure)
        for one in self.optimizers.values():
            one._opt_called = True  # type: ignore[attr-defined]  # else a schedule warns that it is ahead
        rows = self.model.rows()
        if not rows:
            return found
        for index, group in enumerate(self.param_groups):
            own = self._own(index, rows, float(group["lr"]))
            like = next(iter(self.optimizers.values())).param_groups[index]
            ready: dict[Any, dict[str, torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, rows, own, index, like, ready)
        return found

    def _own(self, index: int, rows: list[int], factor: float) -> dict[str, torch.Tensor]:
        """Return the hyper-parameters of the members `rows`, in parameter group `index`, by name; each has the shape
        [rows]."""
        found: dict[str, list[float]] = {}
        members = list(self.optimizers.values())
        for row in rows:
            group = members[row].param_groups[index]
            for name in self._update.numbers:
                value = group[name]
                pairs = [("beta1", value[0]), ("beta2", value[1])] if name == "betas" else [(name, value)]
                for key, number in pairs:
                    found.setdefault(key, []).append(float(number) * (factor if key == "lr" else 1.0))
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}

    def _step(
        self,
        p: torch.Tensor,
        rows: list[int],
        own: dict[str, torch.Tensor],
        index: int,
        like: Mapping[str, Any],
        ready: dict[Any, dict[str, torch.Tensor]],
    ) -> None:
        assert p.grad is not None
        state = self._state_of(p, index)
        steps = state[STEP]
        steps[rows] += 1
        made = steps[rows]
        key = (tuple(made.tolist()), p.dtype, p.device, p.dim())
        if key not in ready:
            scalars = self._update.scalars(own, made.double(), like)
            # A decay of 0 for all members is left out. One copy to the device for all of them.
            used = {name: value for name, value in scalars.items() if name != "decay" or bool(value.any())}
            there = torch.stack(list(used.values())).to(p.device, p.dtype, non_blocking=True)
            shape = (len(rows), *[1] * (p.dim() - 1))
            ready[key] = {name: there[place].view(shape) for place, name in enumerate(used)}
        kept = {name: state[name] for name in self._kept[index]}
        if len(rows) == len(self.model):
            self._update.apply(p, p.grad, kept, ready[key], like)
            return
        chosen = torch.tensor(rows).to(p.device, non_blocking=True)
        part = {name: tensor.index_select(0, chosen) for name, tensor in kept.items()}
        p_part = p.index_select(0, chosen)
        self._update.apply(p_part, p.grad.index_select(0, chosen), part, ready[key], like)
        p.index_copy_(0, chosen, p_part)
        for name, tensor in kept.items():
            tensor.index_copy_(0, chosen, part[name])

    def _state_of(self, p: torch.Tensor, index: int) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state[STEP] = torch.zeros(len(self.model), dtype=torch.float32)
            for name in self._kept[index]:
                state[name] = torch.zeros_like(p)
        return state

    def member(self, name: str) -> dict[str, Any]:
        """Return this member's state in the form of an ordinary script,
        `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`, copied to the CPU."""
        row, one = self.model.row(name), self.optimizers[name]
        groups = one.state_dict()["param_groups"]
        state: dict[int, dict[str, Any]] = {}
        for index, (group, numbered) in enumerate(zip(self.param_groups, groups, strict=True)):
            for p, number in zip(group["params"], numbered["params"], strict=True):
                held = self.state.get(p)
                if held and held[STEP][row]:
                    kept = {key: held[key][row].detach().cpu().clone() for key in self._kept[index]}
                    if its := self._update.alone(kept, held[STEP][row].clone(), one.param_groups[index]):
                        state[number] = its
        return {"model": self.model.member(name), "optimizer": {"state": state, "param_groups": groups}}

    def load_member(self, name: str, saved: Mapping[str, Any]) -> None:
        """Load a state from `member`, or from an ordinary script, into this member. A missing `model` or `optimizer`
        leaves that part unchanged. Raises ValueError if the state does not fit."""
        row, one = self.model.row(name), self.optimizers[name]
        if "model" in saved:
            self.model.load_member(name, saved["model"])
        if "optimizer" not in saved:
            return
        theirs = saved["optimizer"]
        if why := difference(_sizes(one.state_dict()["param_groups"]), _sizes(theirs["param_groups"]), name):
            raise ValueError(f"fuse: the optimizer of member {name!r} cannot be loaded: {why}")
        for index, (group, numbered) in enumerate(zip(self.param_groups, theirs["param_groups"], strict=True)):
            mine = one.param_groups[index]
            mine.update({key: value for key, value in numbered.items() if key != "params"})
            for p, number in zip(group["params"], numbered["params"], strict=True):
                kept, held = theirs["state"].get(number, {}), self._state_of(p, index)
                held[STEP][row] = self._update.steps(kept) if kept else 0.0
                for key in self._kept[index]:
                    value = kept.get(key)
                    held[key][row].copy_(value if value is not None else torch.zeros_like(held[key][row]))

    def save(self, folder: str | os.PathLike[str], *names: str) -> None:
        """Write `NAME.pt` for the named members (default: all) into a folder, which is created if missing. Each file is
        complete or absent. An ordinary script continues from a file:

            saved = torch.load("results/a.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        """
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        for name in names or self.model.members:
            part = where / f".{name}.pt.part"
            part.unlink(missing_ok=True)
            write_plain(part, self.member(name))
            part.replace(where / f"{name}.pt")
            sync(where)


def _plain(value: Any) -> Any:
    return [float(item) for item in value] if isinstance(value, (tuple, list)) else float(value)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {f"the number of parameters of group {index}": len(group["params"]) for index, group in enumerate(groups)}


def _same_update(optimizers: Mapping[str, torch.optim.Optimizer]) -> Update:
    """Return the update rule of all members. Raises ValueError if their optimizers are of different kinds."""
    names = list(optimizers)
    kind = type(optimizers[names[0]])
    for name, one in optimizers.items():
        if type(one) is not kind:
            raise ValueError(
                f"fuse: member {name!r} is trained by {type(one).__name__} and {names[0]!r} by {kind.__name__}; "
                "members that are fused have the same kind of optimizer"
            )
    return update_for(optimizers[names[0]])


def _partitions(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> list[list[str]]:
    """Return the names of the parameters in each group. Raises ValueError if members differ, if an optimizer has
    parameters of another model, or if an optimizer has already stepped."""
    found: dict[str, list[list[str]]] = {}
    for member, one in optimizers.items():
        names = {id(p): name for name, p in models[member].named_parameters()}
        try:
            found[member] = [[names[id(p)] for p in group["params"]] for group in one.param_groups]
        except KeyError:
            raise ValueError(
                f"fuse: the optimizer of member {member!r} has parameters that are not its model's"
            ) from None
        if one.state:
            raise ValueError(
                f"fuse: the optimizer of member {member!r} has already stepped; fuse new ones, and give the state to "
                "optimizer.load_member"
            )
    first = next(iter(found))
    for member, groups in found.items():
        if groups != found[first]:
            raise ValueError(
                f"fuse: the optimizer of member {member!r} has its parameters in other groups than that of {first!r}"
            )
    return found[first]


def _check_groups(update: Update, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise ValueError for options that differ between members, or that the update rule does not support."""
    first, *_ = names = list(optimizers)
    for name in names:
        for index, group in enumerate(optimizers[name].param_groups):
            theirs = optimizers[first].param_groups[index]
            for key, supported in update.same.items():
                if group[key] not in supported:
                    raise ValueError(
                        f"fuse: {key}={group[key]} of member {name!r} is not supported by a fused optimizer"
                    )
                if group[key] != theirs[key]:
                    raise ValueError(
                        f"fuse: member {name!r} has {key}={group[key]} and {first!r} has {key}={theirs[key]}, which "
                        "must be the same for all members"
                    )
