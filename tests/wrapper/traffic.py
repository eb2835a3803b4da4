"""What a rank sends in a step, and what its forward pass keeps for the backward one: counted, not estimated.

    with Traffic() as sent:
        loss.backward()
    sent.bytes, sent.by_operation

Payload bytes by the usual algorithms: a ring for sums and gathers, a tree for broadcasts, counted as a mean over ranks.
Headers and gloo's own copies are not in it. Operations of raw process groups are not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Bytes sent by a rank of n, over the bytes of the operation's input on a rank.
SENT = {
    "allreduce_": lambda n: 2 * (n - 1) / n,
    "allreduce_coalesced_": lambda n: 2 * (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "allgather_": lambda n: n - 1,
    "_allgather_base_": lambda n: n - 1,
    "allgather_into_tensor_coalesced_": lambda n: n - 1,
    "reduce_scatter_": lambda n: (n - 1) / n,
    "_reduce_scatter_base_": lambda n: (n - 1) / n,
    "reduce_scatter_tensor_coalesced_": lambda n: (n - 1) / n,
    "alltoall_": lambda n: (n - 1) / n,
    "alltoall_base_": lambda n: (n - 1) / n,
    "broadcast_": lambda n: (n - 1) / n,
    "reduce_": lambda n: (n - 1) / n,
    "gather_": lambda n: (n - 1) / n,
    "scatter_": lambda n: (n - 1) / n,
    "send": lambda n: 1,
}
INPUT = {"allgather_": 1, "_allgather_base_": 1, "reduce_scatter_": 1, "_reduce_scatter_base_": 1, "alltoall_": 1}
"""Which argument is the input, where it is not the first."""
INPUT |= {"alltoall_base_": 1, "scatter_": 1, "gather_": 1}
INPUT |= {"allgather_into_tensor_coalesced_": 1, "reduce_scatter_tensor_coalesced_": 1}
NOTHING = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")


class Traffic(TorchDispatchMode):
    """Counts while it is entered, by this thread and its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()
        """Bytes sent by this rank."""

    @property
    def bytes(self) -> int:
        """Bytes sent by this rank."""
        return sum(self.by_operation.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor makes ordinary operations of it, which come here again
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name in NOTHING:
            return
        if name not in SENT:
            raise AssertionError(f"{name}: how many bytes it sends is not known here; add it to SENT")
        boxed = [one for one in args if isinstance(one, torch.ScriptObject)]
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])
        given = sum(one.numel() * one.element_size() for one in _tensors(args[INPUT.get(name, 0)]))
        self.by_operation[name] += round(given * SENT[name](group.size()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


@contextmanager
def saved_bytes(*models: torch.nn.Module) -> Iterator[list[int]]:
    """Bytes that forward passes keep for their backward pass, in a list's only item: each storage once, parameters and
    buffers of the models left out.
    """
    found = [0]
    seen = {one.untyped_storage().data_ptr() for model in models for one in (*model.parameters(), *model.buffers())}
    kept: list[torch.Tensor] = []  # or a freed one's address could come again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(local)
            found[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
