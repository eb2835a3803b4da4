"""Schedules follow progress: through any batches and restarts, rates are those of the undisturbed run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lr
from torch.utils.data import IterableDataset, TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.checkpoint.state import pack, unpack
from ones_wrapper.data.feed import split
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.gradients.schedule import ProgressScheduler, Schedules, base_steps, counted
from ones_wrapper.protocol import Order, decode_report, encode
from tests.marks import NIGHTLY, examples, nightly

BASE, EPOCHS = 4, 3
Make = Callable[[torch.optim.Optimizer, int], Any]
"""Makes a scheduler for so many steps."""


class Own:
    """Another library's scheduler: it only looks like torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self) -> None:
        self.last_epoch += 1
        self.optimizer.param_groups[0]["lr"] = 0.5 / (1 + self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert set(state) == {"last_epoch"}
        self.last_epoch = state["last_epoch"]


def sequence(optimizer: torch.optim.Optimizer, steps: int) -> lr.SequentialLR:
    warm_up = lr.LinearLR(optimizer, 0.1, total_iters=3)
    return lr.SequentialLR(optimizer, [warm_up, lr.CosineAnnealingLR(optimizer, max(1, steps - 3))], [3])


SCHEDULERS: dict[str, Make] = {
    "lambda": lambda o, n: lr.LambdaLR(o, lambda step: min((step + 1) / 3, 1 - step / n)),
    "multiplicative": lambda o, n: lr.MultiplicativeLR(o, lambda step: 0.95),
    "step": lambda o, n: lr.StepLR(o, 3, 0.5),
    "multistep": lambda o, n: lr.MultiStepLR(o, [2, 5, 6], 0.5),
    "constant": lambda o, n: lr.ConstantLR(o, 0.2, 4),
    "linear": lambda o, n: lr.LinearLR(o, 0.1, total_iters=5),
    "exponential": lambda o, n: lr.ExponentialLR(o, 0.9),
    "polynomial": lambda o, n: lr.PolynomialLR(o, n, 2.0),
    "cosine": lambda o, n: lr.CosineAnnealingLR(o, n),
    "restarts": lambda o, n: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "cyclic": lambda o, n: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda o, n: lr.OneCycleLR(o, 0.5, total_steps=n),
    "sequence": sequence,
    "chain": lambda o, n: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 3), lr.ExponentialLR(o, 0.9)]),
    "own": lambda o, n: Own(o),
}


class Training:
    """Steps of an epoch-wise loop over `samples`, as `Loader` makes them."""

    def __init__(self, make: Make, samples: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)
        self.make, self.progress = make, TrainingProgress(dataset=samples)
        self.optimizer = torch.optim.SGD([weight], lr=0.3, momentum=0.9)
        self.own = make(self.optimizer, max(2, EPOCHS * base_steps(samples, BASE)))
        self.schedules = Schedules(BASE)
        self.scheduler = self.schedules.wrap(self.own)

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def resumed(self) -> Training:
        """A new process that goes on from what this one saved."""
        new = Training(self.make, self.progress.dataset)
        new.progress = TrainingProgress(**vars(self.progress))
        new.optimizer.load_state_dict(self.optimizer.state_dict())
        new.scheduler.load_state_dict(unpack(pack(self.scheduler.state_dict(), "scheduler"), {}))
        return new

    def step(self, batch: int, stepping: bool = True) -> float:
        """One step; the rate that it was made with."""
        progress, rate = self.progress, self.rate
        share = split(progress.cursor, min(batch, progress.dataset - progress.cursor), 1, 0)
        self.schedules.enter(counted(progress, share.total, batch, BASE))
        self.optimizer.step()
        if stepping:
            self.scheduler.step()
        self.schedules.check()
        progress.padding += counted(progress, share.total, batch, BASE) - share.total
        progress.cursor += share.total
        progress.samples += share.total
        self.schedules.leave()
        if progress.cursor == progress.dataset:
            progress.epoch, progress.cursor = progress.epoch + 1, 0
        return rate

    @property
    def base_steps(self) -> int:
        return (self.progress.samples + self.progress.padding) // BASE


def undisturbed(make: Make, samples: int) -> tuple[list[float], dict[str, Any]]:
    """The rate of each step at the base batch, and after the last; without a wrapper. The scheduler's last state."""
    training = Training(make, samples)
    rates = [training.rate]
    for _ in range(EPOCHS * base_steps(samples, BASE)):
        training.optimizer.step()
        training.own.step()
        rates.append(training.rate)
    return rates, training.own.state_dict()


@pytest.mark.parametrize("name", SCHEDULERS)
@examples(8)
@given(
    samples=st.integers(3, 30),
    history=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
)
def test_any_batches_and_restarts_end_as_undisturbed(
    name: str, samples: int, history: list[tuple[int, int, bool]]
) -> None:
    """Protects the end of training: any sequence of batches, larger or smaller, and of restarts ends in the state of
    the run that nobody disturbed. On the way each step has the rate that its first sample has there, and a formula by
    `job.base_steps` follows, too."""
    make = SCHEDULERS[name]
    rates, last = undisturbed(make, samples)
    training, each = Training(make, samples), base_steps(samples, BASE)
    plan = [(batch, resume and not index) for batch, steps, resume in history for index in range(steps)]
    number = 0
    while training.progress.epoch < EPOCHS:
        batch, resume = plan[number % len(plan)]
        number += 1
        training = training.resumed() if resume else training
        done = training.progress.epoch * each + training.progress.cursor // BASE
        assert training.base_steps == done
        assert training.step(batch) == rates[done]
    state = training.own.state_dict()
    assert training.rate == rates[-1]
    assert {key: state[key] for key in last if key not in ("lr_lambdas", "_scale_fn_ref")} == {
        key: last[key] for key in last if key not in ("lr_lambdas", "_scale_fn_ref")
    }


@pytest.mark.parametrize("batch", [2, 4, 8, 16])
def test_a_schedule_that_steps_at_some_batches_alone(batch: int) -> None:
    """Protects scripts that step a schedule at every second batch: by samples it is as far as at the base batch."""
    training = Training(SCHEDULERS["own"], 64)
    for number in range(64 // batch):
        training.step(batch, stepping=number % 2 == 1)
    assert training.own.last_epoch == 8


def test_once_an_epoch_is_the_scripts_own() -> None:
    """Protects schedules in epochs, those with metrics among them."""
    training = Training(lambda o, n: lr.ReduceLROnPlateau(o, patience=0), 8)
    for loss in (1.0, 2.0, 3.0):
        training.step(8, stepping=False)
        training.scheduler.step(loss)
    assert training.rate == pytest.approx(0.003)
    assert training.scheduler.get_last_lr() == [training.rate]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("plateau", (1.0,), "after that loop"),
        ("plateau", (), "after that loop"),
        ("restarts", (0.5,), r"len\(loader\)"),
    ],
)
def test_what_cannot_follow_is_refused(name: str, given: tuple[float, ...], words: str) -> None:
    """Protects training from a schedule that would end elsewhere, by an error that says what to write."""
    made = SCHEDULERS | {"plateau": lambda o, n: lr.ReduceLROnPlateau(o)}
    training = Training(made[name], 8)
    training.schedules.enter(4)
    with pytest.raises(RuntimeError, match=words):
        training.scheduler.step(*given)


@pytest.mark.parametrize("name", ["cosine", "chain", "sequence", "own"])
def test_the_unwrapped_scheduler_is_refused(name: str) -> None:
    """Protects schedules of scripts that go on with the scheduler that they gave: they learn at the first step, not
    when the batch grows, what to write. Once an epoch both are the same."""
    training = Training(SCHEDULERS[name], 8)
    training.step(8)
    training.own.step()
    training.step(8)
    training.schedules.enter(4)
    training.own.step()
    with pytest.raises(RuntimeError, match=r"optimizer, scheduler = job\.prepare"):
        training.schedules.check()


def test_a_schedule_stays_at_its_end() -> None:
    """Protects the last steps of training from OneCycleLR's error."""
    training = Training(lambda o, n: lr.OneCycleLR(o, 0.5, total_steps=5), 40)
    for _ in range(3):
        training.step(12)
    assert training.own.last_epoch == 5


def test_only_schedulers_are_wrapped() -> None:
    """Protects the other things that scripts register, and nothing is changed in what the script made."""
    training = Training(SCHEDULERS["cosine"], 8)
    before = vars(training.own).copy()
    things = [training.optimizer, torch.amp.GradScaler("cpu"), torch.nn.Linear(1, 1)]
    assert [training.schedules.wrap(thing) for thing in things] == things
    assert isinstance(training.scheduler, ProgressScheduler) and training.scheduler.T_max == 6
    assert vars(training.own) == before
    training.scheduler.load_state_dict(training.own.state_dict())  # as older checkpoints have it


# -- whole jobs -------------------------------------------------------------------------------------------------------

SAMPLES = 50
CHANGES = [(1, 8), (2, 16), (1, 4), (3, 24), (2, 2), (1, 40), (2, 16), (1, 6), (2, 32), (1, 12), (2, 8)]
"""Ranks and batch of each start: ten resizes by night, three by day."""


def train(changes: Sequence[tuple[int, int]], passes: int = 1) -> int | None:
    """A run of `job.loader` over so many starts, which a schedule, one with metrics and a formula follow."""
    start = int(os.environ["SLURM_RESTART_COUNT"])
    folder = Path(os.environ["ONES_JOB_DIR"])
    folder.mkdir(exist_ok=True)
    (folder / "orders.json").write_bytes(encode(Order(start + 1, start, batch=changes[start][1])))
    job = ones.init(
        batch=8, max_batch=64, max_local_batch=64 if passes == 1 else 5, max_accumulation_steps=passes, epochs=8,
    )  # fmt: skip
    model = job.ddp(torch.nn.Linear(2, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = job.loader(TensorDataset(torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))))
    assert len(loader) == 7
    cosine = lr.CosineAnnealingLR(optimizer, T_max=8 * len(loader), eta_min=1e-4)
    plateau = lr.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=1.0), patience=1)
    optimizer, scheduler, plateau = job.register(model=model, optimizer=optimizer, scheduler=cosine, plateau=plateau)
    assert scheduler.scheduler is cosine
    last = len(changes) - 1
    for _ in job.epochs():
        for (x,) in loader:
            if start < last and job.base_steps >= (start + 1) * 56 // len(changes):
                job.checkpoint()
                return changes[start + 1][0]
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        plateau.step(1.0)
    assert (job.base_steps, cosine.last_epoch) == (56, 56)
    rates = [scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"]]
    reports = [decode_report(line)[2] for path in folder.glob("reports-*") for line in path.read_bytes().splitlines()]
    factors = {getattr(report, "lr_factor", 1.0) for report in reports}
    testing.put((rates, plateau.last_epoch, sorted(factors)))
    return None


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, nightly(12)])
def test_resizes_end_with_the_rate_of_the_undisturbed_run(passes: int) -> None:
    """Protects the promise of schedules: after resizes and batch changes the script's own rate at the end of a
    cosine is that of a run that nobody disturbed, with accumulation steps too; the factor by the batch is reported."""
    ends = testing.run(partial(train, CHANGES if passes == 1 and NIGHTLY else CHANGES[:4], passes), ranks=1)
    quiet = testing.run(partial(train, [(1, 8)]), ranks=1)
    assert quiet[0].value[0] == pytest.approx([1e-4, 1e-4])
    for one in ends:
        assert one.value[0] == pytest.approx(quiet[0].value[0], rel=1e-9)
        assert one.value[1] == quiet[0].value[1] == 8
        assert min(one.value[2]) < 1.0 and max(one.value[2]) >= 3.0
    assert quiet[0].value[2] == [1.0]


class Stream(IterableDataset[torch.Tensor]):
    """Ten samples without a length."""

    def from_position(self, epoch: int, start: int) -> Any:
        return iter(torch.ones(10, 2)[start:])

    def __iter__(self) -> Any:
        raise AssertionError("not reached")


def stream() -> None:
    job = ones.init(batch=4, epochs=2)
    model = job.ddp(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = job.loader(Stream())
    with pytest.raises(TypeError, match="choose the schedule's number of steps"):
        len(loader)
    schedulers: Any = {"one": lr.ConstantLR(optimizer), "two": lr.ExponentialLR(optimizer, 0.9)}
    optimizer, schedulers = job.register(model=model, optimizer=optimizer, scheduler=schedulers)
    for _ in job.epochs():
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
            schedulers["one"].step()
        schedulers["two"].step()
    testing.put((schedulers["one"].last_epoch, schedulers["two"].last_epoch, job.base_steps))


def test_a_stream_without_a_length() -> None:
    """Protects streams, of which nobody knows the length: at the base batch a step is one, and `len` says why not; and
    schedulers in a dict, one by step and one by epoch."""
    assert [one.value for one in testing.run(stream)] == [(6, 2, 6)]
