"""Steps of a small model on ranks, and the same steps in one process, for the tests of the gradient exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import nn

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.gradients.exchange import DdpExchange, Exchange
from ones_wrapper.gradients.fsdp import FsdpExchange
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group

Sizes = Sequence[Sequence[int]]
"""Samples of one step, by rank and pass."""
EXCHANGES: dict[str, type[Exchange]] = {"ddp": DdpExchange, "fsdp": FsdpExchange}


class Model(nn.Module):
    """Parameters that three ranks cannot share evenly, some of them in blocks."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5)) for _ in range(2))
        self.last = nn.Linear(5, 1)
        self.seldom = nn.Linear(5, 1)
        self.skip = skip
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        found: torch.Tensor = self.last(hidden)
        return found if self.skip and len(x) % 2 else found + self.seldom(hidden)


def made(seed: int = 0, skip: bool = False) -> Model:
    torch.manual_seed(seed)
    return Model(skip)


def sample(number: int) -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def local_batch(start: int, samples: int) -> torch.Tensor:
    """Inputs of a pass; those of a borrowed sample would spoil everything."""
    if samples == 0:
        return torch.full((1, 3), torch.nan, dtype=torch.float64)
    return torch.stack([sample(start + i) for i in range(samples)])


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1).square().mean()


def passes_of(sizes: Sizes, rank: int, cursor: int) -> Iterator[AccumulationStep]:
    """A rank's passes of a step that begins with sample `cursor`."""
    start = cursor + sum(map(sum, sizes[:rank]))
    total, largest = sum(map(sum, sizes)), max(map(max, sizes))
    share = Share(start, start + sum(sizes[rank]), total)
    for index, samples in enumerate(sizes[rank]):
        yield AccumulationStep(share, start, samples, index, len(sizes[rank]), largest)
        start += samples


def flat(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> npt.NDArray[np.float64]:
    """All gradients in one vector; zeros where there is none."""
    whole = []
    for gradient, parameter in zip(gradients, like, strict=True):
        full = getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)()
        whole.append(torch.zeros(parameter.shape).flatten() if full is None else full.flatten())
    return torch.cat(whole).numpy().astype(np.float64)


class Seen(NoiseScale):
    """Keeps the squares of what it is shown, and measures nothing."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.locals: list[tuple[float, int, int]] = []
        self.wholes: list[float] = []

    def local(self, bucket: int, gradient: torch.Tensor, samples: int, total: int, passes: int = 1) -> None:
        self.locals.append((float(gradient.square().sum()), samples, passes))

    def whole(self, gradient: torch.Tensor, total: int) -> None:
        self.wholes.append(float(gradient.square().sum()))

    def whole_shard(self, gradient: torch.Tensor, total: int, passes: int = 1) -> None:
        self.wholes.append(float(gradient.square().sum()))


def on_ranks(
    group: Group, kind: str, steps: Sequence[Sizes], options: dict[str, Any], noise: bool, to_none: bool, skip: bool
) -> list[npt.NDArray[np.float64]]:
    """The gradients of each step, on one of the ranks; each begins with a model of its own."""
    exchange = EXCHANGES[kind](group, NoiseScale(group) if noise else None)
    model = exchange.wrap(made(group.rank, skip), **options)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    cursor, found = 0, []
    for sizes in steps:
        for part in passes_of(sizes, group.rank, cursor):
            with exchange.during(part):
                loss(model(local_batch(part.start, part.samples))).backward()
                if part.last:
                    exchange.finish()
                    found.append(flat([p.grad for p in parameters], list(made().parameters())))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
        cursor += sum(map(sum, sizes))
    return found


def in_one_process(steps: Sequence[Sizes], skip: bool = False) -> list[npt.NDArray[np.float64]]:
    """The gradients of each step's mean over its samples."""
    model = made(0, skip)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cursor, found = 0, []
    for sizes in steps:
        for rank in range(len(sizes)):
            for part in passes_of(sizes, rank, cursor):
                if part.samples:  # a pass at a time, since the model may look at its size
                    weight = part.samples / part.share.total
                    (weight * loss(model(local_batch(part.start, part.samples)))).backward()
        found.append(flat([p.grad for p in model.parameters()], list(model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        cursor += sum(map(sum, sizes))
    return found


def step_sizes(world: int, most_passes: int = 3, most_samples: int = 4) -> st.SearchStrategy[Sizes]:
    """Any sizes, also none on a rank or in a pass; the step has samples."""

    def by_rank(passes: int) -> st.SearchStrategy[Sizes]:
        rank = st.lists(st.integers(0, most_samples), min_size=passes, max_size=passes)
        return st.lists(rank, min_size=world, max_size=world)

    return st.integers(1, most_passes).flatmap(by_rank).filter(lambda sizes: any(map(any, sizes)))
