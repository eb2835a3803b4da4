"""Several models, optimizers and schedulers in one job, and dicts of plain values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.feed import permutation
from tests.wrapper import gan
from tests.wrapper.runs import samples_used

EPOCHS = 3


def undisturbed() -> dict[str, torch.Tensor]:
    orders = [permutation(gan.SAMPLES, gan.SEED, epoch, True).tolist() for epoch in range(EPOCHS)]
    return gan.train(order[i : i + gan.BATCH] for order in orders for i in range(0, gan.SAMPLES, gan.BATCH))


class Resized(Exception):
    """Leaves the loop."""


def resized(history: list[tuple[int, int]]) -> int | None:
    """Starts of so many ranks, each of which ends at this step with a checkpoint."""
    number = int(os.environ["SLURM_RESTART_COUNT"])
    at = history[number][1]

    def each(job: ones.Job) -> None:
        if job.progress.step == at:
            job.checkpoint()
            raise Resized

    try:
        testing.put(gan.elastic(EPOCHS, each))
    except Resized:
        return history[number + 1][0]
    return None


@pytest.mark.slow
def test_a_gan_trains_as_in_one_process(tmp_path: Path) -> None:
    """Protects models that are trained in turns: gradients are those of one process, by any optimizer and however often
    each steps; resizes keep samples, both optimizers' states and the plain values."""
    env = {"ONES_TRACE": str(tmp_path / "trace-{restart}-{rank}.jsonl")}
    put = testing.run(partial(resized, [(1, 4), (2, 9), (3, 15), (2, -1)]), ranks=1, env=env)
    wanted = undisturbed()
    for one in put:
        found, counters = one.value
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
        steps = EPOCHS * -(-gan.SAMPLES // gan.BATCH)
        assert counters == {"steps": steps, "seen": [steps / 2], "point": 1 - 2j}
    for used in samples_used(tmp_path).values():
        assert used == dict.fromkeys(range(gan.SAMPLES), 1)


def net(size: int = 2) -> torch.nn.Module:
    return torch.nn.Linear(size, 1)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unregistered(job: ones.Job) -> None:
    a, b = job.ddp(net()), job.ddp(net())
    job.register(model=a, optimizer=sgd(a)), b


def of_no_model(job: ones.Job) -> None:
    a = job.ddp(net())
    job.register(model={"a": a}, optimizer={"a": sgd(a), "b": sgd(net())})


def shared(job: ones.Job) -> None:
    one = net()
    job.ddp(one), job.ddp(torch.nn.Sequential(one, net(1)))


def no_parameters(job: ones.Job) -> None:
    job.ddp(torch.nn.ReLU())


def plain(**others: Any) -> Callable[[ones.Job], None]:
    def register(job: ones.Job) -> None:
        a = job.ddp(net())
        job.register(model=a, optimizer=sgd(a), **others)

    return register


def named(models: Any) -> Callable[[ones.Job], None]:
    def register(job: ones.Job) -> None:
        a = job.ddp(net())
        job.register(model=models(a), optimizer=sgd(a))

    return register


def thawed(job: ones.Job) -> None:
    plain_net = torch.nn.Sequential(net(), net(1))
    plain_net[0].requires_grad_(False)
    model = job.ddp(plain_net)
    optimizer = job.register(model=model, optimizer=sgd(model))
    loader = job.loader(TensorDataset(torch.ones(4, 2)))
    for _ in job.epochs():
        plain_net.requires_grad_(True)
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()


def past_the_scheduler(job: ones.Job) -> None:
    model = job.ddp(net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = job.loader(TensorDataset(torch.ones(8, 2)))
    for _ in job.epochs():
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()


def in_turns(job: ones.Job) -> None:
    models = {name: job.ddp(net()) for name in "ab"}
    by = job.register(model=models, optimizer={name: sgd(model) for name, model in models.items()})
    loader = job.loader(TensorDataset(torch.ones(8, 2)))
    for _ in job.epochs():
        for (x,) in loader:
            for name, model in models.items():
                by[name].zero_grad()
                model(x).mean().backward()
                by[name].step()


CASES = {
    "not registered": (unregistered, "is not registered, so no checkpoint"),
    "of no model": (of_no_model, r"optimizer\['b'\] has parameters that are in no registered model"),
    "shared": (shared, "two models share parameters"),
    "no parameters": (no_parameters, "ReLU has no parameter that requires a gradient"),
    "no plain value": (plain(counters={"best": object()}), r"counters\['best'\] is a builtins.object"),
    "no state": (plain(step=3), "step is a int"),
    "a list": (named(lambda a: [a]), "model is a list, not a Module"),
    "a dot": (named(lambda a: {"a.b": a}), "has the name 'a.b'"),
    "empty": (named(lambda a: {}), "model is an empty dict"),
    "thawed": (thawed, "0.weight did not require a gradient"),
    "the script's own scheduler": (past_the_scheduler, r"optimizer, scheduler = job\.prepare"),
    "in turns": (in_turns, "trained in turns"),
}


def fails(number: int) -> None:
    case, _ = list(CASES.values())[number]
    passes = 2 if case is in_turns else 1
    job = ones.init(batch=8, epochs=1, max_local_batch=2 if passes == 2 else 8, max_accumulation_steps=passes)
    try:
        case(job)
    except (ValueError, TypeError, RuntimeError) as error:
        testing.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_carried_is_said(name: str) -> None:
    """Protects people from gradients that nobody averages and state that nobody saves: an error names the thing."""
    (put,) = testing.run(partial(fails, list(CASES).index(name)))
    assert re.search(CASES[name][1], put.value)


def one_loss(world: int) -> int | None:
    """Two optimizers on one model and one loss, in accumulation steps; a frozen model beside; a later group."""
    start = int(os.environ["SLURM_RESTART_COUNT"])
    job = ones.init(batch=8, epochs=2, max_local_batch=1, max_accumulation_steps=8)
    torch.manual_seed(0)
    inner = torch.nn.Sequential(net(), net(1)).double()
    model, frozen = job.ddp(inner), net().requires_grad_(False)
    by = {"first": torch.optim.Adam(inner[0].parameters(), lr=0.1), "second": sgd(inner[1])}
    schedules = {name: torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for name, one in by.items()}
    by, schedules = job.register(model={"net": model, "frozen": frozen}, optimizer=by, scheduler=schedules)
    assert set(by) == set(schedules) == {"first", "second"}
    x = torch.arange(32, dtype=torch.float64).reshape(16, 2) / 32
    loader = job.loader(TensorDataset(x), shuffle=False)
    for _ in job.epochs():
        for (part,) in loader:
            if start == 0 and job.progress.step == 1 and job._run.loop.part.index == 0:
                job.checkpoint()
                return world
            for one in by.values():
                one.zero_grad()
            model(part).square().mean().backward()
            for one in by.values():
                one.step()
        for schedule in schedules.values():
            schedule.step()
    testing.put([p.detach().clone() for p in inner.parameters()])
    testing.put([one.param_groups[0]["lr"] for one in by.values()])
    return None


@pytest.mark.slow
def test_two_optimizers_of_one_model_accumulate() -> None:
    """Protects several optimizers whose backward passes come before all steps: accumulation, a resize on the way, and a
    scheduler for each."""
    one, lr = (put.value for put in testing.run(partial(one_loss, 1)))
    for put in testing.run(partial(one_loss, 3)):
        for found, wanted in zip(put.value, one if isinstance(put.value[0], torch.Tensor) else lr, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_sparse_embedding_goes_on() -> None:
    """Protects a job with sparse gradients from an error at its first resize, and its optimizer's state: whatever the
    accumulation steps, gradients are averaged as others are; only the noise scale cannot be measured on them."""

    def words(most: int, moves: bool) -> int | None:
        job = ones.init(batch=8, epochs=3, max_local_batch=most, max_accumulation_steps=4)
        torch.manual_seed(0)
        inner = torch.nn.Embedding(5, 3, sparse=True)
        model = job.ddp(inner)
        optimizer = job.register(model=model, optimizer=torch.optim.SparseAdam(list(inner.parameters()), lr=0.1))
        loader = job.loader(TensorDataset(torch.arange(32) % 5))
        for epoch in job.epochs():
            if moves and epoch == 1 and job.world == 1:
                job.checkpoint()
                return 2
            for (part,) in loader:
                optimizer.zero_grad()
                model(part).square().mean().backward()
                optimizer.step()
        testing.put(inner.weight.detach().clone())
        return None

    (still,) = testing.run(partial(words, 8, False))
    for put in testing.run(partial(words, 2, True)):
        torch.testing.assert_close(put.value, still.value)
