"""What scripts do besides the documented loop: it is carried through a resize, or said before the first.

Each test is one kind, from public scripts. Ranks are forked from the test's process.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.protocol import Epoch, decode_report
from tests.marks import nightly

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Numbers(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Samples that say which they are."""

    def __init__(self, samples: int = 20, bad: int = -1) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        y = float("nan") if index == self.bad else index % 10 / 5.0
        return index, torch.full((4,), index % 10 / 10.0), torch.tensor([y])


class Loop:
    """A script's objects, registered."""

    def __init__(
        self,
        batch: int = 4,
        epochs: int = 2,
        data: Dataset[Any] | None = None,
        model: torch.nn.Module | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        **others: Any,
    ) -> None:
        self.job = job = ones.init(batch=batch, max_local_batch=batch, epochs=epochs, noise_scale=False)
        torch.manual_seed(0)
        self.model = job.ddp(model or torch.nn.Linear(4, 1))
        found = job.register(model=self.model, optimizer=optimizer(list(self.model.parameters())), **others)
        self.optimizer = found[0] if others else found
        self.loader = job.loader(data or Numbers(), seed=3)

    def loss(self, batch: Batch) -> torch.Tensor:
        _, x, y = batch
        loss: torch.Tensor = (self.model(x) - y).square().mean()
        return loss

    def step(self, batch: Batch) -> None:
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self, at: Callable[[Batch], object] = lambda batch: None) -> None:
        """The documented loop; `at` is called before each step."""
        for _ in self.job.epochs():
            for batch in self.loader:
                at(batch)
                self.step(batch)

    @property
    def epochs_reported(self) -> list[tuple[int, float | None]]:
        """Each epoch's number and accuracy."""
        lines = (self.job._run.directory / "reports-0.jsonl").read_bytes().splitlines()
        return [(one.epoch, one.accuracy) for line in lines if isinstance(one := decode_report(line)[2], Epoch)]

    @property
    def weights(self) -> list[float]:
        return [round(value, 5) for p in self.job.unwrap(self.model).parameters() for value in p.flatten().tolist()]


def logged(body: Callable[[], Any], capfd: pytest.CaptureFixture[str], ranks: int = 1) -> tuple[list[Any], str]:
    """What the ranks put, and the job's log."""
    capfd.readouterr()
    put = testing.run(body, ranks=ranks)
    return [one.value for one in put], capfd.readouterr().err


# -- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_that_are_left_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects who accumulates by hand from losing his place at a resize without a word."""

    def body() -> None:
        loop = Loop(epochs=1)
        loop.optimizer.zero_grad()
        for _ in loop.job.epochs():
            for turn, batch in enumerate(loop.loader):
                (loop.loss(batch) / 2).backward()
                if turn % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()

    _, log = logged(body, capfd)
    assert log.count("max_accumulation_steps=N") == 1 and "(test_scripts.py:" in log


class Agreeing:
    """One rank's group, which counts."""

    rank, world = 0, 1

    def maximum(self, values: list[int]) -> list[int]:
        return list(values)

    def maximum_later(self, values: list[int]) -> Callable[[], list[int]]:
        return lambda: list(values)


def test_a_boundary_amid_unused_gradients_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects gradients that no optimizer has used yet: what was asked for is asked again, but not for ever."""
    from ones_wrapper.process.hooks import Flags
    from ones_wrapper.run import boundary

    flags = Flags()
    boundaries = boundary.Boundary(Agreeing(), flags)  # type: ignore[arg-type]
    flags.checkpoint = True
    boundaries.start_agreement(1.0, False, False)
    held = boundaries.finish_agreement(True)
    assert held is not None and not held.checkpoint and flags.checkpoint
    boundaries.start_agreement(1.0, False, False)
    agreed = boundaries.finish_agreement(False)
    assert agreed is not None and agreed.checkpoint and not flags.checkpoint
    flags.stop = True
    boundaries.start_agreement(1.0, False, False)
    assert boundaries.finish_agreement(True).stop == 0  # type: ignore[union-attr]
    monkeypatch.setattr(boundary, "HELD_S", 0.0)
    boundaries.start_agreement(1.0, False, False)
    assert boundaries.finish_agreement(True).stop == boundary.BY_SIGNAL  # type: ignore[union-attr]


@pytest.mark.parametrize("held", [False, True])
def test_a_signal_while_an_agreement_begins_is_not_lost(held: bool) -> None:
    """Protects a checkpoint that is asked for in the moment in which the flag was just read."""
    from ones_wrapper.process.hooks import CHECKPOINT, Flags
    from ones_wrapper.run.boundary import Boundary

    class Interrupted(Flags):
        """Gets a signal right after the flag was read."""

        comes = False

        @property
        def checkpoint(self) -> bool:
            found = self._checkpoint
            if self.comes:
                self.comes = False
                self.handle(CHECKPOINT[0], None)
            return found

        @checkpoint.setter
        def checkpoint(self, value: bool) -> None:
            self._checkpoint = value

    flags = Interrupted()
    boundaries = Boundary(Agreeing(), flags)  # type: ignore[arg-type]
    flags.stop, flags.comes = held, not held
    boundaries.start_agreement(1.0, False, False)
    flags.comes = held
    boundaries.finish_agreement(held)
    assert flags.comes or flags.checkpoint


def test_a_skipped_backward_pass_is_said_on_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects from a hang at the first resize; by `job.any` ranks skip together."""

    def skips(agreed: bool) -> None:
        loop = Loop(data=Numbers(bad=7), epochs=1)
        for _ in loop.job.epochs():
            for batch in loop.loader:
                bad = not loop.loss(batch).isfinite()
                if loop.job.any(bad) if agreed else bad:
                    continue
                loop.step(batch)
        testing.put(loop.weights)

    _, log = logged(partial(skips, False), capfd)
    assert log.count("a turn of the loop (test_scripts.py:") == 1 and "job.any(bad)" in log
    (one, other), _ = logged(partial(skips, True), capfd, 2)
    assert one == other


def test_a_batch_in_parts_is_said_on_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects from an error at the first resize, where ranks have unequally many parts."""

    def body(size: int) -> None:
        loop = Loop(batch=5, epochs=1)
        for _ in loop.job.epochs():
            for batch in loop.loader:
                loop.optimizer.zero_grad()
                for part in zip(*(one.split(size) for one in batch), strict=True):
                    loop.loss(part).backward()  # type: ignore[arg-type]
                loop.optimizer.step()

    _, log = logged(partial(body, 2), capfd)
    assert log.count("in several parts") == 1 and "(test_scripts.py:" in log
    _, log = logged(partial(body, 5), capfd)
    assert "parts" not in log


@pytest.mark.parametrize(
    ("mine", "other", "culprit"),
    [
        ((5, 5, 5), (4, 5, 4), False),  # the other is in the exchange that this one has begun, too
        ((5, 4, 4), (4, 5, 4), True),
        ((5, 4, 4), (5, 5, 5), True),  # by NCCL the other does not wait for it at once
        ((4, 4, 4), (4, 5, 4), False),  # this one is slow
    ],
)
def test_who_made_fewer_passes_is_named(mine: tuple[int, ...], other: tuple[int, ...], culprit: bool) -> None:
    """Protects from a rank that is taken for the one that skipped."""
    from ones_wrapper.script.stuck import Standpoint, unequal

    why = unequal(Standpoint(1, *mine, "", " (a.py:3)"), [Standpoint(0, *other, "", " (a.py:9)")])
    assert bool(why) == culprit
    assert not culprit or ("rank 1 made 1" in why and "(a.py:3)" in why and "(a.py:9)" in why)


def test_a_rank_that_skips_alone_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects from ranks that wait for each other for ever, deaf to signals."""

    def hangs() -> None:
        from ones_wrapper.script import stuck

        stuck.STILL_S, stuck.Watch.POLL_S = 0.3, 0.05
        loop = Loop(epochs=1)
        for _ in loop.job.epochs():
            for batch in loop.loader:
                if loop.job.rank == 1 and loop.job.progress.step == 2:
                    continue
                loop.step(batch)

    began = time.monotonic()
    with pytest.raises(testing.RankFailed) as failed:
        testing.run(hangs, ranks=2)
    assert time.monotonic() - began < 20
    log = str(failed.value) + capfd.readouterr().err
    fewer = r"rank 1 made 1 backward pass\(es\) fewer than (rank 0 .*it is|others up to this step)"
    assert re.search(fewer + r" \(test_scripts.py:\d+\)", log), log


def inner() -> None:
    loop = Loop()
    model = loop.job.unwrap(loop.model)
    for _ in loop.job.epochs():
        for _, x, y in loop.loader:
            loop.optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            loop.optimizer.step()


# -- the loop --------------------------------------------------------------------------------------------------------


def ahead(depth: int, samples: int) -> None:
    loop = Loop(data=Numbers(samples))
    for _ in loop.job.epochs():
        coming = iter(loop.loader)
        queue = [next(coming) for _ in range(depth + 1)]
        while queue:
            batch, *queue = queue
            loop.step(batch)
            testing.put((loop.job.progress.epoch, loop.job.progress.step, batch[0].tolist()))
            if (more := next(coming, None)) is not None:
                queue.append(more)
    assert loop.job.progress.samples == 2 * samples


def test_one_batch_may_be_asked_for_ahead() -> None:
    """Protects a prefetcher's last batch of each epoch, and the count of what was trained on; also where it fetches
    between the forward and the backward pass."""

    def fetches_between() -> None:
        loop = Loop(epochs=2)
        for _ in loop.job.epochs():
            coming = iter(loop.loader)
            batch = next(coming)
            while batch is not None:
                loss = loop.loss(batch)
                batch = next(coming, None)
                loop.optimizer.zero_grad()
                loss.backward()
                loop.optimizer.step()
        assert loop.job.progress.samples == 40 and loop.job.progress.step == 10

    put = [one.value for one in testing.run(partial(ahead, 1, 22))]
    assert [step for _, step, _ in put] == list(range(12))
    for epoch in (0, 1):
        assert sorted(i for at, _, ids in put for i in ids if at == epoch) == list(range(22))
    testing.run(fetches_between)


def unfreezes() -> None:
    loop, extra = Loop(epochs=1), torch.nn.Parameter(torch.zeros(1))

    def at(batch: Batch) -> None:
        if loop.job.progress.step == 2 and len(loop.optimizer.param_groups) == 1:
            loop.optimizer.add_param_group({"params": [extra]})

    loop.train(at)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param(inner, "gradients were not exchanged", id="a forward pass on the inner model"),
        pytest.param(partial(ahead, 2, 20), "only one batch can be fetched ahead", id="two batches ahead"),
        pytest.param(unfreezes, r"SGD\.add_param_group was called after job\.prepare", id="a group of parameters"),
    ],
)
def test_what_would_end_a_resized_job_is_refused_on_one_rank(body: Callable[[], None], why: str) -> None:
    with pytest.raises(testing.RankFailed, match=why):
        testing.run(body)


def endless() -> None:
    loop = Loop()

    def cycle() -> Iterator[Batch]:
        while True:
            yield from loop.loader

    for _, batch in zip(range(12), cycle(), strict=False):
        loop.step(batch)


def in_range() -> None:
    loop = Loop()
    for _ in range(2):
        for batch in loop.loader:
            loop.step(batch)


def replayed() -> None:
    loop = Loop()
    for batch in itertools.islice(itertools.cycle(loop.loader), 12):
        loop.step(batch)


@pytest.mark.parametrize("body", [endless, in_range, replayed])
def test_a_second_pass_over_an_epoch_names_job_epochs(
    body: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Protects from a loop that spins, and from epochs without a batch."""
    with pytest.raises(testing.RankFailed, match=r"(epoch 0 is used up|outside the loader's loop).* job\.epochs\(\)"):
        testing.run(body)
    assert "outside job.epochs() (test_scripts.py:" in capfd.readouterr().err


def test_a_loop_of_its_own_ends_its_epochs() -> None:
    """Protects loops that do not go by `job.epochs`, and what ends an epoch before its turn does."""

    def body() -> None:
        loop = Loop(epochs=3)
        for _ in range(2):
            for batch in loop.loader:
                loop.step(batch)
            loop.job.epoch_end(accuracy=0.5)
        for _ in loop.job.epochs():
            for batch in loop.loader:
                loop.step(batch)
            loop.job.epoch_end(accuracy=0.75)
        testing.put(loop.epochs_reported)

    (put,) = testing.run(body)
    assert put.value == [(0, 0.5), (1, 0.5), (2, 0.75)]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_no_start_finds_an_epoch_without_a_batch(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects scripts that read behind an epoch's batches what was set in them, whenever a checkpoint is asked for."""
    monkeypatch.setattr("ones_wrapper.run.boundary.EVERY_S", 0.0)

    def body() -> None:
        loop, first = Loop(epochs=3, data=Numbers(8)), os.environ["SLURM_RESTART_COUNT"] == "0"
        assert first or loop.job.progress.step > 0  # the checkpoint that was asked for
        for _ in loop.job.epochs():
            batch = None
            for batch in loop.loader:
                loop.step(batch)
                if first and loop.job.progress.step == step:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if first and loop.job.progress.step == 4:
                    testing.die(1)
            assert batch is not None

    testing.run(body)


def test_a_signal_in_the_last_step_lets_the_script_finish() -> None:
    """Protects what follows the loop over epochs, which a start would reach without one."""

    def body() -> None:
        loop = Loop(epochs=1, data=Numbers(4))
        loop.train(lambda batch: os.kill(os.getpid(), signal.SIGTERM))
        assert loop.job._run.over

    testing.run(body)


def test_leaving_the_epochs_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects an early stop: a restart in what follows the loop trains nothing again."""

    def body() -> int | None:
        FLAGS.tested = False
        loop = Loop(epochs=3)
        again = loop.job.progress.step > 0
        for epoch in loop.job.epochs():
            for batch in loop.loader:
                loop.step(batch)
            testing.put(("trained", epoch))
            loop.job.report(accuracy=epoch / 4)
            if epoch == 1:
                break
        testing.put(("behind", loop.job.progress.step, loop.epochs_reported))
        return None if again else 1

    put = [one.value for one in testing.run(body)]
    behind = ("behind", 10, [(0, 0.0), (1, 0.25)])
    assert put == [("trained", 0), ("trained", 1), behind, behind]
    assert "the script left job.epochs()" in capfd.readouterr().err


def test_an_error_that_leaves_the_epochs_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects who stops early by an error of his own from training again at the next start."""

    def body(stops: bool) -> None:
        FLAGS.tested = False
        loop = Loop(epochs=2)
        try:
            for _ in loop.job.epochs():
                for batch in loop.loader:
                    loop.step(batch)
                if stops:
                    raise InterruptedError
        except InterruptedError:
            pass

    for stops in (True, False):
        _, log = logged(partial(body, stops), capfd)
        assert log.count("Leave the loop by break") == stops


def test_an_error_is_no_leaving() -> None:
    """Protects the other ranks from waiting for one that failed."""
    from ones_wrapper.script.line import left_on_purpose

    def numbers() -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            found.append(left_on_purpose(sys._getframe().f_back))

    def bar(numbers: Iterator[int]) -> Iterator[int]:
        yield from numbers

    def loop(error: bool, around: Callable[[Iterator[int]], Iterator[int]] = iter) -> list[bool]:
        found.clear()
        try:
            for _ in around(numbers()):
                if error:
                    raise ValueError
                break
        except ValueError:
            pass
        return list(found)

    found: list[bool] = []
    assert loop(False, bar) == [True] and loop(True, bar) == [False]  # within a progress bar
    assert loop(False) == [True] and loop(True) == [False]


# -- what is registered ------------------------------------------------------------------------------------------------


class NoClosure(torch.optim.Optimizer):
    """As LARS in public scripts has it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad)
                p.sub_(mean, alpha=group["lr"])


class TwoSteps(torch.optim.Optimizer):
    """As SAM: first to where the loss is worst, then by another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise ValueError("give a closure")
        self.base_optimizer.step()

    def second_step(self) -> None:
        self.base_optimizer.step()


class Slow(torch.optim.Optimizer):
    """As Lookahead: another state_dict than torch's."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.AdamW(params, lr=0.05)
        self.counter = 0

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counter += 1
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter, "base_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter = state_dict["counter"]
        self.optimizer.load_state_dict(state_dict["base_optimizer"])


def optimizes(kind: Callable[[Any], torch.optim.Optimizer], stops: bool) -> int | None:
    loop = Loop(optimizer=kind, batch=2, epochs=3)
    for _ in loop.job.epochs():
        for batch in loop.loader:
            if stops and loop.job.progress.step == 7:
                loop.job.checkpoint()
                stops = False
                if not loop.job.progress.resizes:
                    return 2
            loop.optimizer.zero_grad()
            loop.loss(batch).backward()
            getattr(loop.optimizer, "second_step", loop.optimizer.step)()
    testing.put(loop.weights)
    return None


@pytest.mark.parametrize("kind", [NoClosure, TwoSteps, Slow, nightly("LARS"), nightly("Lamb")])
def test_optimizers_of_other_forms_go_on(
    kind: str | Callable[[Any], torch.optim.Optimizer], capfd: pytest.CaptureFixture[str]
) -> None:
    """Protects what an optimizer knows, those for large batches of `pytorch-optimizer` among them: the same weights
    with a resize and without."""
    if isinstance(kind, str):
        kind = partial(getattr(pytest.importorskip("pytorch_optimizer"), kind), lr=0.02)
    (still,), log = logged(partial(optimizes, kind, False), capfd)
    moved, _ = logged(partial(optimizes, kind, True), capfd)
    assert all(one == pytest.approx(still, abs=2e-5) for one in moved) and len(moved) == 2
    assert "has not stepped" not in log


class Ema:
    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


class Shadow(Ema):
    """The same, whose name does not say so."""


class NoamLR:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.number = optimizer, 0

    def step(self) -> None:
        self.number += 1
        self.optimizer.param_groups[0]["lr"] = 0.05 * self.number**-0.5

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_what_is_not_registered_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects schedules and averages that begin anew at each resize."""

    def forgets() -> None:
        loop = Loop(epochs=1)
        schedule, shadow = NoamLR(loop.optimizer), Shadow(loop.model.module)
        late = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3)
        average, own = torch.optim.swa_utils.AveragedModel(loop.model.module), Ema(loop.model.module)
        loop.train(lambda batch: (late.step(), schedule.step(), average.update_parameters(loop.model.module)))
        del shadow, own

    def remembers() -> None:
        model = torch.nn.Linear(4, 1)
        Loop(epochs=1, model=model, ema=Ema(model)).train()

    _, log = logged(forgets, capfd)
    for what in ("StepLR drives a registered optimizer", "NoamLR drives a registered"):
        assert log.count(what) == 1
    for kind in ("AveragedModel", "Ema", "Shadow"):
        assert log.count(f"{kind} has a state and is not registered") == 1
    _, log = logged(remembers, capfd)
    assert "registered" not in log


@pytest.mark.parametrize(("ranks", "samples"), [(1, 19), (2, 20), nightly(4, 20), (3, 19)])
def test_batchnorm_never_gets_one_sample(ranks: int, samples: int) -> None:
    """Protects the end of an epoch, whose last two samples two ranks would share, or where one would be left."""

    def body() -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        loop = Loop(batch=6, data=Numbers(samples), model=net, epochs=1)
        loop.train(lambda batch: testing.put((len(batch[0]), loop.job._run.loop.part.samples)))
        assert loop.job.base_steps == 4

    put = [one.value for one in testing.run(body, ranks=ranks)]
    assert sum(counted for _, counted in put) == samples and 1 not in {one for both in put for one in both}


def test_a_loader_has_what_scripts_ask_of_one() -> None:
    def body() -> None:
        data = Numbers()
        loader = Loop(data=data).loader
        loader.sampler.set_epoch(3)
        assert (loader.dataset, loader.batch_size, loader.drop_last, loader.num_workers) == (data, 4, False, 0)
        with pytest.raises(AttributeError, match="has no batch_sampler"):
            _ = loader.batch_sampler

    testing.run(body)


# -- signals and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_handlers_of_the_script_are_called_besides_ours(late: bool) -> None:
    """Protects both: what a script does at a signal, and the checkpoint that ours takes."""

    def body() -> None:
        seen: list[int] = []

        def own() -> None:
            signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))

        if not late:
            own()
        loop = Loop(epochs=2)
        if late:
            own()

        def at(batch: Batch) -> None:
            if loop.job.progress.step in (3, 7):
                os.kill(os.getpid(), signal.SIGUSR1)

        loop.train(at)
        assert seen == [signal.SIGUSR1] * 2
        assert list((loop.job._run.directory / "checkpoints").glob("step-*"))

    testing.run(body)


def test_a_leftover_stop_is_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects a training from a request that came too late for the one before."""
    from ones_wrapper.files.resume import prepare_job_directory

    (tmp_path / "ones.stop").touch()
    claim = prepare_job_directory(tmp_path, {}, tmp_path)
    assert claim is not None
    claim.release()
    assert not (tmp_path / "ones.stop").exists() and "ones.stop of " in capfd.readouterr().err
    (tmp_path / "ones.stop").touch()
    prepare_job_directory(tmp_path, {"ONES_LAUNCHED": "1"}, tmp_path)  # the ranks start again
    assert (tmp_path / "ones.stop").exists()


def test_a_second_script_in_the_directory_is_refused_by_name() -> None:
    """Protects a training from another one of the same model, which would go on in it without a word."""

    def starts(names: list[str]) -> int | None:
        start = int(os.environ["SLURM_RESTART_COUNT"])
        sys.modules["__main__"].__file__ = names[start]
        Loop(epochs=1).job.checkpoint()
        return 1 if start + 1 < len(names) else None

    testing.run(partial(starts, ["/a/pretrain.py", "/b/pretrain.py"]))
    said = r"step-0+ is of pretrain.py \(job 0, start 0\), whose training tune.py .*ONES_JOB_DIR.*--resume-from"
    with pytest.raises(testing.RankFailed, match=said):
        testing.run(partial(starts, ["/a/pretrain.py", "/a/tune.py"]))


# -- what the start chose, averages and schedules --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["agreed", "before", "after"])
def test_a_first_batch_that_is_left_out_shifts_none(how: str) -> None:
    """Protects a resize after it from repeating a batch: the step that is counted is the one that is trained on."""

    def body() -> None:
        loop = Loop(data=Numbers(24), epochs=1)
        for _ in loop.job.epochs():
            for turn, batch in enumerate(loop.loader):
                if how == "agreed" and loop.job.any(turn == 0):
                    continue
                if how != "agreed" and turn == 0:
                    if how == "after":
                        loop.loss(batch)
                    continue
                testing.put((loop.job.progress.step, batch[0].tolist()))
                loop.step(batch)
        assert loop.job.progress.samples == 24

    put = [one.value for one in testing.run(body)]
    # Nobody knows that the first was left out before the forward pass on the second, in which the next step begins.
    assert [step for step, _ in put][1:] == [2, 3, 4, 5] and len({i for _, ids in put for i in ids}) == 20


class Split(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """A split, a sample that draws, and one that holds something without a value."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        draws = float(time.perf_counter_ns() % 1000003) if index == 3 else torch.rand(1).item()
        return index, torch.full((4,), float(index + self.shift)), torch.tensor([draws])


def chooses(shifts: list[int], workers: int, seeds: tuple[int, int] = (0, 0)) -> int | None:
    job = ones.init(batch=4, max_local_batch=4, epochs=2, noise_scale=False)
    model = job.ddp(torch.nn.Linear(4, 1))
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    restart = int(os.environ["SLURM_RESTART_COUNT"])
    loader = job.loader(Split(shifts[restart]), num_workers=workers, seed=seeds[restart])
    for _ in job.epochs():
        for _, x, _ in loader:
            if job.progress.step == 2 and not restart:
                job.checkpoint()
                return 1
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return None


@pytest.mark.parametrize("workers", [0, nightly(1)])
def test_a_start_that_chose_other_samples_is_an_error(workers: int) -> None:
    """Protects each sample once an epoch from a split that comes out otherwise; what draws, or changes with time, is
    no difference."""
    testing.run(partial(chooses, [0, 0], workers))
    with pytest.raises(testing.RankFailed, match=r"sample 0 is another one than at checkpoint step-"):
        testing.run(partial(chooses, [0, 1], workers))
    testing.run(partial(chooses, [0, 1], workers), env={"ONES_FINGERPRINT": "0"})


def test_a_start_with_another_seed_is_an_error() -> None:
    """Protects the rest of an epoch, which would go on in another order."""
    with pytest.raises(testing.RankFailed, match=r"seed or shuffle is another than at checkpoint step-"):
        testing.run(partial(chooses, [0, 0], 0, (0, 1)))


@pytest.mark.parametrize("what", ["seed or shuffle", "sample 0"])
def test_ranks_with_other_samples_are_an_error_at_once(what: str) -> None:
    """Protects each sample once an epoch from a seed made of the rank, and from data that was cut by hand."""

    def body() -> None:
        job = ones.init(batch=4, max_local_batch=4, epochs=1, noise_scale=False)
        model = job.ddp(torch.nn.Linear(4, 1))
        job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        shift, seed = (int(job.rank), 0) if what == "sample 0" else (0, int(job.rank))
        job.loader(Split(shift), seed=seed)
        list(job.epochs())

    with pytest.raises(testing.RankFailed, match=f"{what} is another.*than on rank 0"):
        testing.run(body, ranks=2)


def test_samples_are_read_once_for_it() -> None:
    """Protects those who train from waiting for a new block that reads samples when its state arrives."""
    from ones_wrapper.data.feed import Feed

    class Counted(Split):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    data = Counted(0)
    feed = Feed(data, shuffle=False, seed=0)
    assert feed.fingerprint() == feed.fingerprint() and data.reads == 2 * 16


def test_what_has_no_value_is_left_out() -> None:
    """Protects from a difference between two objects that are only elsewhere in memory."""
    from ones_wrapper.data.fingerprint import fingerprint

    kinds: list[Any] = [object(), 1, {"a": [b"x", None]}, torch.zeros(2, dtype=torch.bfloat16), {3}]
    found = fingerprint(kinds, 5, {}, 7)  # type: ignore[arg-type]
    assert [one.split(":")[0] for one in found.split()] == ["1", "2", "3", "order"]


def averages(batch: int, passes: int, resized: bool) -> int | None:
    job = ones.init(
        batch=2, max_batch=8, max_local_batch=8 // passes, max_accumulation_steps=passes, epochs=1,
        noise_scale=False, scale_lr=False,
    )  # fmt: skip
    model = job.ddp(torch.nn.Linear(4, 1, bias=False))
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    torch.nn.init.ones_(average.module.weight)
    average.n_averaged += 1
    torch.nn.init.zeros_(model.module.weight)
    optimizer, average = job.register(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), average=average
    )
    job._run.progress.batch = batch
    loader = job.loader(Numbers(16))
    for _ in job.epochs():
        for _, x, y in loader:
            if resized and (job.progress.step, os.environ["SLURM_RESTART_COUNT"]) == (1, "0"):
                job.checkpoint()
                return 1
            optimizer.zero_grad()
            (model(x) - y).mean().backward()
            optimizer.step()
            average.update_parameters(model.module)
    testing.put((job.progress.step, average.module.weight[0, 0].item()))
    return None


@pytest.mark.parametrize(("batch", "passes", "resized"), [(2, 1, False), (8, 1, False), (8, 2, False), (3, 1, True)])
def test_an_average_follows_progress(batch: int, passes: int, resized: bool) -> None:
    """Protects an average from a longer memory where a larger batch makes fewer steps: decay ** (batch / base), also if
    a resize comes between two steps of the base batch. A pass before the optimizer's step counts nothing."""
    ((step, weight),) = (one.value for one in testing.run(partial(averages, batch, passes, resized)))
    assert step == -(-16 // batch) and weight == pytest.approx(0.5**8)


def test_an_average_of_another_kind_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    class MyEma:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def body() -> None:
        job = ones.init(batch=2, max_batch=8, max_local_batch=8, epochs=1)
        model = job.ddp(torch.nn.Linear(4, 1))
        job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), ema=MyEma())

    _, log = logged(body, capfd)
    assert log.count("MyEma is updated once a step") == 1 and "decay ** (job.batch / 2)" in log


def test_a_schedule_that_is_another_at_a_resize_is_said() -> None:
    """Protects a schedule that is multiplied by the number of processes."""
    from ones_wrapper.gradients.schedule import Schedules

    def scheduler(length: int, schedules: Schedules) -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return schedules.wrap(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / length)))

    schedules = Schedules(4)
    before = scheduler(10, schedules)
    for _ in range(3):
        before.step()
    for length, said in ((10, 0), (20, 1)):
        schedules.differences.clear()
        scheduler(length, schedules).load_state_dict(before.state_dict())
        assert len(schedules.differences) == said
    assert "another rate at step 3 than at the checkpoint (0.15 and 0.3" in schedules.differences[0]


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (lambda optimizer, ranks: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * ranks), "T_max=16"),
        nightly(lambda optimizer, ranks: torch.optim.lr_scheduler.MultiStepLR(optimizer, [4 * ranks]), "milestones="),
        (lambda optimizer, ranks: torch.optim.lr_scheduler.StepLR(optimizer, 4), ""),
    ],
)
def test_a_schedule_that_is_made_by_the_number_of_ranks_is_said(
    made: Callable[[Any, int], Any], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Protects from a schedule whose length is another at each number of GPUs; that of the first start stays."""

    def body() -> int | None:
        job = ones.init(batch=4, epochs=1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, scheduler, loader = job.prepare(model, optimizer, made(optimizer, job.world), Numbers())
        for _ in job.epochs():
            for _, x, _ in loader:
                if job.progress.step == 2 and job.world == 1:
                    job.checkpoint()
                    return 2
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                scheduler.step()
        testing.put(scheduler.state_dict().get("T_max", 8))
        return None

    put, log = logged(body, capfd)
    assert put == [8, 8]
    assert log.count("which stays in force") == bool(key) and key in log


# -- the script's own collectives over a batch ----------------------------------------------------------------------


class Gathering:
    """A script that gathers the features of all ranks, as contrastive losses do."""

    def __init__(
        self, batch: int, shares: str = "all", model: torch.nn.Module | None = None, data: Dataset[Any] | None = None
    ) -> None:
        options: dict[str, Any] = {"max_local_batch": batch, "epochs": 2, "noise_scale": False, "shares": shares}
        self.job = ones.init(batch=batch, **options)
        self.model = self.job.ddp(model or torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 6)
        both = self.job.register(model=self.model, optimizer=optimizer, scheduler=scheduler)
        self.optimizer, self.scheduler = both
        self.loader = self.job.loader(data or Numbers(20), seed=3)

    def walk(self, gathers: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> None:
        for _ in self.job.epochs():
            for index, x, _ in self.loader:
                self.optimizer.zero_grad()
                features = self.model(x)
                mine = gathers(features.detach())
                found = [torch.zeros_like(mine) for _ in range(self.job.world)]
                dist.all_gather(found, mine)
                testing.put((self.job.progress.epoch, index.tolist(), sum(map(len, found))))
                features.square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
        testing.put(self.scheduler.get_last_lr())


def test_a_batch_that_is_gathered_is_said_on_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects a job that gathers its batch from its first resize; figures of one dimension are none of it."""
    testing.run(lambda: Gathering(5).walk(lambda features: features[:, 0]))
    assert "gathers" not in capfd.readouterr().err
    testing.run(lambda: Gathering(5).walk())
    said = capfd.readouterr().err
    assert said.count("shares='equal'") == 1 and re.search(r"all_gather \(test_scripts.py:\d+\) gathers", said)


def test_a_batch_of_uneven_shares_is_not_gathered() -> None:
    """Protects from what gloo and NCCL make of it: memory of others, an abort, a hang."""
    with pytest.raises(
        testing.RankFailed, match=r"different numbers of them in this step \(\d here\): write ones.init\(shares"
    ):
        testing.run(lambda: Gathering(5).walk(), ranks=2)


class Stream(IterableDataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        return (Numbers()[index] for index in range(self.start, 20))

    def skip(self, number: int) -> Stream:
        return Stream(self.start + number)


class Sized(Stream):
    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize(
    ("ranks", "normal", "data"),
    [(3, False, Numbers), (3, True, Numbers), (3, False, Sized)],
)
def test_equal_shares(ranks: int, normal: bool, data: type[Dataset[Any]]) -> None:
    """Protects losses that gather a batch: at any size all ranks have equally many samples of each pass, no sample is
    used twice, what is left out is less than a step's least, other samples in each epoch, and schedules come to their
    end all the same."""

    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1)) if normal else None
        Gathering(7, "equal", model, data()).walk()

    put = [one.value for one in testing.run(body, ranks=ranks)]
    rates = [one for one in put if isinstance(one, list)]
    steps = [one for one in put if isinstance(one, tuple)]
    assert rates == [[0.0]] * ranks
    for epoch in (0, 1):
        used = [index for at, samples, _ in steps if at == epoch for index in samples]
        assert len(used) == len(set(used))
        assert 20 - len(used) < (2 if normal else 1) * ranks
    assert all(len(samples) * ranks == found for _, samples, found in steps)


def test_of_a_stream_without_a_length_schedules_count_what_was_used() -> None:
    """Its end shows when no whole step is left; 36 of its 40 samples are five steps of 7."""
    put = [one.value for one in testing.run(lambda: Gathering(7, "equal", None, Stream()).walk(), ranks=3)]
    assert [one for one in put if isinstance(one, list)] == [[pytest.approx(0.1 * (1 - 5 / 6))]] * 3
    assert sum(len(one[1]) for one in put if isinstance(one, tuple)) == 36


def test_shares_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="does not go with uneven"):
        ones.init(batch=4, shares="equal", uneven=True)

    def body() -> None:
        with pytest.raises(ValueError, match="gives each of 3 GPUs equally many"):
            ones.init(batch=2, shares="equal")

    testing.run(body, ranks=3)
