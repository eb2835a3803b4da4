"""Rings as parts of an elastic job: meshes of data and sequence, sharded weights, and dropout through resizes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.strategies.ring.strategy import Ring
from tests.wrapper.strategies.ring_script import BATCH, LENGTH, SEED, data, model_of, optimizer_of
from wrapper.examples.lm_ring import Block

pytestmark = pytest.mark.slow


def train(history: tuple[tuple[int, int], ...], sharded: bool, rate: float) -> int | None:
    """An epoch in which each start, of (ranks, ranks of a ring), makes two steps, the last one the rest. Puts the
    parameters and the evaluation."""
    number = int(os.environ["SLURM_RESTART_COUNT"])
    ring = Ring(LENGTH, causal=True, ranks=history[number][1])
    job = ones.init(batch=BATCH, max_accumulation_steps=BATCH, epochs=1, strategy=ring)
    plain = model_of(ring)
    for block in plain.blocks:  # type: ignore[union-attr]
        block.attention.rate = rate
    model = job.fsdp(plain, modules=Block) if sharded else job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(model))
    loader = job.loader(data(), seed=SEED)
    begun = job.progress.step
    for _ in job.epochs():
        for (pieces,) in loader:
            if number < len(history) - 1 and job.progress.step == begun + 2:
                job.checkpoint()
                return history[number + 1][0]
            loss = ring.mean(_losses(model, ring, pieces, rate))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            job.loss(loss)
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for (pieces,) in job.evaluate(data(), batch=3):
            found = _losses(model, ring, pieces, 0.0)
            total, count = total + found.sum().item(), count + found.numel()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    testing.put((torch.cat([p.detach().flatten() for p in whole]), job.mean(total, count)))
    return None


def _losses(model: Any, ring: Ring, pieces: torch.Tensor, rate: float) -> torch.Tensor:
    guess, target = ring.dropout(model(pieces[:, :-1]), rate), ring.shard(pieces[:, 1:])
    return cross_entropy(guess.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def ended(*history: tuple[int, int], sharded: bool = False, rate: float = 0.0) -> tuple[torch.Tensor, float]:
    put = testing.run(partial(train, history, sharded, rate), ranks=history[0][0])
    found: tuple[torch.Tensor, float] = put[-1].value
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("history", "sharded", "rate"),
    [(((4, 2), (2, 1), (4, 4)), False, 0.0), (((4, 2),), True, 0.0), (((4, 4), (1, 1), (2, 2)), False, 0.3)],
    ids=["two rings, no ring, one ring", "two rings, weights sharded", "one ring of 4, 1 and 2 ranks with dropout"],
)
def test_a_job_ends_where_one_rank_does(history: tuple[tuple[int, int], ...], sharded: bool, rate: float) -> None:
    """Whatever the mesh and its changes; with dropout as long as the number of rings stays."""
    found, loss = ended(*history, sharded=sharded, rate=rate)
    wanted, its_loss = ended((1, 1), rate=rate)
    assert (found - wanted).abs().max() < 1e-9
    assert abs(loss - its_loss) < 1e-9
