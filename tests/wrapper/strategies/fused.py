"""Fusion under the contract: each member as if trained alone, and the bytes of all of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ones_wrapper as ones
from ones_wrapper.group import Group
from tests.wrapper.strategies import fused_script
from tests.wrapper.strategies.rows import Row
from tests.wrapper.strategies.script import flat, steps


def expected(group: Group) -> list[float]:
    """Each member trained by itself."""
    models, optimizers, schedules = fused_script.parts()
    x, y = fused_script.data()
    length = -(-fused_script.SAMPLES // fused_script.BATCH)
    order = steps(fused_script.SAMPLES, fused_script.BATCH, fused_script.EPOCHS, fused_script.SEED)
    for count, chosen in enumerate(order, 1):
        for name, model in models.items():
            optimizers[name].zero_grad()
            mse_loss(model(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizers[name].step()
            if count % length == 0:
                schedules[name].step()
    return flat(fused_script.ordered({name: model.state_dict() for name, model in models.items()}))


def measure(group: Group) -> dict[str, float]:
    """What a step keeps on a rank, and the gradients that it hands to the ring all-reduce."""
    models, optimizers, _ = fused_script.parts()
    fused, optimizer = ones.strategies.fuse(models, optimizers, loss=mse_loss)
    exchanged: list[int] = []

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]
        exchanged.append(bucket.buffer().numel() * bucket.buffer().element_size())
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        found.set_result(bucket.buffer())
        return found

    model = DistributedDataParallel(fused)
    model.register_comm_hook(None, hook)
    x, y = fused_script.data()
    model(x, y).sum().backward()
    optimizer.step()
    moments = [its[key] for its in optimizer.state.values() for key in its if key != "step"]
    kept = [*fused.parameters(), *(p.grad for p in fused.parameters() if p.grad is not None), *moments]
    world = group.world
    return {
        "fixed_bytes": sum(t.numel() * t.element_size() for t in kept),
        "data_bytes": 2 * (world - 1) / world * sum(exchanged),
    }


ROW = Row(
    make=fused_script.strategy,
    script=Path(fused_script.__file__),
    samples=fused_script.SAMPLES,
    epochs=fused_script.EPOCHS,
    expected=expected,
    tolerance=1e-11,
    measure=measure,
    measured_at=(2,),
)
