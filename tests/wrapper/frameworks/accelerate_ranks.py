"""Ranks of test_accelerate.py: loops over the elastic Accelerator."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ones_wrapper import testing
from ones_wrapper.frameworks.accelerate import Accelerator, Registered

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
    # As scripts count the steps that they train, and the samples of each.
    assert math.ceil(len(loader) / 2) * 2 == accelerator.job.progress.step == 6
    assert loader.total_batch_size * 2 == 8 and loader.total_dataset_length == ROWS
    testing.put((accelerator.unwrap_model(model).weight.detach(), scheduler.get_last_lr()))


def overflows() -> None:
    """As under fp16, with a scaler of the CPU: the first of three steps overflows in its second accumulation step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    skipped = []
    for _ in accelerator.epochs(1):
        for passes, (x, y) in enumerate(loader):
            accelerator.backward(cross_entropy(model(x), y) * (math.inf if passes == 1 else 1.0))
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    assert skipped == [False, True, False, False, False, False]


def registers_late() -> None:
    registered = Registered()
    registered.load_state_dict({"0": {"at": 1}, "1": {"at": 2}})
    assert registered.state_dict() == {"0": {"at": 1}, "1": {"at": 2}}


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
