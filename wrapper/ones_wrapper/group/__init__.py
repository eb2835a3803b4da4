"""The process group: the ranks of one run, and their collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ones_wrapper.devices.choice import choose, stay_near
from ones_wrapper.devices.host_memory import bytes_of
from ones_wrapper.group.flat import flattened, together, unflatten
from ones_wrapper.network import plain, rendezvous
from ones_wrapper.network.pairwise import prove_groups
from ones_wrapper.process.hang_detector import collective
from ones_wrapper.process.log import log

T = TypeVar("T")

TOGETHER = 64 << 20
"""Largest number of bytes of tensors in one message."""


class RankError(Exception):
    """Error on all ranks, because a function failed on at least one rank. The message names the failed ranks and their
    errors."""


@dataclass(eq=False)
class Group:
    """The ranks of one run, and their collectives. Every method is collective unless it says otherwise: all ranks call
    it at the same point.

    In a job of blocks the ranks change at step boundaries. This base class has one rank; subclasses send messages.
    """

    rank: int
    world: int
    local_rank: int
    nodes: int
    gpus_per_node: int
    device: torch.device

    def duplicate(self) -> Group | None:
        """Return another group of the same ranks, for collectives of a background thread; the caller must close it.
        Return None on all ranks if a second thread cannot send messages."""
        return self

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over the ranks."""
        return self.maximum_later(values)()

    def maximum_later(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start the elementwise maximum over the ranks. Return a function that waits for the result and returns it."""
        return lambda: list(values)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over the ranks, in double precision."""
        return list(values)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. A value consists of plain data, arrays and tensors
        (`network.plain`)."""
        return [value]

    def close(self, code: int = 0) -> None:
        """Leave the process group.

        `code` is the exit code with which this rank ends. If it is not 0, the call is not collective. It then ends
        other ranks' wait for this rank, unless the transport does.
        """

    def say(self, *texts: str) -> None:
        """Log these lines on rank 0. Not collective."""
        for text in texts if self.rank == 0 else ():
            log(text)

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """Run `function` on every rank; return all results in rank order. Raises `RankError` if it failed on any
        rank."""
        outcome: tuple[T | None, str | None]
        try:
            outcome = (function(), None)
        except Exception as error:
            outcome = (None, f"{type(error).__name__}: {error}"[:500])
        outcomes = self.gather(outcome)
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why is not None]
        if failed:
            raise RankError("; ".join(failed[:3]))
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def here(self, function: Callable[[], T]) -> T:
        """Run `function` on every rank; return this rank's own result, which is not sent. Raises `RankError` on all
        ranks if it failed on any."""
        found: Future[T] = Future()
        try:
            found.set_result(function())
        except Exception as error:
            found.set_exception(error)
        # One number says whether any rank failed; reasons are sent only if so.
        if self.maximum([int(found.exception() is not None)])[0]:
            self.everywhere(lambda: None if found.exception() is None else found.result())
        return found.result()

    def on_first(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 only; return its result on every rank. Raises `RankError` if it failed."""
        return self.everywhere(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]


@dataclass(eq=False)
class TorchGroup(Group):
    """The ranks of a torch.distributed process group."""

    control: Any
    """Gloo group for small messages on the CPU, which never wait for a GPU. It may be raw: unknown to
    torch.distributed."""
    main: bool = True
    """True if `close` ends torch.distributed, False if it ends only `control`."""
    again: Callable[[], Any] | None = None
    """Function that returns another raw group of the same ranks, for a raw `control`; else None."""

    def duplicate(self) -> TorchGroup:
        control = self.again() if self.again is not None else dist.new_group(backend="gloo")
        assert control is not None
        return replace(self, control=control, main=False)

    def become(
        self, rank: int, world: int, nodes: int, gpus_per_node: int, control: Any, again: Callable[[], Any] | None
    ) -> None:
        """Replace the ranks of this object. Not collective."""
        self.rank, self.world, self.nodes, self.gpus_per_node = rank, world, nodes, gpus_per_node
        self.control, self.again = control, again

    def maximum_later(self, values: Sequence[int]) -> Callable[[], list[int]]:
        if self.world == 1:
            return super().maximum_later(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        work = self._reduce(tensor, dist.ReduceOp.MAX)

        def result() -> list[int]:
            work.wait()
            found: list[int] = tensor.tolist()
            return found

        return result

    def total(self, values: Sequence[float]) -> list[float]:
        if self.world == 1:
            return super().total(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        self._reduce(tensor, dist.ReduceOp.SUM).wait()
        return [float(v) for v in tensor.tolist()]

    def gather(self, value: T) -> list[T]:
        if self.world == 1:
            return super().gather(value)
        data = plain.encode(value)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._reduce(sizes, dist.ReduceOp.SUM).wait()
        longest = int(sizes.max())
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        all_ = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        self.control.allgather([all_], [mine]).wait()
        return [plain.decode(one.numpy().tobytes()[:size]) for one, size in zip(all_, sizes.tolist(), strict=True)]

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy rank 0's values of these tensors to all ranks. Many tensors share a message."""
        for some in together(tensors, TOGETHER) if self.world > 1 else ():
            flat = flattened(some)
            row = bytes_of(flat)  # gloo and NCCL do not know all types
            if row.device.type == "cuda":
                dist.broadcast(row, 0)
            else:
                self.control.broadcast([row], dist.BroadcastOptions()).wait()
            unflatten(flat, some)

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> Any:
        return self.control.allreduce([tensor], _options(operation))

    def close(self, code: int = 0) -> None:
        # After an error the others notice by themselves: their connections to this rank close.
        if code or not dist.is_initialized():
            return
        if self.main:
            dist.destroy_process_group()
        elif self.again is None:
            dist.destroy_process_group(self.control)


def check_torch(what: str, group: Group) -> None:
    """Raise ValueError if the ranks use MPI, for a strategy that needs torch.distributed. `what` is the strategy's
    name."""
    if not isinstance(group, TorchGroup):
        raise ValueError(f"{what}: its messages go over torch.distributed; leave out backend='mpi'")


@cache
def _options(operation: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return options


def join_torch(backend: str | None = None) -> TorchGroup:
    """Build the process group from the variables that the node launcher set. Without these variables the group has one
    rank.

    `backend` is by default nccl if every rank of the node has a GPU of its own, else gloo (`devices.choice`). Raises
    `ProofError` if a rank does not belong to this job, and `ConfigurationError` if GPUs are missing.
    """
    env = os.environ
    alone = "RANK" not in env
    rank, world = (0, 1) if alone else (int(env["RANK"]), int(env["WORLD_SIZE"]))
    local_rank, local_world = (0, 1) if alone else (int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"]))
    device, backend = choose(env, local_rank, local_world, backend)
    stay_near(device, local_world)
    timeout = collective(env)
    if not dist.is_initialized():
        own: dict[str, Any] = {"store": dist.HashStore()} if alone else {}  # type: ignore[attr-defined]
        if backend == "nccl" and not alone:
            own["device_id"] = device
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout, **own)
    control = dist.new_group(backend="gloo")
    assert control is not None
    if (key := rendezvous.group_key()) is not None:
        prove_groups(control, key, rank, world)
    return TorchGroup(rank, world, local_rank, max(1, world // local_world), local_world, device, control)
