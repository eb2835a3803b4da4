"""Models in both layouts on real gloo ranks, for the checkpoint tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ones_wrapper.api import join
from ones_wrapper.checkpoint import SavedState
from ones_wrapper.group import Group
from tests.wrapper.forked import Forked


def _rank(
    rank: int, world: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    group = join("gloo")
    try:
        pipe.send((None, function(group, *arguments)))
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", None))
    group.close()


def start(function: Callable[..., Any], arguments: tuple[Any, ...], world: int, store: Path) -> list[Forked]:
    """Start `function(group, *arguments)` on `world` ranks; its outcome comes to the end of each."""
    return [Forked(_rank, rank, world, str(store), function, arguments) for rank in range(world)]


class Net(torch.nn.Module):
    """Sizes that no world size divides, a buffer, and a part that is never used."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.a = torch.nn.Linear(5, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.b = torch.nn.Linear(width, 1)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.norm(self.a(x)).relu())
        return out


def make(layout: str, group: Group, seed: int, width: int = 7) -> SavedState:
    """A model of this layout (`ddp`, `fsdp` or `plain`) with AdamW and a scheduler."""
    torch.manual_seed(seed)
    model: torch.nn.Module = Net(width)
    if layout == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif layout == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (group.world,))
        fully_shard(model.a, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return SavedState(model, {"": optimizer}, {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])})


def train(state: SavedState, steps: int, first: int = 0) -> None:
    """Steps on batches that are the same on every rank, whatever their number."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 5, generator=generator)
        state.optimizers[""].zero_grad()
        state.model(x).square().mean().backward()
        state.optimizers[""].step()
        state.extras["scheduler"].step()  # type: ignore[attr-defined]


def whole(state: SavedState) -> dict[str, Any]:
    """Parameters, buffers, optimizer state and scheduler, gathered and by name. Collective."""

    def full(value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.detach().clone().numpy() if isinstance(value, torch.Tensor) else value

    named = {name.removeprefix("module."): p for name, p in state.model.named_parameters()}
    found = {name.removeprefix("module."): full(value) for name, value in state.model.state_dict().items()}
    for name, parameter in named.items():
        for key, value in state.optimizers[""].state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full(value)
    found["lr"] = state.optimizers[""].param_groups[0]["lr"]
    found["scheduler"] = state.extras["scheduler"].state_dict()
    return found
