"""The gradient exchange of a sharded model: torch's FSDP2 (`fully_shard`) with a weighted reduce-scatter.

At the end of every backward pass FSDP2 reduce-scatters each module's gradients, and adds the result to this rank's
gradient shard. Here each rank first multiplies its gradient by n_rp / N, and the sum is not divided. So the shards hold
the mean over the step's samples for passes of any size (exchange.py). Each accumulation step costs a reduce-scatter,
but no rank ever holds the whole model's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ones_wrapper.gradients.exchange import Exchange, scale
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group, TorchGroup

Choice = type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] | Callable[[torch.nn.Module], bool]
"""Types of the submodules to shard as units, or a function that returns True for such a submodule."""

# torch 2.13 renamed this function, and warns of the old name.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class FsdpExchange(Exchange):
    """The gradient exchange of torch's fully sharded data parallelism, version 2."""

    gathers = True

    def __init__(self, group: Group, noise: NoiseScale | None) -> None:
        super().__init__(group, noise)
        self._sums: dict[int, torch.Tensor] = {}
        """This rank's gradient shards, summed over the step's passes so far, by module; for the noise scale."""
        self._counts = True
        """True if this rank's shards count for the noise scale. Of several ranks with the same shards, one counts."""

    def wrap(self, model: torch.nn.Module, *, modules: Choice | None = None, **options: Any) -> torch.nn.Module:
        """Shard the model in place, from rank 0's parameters and buffers.

        `modules` selects the submodules that are gathered and freed as units: types, or a function of a module. The
        default is the children of the ModuleList with the most parameters. The rest of the model is one more unit.
        `options` are those of `fully_shard`: `mp_policy`, `reshard_after_forward`, `offload_policy`, `mesh` (of all
        ranks), … Make the optimizer after this call, since it must hold the shards.
        """
        self._first(model)
        world = self._group.world
        if any(parameter.requires_grad for parameter in options.get("ignored_params") or ()):
            raise ValueError("ignored_params: FSDP would not average their gradients; set requires_grad to False first")
        mesh = options.pop("mesh", None) or init_device_mesh(self._group.device.type, (world,))
        if mesh.size() != world or (world > 1 and mesh.size(mesh.ndim - 1) == 1):
            raise ValueError(
                f"mesh {tuple(mesh.shape)} does not shard over the {world} ranks that this run has; "
                "make it from job.world, or leave it out"
            )
        self._counts = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        # Ranks that made the model with other random numbers would each shard a model of their own.
        assert isinstance(self._group, TorchGroup)
        self._group.share([tensor for tensor in chain(model.parameters(), model.buffers()) if not tensor.is_meta])
        sharded = [fully_shard(module, mesh=mesh, **options) for module in [*_chosen(model, modules), model]]
        for index, module in enumerate(sharded):
            if world == 1 or self._noise is not None:
                module.set_all_reduce_hook(partial(self._shard, index))
            if world > 1:
                weighing: Any = _Weighing(partial(self._local, index))  # only its two methods matter
                module.set_custom_reduce_scatter(weighing)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.model = model
        return model

    def _local(self, module: int, gradient: torch.Tensor) -> None:
        """Hook before the reduce-scatter: multiply a module's gradient, the mean over the pass's samples, by n_rp /
        N."""
        if self.trying:
            return
        part = self._now()
        if (noise := self._measured) is not None:
            noise.local(module, gradient, part.weight, part.share.total, part.count)
        scale(gradient, part.weight, part.share.total)

    def _shard(self, module: int, gradient: torch.Tensor) -> None:
        """Hook after the reduce-scatter: measure this rank's shard of a module's gradient."""
        if self.trying:
            return
        part, noise = self._now(), self._measured
        total, alone = part.share.total, self._group.world == 1
        if gradient.is_cuda:
            # The gradient came from another stream, which may reuse the memory before this stream has read it.
            gradient.record_stream(torch.cuda.current_stream())
        if alone:
            scale(gradient, part.weight, part.share.total)  # there was no reduce-scatter
        if noise is None:
            return
        if part.count > 1:
            if part.index == 0:
                self._sums[module] = gradient.clone()
            else:
                self._sums[module] += gradient
        if part.last:
            whole = self._sums.pop(module, gradient)
            if alone:
                noise.local(module, whole, total, total)
            elif self._counts:
                noise.whole_shard(whole, total, part.count)


class _Weighing:
    """Reduce-scatter that sums without a division. It first calls `seen` with the gradient, which `seen` may change."""

    def __init__(self, seen: Callable[[torch.Tensor], None]) -> None:
        self._seen = seen

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._seen(input_tensor)
        work: dist.Work | None = _REDUCE_SCATTER(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


def _chosen(model: torch.nn.Module, modules: Choice | None) -> list[torch.nn.Module]:
    """Return the submodules to shard as units, inner ones first."""
    below = list(model.modules())[:0:-1]
    if modules is None:
        lists = [module for module in below if isinstance(module, torch.nn.ModuleList)]
        largest = max(lists, key=lambda one: sum(parameter.numel() for parameter in one.parameters()), default=None)
        return [] if largest is None else list(largest.children())
    if isinstance(modules, type | tuple):
        kinds = modules
        found = [module for module in below if isinstance(module, kinds)]
    else:
        found = [module for module in below if modules(module)]
    if not found:
        raise ValueError(f"modules: {type(model).__name__} has no submodule that this selects")
    return found
