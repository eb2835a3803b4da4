"""Ranks that each minimise a function of their own of one vector, for the exchanges whose ranks go apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.gradients.apart import ApartExchange

Array = npt.NDArray[np.float64]


class Point(torch.nn.Module):
    def __init__(self, at: Array, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(at, dtype=torch.float64))
        self.value = value

    def forward(self) -> torch.Tensor:
        return self.value(self.x)


def quadratic(hessian: Array, slope: Array) -> Callable[[torch.Tensor], torch.Tensor]:
    """½ xᵀ H x − cᵀ x."""
    h, c = torch.tensor(hessian, dtype=torch.float64), torch.tensor(slope, dtype=torch.float64)
    return lambda x: 0.5 * x @ (h @ x) - c @ x


def regression(ranks: int, size: int, scale: float, seed: int = 0) -> tuple[Array, Array]:
    """Hessians [rank, size, size] and slopes [rank, size] of linear regressions whose ranks have data of their own,
    about `scale` in curvature."""
    random, rows = np.random.default_rng(seed), 50 * size
    features = random.normal(size=(ranks, rows, size))
    own = random.normal(size=size) + 0.5 * random.normal(size=(ranks, size))
    targets = np.einsum("nrd,nd->nr", features, own) + random.normal(size=(ranks, rows))
    weight = scale / rows
    hessians = weight * np.einsum("nri,nrj->nij", features, features)
    return hessians, weight * np.einsum("nri,nr->ni", features, targets)


def minimise(
    exchange: ApartExchange, model: Point, optimizer: torch.optim.Optimizer, rank: int, world: int, steps: int
) -> list[Array]:
    """Steps of one rank, each on one sample; where it was after each."""
    part, path = AccumulationStep(Share(rank, rank + 1, world), rank, 1, 0, 1, 1), []
    exchange.trained_by([optimizer])
    hook = optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    for _ in range(steps):
        with exchange.during(part):
            optimizer.zero_grad()
            loss = model()
            loss.backward()  # type: ignore[no-untyped-call]
            exchange.loss(loss)
            optimizer.step()
        path.append(model.x.detach().numpy().copy())
    hook.remove()
    return path
