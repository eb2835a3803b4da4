"""The gradient exchanges of all models of a job, as one object for the loop and the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ones_wrapper.gradients.exchange import Exchange

if TYPE_CHECKING:
    from ones_wrapper.data.feed import AccumulationStep


class Exchanges:
    """Gradient exchanges of one job, in the order in which its script made them."""

    def __init__(self) -> None:
        self._all: list[Exchange] = []
        self._inside: list[torch.nn.Module] = []
        self._trained: list[frozenset[torch.nn.Parameter]] = []
        """Trained parameters of each exchange."""
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._of: dict[torch.optim.Optimizer, tuple[int, list[Exchange]]] = {}
        """(number of parameter groups, exchanges of the parameters) for each optimizer."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self._all)

    def add(self, exchange: Exchange, model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
        """Wrap `model` by `exchange`; return the model to train with. Collective. Raises ValueError if the model shares
        parameters with another model."""
        mine = frozenset(p for p in model.parameters() if p.requires_grad)
        if any(mine & other for other in self._trained):
            raise ValueError(
                "ddp, fsdp, exchange: two models share parameters, whose gradients would be exchanged twice; put these "
                "models into one torch.nn.Module"
            )
        wrapped: torch.nn.Module = exchange.wrap(model, **options)
        self._all.append(exchange)
        self._inside.append(model)
        self._trained.append(frozenset(p for p in wrapped.parameters() if p.requires_grad))
        self._frozen += [(name, p) for name, p in wrapped.named_parameters() if not p.requires_grad]
        return wrapped

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that a step exchanges; for a sharded model, those of the whole model."""
        return sum(p.numel() * p.element_size() for trained in self._trained for p in trained)

    def owns(self, model: torch.nn.Module) -> bool:
        """Return True if `add` returned this model."""
        return any(exchange.model is model for exchange in self._all)

    def inside(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the script's model inside a `model` that `add` returned, in the form to save, export or evaluate. Any
        other model is returned as it is."""
        found = zip(self._all, self._inside, strict=True)
        return next((exchange.inside(inside) for exchange, inside in found if exchange.model is model), model)

    def check(self) -> None:
        """Raise ValueError if a parameter that was frozen at `add` is trained now, since its gradient would not be
        exchanged."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} did not require a gradient when its model was given to the job, so its gradient would "
                    "not be averaged over the ranks: call requires_grad_(False) after job.prepare or job.ddp, or "
                    "leave it trained"
                )

    @property
    def begun(self) -> int:
        """Number of gradient exchanges that have begun."""
        return sum(exchange.begun for exchange in self._all)

    def during(self, part: AccumulationStep) -> AbstractContextManager[None]:
        """Context of one forward and backward pass in the script's loop."""
        return self._within(lambda exchange: exchange.during(part))

    @contextmanager
    def _within(self, around: Callable[[Exchange], AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for exchange in self._all:
                stack.enter_context(around(exchange))
            yield

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Context of passes that belong to no step. See `Exchange.trying`."""
        for exchange in self._all:
            exchange.trying = True
        try:
            yield
        finally:
            for exchange in self._all:
                exchange.trying = False

    def trained_by(self, optimizers: Iterable[torch.optim.Optimizer], scaled: bool) -> None:
        """Record all optimizers of the job. See `Exchange.trained_by`."""
        held = {one: {p for group in one.param_groups for p in group["params"]} for one in optimizers}
        for exchange, trained in zip(self._all, self._trained, strict=True):
            exchange.trained_by([one for one, its in held.items() if trained & its], scaled)

    def loss(self, loss: torch.Tensor | float) -> None:
        """Record the training loss of this rank's pass."""
        for exchange in self._all:
            exchange.loss(loss)

    def published(self) -> AbstractContextManager[None]:
        """Context of a checkpoint. See `Exchange.published`."""
        return self._within(lambda exchange: exchange.published())

    def settle(self) -> None:
        """Set all ranks to the published state. Collective."""
        for exchange in self._all:
            exchange.settle()

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before an optimizer's step, that its gradients were exchanged. See `Exchange.finish`."""
        self.check()
        groups, its = self._of.get(optimizer, (-1, []))
        if groups != len(optimizer.param_groups):
            held = {p for group in optimizer.param_groups for p in group["params"]}
            pairs = zip(self._all, self._trained, strict=True)
            its = [exchange for exchange, trained in pairs if trained & held]
            self._of[optimizer] = len(optimizer.param_groups), its
        for exchange in its:
            # Of an optimizer's several models, some may sit a step out.
            if len(its) == 1 or not exchange.idle:
                exchange.finish()

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation. Entering it is collective."""
        return self._within(lambda exchange: exchange.evaluating())

    @property
    def gathers(self) -> bool:
        """True if forward passes are collective."""
        return any(exchange.gathers for exchange in self._all)

    @property
    def steps_together(self) -> bool:
        """True if `Exchange.steps_together` holds for every model."""
        return all(exchange.steps_together for exchange in self._all)

    @property
    def hot(self) -> bool:
        """True if the ranks may change during training."""
        return bool(self._all) and all(exchange.hot for exchange in self._all)

    def ranks_changed(self) -> None:
        """Continue with the group's new ranks, between two steps; `begun` restarts at 0. Not collective."""
        with self.thawed():
            for exchange in self._all:
                exchange.ranks_changed()
                exchange.begun = 0

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Context in which all parameters that were trained at `add` require gradients, even if the script has frozen
        them since. Otherwise DDP would not average them, and torch would not load their optimizer state."""
        frozen = [parameter for trained in self._trained for parameter in trained if not parameter.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
