"""Gradient exchanges for strategies whose ranks train different models, and average or copy parameters in some steps.

A rank steps on the mean gradient of its own samples. The job evaluates and saves one model, on which all ranks agree:
the published model. `published` is a context in which all ranks hold this model; after it each rank continues with its
own. `settle` makes all ranks continue with the published model.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ones_wrapper.gradients.exchange import Exchange, scaled
from ones_wrapper.group import Group
from ones_wrapper.group.flat import flattened, together, unflatten

if TYPE_CHECKING:
    from ones_wrapper.data.feed import AccumulationStep

MB = 2**20


class ApartExchange(Exchange):
    """An exchange whose ranks step on their own gradients. A subclass keeps the ranks' parameters close to each
    other."""

    hot = True
    steps_together = False
    name = ""

    def __init__(self, group: Group) -> None:
        super().__init__(group, None)  # the noise scale compares gradients at one and the same point
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._bucket = 25 * MB
        self._apart = False
        """True if parameters may differ between ranks; equal on all ranks."""

    def wrap(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Return the model itself. Its attribute `module` is the model, too, as in DistributedDataParallel.

        `options` may have `bucket_cap_mb`, the largest message in MB (default 25). Collective: all ranks get rank 0's
        model. Raises ValueError for other options, for a model without trainable parameters, and if the ranks' models
        differ.
        """
        self._bucket = int(float(options.pop("bucket_cap_mb", None) or 25) * MB)
        if options:
            raise ValueError(
                f"{self.name}: ddp takes no option {', '.join(sorted(options))} with it, but bucket_cap_mb"
            )
        self._first(model)
        model = model.to(self._group.device)
        self._check(model)
        self._in_place(model, partial(self._from, 0))
        for parameter in self._trained():
            parameter.register_hook(self._weigh)  # type: ignore[no-untyped-call]
        return model

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the mean gradient of a pass times the pass's fraction of this rank's samples in the step."""
        if self.trying:
            return gradient
        part = self._now()
        return scaled(gradient, part.samples, part.share.samples)

    def _check(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(f"{self.name}: parameter {name} is {parameter.dtype}; real numbers can be averaged")

    def trained_by(self, optimizers: Sequence[torch.optim.Optimizer], scaled: bool = False) -> None:
        self._optimizers = optimizers

    def ranks_changed(self) -> None:
        self._apart = False  # they settled before

    @contextmanager
    def during(self, part: AccumulationStep) -> Iterator[None]:
        with self._within(part):
            yield
        if part.last and self._group.world > 1:
            self._apart = True
            self._step_made()

    def _step_made(self) -> None:
        """Act after a step, which may have left the parameters unchanged. Collective."""

    def finish(self) -> None:
        super().finish()
        if self._part is not None and self._part.last:
            self._apart = self._group.world > 1  # a script that leaves the loop now does not come back into `during`

    # -- what the job publishes ---------------------------------------------------------------------------------------

    @abstractmethod
    def _publish(self, tensors: list[torch.Tensor]) -> None:
        """Set `tensors` (parameters, buffers, optimizer state) to the published values on all ranks. Collective."""

    def settle(self) -> None:
        if self._apart:
            with self._own_where(self._carried, always=False):
                pass
            self._apart = False

    def published(self) -> AbstractContextManager[None]:
        return self._own_where(self._carried)

    def evaluating(self) -> AbstractContextManager[None]:
        return self._own_where(self._tensors)

    @contextmanager
    def _own_where(self, which: Callable[[], list[torch.Tensor]], always: bool = True) -> Iterator[None]:
        """Context in which the tensors that `which` returns hold the published values. At its end this rank's own
        values are restored if `always`. After an error they are always restored, so that a rescue never mixes two
        models."""
        if not self._apart:
            yield
            return
        tensors = which()
        own = [tensor.detach().clone() for tensor in tensors]
        whole = False
        try:
            with torch.no_grad():
                self._publish(tensors)
            yield
            whole = True
        finally:
            if always or not whole:
                with torch.no_grad():
                    for tensor, value in zip(tensors, own, strict=True):
                        tensor.copy_(value)

    def inside(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of the published model (collective) if the ranks' models differ; else the model itself."""
        if not self._apart:
            return model
        with self.evaluating():
            return copy.deepcopy(model)

    def _trained(self) -> list[torch.nn.Parameter]:
        assert self.model is not None
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _tensors(self) -> list[torch.Tensor]:
        assert self.model is not None
        return [tensor.detach() for tensor in chain(self.model.parameters(), self.model.buffers())]

    def _carried(self) -> list[torch.Tensor]:
        """Return parameters, buffers and optimizer state, equally many tensors on all ranks. Collective. Optimizer
        state that this rank lacks, because its samples did not use a layer, is created as zeros."""
        assert self.model is not None
        mine = {parameter: number for number, parameter in enumerate(self.model.parameters())}
        states = [
            (optimizer, parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in mine
        ]
        described = [_described(optimizer.state.get(parameter, {})) for optimizer, parameter in states]
        everywhere = self._group.gather(described)
        found: list[torch.Tensor] = []
        for number, (optimizer, parameter) in enumerate(states):
            wanted = {key: kind for one in everywhere for key, kind in one[number].items()}
            state = optimizer.state[parameter] if wanted else {}
            for key in sorted(wanted):
                if not isinstance(state.get(key), torch.Tensor):
                    shape, dtype, device = wanted[key]
                    place = parameter.device if device == parameter.device.type else torch.device(device)
                    state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=place)
                found.append(state[key])
        return self._tensors() + found

    # -- messages -----------------------------------------------------------------------------------------------------

    def _from(self, source: int, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the `tensors` of rank `source` to all ranks. Collective."""
        for some in together(tensors, self._bucket):
            flat = flattened(some, self._group.device)
            dist.broadcast(flat, source)
            if self._group.rank != source:
                unflatten(flat, some)

    def _mean(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set `tensors` on all ranks to their mean over the ranks, and integer tensors to rank 0's values.
        Collective."""
        tensors = list(tensors)
        self._from(0, [tensor for tensor in tensors if not tensor.is_floating_point()])
        for some in together([tensor for tensor in tensors if tensor.is_floating_point()], self._bucket):
            flat = flattened(some, self._group.device)
            if flat.dtype.itemsize < 4:
                flat = flat.float()
            dist.all_reduce(flat)
            unflatten(flat.div_(self._group.world), some)


def _described(state: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str, str]]:
    return {
        key: (tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
