"""Mean of the gradients over a step's samples, computed from the gradients of all passes and ranks.

Each pass gives the mean gradient over its own samples. Passes may differ by one sample, and some have none. So a plain
mean over ranks and passes would be wrong. The right mean is Σ_rp (n_rp / N) g_rp, if pass p of rank r has n_rp of the
step's N samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group
from ones_wrapper.group.flat import local

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ones_wrapper.data.feed import AccumulationStep
    from ones_wrapper.data.uneven import OwnTime


class Exchange(ABC):
    """The gradient exchange of one model. Backward passes are collective: each rank makes equally many."""

    def __init__(self, group: Group, noise: NoiseScale | None) -> None:
        self._group, self._noise = group, noise
        self.model: torch.nn.Module | None = None
        """Model that `wrap` returned, or None."""
        self._part: AccumulationStep | None = None
        self._arrived = False
        """True if the present pass has exchanged gradients."""
        self._stepped = False
        """True if an optimizer has stepped on the present pass's gradients. The pass's later gradients are not
        measured."""
        self.begun = 0
        """Number of exchanges that have begun."""
        self._unit = 0.0
        """Divisor n (samples or tokens) of the sum of gradients so far, Σ n_rp g_rp / n; 0 until a pass of the step has
        samples."""

    trying = False
    """True during passes that belong to no step (`Job.probe`): hooks on parameters then do not change gradients."""
    timed = False
    """True if this rank's gradients are ready before it waits for others, so that `watch` can measure the rank's own
    time."""
    watch: OwnTime | None = None

    @abstractmethod
    def wrap(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Return the model that the script must call, so that its gradients are exchanged. Collective. Raises
        ValueError, with a remedy, if the model or the options cannot be used."""

    def during(self, part: AccumulationStep) -> AbstractContextManager[None]:
        """Context of a forward and backward pass. After the step's last pass, the gradients are the mean over the
        step's samples."""
        return self._within(part)

    hot = False
    """True if the ranks may change during training (`ranks_changed`)."""

    def ranks_changed(self) -> None:
        """Continue with the group's new ranks, between two steps. The script's model object stays the same. Not
        collective."""
        raise NotImplementedError(f"{type(self).__name__} cannot change its ranks")

    steps_together = True
    """True if no rank can step before all ranks have given their gradients. If False, a rank's last steps before a loss
    of other ranks may lack those ranks' samples."""

    gathers = False
    """True if forward passes are collective. Then all ranks must make equally many passes, also in an evaluation."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation, in which ranks may make different numbers of passes. Entering it is collective."""
        return nullcontext()

    def trained_by(self, optimizers: Sequence[torch.optim.Optimizer], scaled: bool = False) -> None:  # noqa: B027
        """Record the optimizers with this model's parameters. `scaled` is True if a gradient scaler may skip their
        steps. Not collective. Raises ValueError, with a remedy, for an optimizer that cannot be used."""

    def loss(self, loss: torch.Tensor | float) -> None:  # noqa: B027
        """Record the training loss of this rank's pass. Not collective; does not wait for the GPU."""

    def published(self) -> AbstractContextManager[None]:
        """Context of a checkpoint, in which model and optimizers hold the published state, equal on all ranks. It
        changes nothing unless ranks train different models. Entering it is collective."""
        return nullcontext()

    def settle(self) -> None:  # noqa: B027
        """Continue on all ranks with the published state. Collective; between two steps."""

    def inside(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model`, which was given to `wrap`, in the form to save, export or evaluate."""
        return model

    def finish(self) -> None:
        """Check, before an optimizer's step, that this model's gradients were exchanged. Raises RuntimeError if not,
        because the ranks' models would drift apart. Not called before a step with a closure, which itself runs
        backward."""
        part = self._part
        if part is None or not part.last:
            return
        self._stepped = True
        if not self._arrived and self._shows:
            raise RuntimeError(
                "the step's gradients were not exchanged between the ranks: the forward pass must call the model that "
                "the job returned, not the one inside it, and run within the loader's loop. If it leaves out some "
                "parameters, write job.ddp(model, find_unused_parameters=True)"
            )
        if self.watch is not None:
            self.watch.exchanged()

    @property
    def _shows(self) -> bool:
        """True if hooks notice a backward pass of the model."""
        return self._group.world > 1

    @property
    def idle(self) -> bool:
        """True if the present pass did not use the model: no gradient was exchanged, and all gradients are missing or
        0."""
        if self._arrived or self.model is None:
            return False
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        return not any(bool(local(gradient).any()) for gradient in gradients)

    @property
    def _measured(self) -> NoiseScale | None:
        """The noise scale, if the present gradients are needed for it; else None."""
        noise = self._noise
        return None if self._stepped or noise is None or not noise.looks else noise

    def _first(self, model: torch.nn.Module) -> None:
        if self.model is not None:
            raise ValueError("an exchange is for one model; make one for each")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")

    def _alike(self, model: torch.nn.Module) -> None:
        """Check that all ranks have the same model. Collective. Raises ValueError if their models differ."""
        named = chain(model.named_parameters(), model.named_buffers())
        mine = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in named]
        for rank, theirs in enumerate(self._group.gather(mine)):
            if theirs != mine:
                other = next((pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]), None)
                difference = f"{other[0]} here, {other[1]} there" if other else f"{len(mine)} and {len(theirs)} tensors"
                raise ValueError(f"ddp: rank {rank} has another model than rank {self._group.rank}: {difference}")

    def _in_place(self, model: torch.nn.Module, send: Callable[[list[torch.Tensor]], None]) -> torch.nn.Module:
        """Prepare the model itself for training, without a wrapper; it is already on the group's device. `send` copies
        rank 0's tensors to all ranks. Its attribute `module` becomes the model, as in DistributedDataParallel.
        Collective."""
        self._alike(model)
        if self._group.world > 1:
            send(list(chain(model.parameters(), model.buffers())))
        self.model = model
        if not hasattr(model, "module"):
            model.__dict__["module"] = model  # not a submodule: its state keeps its names
        return model

    @contextmanager
    def _adding_up(self, part: AccumulationStep) -> Iterator[None]:
        """Context of a pass whose gradients are added to the sum of this rank's earlier passes in the step. The sum is
        Σ n_rp g_rp / n, where n is the size of the newest pass. The sum is rescaled when n changes (Horner's rule)."""
        assert self.model is not None
        if part.index == 0:
            self._unit = 0
        silenced: list[RemovableHandle] = []
        if part.weight:
            if self._unit not in (0, part.weight):
                sums = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
                torch._foreach_mul_(sums, self._unit / part.weight)
            self._unit = part.weight
        elif part.count > 1:
            # The borrowed sample's gradient must not reach the sum.
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            silenced = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in silenced:
                handle.remove()

    @contextmanager
    def _within(self, part: AccumulationStep) -> Iterator[None]:
        self._part, self._arrived, self._stepped = part, False, False
        try:
            yield
        finally:
            self._part = None

    def _now(self) -> AccumulationStep:
        """Count a gradient exchange, and return the present pass. Raises RuntimeError outside the loader's loop."""
        if self._part is None:
            raise RuntimeError(
                "a backward pass outside the loader's loop: the number of samples in its gradients is unknown. Use "
                "`for epoch in job.epochs(): for batch in loader:`, without batches that were kept (itertools.cycle) "
                "or that a thread fetches"
            )
        self.begun += not self._arrived
        self._arrived = True
        if self.watch is not None:
            self.watch.arrived()
        return self._part


LOOK = 3
"""Number of first passes in which a single rank runs the checks for errors that only several ranks have."""


class DdpExchange(Exchange):
    """torch's DistributedDataParallel, with a communication hook in place of its mean over ranks.

    Gradients of all passes but the last are accumulated on the rank itself. In the last pass the hook divides this sum
    by N, the step's samples, and all-reduces it.
    """

    hot = timed = True

    def __init__(self, group: Group, noise: NoiseScale | None) -> None:
        super().__init__(group, noise)
        self._options: dict[str, Any] = {}
        self._learns: list[torch.nn.Parameter] = []
        self._frozen: list[bool] = []
        """True for each parameter in `_learns` that was frozen when DDP was last built."""
        self._looked = 0
        """Number of passes in which a single rank used DDP only for its checks (see `LOOK`)."""
        self._hooked = True
        """True if DDP's communication hook is called in the present pass."""

    def wrap(self, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Return the model in DistributedDataParallel. `options` are its options, except those that choose ranks."""
        self._first(model)
        if taken := {"process_group", "device_mesh"} & options.keys():
            raise ValueError(f"ddp: {taken.pop()} cannot be given: gradients are averaged over all ranks of the job")
        device = self._group.device
        self._options = {"device_ids": [device] if device.type == "cuda" else None, **options}
        self.model = wrapped = DistributedDataParallel(model.to(device), **self._options)
        self._hook(wrapped)
        self._learns = [p for p in wrapped.parameters() if p.requires_grad]
        self._frozen = [False for _ in self._learns]
        wrapped.register_forward_pre_hook(lambda *_: self._look_for_frozen())
        return wrapped

    def _look_for_frozen(self) -> None:
        """Build DDP again if the script froze or unfroze parameters, since it would wait for gradients of frozen
        ones."""
        frozen = [not p.requires_grad for p in self._learns]
        if frozen != self._frozen and not all(frozen) and torch.is_grad_enabled():
            self.ranks_changed()

    def _hook(self, wrapped: DistributedDataParallel) -> None:
        # A lambda, since DDP checks a function's annotations, and refuses strings. If a script compiles its backward
        # pass, torch would compile the hook, too, and fail.
        hook = torch.compiler.disable(lambda exchange, bucket: exchange._reduce(bucket.index(), bucket.buffer()))  # type: ignore[no-untyped-call]
        wrapped.register_comm_hook(self, hook)

    def ranks_changed(self) -> None:
        wrapped = self.model
        assert isinstance(wrapped, DistributedDataParallel)
        # Made again in place, over the present default group; the script's hooks and attributes stay on the object.
        kept = {name: value for name, value in vars(wrapped).items() if name in _SCRIPTS or name in _CONTEXTS}
        options = {**self._options, "init_sync": False}
        del wrapped.reducer, wrapped.logger  # first: else its buckets, as large as all gradients, exist twice
        DistributedDataParallel.__init__(wrapped, wrapped.module, **options)
        vars(wrapped).update(kept)
        self._frozen = [not p.requires_grad for p in self._learns]
        self._hook(wrapped)

    @contextmanager
    def during(self, part: AccumulationStep) -> Iterator[None]:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        # A single rank needs DDP only to add up passes of different size, or to pass gradients to the noise scale.
        alone = self._group.world == 1 and part.count == 1 and self._noise is None
        self._looked += alone
        idle = alone and self._looked > LOOK
        # DDP learns a static graph in the first pass, and needs its hooks for that; so `_reduce` returns early there.
        apart = (idle or not part.last) and not model.static_graph
        self._hooked = not apart
        with self._within(part):
            if part.count == 1 and not apart:
                self._unit = part.weight  # nothing adds up
                yield
                return
            with self._adding_up(part), model.no_sync() if apart else nullcontext():
                yield

    @property
    def _shows(self) -> bool:
        return self._hooked

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation: rank 0's buffers are broadcast once at its beginning, not in each forward pass."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if self._group.world == 1 or not model.broadcast_buffers:
            yield
            return
        for buffer in model.module.buffers():
            dist.broadcast(buffer.detach(), 0)
        model.broadcast_buffers = False  # `require_forward_param_sync` would be set again by a forward with gradients
        try:
            yield
        finally:
            model.broadcast_buffers = True

    def _reduce(self, bucket: int, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Communication hook of DDP: turn a bucket of gradients into the mean over all samples, in place."""
        self.begun += self._arrived and bucket == 0  # one more exchange in the same pass
        part, noise = self._now(), None if gradient.is_sparse else self._measured
        samples, total = part.share_weight, part.share.total
        if not part.last:
            return known(gradient)
        scale(gradient, self._unit, samples)
        if noise is not None:
            noise.local(bucket, gradient, samples, total)
        scale(gradient, samples, total)
        if self._group.world == 1:
            return known(gradient)
        # Not dist.all_reduce, whose checks take as long again.
        ranks = dist.group.WORLD
        assert ranks is not None
        complex_ = gradient.is_complex()
        work = ranks.allreduce([torch.view_as_real(gradient) if complex_ else gradient])

        def whole(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            summed = future.value()[0]
            if complex_:
                summed = torch.view_as_complex(summed)
            if noise is not None:
                noise.whole(summed, total)
            return summed

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(whole)
        return done


_SCRIPTS = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""Attributes of a module that a script can change, such as hooks and training mode. A rebuilt DDP gets the old
values."""
_CONTEXTS = {"broadcast_buffers", "forward_sync_buffers", "require_forward_param_sync", "require_backward_grad_sync"}
"""Attributes of DDP that contexts such as `no_sync` set. A rebuilt DDP gets the old values. Newer versions of torch
have the second name in place of the first."""


def scaled(gradient: torch.Tensor, numerator: float, denominator: float) -> torch.Tensor:
    """Return the gradient times numerator / denominator. For numerator 0 return zeros, since the gradient of a borrowed
    sample may be NaN."""
    if not numerator:
        return torch.zeros_like(gradient)
    return gradient if numerator == denominator else gradient * (numerator / denominator)


def scale(gradient: torch.Tensor, numerator: float, denominator: float) -> None:
    """Multiply the gradient in place by numerator / denominator, as `scaled` does."""
    if not numerator:
        gradient.zero_()
    elif numerator != denominator:
        gradient.mul_(numerator / denominator)


def known(gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(gradient)
    return found
