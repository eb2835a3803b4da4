"""1-bit LAMB (Li et al. 2021, arXiv 2104.06069), based on LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2).

In the warm-up it is LAMB on averaged gradients. Then the variance and the trust ratios freeze, and ranks exchange their
momentum, in one bit an element, in place of gradients (`onebit`). Each tensor's frozen trust ratio is multiplied by a
factor, which follows the variance of the gradients. These are computed back from the exchanged momentum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ones_wrapper.gradients.accumulation import RefusesScaler
from ones_wrapper.gradients.lamb import Lamb, lamb
from ones_wrapper.group.flat import flattened, pieces
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean

MEMORY = 0.9
"""Weight of the old value in the running mean of trust ratios."""
FACTOR = (0.5, 4.0)
"""(smallest, largest) factor on a frozen trust ratio."""
CHANGE = 0.1
"""Largest relative change of the factor in one step."""


class CompressedLamb(RefusesScaler, Lamb):
    """LAMB without bias correction for `warmup_steps` steps, then 1-bit LAMB. `OneBitLamb.optimizer` returns it.

    State of each element of a parameter: `exp_avg`, `exp_avg_sq` (frozen after the warm-up), `exp_avg_sq_fresh` (the
    same, not frozen) and `residual` (this rank's error of the compressed momentum). State of the whole tensor: `trust`
    (running mean of trust ratios), `factor`, and `scale` (which makes tensors equally large before compression). While
    momentum is exchanged, `step` is collective, and `.grad` is this rank's own part of the gradient.
    """

    scaler_refused = (
        "onebit_lamb: a gradient scaler lets single ranks skip a step that all must make together; compute in "
        "bfloat16, which needs none"
    )

    def __init__(self, params: Any, mean: OneBitMean, *, lr: float, warmup_steps: int, **numbers: Any) -> None:
        """`numbers` are further arguments of `Lamb`. Raises ValueError for a number outside its range, and for
        parameters that are sharded or have less than 32 bits."""
        if "betas" in numbers and not numbers["betas"][0]:
            raise ValueError(f"onebit_lamb: betas={numbers['betas']}: the first must be above 0")
        self._mean, self._warmup_steps = mean, warmup_steps
        self._untrained: set[torch.Tensor] | None = None
        """Parameters that had no gradient in the warm-up; None before the first exchange of momentum."""
        super().__init__(params, lr, **numbers)
        for group in (self.defaults, *self.param_groups):
            group.update({"warmed": 0, "frozen": False, "batch": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if isinstance(p, DTensor):
                raise ValueError("onebit_lamb: parameters are sharded; give the model to job.ddp, not to job.fsdp")
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"onebit_lamb: parameters are {p.dtype}; keep them in float32, and compute in bfloat16 by autocast"
                )

    @property
    def frozen(self) -> bool:
        """True after the warm-up: momentum is exchanged, in one bit an element."""
        return bool(self.param_groups[0]["frozen"])

    @property
    def batch(self) -> int:
        """Global batch in the warm-up; 0 before the first step."""
        return int(self.param_groups[0]["batch"])

    @property
    def elements(self) -> int:
        """Number of exchanged elements in a step."""
        return sum(p.numel() for group in self.param_groups for p in group["params"] if p.requires_grad)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._mean.ranks_changed()
        self._untrained = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step; collective after the warm-up. Raises ValueError for a closure, and if a parameter gets its
        first gradient after the warm-up."""
        if closure is not None:
            raise ValueError(
                "onebit_lamb: a closure is not taken; call loss.backward() yourself, then optimizer.step()"
            )
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and not self.state[p]:
                    self.state[p] = _fresh(p)
        if self.frozen:
            self._exchange()
            return
        for group, p, state in self._trained():
            if p.grad is not None:
                update, ratio = lamb(p, group, state)
                state["trust"].lerp_(ratio, 1 - MEMORY if group["warmed"] else 1.0)
                p.sub_(update * ratio, alpha=group["lr"])
        self._count("warmed", self.param_groups[0]["warmed"] + 1)
        if self.param_groups[0]["warmed"] >= self._warmup_steps:
            self._freeze()

    def settle(self) -> None:
        """Make the ranks' residuals equal (`OneBitMean.carried`), before the state is saved or sent. Collective."""
        trained = list(self._trained())
        if not self.frozen or not trained:
            return
        found = self._mean.carried(flattened([state["residual"] for *_, state in trained]))
        for (*_, state), part in zip(trained, pieces(found, [p for _, p, _ in trained]), strict=True):
            torch.mul(part, state["exp_avg_sq"] > 0, out=state["residual"])

    def restart(self, batch: int) -> None:
        """Begin a new warm-up at this global batch: the variance is no longer frozen, and the residual is added to the
        momentum. Collective."""
        self.settle()
        for group, _, state in self._trained() if self.frozen else ():
            state["exp_avg"] += state["residual"] / (state["scale"] * group["betas"][0])
            state["residual"].zero_()
        for key, value in {"warmed": 0, "frozen": False, "batch": batch}.items():
            self._count(key, value)

    def _count(self, key: str, value: int) -> None:
        for group in self.param_groups:
            group[key] = value

    def _trained(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
        """Yield (group, parameter, state) of all exchanged parameters, in the same order on all ranks."""
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p):
                    yield group, p, self.state[p]

    def _freeze(self) -> None:
        """End the warm-up: set each tensor's scale and factor, and freeze the variance."""
        states = [state for *_, state in self._trained()]
        sizes = torch.stack(
            [torch.linalg.vector_norm(s["exp_avg"]) / max(s["exp_avg"].numel(), 1) ** 0.5 for s in states]
        )
        mean = sizes.sum() / (sizes > 0).sum().clamp(min=1)
        for state, size in zip(states, sizes, strict=True):
            state["scale"] = torch.where(size > 0, mean / size, 1.0)
            state["factor"] = torch.ones_like(state["factor"])
            state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])
            state["residual"].zero_()
        self._untrained = None
        self._count("frozen", True)

    def _exchange(self) -> None:
        trained = list(self._trained())
        self._check_trained(trained)
        moved = []
        for group, p, state in trained:
            beta1 = group["betas"][0]
            gradient = 0.0 if p.grad is None else p.grad
            moved.append(state["scale"] * (beta1 * state["exp_avg"] + (1 - beta1) * gradient))
        residuals = flattened([state["residual"] for *_, state in trained])
        mean, left = self._mean(flattened(moved), residuals)
        parts = zip(trained, pieces(mean, moved), pieces(left, moved), strict=True)
        for (group, p, state), momentum, residual in parts:
            self._compressed(group, p, state, momentum, residual)

    def _compressed(
        self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any], mean: torch.Tensor, left: torch.Tensor
    ) -> None:
        (beta1, beta2), eps, v = group["betas"], group["eps"], state["exp_avg_sq"]
        # A sign cannot be zero: an element that never had a gradient would get momentum over a variance of 0.
        mask = v > 0
        torch.mul(left, mask, out=state["residual"])
        m = mean / state["scale"] * mask
        gradient = (m - beta1 * state["exp_avg"]) / (1 - beta1)
        state["exp_avg"].copy_(m)
        fresh = state["exp_avg_sq_fresh"]
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = v.sqrt() + eps
        update = m / root
        factor = (root / (fresh.sqrt() + eps)).max()
        if group["weight_decay"]:
            before = torch.linalg.vector_norm(update)
            update += group["weight_decay"] * p
            after = torch.linalg.vector_norm(update)
            share = torch.where(after > 0, before / after, 1.0).clamp(max=1.0)
            factor = factor * share + 1 - share
        last = state["factor"]
        factor = factor.clamp(*FACTOR).clamp(last * (1 - CHANGE), last * (1 + CHANGE))
        state["factor"] = factor
        p.sub_(update * (state["trust"] * factor), alpha=group["lr"])

    def _check_trained(self, trained: list[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]) -> None:
        if self._untrained is None:
            self._untrained = {p for _, p, state in trained if not bool(state["exp_avg_sq"].any())}
        late = [p for p in self._untrained if p.grad is not None and bool(p.grad.any())]
        if late:
            raise ValueError(
                f"onebit_lamb: {len(late)} parameters (one of shape {tuple(late[0].shape)}) got their first gradient "
                f"after {self._warmup_steps} steps of warm-up, when their variance was frozen; train them from the "
                "beginning, or raise warmup_steps"
            )


def _fresh(p: torch.Tensor) -> dict[str, Any]:
    names = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "residual")
    scalars = ("trust", "factor", "scale")
    return {name: torch.zeros_like(p) for name in names} | {name: p.new_ones(()) for name in scalars}
