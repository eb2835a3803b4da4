"""Several models of one architecture trained as one, each with its own hyper-parameters (HFTA, Wang et al., MLSys 2021,
arXiv 2102.02344, §3). A layer of B small models becomes one larger operation, which uses a GPU better than B small
operations one after another.

Scripts call `fuse`:

    models = [make() for _ in rates]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=rate) for model, rate in zip(models, rates)]
    fused, optimizer = ones.strategies.fuse(models, optimizers, loss=cross_entropy)
    for x, y in loader:
        losses = fused(x, y)              # one for each member
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    optimizer.save("results")             # results/0.pt, …: what an ordinary script loads

`fused` is an ordinary module and `optimizer` an ordinary optimizer, so `job.ddp` and `job.register` accept them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ones_wrapper.api import present_group
from ones_wrapper.gradients.lamb import Lamb
from ones_wrapper.run import local_batch
from ones_wrapper.strategies.fusion.alike import check_models, named
from ones_wrapper.strategies.fusion.gain import Gain, NoGainError, device_of, losses_of, measure
from ones_wrapper.strategies.fusion.model import FusedModel, Loss
from ones_wrapper.strategies.fusion.optimizer import FusedOptimizer
from ones_wrapper.strategies.fusion.strategy import Fused

__all__ = ["Fused", "FusedModel", "FusedOptimizer", "Gain", "Lamb", "NoGainError", "fuse", "gain", "largest"]

Models = Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module]
Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def fuse(
    models: Models,
    optimizers: Optimizers,
    *,
    loss: Loss | Sequence[Loss],
    values: Mapping[str, Sequence[float]] | None = None,
    randomness: str = "different",
    probe: Sequence[Any] | None = None,
) -> tuple[FusedModel, FusedOptimizer]:
    """Return one module and one optimizer that train all of `models`, each as its own optimizer in `optimizers` would.

    The keys of a dict name the members; members of a list are named "0", "1", …. All optimizers are of one kind: SGD,
    Adam, AdamW or Lamb. Learning rate, weight decay, betas and momentum of each member are read from its optimizer in
    each step, so that an ordinary scheduler works.

    `loss(output, *targets)` returns the mean over the samples; a list has one loss for each member. `values` has, by
    name, a number for each member, which the loss gets as a 0-dimensional tensor (`values={"label_smoothing": [0.0,
    0.1]}`). With `randomness` "different" each member has a dropout mask of its own, with "same" all have one mask.

    `probe` is a local batch (x, *targets) on the training device. With it, copies of the members take a few steps fused
    and separately; `NoGainError` is raised if fusing is not faster. After `ones.init` all ranks must give a probe, and
    the mean of their measurements decides.

    The models are copied: the given ones do not change. Members may differ only in the values of their tensors and the
    numbers of their optimizers. Raises ValueError, with the member's name, for any other difference.
    """
    its_models, its_optimizers = named("models", models), named("optimizers", optimizers)
    if list(its_models) != list(its_optimizers):
        raise ValueError(
            f"fuse: models are {', '.join(its_models)} and optimizers {', '.join(its_optimizers)}; give one of each "
            "for every member, in the same order"
        )
    check_models(its_models)
    if randomness not in ("different", "same"):
        raise ValueError(f"fuse: randomness={randomness!r} is neither 'different' nor 'same'")
    if probe is not None:
        found = gain(its_models, its_optimizers, loss=loss, values=values, batch=probe)
        if (group := present_group()) is not None:
            found = found.of_all(group)
        if not found.pays:
            raise NoGainError(found)
    model = FusedModel(its_models, loss, values or {}, randomness)
    return model, FusedOptimizer(model, its_models, its_optimizers)


def gain(
    models: Models,
    optimizers: Optimizers,
    *,
    loss: Loss | Sequence[Loss],
    batch: Sequence[Any],
    values: Mapping[str, Sequence[float]] | None = None,
    steps: int = 3,
) -> Gain:
    """Return the gain of fusing these members, measured with copies on the device of `batch`, a local batch (x,
    *targets). On a CPU, processor time is measured. Takes about ten steps of each member."""
    its_models, its_optimizers = named("models", models), named("optimizers", optimizers)
    fused = fuse(its_models, its_optimizers, loss=loss, values=values)
    losses = losses_of(loss, values or {}, batch[1:], len(its_models))
    return measure(fused, its_models, its_optimizers, losses, batch, steps)


def largest(
    models: Models,
    optimizers: Optimizers,
    *,
    loss: Loss,
    batch: Sequence[Any],
    values: Mapping[str, Sequence[float]] | None = None,
) -> int:
    """Return the largest number N for which the first N members fit into the memory of the batch's device together; 0
    if not even one fits. N is found by steps with more and more members."""
    its_models, its_optimizers = named("models", models), named("optimizers", optimizers)
    device = device_of(batch)

    def fits(count: int) -> bool:
        some, its = dict(islice(its_models.items(), count)), dict(islice(its_optimizers.items(), count))
        own = {name: of_each[:count] for name, of_each in (values or {}).items()}
        try:
            model, optimizer = fuse(some, its, loss=loss, values=own)
            model.to(device)
            model(*batch).sum().backward()
            optimizer.step()
        except (MemoryError, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return False
        return True

    return local_batch.largest(fits, len(its_models))
