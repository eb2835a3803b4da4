"""The short form: `job.prepare` gives back what it was given, in order, and trains as the long form does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.dataloader import settings_of
from ones_wrapper.run.fixed import FixedRanks, Unknown
from ones_wrapper.run.given import named_by_type
from ones_wrapper.run.run import Run
from tests.marks import nightly

SAMPLES, BATCH, EPOCHS, SEED = 22, 4, 3, 5
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(torch.arange(SAMPLES), X, X.prod(1, keepdim=True))


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def rates(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


def trains(short: bool, once_an_epoch: bool, history: list[tuple[int, int]]) -> int | None:
    """A script in the short form or the long one, through starts of so many ranks that end at this step."""
    number = int(os.environ["SLURM_RESTART_COUNT"])
    job = ones.init(batch=BATCH, max_local_batch=2, epochs=EPOCHS, noise_scale=False)
    model, counters = net(), {"seen": 0}
    average, scaler = AveragedModel(model), torch.amp.GradScaler("cpu", enabled=False)
    if short:
        optimizer = rates(model)
        order = torch.Generator().manual_seed(SEED)
        loader = DataLoader(DATA, BATCH, shuffle=True, drop_last=True, generator=order)
        scheduler = CosineAnnealingLR(optimizer, EPOCHS if once_an_epoch else EPOCHS * len(loader))
        length = len(loader)
        counters, scheduler, loader, average, model, scaler, optimizer = job.prepare(  # type: ignore[assignment]
            counters, scheduler, loader, average, model, scaler, optimizer
        )
        assert len(loader) == length
    else:
        model = job.ddp(model)
        optimizer = rates(model)
        loader = job.loader(DATA, seed=SEED, drop_last=True)  # type: ignore[assignment]
        scheduler = CosineAnnealingLR(optimizer, EPOCHS if once_an_epoch else EPOCHS * len(loader))
        optimizer, scheduler, average, scaler, counters = job.register(
            model=model, optimizer=optimizer, scheduler=scheduler, average=average, scaler=scaler, counters=counters
        )
    for epoch in job.epochs():
        for ids, x, y in loader:
            if job.progress.step == history[number][1]:
                job.checkpoint()
                return history[number + 1][0]
            if job._run.loop.part.samples:
                testing.put(("used", epoch, ids.tolist()))
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            if job.updates:
                counters["seen"] += 1
            scaler.step(optimizer)
            scaler.update()
            if not once_an_epoch:
                scheduler.step()
            if job.updates:
                average.update_parameters(job.unwrap(model))
        if once_an_epoch:
            scheduler.step()
    weights = [p.detach().flatten() for one in (job.unwrap(model), average.module) for p in one.parameters()]
    testing.put(("end", counters["seen"], scheduler.scheduler.last_epoch, torch.cat(weights).tolist()))
    return None


@pytest.mark.parametrize("once_an_epoch", [nightly(False), True])
def test_it_trains_as_the_long_form_does(once_an_epoch: bool) -> None:
    """Protects the short form through resizes: the same samples once each, and the same weights, schedule, average and
    counters as the long form undisturbed, on ranks that accumulate and ranks that do not."""
    still = [one.value for one in testing.run(partial(trains, False, once_an_epoch, [(1, -1)]))]
    history = [(1, 3), (3, 8), (2, -1)]
    moved = [one.value for one in testing.run(partial(trains, True, once_an_epoch, history))]

    def used(put: list[Any]) -> list[list[int]]:
        return [
            sorted(i for kind, at, *ids in put if kind == "used" and at == e for i in ids[0]) for e in range(EPOCHS)
        ]

    assert used(moved) == used(still) and all(len(ids) == len(set(ids)) == 20 for ids in used(moved))
    assert used(still)[0] != used(still)[1], "drop_last leaves out others in each epoch"
    wanted = next(one for one in still if one[0] == "end")
    ends = [one for one in moved if one[0] == "end"]
    assert len(ends) == 2
    for found in ends:
        assert found[1:3] == wanted[1:3] and found[3] == pytest.approx(wanted[3], abs=1e-12)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([DATA[i] for i in range(SAMPLES)])

    def skip(self, start: int) -> Any:
        return (DATA[i] for i in range(start, SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def subsets(kind: str) -> None:
    job = ones.init(batch=BATCH, epochs=1, noise_scale=False)
    model: Any = net()
    if kind == "one by one":
        loader = job.prepare(DATA)
        optimizer = rates(model)
        model = job.prepare(model)
        optimizer = job.prepare(optimizer)
    elif kind == "a stream":
        model, optimizer, loader = job.prepare(model, rates(model), DataLoader(Stream(), BATCH))
    elif kind == "the long form's model":
        model = job.ddp(model, broadcast_buffers=False)
        given = model
        model, optimizer, loader = job.prepare(model, rates(model), DATA)
        assert model is given
    elif kind == "frozen":
        model[0].requires_grad_(False)
        teacher, loss = net().requires_grad_(False), torch.nn.MSELoss()
        same = teacher, loss
        teacher, optimizer, loader, model, loss = job.prepare(teacher, rates(model), DATA, model, loss)
        assert same == (teacher, loss) and list(job._models) == ["Sequential", "Sequential2"]
    elif kind == "compiled":
        compiled: Any = torch.compile(model, backend="eager")
        model, optimizer, loader = job.prepare(compiled, rates(model), DATA)
    else:
        head = net()
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
        first = model
        model, head, optimizer, loader = job.prepare(model, head, optimizer, DATA)
        trunk = model
        model = lambda x: trunk(x) + head(x)  # noqa: E731
        assert job.unwrap(trunk) is first
    used = []
    for _ in job.epochs():
        for ids, x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            used += ids.tolist()
    testing.put(used)


@pytest.mark.parametrize(
    "kind", ["one by one", "a stream", "the long form's model", "frozen", "compiled", "several models"]
)
def test_any_part_of_it_may_be_given(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        put = testing.run(partial(subsets, kind), ranks=2)
    assert sorted(i for one in put for i in one.value) == list(range(SAMPLES))


REFUSED: dict[str, tuple[Callable[[torch.nn.Module], list[Any]], str]] = {
    "no model": (lambda m: [rates(m)], "give SGD together with model and optimizer"),
    "no optimizer": (lambda m: [m, StepLR(rates(m), 1)], "give StepLR together with model and optimizer"),
    "a list": (lambda m: [m, rates(m), [StepLR(rates(m), 1)]], "a list is no model, optimizer"),
    "a function": (lambda m: [m, rates(m), len], "a builtin_function_or_method is no model"),
    "a dict of models": (lambda m: [{"a": m}, rates(m)], "the dict holds a Sequential"),
    "DataParallel": (lambda m: [DataParallel(m), rates(m)], "the model is a DataParallel already"),
    "DDP": (lambda m: [DistributedDataParallel(m), rates(m)], "the model is a DistributedDataParallel already"),
}


def refused(name: str) -> None:
    ones.init(batch=BATCH, epochs=1).prepare(*REFUSED[name][0](net()))


def again() -> None:
    job, model = ones.init(batch=BATCH, epochs=1), net()
    job.prepare(model, rates(model), DATA)
    job.prepare(rates(model))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said(name: str) -> None:
    """Protects from what works on one GPU and not after a resize: the sentence says what to write."""
    with pytest.raises(testing.RankFailed, match=REFUSED[name][1]):
        testing.run(partial(refused, name))


def test_all_that_is_carried_comes_at_once() -> None:
    with pytest.raises(testing.RankFailed, match="give all objects with a state in one call"):
        testing.run(again)


class Few(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def test_settings_of_a_loader() -> None:
    """Protects what a script chose for its data."""
    plain = settings_of(DataLoader(Few(), 2), 2)
    assert (plain["shuffle"], plain["drop_last"], plain["num_workers"], "seed" in plain) == (False, False, 0, False)
    seeded = torch.Generator().manual_seed(9)
    loader: DataLoader[Any] = DataLoader(
        Few(), 2, shuffle=True, num_workers=1, prefetch_factor=3, persistent_workers=True, generator=seeded, timeout=7
    )
    found = settings_of(loader, 2)
    wanted = {"shuffle": True, "seed": 9, "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
    assert {**found, **wanted, "timeout": 7} == found
    for sampler in (RandomSampler(Few(), replacement=True), RandomSampler(Few(), num_samples=2)):
        with pytest.raises(ValueError, match="comes through RandomSampler"):
            settings_of(DataLoader(Few(), 2, sampler=sampler), 2)
    cut = settings_of(DataLoader(Few(), batch_sampler=BatchSampler(SequentialSampler(Few()), 2, drop_last=True)), 2)
    assert (cut["shuffle"], cut["drop_last"]) == (False, True)
    with pytest.raises(ValueError, match="comes through batch_size=None"):
        settings_of(DataLoader(Few(), batch_size=None), 2)


def test_names_stay_the_same() -> None:
    """Protects a checkpoint of the one form in the other, and of several things of a kind."""
    model, plain = net(), {"a": 1}
    optimizer = rates(model)
    things = [StepLR(optimizer, 1), plain, StepLR(optimizer, 2), torch.amp.GradScaler("cpu"), AveragedModel(model)]
    assert list(named_by_type(things)) == ["scheduler", "values", "scheduler2", "scaler", "average"]


class Joining(FixedRanks):
    joining = True


def test_a_block_that_waits_has_no_rank() -> None:
    """Protects from a wrong number: what a script does on one rank, or prints, is not done or printed by it."""
    run: Any = SimpleNamespace(group=SimpleNamespace(rank=0, world=1), ranks=Joining())
    run.known = partial(Run.known, run)
    rank, world = Run.rank.fget(run), run.known(run.group.world)  # type: ignore[attr-defined]
    assert isinstance(rank, Unknown) and not any(rank == n or world == n for n in range(4)) and rank != 1
    assert f"{rank} of {world:d}, {rank!r}" == "none yet of none yet, none yet"
    torch.manual_seed(7 + rank)
    run.ranks = FixedRanks()
    assert (run.known(0), f"{run.known(1)}") == (0, "1")
