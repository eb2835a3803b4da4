"""The optimizers' steps on the tensors of several members at once, each with its own numbers.

Each rule is that of one kind of optimizer: which numbers members have of their own, what it keeps of a parameter, and
how a step changes it. Tensors have the members as first dimension; a member's numbers are broadcast over its row. The
operations and their order are those of the optimizer for one model, so that in double precision the results agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ones_wrapper.gradients.lamb import Lamb, trust

Numbers = Mapping[str, torch.Tensor]
"""A member's numbers by name, of shape [B], in double precision on the CPU."""

Tensors = dict[str, torch.Tensor]
Options = Mapping[str, Any]
"""A parameter group of one model's optimizer."""

STEP = "step"


class Update(ABC):
    """Rule of one kind of optimizer, for the tensors of all members."""

    numbers: tuple[str, ...]
    """Numbers that each member has of its own in a parameter group; `betas` are two."""
    same: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Options that must be the same for all members, and the values that are supported."""

    @abstractmethod
    def keeps(self, groups: Sequence[Options]) -> tuple[str, ...]:
        """Names of the tensors that are kept of each parameter, for members with these groups."""

    @abstractmethod
    def scalars(self, own: Numbers, steps: torch.Tensor, group: Options) -> Tensors:
        """Scalars that `apply` needs of the members, of shape [B], from their numbers and the steps made with this
        one."""

    @abstractmethod
    def apply(self, p: torch.Tensor, gradient: torch.Tensor, kept: Tensors, by: Numbers, group: Options) -> None:
        """Make one step in place. `by` has the scalars, in the parameter's type, ready to be broadcast; without `decay`
        if it is 0 for all."""

    def alone(self, kept: Tensors, step: torch.Tensor, own: Options) -> dict[str, Any]:
        """State that the optimizer of one model keeps, from the row of a member that has stepped."""
        return {STEP: step, **kept}

    def steps(self, kept: Options) -> float:
        """Steps made, from what the optimizer of one model keeps."""
        return float(kept[STEP])


class SgdUpdate(Update):
    """torch.optim.SGD: weight decay in the gradient, momentum with dampening, Nesterov's variant."""

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
    """torch.optim.Adam and AdamW."""

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
        """Both moments with this gradient in them."""
        mean, square = kept["exp_avg"], kept["exp_avg_sq"]
        mean.lerp_(gradient, by["beta1"])
        square.mul_(by["beta2"]).add_(gradient * gradient * by["rest2"])
        return mean, square


class LambUpdate(AdamUpdate):
    """`Lamb`, with a trust ratio for each tensor of each member."""

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
    """Return the norm of each member's part, ready to be broadcast."""
    flat = tensor.reshape(len(tensor), -1)
    norms: torch.Tensor = torch.linalg.vector_norm(flat, dim=1).view(-1, *[1] * (tensor.dim() - 1))
    return norms


def update_for(optimizer: torch.optim.Optimizer) -> Update:
    """The rule for this optimizer. Raises ValueError for a kind that has none."""
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return SgdUpdate()
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return AdamUpdate()
    if kind is Lamb:
        return LambUpdate()
    raise ValueError(
        f"fuse: an optimizer is a {kind.__module__}.{kind.__qualname__}; those that can be fused are torch.optim.SGD, "
        "Adam, AdamW and ones_wrapper.strategies.fusion.Lamb"
    )
