"""Gradient exchange between replicas that are meshes: each rank all-reduces its blocks over the ranks with the same
blocks.

Within a replica the matrix products have already summed the gradients. So each rank has its blocks of the gradient for
the mean over the replica's local batch. The gradient of each pass is multiplied by the pass's fraction of the step's
samples before it is added (gradients/exchange.py). Then only the sum over the replicas is missing: an all-reduce in
buckets during the backward pass, last parameters first (Li et al., VLDB 2020, §3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ones_wrapper.gradients.exchange import Exchange, scaled
from ones_wrapper.group import Group
from ones_wrapper.group.flat import flattened, local, pieces, together
from ones_wrapper.strategies.optimus.mesh import Mesh

if TYPE_CHECKING:
    from ones_wrapper.data.feed import AccumulationStep

BUCKET_MB = 25.0


class MeshExchange(Exchange):
    """The exchange of a model whose parameters are blocks on a mesh. Passes are collective over a replica."""

    def __init__(self, group: Group, mesh: Mesh) -> None:
        super().__init__(group, None)
        self._mesh = mesh
        self._buckets: list[_Bucket] = []
        self._begun = self._over = False
        """True once backward of the step's last pass has begun; `_over` is True once the step's gradients are
        complete."""
        self._started = 0
        """Number of buckets whose all-reduce has started, in the same order on all ranks."""

    def wrap(self, model: torch.nn.Module, *, bucket_mb: float = BUCKET_MB, **options: Any) -> torch.nn.Module:
        """Return the model itself; all replicas get the first replica's parameters."""
        self._first(model)
        if options:
            raise ValueError(f"optimus2d: {', '.join(sorted(options))} cannot be given to job.ddp; bucket_mb can")
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) or parameter.device_mesh != self._mesh.ranks:
                raise ValueError(
                    f"optimus2d: {name} is no block on the mesh, so the ranks would train it apart; make its layer by "
                    "the strategy: strategy.linear, strategy.layer_norm, strategy.embedding, …"
                )
        self._alike(model)
        self._take_first(model)
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self._buckets = [_Bucket(some) for some in together(reversed(trained), int(bucket_mb * 2**20))]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_hook(self._weigh)  # type: ignore[no-untyped-call]
                arrive = partial(self._arrive, bucket)
                parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
        return model

    @torch.no_grad()
    def _take_first(self, model: torch.nn.Module) -> None:
        """Broadcast the first replica's parameters, since replicas may have drawn different ones."""
        mesh = self._mesh
        for parameter in model.parameters():
            if mesh.replicas > 1:
                dist.broadcast(local(parameter), group=mesh.across, group_src=0)
            if mesh.q > 1 and isinstance(parameter, DTensor) and parameter.placements[0].is_replicate():
                dist.broadcast(local(parameter), group=mesh.in_column, group_src=0)

    @contextmanager
    def during(self, part: AccumulationStep) -> Iterator[None]:
        self._started, self._begun, self._over = 0, False, False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        with self._within(part):
            yield
            if self._begun:
                self._finish_all()  # a script that makes no step here must not leave messages under way

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the mean gradient of a pass times the pass's fraction of the step's samples."""
        if self.trying:
            return gradient
        part = self._now()
        return scaled(gradient, part.samples, part.share.total)

    def _arrive(self, bucket: _Bucket, parameter: torch.nn.Parameter) -> None:
        """Hook after backward has computed a parameter's gradient: start the all-reduce of complete buckets."""
        if self.trying or not self._now().last:
            return
        if self._over or not bucket.missing:
            raise RuntimeError(
                "optimus2d: a parameter got a gradient twice in one step; call backward once for each batch, on the "
                "sum of the losses"
            )
        if not self._begun:
            self._begun = True
            # Ready when backward ends, for scripts that clip gradients.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_all)
        bucket.missing -= 1
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._started]
        self._started += 1
        if self._mesh.replicas > 1:
            bucket.fill()
            bucket.work = dist.all_reduce(bucket.flat, group=self._mesh.across, async_op=True)

    def _finish_all(self) -> None:
        if self._over:
            return
        while self._started < len(self._buckets):
            self._start()
        self._over = True
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.hand_out()


class _Bucket:
    """Parameters of one type whose gradients are sent in one message."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        """Number of parameters whose gradients are missing in the present pass."""
        self.flat = torch.empty(0)
        self.work: Any = None

    @torch.no_grad()
    def fill(self) -> None:
        """Collect the gradients in one vector, with zeros for parameters that have none on this replica."""
        self.flat = flattened([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])

    @torch.no_grad()
    def hand_out(self) -> None:
        """Copy the sums to the parameters' gradients, and drop the vector. A parameter without a gradient here has none
        on any replica."""
        for parameter, piece in zip(self.parameters, pieces(self.flat, self.parameters), strict=True):
            if parameter.grad is not None:
                local(parameter.grad).copy_(piece)
        self.flat, self.work = torch.empty(0), None
