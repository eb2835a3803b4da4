"""The same result: however often a run is resized, interrupted and killed, it ends where an uninterrupted one does."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import ones_wrapper as ones
from ones_wrapper import testing
from tests.marks import examples

pytestmark = pytest.mark.slow

RTOL = 1e-9
SAMPLES, BATCH, EPOCHS = 22, 6, 2
STEPS = EPOCHS * -(-SAMPLES // BATCH)


Item = tuple[torch.Tensor, torch.Tensor, int]


class Augmented(Dataset[Item]):
    """A regression whose inputs are jittered anew in each epoch, by all three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
        self.y = self.x.prod(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Item:
        noise = torch.randn(4, dtype=torch.float64) + random.random() + np.random.rand()
        return self.x[index] + 0.1 * noise, self.y[index], index


class Stream(IterableDataset[Item]):
    """The same as a stream of unknown length, in another order in each epoch."""

    def __iter__(self) -> Iterator[Item]:
        return self.from_position(0, 0)

    def from_position(self, epoch: int, start: int) -> Iterator[Item]:
        items = Augmented()
        for index in np.random.default_rng(epoch).permutation(SAMPLES)[start:].tolist():
            yield items[index]


@dataclass(frozen=True)
class Job:
    optimizer: str = "sgd"
    stream: bool = False
    workers: int = 0
    max_local: int = BATCH
    """Most samples of a pass: less than a rank's share of the batch is accumulated."""


@dataclass(frozen=True)
class Stretch:
    ranks: int
    steps: int
    """How many it takes before it ends."""
    ending: str
    """checkpoint: one is taken there; none: it just ends; killed: without a goodbye."""
    every: int
    """In passing, checkpoints after so many steps each; 0 for none."""


LAST = Stretch(1, STEPS, "none", 0)
"""To the end of the training."""

histories = st.lists(
    st.builds(
        Stretch,
        ranks=st.integers(1, 3),
        steps=st.integers(0, STEPS - 1),
        ending=st.sampled_from(["checkpoint", "none", "killed"]),
        every=st.sampled_from([0, 1, 2]),
    ),
    min_size=1,
    max_size=3,
)
jobs = st.builds(
    Job,
    optimizer=st.sampled_from(["sgd", "adam"]),
    stream=st.booleans(),
    workers=st.sampled_from([0, 0, 0, 1]),
    max_local=st.sampled_from([1, 2, BATCH, BATCH]),
)


def train(history: list[Stretch], what: Job) -> int | None:
    """One run of the history, the last of which ends the training. Puts the loss of each (step, sample)."""
    number = int(os.environ["SLURM_RESTART_COUNT"])
    now, last = history[number], number == len(history) - 1
    job = ones.init(batch=BATCH, epochs=EPOCHS, max_local_batch=what.max_local, max_accumulation_steps=BATCH)
    torch.manual_seed(job.rank)  # the parameters of rank 0 have to reach all
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    model = job.ddp(plain)
    if what.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = job.loader(Stream() if what.stream else Augmented(), seed=3, num_workers=what.workers)
    assert job.batch == BATCH
    losses: dict[tuple[int, int], float] = {}
    begun = job.progress.step
    for _ in job.epochs():
        for x, y, indices in loader:
            taken = job.progress.step - begun
            ends = taken == now.steps and not last
            passing = now.every and taken and taken % now.every == 0 and job._run.loop.part.index == 0
            if passing or (ends and now.ending == "checkpoint"):
                job.checkpoint()
            if ends:
                testing.put(losses)
                if now.ending == "killed":
                    testing.die(history[number + 1].ranks)
                return history[number + 1].ranks
            each = (model(x) - y).square().squeeze(1)
            losses |= {(job.progress.step, int(i)): float(v) for i, v in zip(indices, each.detach(), strict=True)}
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            if job._run.loop.part.last:
                scheduler.step()
    testing.put(losses)
    state = {"parameters": dict(plain.named_parameters()), "optimizer": optimizer.state_dict()}
    testing.put(flat({**state, "scheduler": scheduler.state_dict()}))
    return None


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """A nested state with one name for each number and tensor."""
    if isinstance(state, (dict, list)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for k, v in items for key, value in flat(v, f"{name}.{k}").items()}
    return {name: state.detach().clone() if isinstance(state, torch.Tensor) else state}


@cache
def uninterrupted(optimizer: str, stream: bool) -> tuple[dict[tuple[int, int], float], dict[str, Any]]:
    """The losses and the end of a run of one rank."""
    losses, state = testing.run(partial(train, [LAST], Job(optimizer, stream)))
    assert len(losses.value) == EPOCHS * SAMPLES
    return losses.value, state.value


@given(history=histories, what=jobs)
@settings(examples(3), phases=set(Phase) - {Phase.shrink})
def test_any_history_ends_where_an_uninterrupted_run_does(history: list[Stretch], what: Job) -> None:
    """Protects the second promise: at a fixed global batch, neither the losses of any step nor the parameters nor the
    state of optimizer and scheduler tell how often the ranks changed, what was lost and what was taken again.
    """
    losses, state = uninterrupted(what.optimizer, what.stream)
    put = testing.run(partial(train, [*history, LAST], what), ranks=history[0].ranks)
    for one in put:
        if one.value and isinstance(next(iter(one.value)), tuple):
            for where, loss in one.value.items():
                assert loss == pytest.approx(losses[where], rel=RTOL), f"start {one.start}, (step, sample) {where}"
        elif one.value:
            for name, value in one.value.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(value, state[name], rtol=RTOL, atol=1e-12, msg=name)
                else:
                    assert value == (state[name] if value is None else pytest.approx(state[name], rel=RTOL)), name
    assert state.keys() == put[-1].value.keys()
    used = {where for one in put for where in one.value if isinstance(where, tuple)}
    assert used == losses.keys()
