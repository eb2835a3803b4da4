"""The elastic Accelerator in forked ranks: accumulation, and what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ones_wrapper import testing

pytest.importorskip("accelerate")

from ones_wrapper.frameworks.accelerate import Accelerator

pytestmark = pytest.mark.slow

ROWS = 23


def data(**options: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    rows = torch.arange(ROWS * 5).view(ROWS, 5) % 7 / 7.0
    given: dict[str, object] = {"batch_size": 4, "shuffle": True} | options
    return DataLoader(TensorDataset(rows, torch.arange(ROWS) % 3), **given)  # type: ignore[arg-type]


def trains(zero_first: bool) -> None:
    """An ordinary loop with accumulation, of either order."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = data()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in accelerator.epochs(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                if not zero_first:
                    optimizer.zero_grad()
    assert len(loader) == 3 and accelerator.job.progress.step == 6
    testing.put((accelerator.unwrap_model(model).weight.detach(), scheduler.get_last_lr()))


@pytest.mark.parametrize("zero_first", [True, False])
def test_accumulation_is_the_same_at_any_number_of_ranks(zero_first: bool) -> None:
    """Protects the result: a step is of eight samples, in two accumulation steps on one rank and in one on three."""
    (alone,), others = (testing.run(partial(trains, zero_first), ranks=ranks) for ranks in (1, 3))
    for put in others:
        torch.testing.assert_close(put.value[0], alone.value[0], rtol=1e-4, atol=1e-5)
        assert put.value[1] == alone.value[1] == [0.0]


def drops() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data(drop_last=True))
    rows = 0
    for _ in accelerator.epochs(1):
        for x, y in loader:
            rows += len(x)
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert (len(loader), rows) == (5, 20)


def test_drop_last() -> None:
    """Protects what the script said of its data: an epoch has whole base batches alone."""
    testing.run(drops)


def refuses() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"accelerator\.prepare"):
        accelerator.epochs(3)
    with pytest.raises(ValueError, match="in one call"):
        accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        weighted = WeightedRandomSampler([1.0] * ROWS, ROWS)
        accelerator.prepare(model, optimizer, data(shuffle=None, sampler=weighted))


def test_what_cannot_be_elastic_is_refused() -> None:
    """Protects from samples that are lost or repeated, and from ranks that would train without each other."""
    testing.run(refuses)
