"""Means over tokens: a batch says how many it holds, and ranks and accumulation steps have unequally many."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.feed import permutation
from ones_wrapper.protocol import Epoch, Throughput, decode_report
from tests.marks import nightly

SAMPLES, BATCH, EPOCHS, MOST = 24, 7, 2, 5
Sample = tuple[torch.Tensor, torch.Tensor]


class Texts(Dataset[Sample]):
    """Texts of no token up to `MOST`: of some passes nothing counts, and their loss is NaN."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        drawn = torch.rand(MOST, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return drawn, (torch.arange(MOST) < (index * 5) % (MOST + 1)).double()


def loss_of(model: torch.nn.Module, batch: Sample) -> torch.Tensor:
    x, mask = batch
    loss: torch.Tensor = ((model(x)[..., 0] - x.sum(-1)).square() * mask).sum() / mask.sum()
    return loss


def made() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def in_one_process() -> tuple[list[torch.Tensor], list[float]]:
    """The parameters at the end, and each epoch's mean loss over its tokens."""
    model, data, losses = made(), Texts(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order, total, held = permutation(SAMPLES, 0, epoch, True).tolist(), 0.0, 0.0
        for start in range(0, SAMPLES, BATCH):
            parts = zip(*(data[index] for index in order[start : start + BATCH]), strict=True)
            x, mask = map(torch.stack, parts)
            loss = loss_of(model, (x, mask))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, held = total + loss.item() * mask.sum().item(), held + mask.sum().item()
        losses.append(total / held)
    return [p.detach() for p in model.parameters()], losses


def trains(parallel: str, sizes: list[int]) -> int | None:
    """One start; it ends after two steps, and the next has the next of `sizes`."""
    start = int(os.environ["SLURM_RESTART_COUNT"])
    options: dict[str, Any] = {"max_local_batch": 2, "max_accumulation_steps": 4, "epochs": EPOCHS}
    job = ones.init(batch=BATCH, tokens=lambda batch: batch[1].sum(), **options)
    model = getattr(job, parallel)(made())
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader, first = job.loader(Texts()), job.progress.step
    for _ in job.epochs():
        for batch in loader:
            if start + 1 < len(sizes) and job.progress.step == first + 2:
                job.checkpoint()
                return sizes[start + 1]
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
    lines = (job._run.directory / f"reports-{start}.jsonl").read_bytes().splitlines()
    reports = [decode_report(line)[2] for line in lines]
    inside = job.unwrap(model)
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in inside.parameters()]
    testing.put((whole, [one.loss for one in reports if isinstance(one, Epoch)]))
    testing.put([(one.samples, one.tokens) for one in reports if isinstance(one, Throughput)])
    return None


@pytest.mark.parametrize(("parallel", "sizes"), [nightly("ddp", [1]), ("ddp", [2, 3, 1]), ("fsdp", [2, 3])])
def test_the_mean_is_over_the_tokens_of_a_step(
    parallel: str, sizes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Protects a training on texts of unequal length: at any size, in any number of accumulation steps and through
    resizes it is that of one process, and so is the reported loss."""
    expected, losses = in_one_process()
    env = {"ONES_REPORT_EVERY_S": "0.000001"}
    put = [one.value for one in testing.run(partial(trains, parallel, sizes), ranks=sizes[0], env=env)]
    for found, reported in put[::2]:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert reported[-1] == pytest.approx(losses[-1], rel=1e-5)
    held = {sum(Texts()[index][1].sum().item() for index in permutation(SAMPLES, 0, 1, True)[:BATCH].tolist())}
    intervals = put[1]
    assert all(1 <= samples <= BATCH and tokens > 0 for samples, tokens in intervals)
    assert not held - {tokens for _, tokens in intervals} or len(sizes) > 1
    assert re.search(rf"1x{sizes[-1]}: \S+ samples/s, \S+ tokens/s", capfd.readouterr().err)


def test_a_strategy_has_a_mean_of_its_own() -> None:
    with pytest.raises(ValueError, match="lsgd has a mean of its own"):
        ones.init(batch=4, tokens=len, strategy=ones.strategies.Lsgd(period=2))
