"""LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2, without bias correction)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TRUST = (0.01, 10.0)


def trust(length: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return the trust ratio `length` / `size`: a tensor's norm divided by its step's norm; 1 if either is 0."""
    return torch.where((size > 0) & (length > 0), (length / size).clamp(*TRUST), 1.0)


def lamb(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Update both moments of a parameter from its gradient. Return its step before the learning rate, and the trust
    ratio."""
    (beta1, beta2), gradient, m, v = group["betas"], p.grad, state["exp_avg"], state["exp_avg_sq"]
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
    return update, trust(torch.linalg.vector_norm(p), torch.linalg.vector_norm(update))


def called(closure: Callable[[], Any] | None) -> Any:
    """Return the result of an optimizer step's closure, called with gradients enabled; None without a closure."""
    with torch.enable_grad():
        return closure() if closure is not None else None


class Lamb(torch.optim.Optimizer):
    """LAMB optimizer: the step of each tensor p is Adam's step times the trust ratio |p| / |step|. State of a
    parameter: `step`, `exp_avg`, `exp_avg_sq`. Sparse gradients are not supported."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        """Raises ValueError for a number outside its range."""
        if not lr >= 0 or not all(0 <= beta < 1 for beta in betas) or not eps >= 0 or weight_decay < 0:
            raise ValueError(
                f"lamb: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: none may be negative, and "
                "betas must be below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; return the closure's result, None without a closure."""
        found = called(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    state.update({"step": torch.tensor(0.0), **zeros})
                state["step"] += 1
                update, ratio = lamb(p, group, state)
                p.sub_(update * ratio, alpha=group["lr"])
        return found
