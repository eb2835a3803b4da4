"""Mean of the gradients over samples by MPI, for clusters on which no backend of torch.distributed works well.

Parameters are grouped in buckets, the model's last ones first, since backward reaches them first. In the last pass of a
step, the all-reduce of a bucket starts as soon as all its gradients are computed (Li et al., VLDB 2020, §3.2). Backward
continues meanwhile. All ranks start the buckets in the same order, so that no deadlock is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch.utils._pytree import tree_leaves

from ones_wrapper.data.feed import AccumulationStep
from ones_wrapper.devices.host_memory import bytes_of
from ones_wrapper.gradients.exchange import Exchange
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group.flat import flattened, pieces, together, unflatten
from ones_wrapper.group.mpi_group import MpiGroup

MB = 2**20
IGNORED = {"find_unused_parameters", "gradient_as_bucket_view", "static_graph"}
"""Options of DistributedDataParallel that are accepted without effect, since this exchange always does what they
request."""


ZEROED = 0.25
"""Mark of a parameter that no pass used in this step, if its gradient is zeros and not None."""


class Bucket:
    """Some parameters of one type, with their gradients in one flat buffer.

    The buffer ends with a mark for each parameter. Marks summed over the ranks show which parameters no rank used.
    Their gradients become None or zeros, as in a single process.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        elements = sum(p.numel() for p in parameters)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)  # half precision is summed in single
        self.flat = torch.zeros(elements + len(parameters), dtype=dtype)
        self.gradient, self.marks = self.flat[:elements], self.flat[elements:]
        self.views = pieces(self.gradient, parameters)
        self.array = self.flat.numpy()  # the same memory
        self.used = [False] * len(parameters)
        self.arrived = [False] * len(parameters)
        """True for each parameter whose gradient backward has computed in the present pass."""

    def add(self, slot: int, gradient: torch.Tensor, weight: float) -> None:
        """Add one pass's gradient of a parameter, times `weight`."""
        view = self.views[slot]
        if self.used[slot]:
            view.add_(gradient, alpha=weight)
        else:
            self.used[slot] = True
            view.copy_(gradient)
            if weight != 1.0:
                view.mul_(weight)

    def complete(self, first: bool) -> None:
        """Zero the gradients of unused parameters, and set the marks, after the step's last pass. `first` is True on
        rank 0, which always has samples."""
        for view, used in zip(self.views, self.used, strict=True):
            if not used:
                view.zero_()
        marks = [
            1.0 if used else ZEROED * (p.grad is not None) for used, p in zip(self.used, self.parameters, strict=True)
        ]
        self.marks.copy_(torch.tensor(marks if first else self.used))

    def hand_out(self) -> None:
        """Copy the gradients to the parameters."""
        for parameter, view, mark in zip(self.parameters, self.views, self.marks.tolist(), strict=True):
            if mark == 0:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(view)


class OutputHook:
    """Forward hook that calls a function with the model's outputs. It does nothing in a copy of the model, or in a
    saved one."""

    def __init__(self, callback: Callable[[object], None] | None = None) -> None:
        self._callback = callback

    def __call__(self, model: torch.nn.Module, inputs: object, outputs: object) -> None:
        if self._callback is not None:
            self._callback(outputs)

    def __reduce__(self) -> tuple[type[OutputHook], tuple[()]]:
        return OutputHook, ()


class MpiExchange(Exchange):
    """The gradient exchange of a model on CPUs, over the ranks of an `MpiGroup`."""

    timed = True

    def __init__(self, group: MpiGroup, noise: NoiseScale | None) -> None:
        super().__init__(group, noise)
        self._comm = group.comm.Dup()
        self._buckets: list[Bucket] = []
        self._buffers: list[torch.Tensor] = []
        self._size = 0
        """Largest message in bytes, except for a larger single tensor."""
        self._requests: list[MPI.Request] = []
        """Requests of the all-reduces that have started, in the order of the buckets."""
        self._over = False
        """True once the step's mean gradients are in the parameters."""
        self._expected = False
        """True if the exchange will be completed at the end of the present backward pass."""

    def wrap(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Return the model itself. Its attribute `module` is the model, too, as in DistributedDataParallel.

        `options` may have `bucket_cap_mb`, the largest message in MB (default 25), and `broadcast_buffers`. If that is
        True (default), all ranks get rank 0's buffers after each step (running means of BatchNorm, …). Collective.
        Raises ValueError for other options, for a model without trainable parameters or with complex ones, and if the
        ranks' models differ.
        """
        self._size = int(float(options.pop("bucket_cap_mb", None) or 25) * MB)
        buffers = bool(options.pop("broadcast_buffers", True))
        if unknown := sorted(set(options) - IGNORED):
            raise ValueError(f"ddp: {', '.join(unknown)} cannot be given with backend mpi")
        self._first(model)
        model = model.to(self._group.device)
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(p.is_complex() for p in trained):
            raise ValueError("ddp: complex parameters cannot be exchanged with backend mpi")
        self._in_place(model, self._from_first)
        self._buffers = list(model.buffers()) if buffers else []
        self._buckets = [Bucket(some) for some in together(reversed(trained), self._size)]
        for number, bucket in enumerate(self._buckets):
            for slot, parameter in enumerate(bucket.parameters):
                arrive = partial(self._arrive, number, slot)
                parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
        model.register_forward_hook(OutputHook(self._forward_ended))
        return model

    @contextmanager
    def during(self, part: AccumulationStep) -> Iterator[None]:
        if part.index == 0:
            self._requests, self._over = [], False
            for bucket in self._buckets:
                bucket.used = [False] * len(bucket.used)
        for bucket in self._buckets:
            bucket.arrived = [False] * len(bucket.arrived)
        self._expected = False
        with self._within(part):
            yield
            if self._arrived:
                self.finish()  # a script that makes no step here must not leave messages under way

    @torch.no_grad()
    def _arrive(self, number: int, slot: int, parameter: torch.nn.Parameter) -> None:
        """Hook after backward has computed a parameter's gradient."""
        if self.trying:
            return
        part, bucket, gradient = self._now(), self._buckets[number], parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("ddp: sparse gradients cannot be exchanged with backend mpi; use sparse=False")
        if self._over or len(self._requests) > number or (part.last and bucket.arrived[slot]):
            raise RuntimeError(
                "ddp: a parameter got a gradient twice in one step. Call backward once for each batch, on the sum of "
                "the losses, with use_reentrant=False for activation checkpoints. Of several models freeze those that "
                "a loss does not train (requires_grad_(False)) while it goes backward"
            )
        bucket.arrived[slot] = True
        if part.weight:
            bucket.add(slot, gradient, part.weight / part.share_weight)
        if not part.last:
            parameter.grad = None  # so that backward does not add the next pass's gradient to it
            return
        if not self._expected:  # the script called a part of the model, or got outputs of a type of its own
            self._expect_end(gradient)
        while len(self._requests) < len(self._buckets) and all(self._buckets[len(self._requests)].arrived):
            self._start(part)
        if self._requests:
            self._requests[-1].Test()  # MPI goes on only while it is called

    def _forward_ended(self, outputs: object) -> None:
        """Hook after a forward pass: make the exchange complete when the backward pass from these outputs ends, so that
        the script can clip gradients."""
        if self._part is None or not self._part.last:
            return
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._expect_end)  # type: ignore[no-untyped-call]

    def _expect_end(self, gradient: torch.Tensor) -> None:
        self._expected = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._expected = False
        if self._arrived:  # torch.autograd.grad, as for a gradient penalty, brings no parameter's gradient
            self.finish()

    def _start(self, part: AccumulationStep) -> None:
        number, samples, total = len(self._requests), part.share_weight, part.share.total
        bucket = self._buckets[number]
        bucket.complete(self._group.rank == 0)
        if self._noise is not None:
            self._noise.local(number, bucket.gradient, samples, total)
        if samples != total:
            bucket.gradient.mul_(samples / total)
        request = MPI.REQUEST_NULL
        if self._group.world > 1:
            request = self._comm.Iallreduce(MPI.IN_PLACE, bucket.array, MPI.SUM)
        self._requests.append(request)

    @torch.no_grad()
    def finish(self) -> None:
        part = self._part
        if part is None or not part.last or self._over:
            return
        super().finish()
        while len(self._requests) < len(self._buckets):
            self._start(part)
        self._over = True
        for bucket, request in zip(self._buckets, self._requests, strict=True):
            request.Wait()
            if self._noise is not None:
                self._noise.whole(bucket.gradient, part.share.total)
            bucket.hand_out()
        if self._buffers and self._group.world > 1:
            self._from_first(self._buffers)

    @torch.no_grad()
    def _from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        for some in together(tensors, self._size):
            flat = flattened(some)
            self._comm.Bcast(bytes_of(flat).numpy(), root=0)
            unflatten(flat, some)
