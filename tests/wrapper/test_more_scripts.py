"""What scripts do besides the documented loop, second part: state that they keep by themselves, calls of some ranks."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.script.line import variables
from ones_wrapper.script.source import ranges
from tests.marks import nightly
from tests.wrapper.test_scripts import Loop, Numbers, logged

START = "SLURM_RESTART_COUNT"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x))
        return found


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [nightly(1), 2])
def test_a_handler_that_notes_a_signal_ends_no_training(ranks: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects a training whose script leaves its loop after a signal: on all ranks at the same step, and the next
    start trains on."""

    def body() -> int | None:
        FLAGS.tested = False
        asked: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
        loop = Loop(epochs=2)
        first = os.environ[START] == "0"
        for _ in loop.job.epochs():
            for batch in loop.loader:
                loop.step(batch)
                if first and loop.job.progress.step == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if asked:
                    break
            if asked:
                break
        testing.put(loop.job.progress.step)
        return 1 if first else None

    put, log = logged(body, capfd, ranks)
    assert len({*put[:ranks]}) == 1 and put[0] < 10 and put[-1] == 10
    assert log.count("the next start continues it") == 1


def test_a_handler_is_called_after_the_checkpoint_of_a_stop() -> None:
    """Protects the ranks from a script that leaves its loop before all of them have saved: its handler is called once
    and later, also one that calls the handler that it replaced, and ends the script."""
    seen: list[int] = []

    def body() -> None:
        loop = Loop(epochs=2)
        before: Any = signal.getsignal(signal.SIGTERM)

        def own(number: int, frame: Any) -> None:
            seen.append(number)
            before(number, frame)
            raise SystemExit(0)

        def at(batch: Any) -> None:
            assert not seen
            if loop.job.progress.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, own)
        with pytest.raises(SystemExit):
            loop.train(at)
        assert list((loop.job._run.directory / "checkpoints").glob("step-*"))
        FLAGS.call_waiting()
        FLAGS.call_waiting()
        assert seen == [signal.SIGTERM]

    testing.run(body)


# -- a state that the script loads -------------------------------------------------------------------------------------


def test_a_load_after_the_jobs_own_is_undone_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects what was trained from weights that the script loads at each start."""
    path = tmp_path / "a.pt"

    def resumes(resized: bool) -> int | None:
        loop = Loop(epochs=2)
        if os.environ[START] == "0":
            torch.save((loop.model.module.state_dict(), loop.optimizer.state_dict()), path)
        weights, state = torch.load(path)
        loop.model.module.load_state_dict(weights)
        loop.optimizer.load_state_dict(state)
        for _ in loop.job.epochs():
            for batch in loop.loader:
                if resized and loop.job.progress.step == 6 and os.environ[START] == "0":
                    loop.job.checkpoint()
                    return 2
                loop.step(batch)
        testing.put(loop.weights)
        return None

    (still,), log = logged(partial(resumes, False), capfd)
    assert log.count("Linear.load_state_dict was called after job.prepare or job.register (test_more_scripts.py:") == 1
    moved, log = logged(partial(resumes, True), capfd)
    assert all(one == pytest.approx(still, abs=2e-5) for one in moved)
    assert log.count("SGD.load_state_dict was called") == 2


# -- averages, copies and counts ---------------------------------------------------------------------------------------


class Plain:
    """An average without state_dict, whose name does not say what it is."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}


class EarlyStopping:
    def __init__(self) -> None:
        self.best_score: float | None = None
        self.counter = 0

    def __call__(self, loss: float) -> bool:
        if self.best_score is None or loss < self.best_score:
            self.best_score = loss
        else:
            self.counter += 1
        return self.counter > 3


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def keeps(how: str) -> None:
    net = Counting() if how == "model" else Net()
    kept: dict[str, Any] = {"best_loss": 9.0, "shadow": [one.detach().clone() for one in net.parameters()]}
    target = copy.deepcopy(net).requires_grad_(False)
    average = Plain(net) if how == "class" else None
    copied = [one.detach().clone() for one in net.parameters()] if how == "list" else []
    stopping = EarlyStopping() if how == "stopping" else None
    if how != "copy":
        del target
    global_step = best_loss = 0.0
    loop = Loop(model=net, epochs=2, kept=kept)
    for _ in loop.job.epochs():
        for batch in loop.loader:
            if how == "rate":
                loop.optimizer.param_groups[0]["lr"] *= 0.9
            if how == "rate by the job":
                loop.optimizer.param_groups[0]["lr"] = 0.9**loop.job.base_steps
            loop.step(batch)
            if how == "variable":
                global_step += 1
            kept["best_loss"] = min(kept["best_loss"], 1.0)
    del average, copied, stopping, global_step, best_loss


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("class", "Plain has a state and is not registered"),
        ("list", "copied may have a state and is not registered"),
        ("copy", "a second Net is not registered"),
        (
            "stopping",
            "EarlyStopping.best_score (test_more_scripts.py), EarlyStopping.counter (test_more_scripts.py): what",
        ),
        ("variable", "global_step"),
        ("model", "Counting.calls"),
        ("rate", "the script sets the learning rate at each step"),
        ("rate by the job", ""),
    ],
)
def test_what_a_script_keeps_by_itself_is_named(how: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects averages, target networks, best values and counts that no checkpoint holds."""
    _, log = logged(partial(keeps, how), capfd)
    log = re.sub(r"py:\d+\)", "py)", log)
    assert log.count(said) == 1 if said else "learning rate" not in log
    assert ("registered" in log) == (how in ("class", "list", "copy", "rate"))
    assert "best_loss" not in log


@pytest.mark.parametrize(
    ("name", "found"),
    [("ModelEmaV2", True), ("EMAModel", True), ("model_ema", True), ("Schema", False), ("Remapping", False)],
)
def test_names_of_averages(name: str, found: bool) -> None:
    from ones_wrapper.script.first_steps import _AVERAGE

    assert bool(_AVERAGE.search(name)) == found


# -- a model or data that changes --------------------------------------------------------------------------------------


class Lazy(Net):
    """Makes a mask when it first sees how long the samples are."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.persistent = persistent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4), persistent=self.persistent)
        return super().forward(x * self.mask)


def trains(model: Callable[[], nn.Module], change: Callable[[Loop], None] = lambda loop: None) -> None:
    loop = Loop(model=model(), epochs=1)
    loop.train(lambda batch: change(loop) if loop.job.progress.step == 2 else None)


def takes_another_head() -> None:
    loop = Loop(model=Net())
    loop.job.unwrap(loop.model).register_module("last", nn.Linear(3, 2))
    loop.job._run.loop.first_steps.end(True, 4)


def unfreezes() -> None:
    def half_frozen() -> nn.Module:
        net = Net()
        net.first.requires_grad_(False)
        return net

    trains(half_frozen, lambda loop: loop.model.module.first.requires_grad_(True))


def takes_more_data() -> None:
    data = Numbers(12)
    loop = Loop(data=data, epochs=2)
    for _ in loop.job.epochs():
        for batch in loop.loader:
            loop.step(batch)
        data.samples = 16


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda: trains(lambda: Lazy(True)), r"module\.mask of the model was made or changed after job\.prepare"),
        (takes_another_head, r"module\.last\.bias of the model was made or changed"),
        (unfreezes, r"first\.weight did not require a gradient"),
        (takes_more_data, "the dataset has 16 samples, and had 12"),
    ],
    ids=["a buffer", "another part", "an unfrozen layer", "more samples"],
)
def test_what_grows_is_refused_when_it_does(body: Callable[[], None], why: str) -> None:
    """Protects a job from an end at its next resize, ranks from weights that drift apart until the epoch ends, and a
    curriculum from training on its first stage in all epochs."""
    with pytest.raises(testing.RankFailed, match=why):
        testing.run(body)


def test_a_buffer_that_is_not_saved_may_come_later() -> None:
    testing.run(partial(trains, lambda: Lazy(False)))


def test_a_module_made_in_each_step_costs_no_look_at_the_model() -> None:
    """Protects the time of steps: the names in the state of a hundred layers take milliseconds."""

    def body() -> None:
        loop, looks = Loop(model=Net(), epochs=1), list[int]()
        loop.model.register_state_dict_pre_hook(lambda *_: looks.append(1))

        def at(batch: Any) -> None:
            nn.CrossEntropyLoss()
            assert not looks

        loop.train(at)

    testing.run(body)


@pytest.mark.slow
def test_a_script_may_compile_its_backward_pass() -> None:
    """Protects a job from an end at its first resize: on one GPU no hook met the compiler."""

    def body(whole: bool) -> None:
        loop = Loop(epochs=1)

        def passes(batch: Any) -> None:
            loop.loss(batch).backward()

        passes = torch.compile(passes, backend="eager") if whole else passes
        for _ in loop.job.epochs():
            for batch in loop.loader:
                loop.optimizer.zero_grad()
                passes(batch)
                loop.optimizer.step()
        testing.put(loop.weights)

    plain, ours = (testing.run(partial(body, whole), ranks=2)[0].value for whole in (False, True))
    assert ours == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("ranks", [nightly(1), 2])
def test_layers_may_be_frozen_later(ranks: int) -> None:
    """Protects what the page says of layers that do not learn at all times, at any number of ranks."""

    def body() -> None:
        net = Net()
        loop = Loop(model=net, epochs=3)
        for epoch in loop.job.epochs():
            net.first.requires_grad_(epoch != 1)
            before = net.first.weight.clone()
            for batch in loop.loader:
                loop.step(batch)
            assert torch.equal(before, net.first.weight) == (epoch == 1)
        testing.put(loop.weights)

    testing.run(partial(trains, Net, lambda loop: loop.model.module.first.requires_grad_(False)), ranks=ranks)
    put = [one.value for one in testing.run(body, ranks=ranks)]
    assert all(one == put[0] for one in put)


@pytest.mark.parametrize("ranks", [nightly(1), 2])
def test_the_loader_after_the_last_epoch(ranks: int) -> None:
    """Protects `update_bn` of an average, in a start after the end, too: nothing is trained or counted."""

    def body() -> int | None:
        FLAGS.tested = False
        job = ones.init(batch=8, epochs=1, noise_scale=False)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        average = torch.optim.swa_utils.AveragedModel(net)
        model, optimizer, average = job.prepare(net, torch.optim.SGD(net.parameters(), 0.05), average)
        loader = job.loader([Numbers()[index][1] for index in range(20)])  # type: ignore[arg-type]
        for _ in job.epochs():
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            average.update_parameters(model)
        torch.optim.swa_utils.update_bn(loader, average)
        testing.put((job.progress.epoch, job.progress.step, int(average.module[1].num_batches_tracked)))
        return 1 if os.environ[START] == "0" else None

    put = [one.value for one in testing.run(body, ranks=ranks)]
    assert put == [(1, 3, 3 if ranks == 1 else 2)] * ranks + [(1, 3, 3)]


# -- what ranks decide by themselves -----------------------------------------------------------------------------------


def test_one_rank_that_stops_early_stops_all(capfd: pytest.CaptureFixture[str]) -> None:
    """Protects the others from waiting for a rank whose own figure told it to stop."""

    def body() -> int | None:
        FLAGS.tested = False
        loop = Loop(epochs=3)
        trained = 0
        for epoch in loop.job.epochs():
            for batch in loop.loader:
                loop.step(batch)
                trained += 1
            if epoch == 1 and loop.job.rank == 1:
                break
        testing.put((loop.job.progress.step, trained))
        return 2 if os.environ[START] == "0" else None

    put, log = logged(body, capfd, 2)
    assert put == [(10, 10), (10, 10), (10, 0), (10, 0)]
    assert log.count("another rank left job.epochs()") == 1


def test_ranks_take_the_same_rate_on_a_plateau() -> None:
    """Protects ranks from rates by their own losses, with which their weights drift apart."""

    def body() -> None:
        job = ones.init(batch=4, epochs=3)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        model, optimizer, plateau, loader = job.prepare(model, optimizer, plateau, Numbers())
        for epoch in job.epochs():
            for _, x, _ in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            plateau.step(float(3 * epoch if job.rank else -epoch))
        testing.put(optimizer.param_groups[0]["lr"])

    rates = [one.value for one in testing.run(body, ranks=2)]
    assert rates == [pytest.approx(0.001)] * 2
    assert [one.value for one in testing.run(body)] == [0.1]


# -- what all ranks do together ----------------------------------------------------------------------------------------


def only_first(how: str) -> None:
    from ones_wrapper.script import stuck

    FLAGS.tested = how != "break"
    stuck.STILL_S, stuck.Watch.POLL_S = 0.3, 0.05
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    loop = Loop(model=net, epochs=1)
    job, model = loop.job, loop.model
    for _ in job.epochs():
        for batch in loop.loader:
            loop.step(batch)
            if job.rank == 0 and job.progress.step == 1:
                if how == "mean":
                    job.mean(1.0, 1.0)
                if how == "evaluate":
                    list(job.evaluate(Numbers()))
                if how == "forward":
                    model.eval()
                    model(batch[1])
                    model.train()
                if how == "inner":
                    job.unwrap(model).eval()(batch[1])
                    model.train()
                if how == "break":
                    break


@pytest.mark.parametrize(
    ("how", "call"), [("mean", "job.mean"), ("evaluate", "job.evaluate"), ("forward", "forward pass"), ("inner", "")]
)
def test_what_all_ranks_do_on_one_is_said(how: str, call: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects a job of one GPU from a hang at its first resize."""
    _, log = logged(partial(only_first, how), capfd)
    assert log.count("is called under a condition on the rank") == bool(call)
    assert not call or re.search(rf"{call}.* \(test_more_scripts.py:\d+\)", log), log


@pytest.mark.parametrize(
    ("test", "asks"),
    [
        ("job.rank == 0", True), ("0 < epoch and rank == 0", True), ("dist.get_rank() != 0", True), ("not rank", True),
        ("accelerator.is_main_process", True), ("lora_rank == 8", False), ("ranking", False), ("main", False),
        ("cfg.lora_rank == 0", False), ("args.local_rank >= 0", False),
    ],
)  # fmt: skip
def test_conditions_on_the_rank(test: str, asks: bool, tmp_path: Path) -> None:
    """If both branches make a call, all ranks make it."""
    one, both = tmp_path / "one.py", tmp_path / "both.py"
    one.write_text(f"x = 1\nif {test}:\n    x = 2\n    x = 3\n")
    both.write_text(f"if {test}:\n    print(job.mean(1, 1))\nelse:\n    job.mean(1, 1)\n")
    assert (ranges(str(one)), ranges(str(both))) == ([range(3, 5)] if asks else [], [])


def test_a_look_at_variables_keeps_nothing_alive() -> None:
    """Protects the memory of a GPU: a step's logits are gone once the script drops them."""

    class Logits:
        pass

    def train() -> Any:
        logits = Logits()
        gone = weakref.ref(logits)
        assert variables(sys._getframe())["logits"] is logits
        del logits
        return gone()

    assert train() is None


@pytest.mark.parametrize("how", ["forward", "break"])
def test_ranks_that_wait_for_each_other_are_named(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects ranks from waiting half an hour, deaf to signals."""
    with pytest.raises(testing.RankFailed) as failed:
        testing.run(partial(only_first, how), ranks=2, timeout_s=20)
    log = str(failed.value) + capfd.readouterr().err
    assert re.search(r"rank 0 waits \(test_.*:\d+\) for other ranks, and rank 1 elsewhere \(test_", log), log
