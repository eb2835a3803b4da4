"""LAMB for one model (You et al. 2020, arXiv 1904.00962, Algorithm 2, without bias correction): what a member that is
trained by itself has, and what its state loads into."""

from __future__ import annotations

from typing import Any

import torch

from ones_wrapper.gradients.trust import trust


class Lamb(torch.optim.Optimizer):
    """Adam's step of each tensor, made as long as the tensor itself: times its trust ratio, |p| / |step|.

    State of a parameter: `step`, `exp_avg`, `exp_avg_sq`. Sparse gradients are not taken.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        """Raises ValueError for numbers outside their ranges."""
        if not lr >= 0 or not all(0 <= beta < 1 for beta in betas) or not eps >= 0 or weight_decay < 0:
            raise ValueError(
                f"lamb: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: none may be negative, and "
                "betas must be below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; what `closure` returns, if there is one."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    state.update({"step": torch.tensor(0.0), **zeros})
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = m / (v.sqrt() + eps) + group["weight_decay"] * p
                p.sub_(update * trust(p.norm(), update.norm()), alpha=group["lr"])
        return found
