"""The row of the ring: sequences split over all ranks."""

from __future__ import annotations

import torch

from ones_wrapper.group import Group
from tests.wrapper.strategies import script
from tests.wrapper.strategies.ring_script import (
    BATCH,
    EPOCHS,
    SAMPLES,
    SEED,
    data,
    dense_loss,
    dense_model,
    model_of,
    optimizer_of,
    ring,
)
from tests.wrapper.strategies.rows import HERE, Row
from tests.wrapper.traffic import Traffic, saved_bytes


def expected(group: Group) -> list[float]:
    """Dense attention in one process, without the wrapper."""
    model, pieces = dense_model(), data().tensors[0]
    optimizer = optimizer_of(model)
    for chosen in script.steps(SAMPLES, BATCH, EPOCHS, SEED):
        optimizer.zero_grad()
        torch.autograd.backward(dense_loss(model, pieces[torch.from_numpy(chosen)]))
        optimizer.step()
    return script.flat(model.parameters())


def measure(group: Group) -> dict[str, float]:
    """One step with four samples in float64 under DDP and AdamW."""
    its, samples = ring(), 4
    its.bind(group)
    model = torch.nn.parallel.DistributedDataParallel(model_of(its))
    optimizer = optimizer_of(model)
    pieces = data().tensors[0][:samples]
    target = its.shard(pieces[:, 1:])
    with Traffic() as sent:
        with saved_bytes(model) as kept:
            guess = model(pieces[:, :-1])
            loss = torch.nn.functional.cross_entropy(guess.flatten(0, 1), target.flatten())
            del guess
        torch.autograd.backward(loss)
    optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    return {
        "fixed_bytes": sum(one.numel() * one.element_size() for one in held if one is not None),
        "sample_bytes": kept[0] / samples,
        "replica_bytes": sent.by_operation["send"] / samples,
        "data_bytes": sent.by_operation["allreduce_"],
    }


ROW = Row(ring, HERE / "ring_script.py", SAMPLES, EPOCHS, expected, tolerance=1e-9, measure=measure, measured_at=(2, 4))
