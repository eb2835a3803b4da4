"""Who writes what: `torch.distributed.checkpoint`'s plan, and the copies of a rank's part.

A replicated tensor is written by one rank, the load spread evenly; of a sharded one each rank writes its shard. So
only a rank's own part has to be copied before training may go on. The plan is the same at each checkpoint unless
tensors came or went, and so it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from ones_wrapper.checkpoint.content import Content
from ones_wrapper.checkpoint.header import Part, encode
from ones_wrapper.group import Group


@dataclass(frozen=True)
class Plan:
    """What this rank writes, in this order, and the header of the file."""

    items: list[WriteItem]
    header: bytes


class Planner:
    """Plans checkpoints, and holds the buffers into which they are copied."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._local: SavePlan | None = None
        self._plan = Plan([], b"")
        self._buffers: list[torch.Tensor] = []

    def local(self, content: Content) -> SavePlan:
        """All that this rank could write. Not collective."""
        planner = _dcp_planner()
        planner.set_up_planner(content.tensors, is_coordinator=self._group.rank == 0)
        plan = planner.create_local_plan()
        others = content.first if self._group.rank else frozenset[str]()
        # Of a tensor with fewer rows than there are ranks, some hold nothing.
        held = [item for item in plan.items if item.index.fqn not in others and not _empty(item)]
        return replace(plan, items=held)

    def agree(self, local: SavePlan) -> Plan:
        """Of what each rank could write, what each does write. Collective. Raises `RankError`."""
        group = self._group
        if group.maximum([local != self._local])[0]:
            self._local = None
            locals_ = group.gather(local)

            def choose() -> None:
                # Every rank computes the same, so that no plan has to travel back.
                plans, _ = _dcp_planner().create_global_plan(locals_)
                # Wide dtypes first: then all are aligned in the file.
                items = sorted(plans[group.rank].items, key=lambda item: -_data(item).properties.dtype.itemsize)
                self._plan = Plan(items, encode([_part(item) for item in items]))

            group.everywhere(choose)
            self._local = local
            self._buffers.clear()
        return self._plan

    def live(self, content: Content) -> list[torch.Tensor]:
        """This rank's part, uncopied."""
        return [find_state_dict_object(content.tensors, item.index).detach() for item in self._plan.items]

    def staged(self, content: Content) -> list[torch.Tensor]:
        """This rank's part, copied into buffers on the CPU that the next call overwrites."""
        pinned = self._group.device.type == "cuda"
        live = self.live(content)
        if not self._buffers:
            self._buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in live]
        for buffer, tensor in zip(self._buffers, live, strict=True):
            buffer.copy_(tensor, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize(self._group.device)
        return self._buffers


def _dcp_planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _data(item: WriteItem) -> TensorWriteData:
    assert isinstance(item.tensor_data, TensorWriteData)
    return item.tensor_data


def _part(item: WriteItem) -> Part:
    data = _data(item)
    return Part(item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype)


def _empty(item: WriteItem) -> bool:
    return 0 in _data(item).chunk.sizes and 0 not in _data(item).size
