"""Optimizer steps on the tensors of several members at once, each member with its own hyper-parameters.

Each kind of optimizer has one rule, which names the hyper-parameters that may differ, names the state tensors of a
parameter, and makes the step. Tensors have the members as their first dimension; a member's hyper-parameters are
broadcast over its row. Operations and their order are those of the ordinary optimizer, so that results agree in double
precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ones_wrapper.gradients.lamb import Lamb, trust

Numbers = Mapping[str, torch.Tensor]
"""Hyper-parameters of the members by name, each of shape [B], in double precision on the CPU."""

Tensors = dict[str, torch.Tensor]
Options = Mapping[str, Any]

STEP = "step"


class Update(ABC):
    """Update rule of one kind of optimizer for the tensors of all members."""

    numbers: tuple[str, ...]
    """Names of the options in a parameter group that may differ between members; `betas` counts as two."""
    same: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Options that must be equal for all members, with the supported values of each."""

    @abstractmethod
    def keeps(self, groups: Sequence[Options]) -> tuple[str, ...]:
        """Return the names of the state tensors of each parameter, for members with these parameter groups."""

    @abstractmethod
    def scalars(self, own: Numbers, steps: torch.Tensor, group: Options) -> Tensors:
        """Return the scalars for `apply` by name, each of shape [B]. `own` has the members' hyper-parameters, `steps`
        their numbers of steps, this one included."""

    @abstractmethod
    def apply(self, p: torch.Tensor, gradient: torch.Tensor, kept: Tensors, by: Numbers, group: Options) -> None:
        """Make one step in place. `by` has the results of `scalars` in the parameter's type, ready to be broadcast; it
        has no key `decay` if the decay is 0 for all members."""

    def alone(self, kept: Tensors, step: torch.Tensor, own: Options) -> dict[str, Any]:
        """Return the state of one model's ordinary optimizer, from a member's row in the state tensors."""
        return {STEP: step, **kept}

    def steps(self, kept: Options) -> float:
        """Return the number of steps made, from the state of an ordinary optimizer."""
        return float(kept[STEP])


class SgdUpdate(Update):
    """Update rule of torch.optim.SGD: weight decay in the gradient, momentum with dampening, Nesterov's variant."""

    numbers = ("lr", "weight_decay", "momentum", "dampening")
    same: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "nesterov": (False, True),
        "maximize": (False,),
        "differentiable": (False,),
    }

    def keeps(self, groups: Sequence[Options]) -> tuple[str, ...]:
        return ("momentum_buffer",) if any(group["momentum"] for group in groups) else ()

    def scalars(self, own: Numbers, steps: torch.Tensor, group: Options) -> Tensors:
        # The first gradient is the buffer, undampened; without momentum there is no buffer.
        whole = (steps == 1) | (own["momentum"] == 0)
        share = torch.where(whole, 1.0, 1.0 - own["dampening"])
        return {"lr": -own["lr"], "decay": own["weight_decay"], "momentum": own["momentum"], "share": share}

    def apply(self, p: torch.Tensor, gradient: torch.Tensor, kept: Tensors, by: Numbers, group: Options) -> None:
        if "decay" in by:
            gradient = torch.addcmul(gradient, p, by["decay"])
        if "momentum_buffer" in kept:
            buffer = kept["momentum_buffer"]
            buffer.mul_(by["momentum"]).add_(gradient * by["share"])
            gradient = torch.addcmul(gradient, buffer, by["momentum"]) if group["nesterov"] else buffer
        p.addcmul_(gradient, by["lr"])

    def alone(self, kept: Tensors, step: torch.Tensor, own: Options) -> dict[str, Any]:
        return kept if own["momentum"] else {}

    def steps(self, kept: Options) -> float:
        return float(kept.get("momentum_buffer") is not None)


class AdamUpdate(Update):
    """Update rule of torch.optim.Adam and AdamW."""

    numbers = ("lr", "weight_decay", "betas", "eps")
    same: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "decoupled_weight_decay": (False, True),
        "amsgrad": (False,),
        "maximize": (False,),
        "differentiable": (False,),
        "capturable": (False,),
    }

    def keeps(self, groups: Sequence[Options]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, own: Numbers, steps: torch.Tensor, group: Options) -> Tensors:
        first, second = own["beta1"], own["beta2"]
        decay = own["weight_decay"]
        return {
            "lr": -own["lr"] / (1 - first**steps),
            "beta1": 1 - first,
            "beta2": second,
            "rest2": 1 - second,
            "root": (1 - second**steps).sqrt(),
            "eps": own["eps"],
            "decay": own["lr"] * decay if group["decoupled_weight_decay"] else decay,
        }

    def apply(self, p: torch.Tensor, gradient: torch.Tensor, kept: Tensors, by: Numbers, group: Options) -> None:
        if "decay" in by:
            if group["decoupled_weight_decay"]:
                p.mul_(1 - by["decay"])
            else:
                gradient = torch.addcmul(gradient, p, by["decay"])
        mean, square = self._moments(gradient, kept, by)
        p.add_(mean / (square.sqrt().div_(by["root"]).add_(by["eps"])) * by["lr"])

    def _moments(self, gradient: torch.Tensor, kept: Tensors, by: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        mean, square = kept["exp_avg"], kept["exp_avg_sq"]
        mean.lerp_(gradient, by["beta1"])
        square.mul_(by["beta2"]).add_(gradient * gradient * by["rest2"])
        return mean, square


class LambUpdate(AdamUpdate):
    """Update rule of `Lamb`, with a trust ratio for each tensor of each member."""

    same: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def scalars(self, own: Numbers, steps: torch.Tensor, group: Options) -> Tensors:
        first, second = own["beta1"], own["beta2"]
        numbers = {"lr": own["lr"], "decay": own["weight_decay"], "eps": own["eps"]}
        return {"beta1": 1 - first, "beta2": second, "rest2": 1 - second, **numbers}

    def apply(self, p: torch.Tensor, gradient: torch.Tensor, kept: Tensors, by: Numbers, group: Options) -> None:
        mean, square = self._moments(gradient, kept, by)
        update = mean / (square.sqrt() + by["eps"])
        if "decay" in by:
            update.addcmul_(p, by["decay"])
        p.sub_(update * (trust(_norms(p), _norms(update)) * by["lr"]))


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(len(tensor), -1)
    norms: torch.Tensor = torch.linalg.vector_norm(flat, dim=1).view(-1, *[1] * (tensor.dim() - 1))
    return norms


def update_for(optimizer: torch.optim.Optimizer) -> Update:
    """Return the update rule for this optimizer. Raises ValueError for a kind without a rule."""
    kind, optim = type(optimizer), torch.optim
    rules = {optim.SGD: SgdUpdate(), optim.Adam: AdamUpdate(), optim.AdamW: AdamUpdate(), Lamb: LambUpdate()}
    if kind not in rules:
        raise ValueError(
            f"fuse: an optimizer is a {kind.__module__}.{kind.__qualname__}; those that can be fused are "
            "torch.optim.SGD, Adam, AdamW and ones_wrapper.strategies.fusion.Lamb"
        )
    return rules[kind]
