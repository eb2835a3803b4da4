"""The process group: who the ranks are, and how they agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class RankError(Exception):
    """Something failed on at least one rank; the message says on which and why. Raised on all ranks."""


@dataclass(frozen=True)
class Group:
    """One run's ranks. Every method is collective: all ranks call it at the same point."""

    rank: int
    world: int
    local_rank: int
    nodes: int
    gpus_per_node: int
    device: torch.device
    control: dist.ProcessGroup
    """A gloo group for small agreements, so that they never wait for the GPU's stream."""

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over the ranks."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return [int(v) for v in tensor.tolist()]

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sum over the ranks."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return [float(v) for v in tensor.tolist()]

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """Run `function` on every rank; its results in rank order. Raises `RankError` where any of them
        failed.
        """
        outcome: tuple[T | None, str | None]
        try:
            outcome = (function(), None)
        except Exception as error:
            outcome = (None, f"{type(error).__name__}: {error}"[:500])
        outcomes: list[tuple[T | None, str | None]] = [outcome] * self.world
        if self.world > 1:
            dist.all_gather_object(outcomes, outcome, group=self.control)
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why is not None]
        if failed:
            raise RankError("; ".join(failed[:3]))
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def on_first(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 alone; its result on every rank. Raises `RankError` where it failed."""
        return self.everywhere(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join(backend: str | None = None) -> Group:
    """Build the process group from the variables that the node launcher set; without them a single process.

    `backend` is nccl when every rank of the node has a GPU of its own, else gloo, unless given.
    """
    env = os.environ
    alone = "RANK" not in env
    rank, world = (0, 1) if alone else (int(env["RANK"]), int(env["WORLD_SIZE"]))
    local_rank, local_world = (0, 1) if alone else (int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"]))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own_gpu = gpus >= local_world
    backend = backend or ("nccl" if own_gpu else "gloo")
    device = torch.device("cuda", local_rank) if own_gpu else torch.device("cpu")
    if own_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            dist.init_process_group(
                backend, rank=rank, world_size=world, device_id=device if backend == "nccl" else None
            )
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
    assert control is not None
    return Group(rank, world, local_rank, max(1, world // local_world), local_world, device, control)


def average(
    gradient: torch.Tensor, samples: int, total: int, seen: Callable[[torch.Tensor], None] = lambda gradient: None
) -> torch.futures.Future[torch.Tensor]:
    """The gradient of the mean over a step's `total` samples, of which this rank had `samples`; summed in
    place, and shown to `seen` once it is whole.

    For DDP's communication hook, in the place of the plain mean over ranks, which is wrong for unequal
    shares.
    """
    if samples:
        gradient.mul_(samples / total)
    else:
        gradient.zero_()  # a sample borrowed for the exchange may give NaN, and NaN times 0 is NaN
    if dist.get_world_size() == 1:
        alone: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        seen(gradient)
        alone.set_result(gradient)
        return alone
    work = dist.all_reduce(gradient, async_op=True)
    assert work is not None

    def whole(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        summed = future.value()[0]
        seen(summed)
        return summed

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(whole)
    return done
