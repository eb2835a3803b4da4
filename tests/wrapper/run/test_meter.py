"""Throughput and loss of stretches of steps, and how often ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.group import TorchGroup
from ones_wrapper.process.hooks import Flags
from ones_wrapper.protocol import Order
from ones_wrapper.run.boundary import _ASKS, Boundary
from ones_wrapper.run.meter import PENDING, WARM_UP, Meter


def test_pauses_and_first_steps_are_not_measured() -> None:
    """Protects the curve that the companion learns: a drain or an evaluation must not look like slow
    steps.
    """
    now = 0.0
    meter = Meter(2.0, lambda: now)
    progress = TrainingProgress()
    reports = []
    for step in range(WARM_UP + 8):
        meter.start()
        now += 9.0 if step < WARM_UP else 0.5
        meter.loss(torch.tensor(2.0 if step % 2 else 4.0), 8)
        if report := meter.stop(progress, 16, 16, 1.0):
            reports.append(report)
        now += 100.0  # a checkpoint
    assert [(r.samples, r.seconds) for r in reports] == [(64, 2.0), (64, 2.0)]
    assert reports[1].loss == 3.0
    assert meter.flush() is None
    epoch = meter.take_epoch()
    assert (float(epoch.total), float(epoch.samples)) == (3.0 * 8 * (WARM_UP + 8), 8.0 * (WARM_UP + 8))


def test_infinite_loss_is_left_out() -> None:
    """Protects reports from numbers that JSON cannot carry."""
    meter = Meter(0.0, lambda: 0.0)
    for _ in range(WARM_UP):
        meter.stop(TrainingProgress(), 1, 1, 1.0)
    meter.loss(float("inf"), 1)
    report = meter.stop(TrainingProgress(), 1, 1, 1.0)
    assert report is not None and report.loss is None and report.nonfinite == 1


def test_losses_of_a_stretch_over_the_end_of_an_epoch_count_once() -> None:
    """Protects the reported loss: epochs and stretches end at different steps, and each loss is in one of either."""
    meter = Meter(100.0, lambda: 0.0)
    for _ in range(WARM_UP):
        meter.stop(TrainingProgress(), 1, 1, 1.0)
    for loss in (1.0, 2.0, float("nan")):
        meter.loss(torch.tensor(loss), 2)
        meter.stop(TrainingProgress(), 2, 2, 1.0)
    first = meter.take_epoch()
    assert (first.mean, float(first.nonfinite)) == (1.5, 1.0)
    meter.loss(6.0, 2)
    meter.stop(TrainingProgress(), 2, 2, 1.0)
    report = meter.flush()
    assert report is not None and (report.loss, report.nonfinite) == (3.0, 1)
    second = meter.take_epoch()
    assert (second.mean, float(second.nonfinite)) == (6.0, 0.0)


class Slow(TorchGroup):
    """Two ranks, as this one sees them, whose agreement takes a while."""

    def maximum_later(self, values: Sequence[int]) -> Callable[[], list[int]]:
        return lambda: list(values)


def test_short_steps_agree_less_often() -> None:
    """Protects throughput: agreeing costs at most about a hundredth of the steps, and never waits above a
    second.
    """
    group = Slow(0, 2, 0, 1, 2, torch.device("cpu"), None)  # type: ignore[arg-type]
    boundary = Boundary(group, Flags())
    boundary._cost_s = 0.001
    assert boundary._interval(1.0) == 1
    assert boundary._interval(0.01) == 10
    assert boundary._interval(0.0001) == 1000
    boundary._cost_s = 1.0
    assert boundary._interval(0.1) == 10
    boundary._cost_s = 0.001
    agreed = []
    for _ in range(12):
        agreed.append(boundary.finish_agreement() is not None)
        boundary.start_agreement(0.02, due=False, measure=False)
    assert [i for i, a in enumerate(agreed) if a][:2] == [1, 6]


class Other(TorchGroup):
    """Two ranks, as rank 0 sees them; the other one asks for what stands in `asks`."""

    asks: Sequence[int] = ()
    sent: list[int]

    def maximum_later(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self.sent.append(len(values))
        others = self.asks if len(values) == len(self.asks) else [_ASKS * bool(self.asks)] if len(values) == 3 else []
        return lambda: [max(pair) for pair in zip_longest(values, others, fillvalue=0)]


def test_ranks_say_what_they_ask_for_only_where_one_asks() -> None:
    """Protects throughput, and that what any rank asks for reaches all: a signal that one rank alone got, an order once
    and not again. A quiet boundary repeats no stop.
    """
    group = Other(0, 2, 0, 1, 2, torch.device("cpu"), None)  # type: ignore[arg-type]
    group.sent = []
    orders = SimpleNamespace(order=Order(3, 0, 64), poll=lambda: orders.order)
    boundary = Boundary(group, Flags())
    boundary.lead(cast(OrderReader, orders), None, 0)

    def step() -> tuple[int, int, list[int]]:
        group.sent.clear()
        boundary.start_agreement(0.01, due=False, measure=False)
        agreed = boundary.finish_agreement()
        if agreed is None:
            return -1, -1, list(group.sent)
        return agreed.stop, agreed.wanted, list(group.sent)

    assert step() == (0, 64, [3, 11])
    assert [step() for _ in range(5)] == [(-1, -1, [])] * 3 + [(0, 64, [3]), (-1, -1, [])], "10 ms: every fourth"
    boundary._skip = 0
    group.asks = [1] + [0] * 10
    assert step() == (1, 64, [3, 11])
    boundary._skip, group.asks = 0, ()
    assert step() == (0, 64, [3])
    boundary._skip, orders.order = 0, Order(4, 0)
    assert step() == (0, 0, [3, 11])
    boundary._skip, orders.order = 0, Order(5, 0, 32)
    assert step() == (0, 32, [3, 11])
    boundary.ranks_changed(5, 0)
    boundary.lead(None, None, 0)
    assert step() == (0, 0, [3]), "ranks that are new know of no order, so the others may not either"


def test_losses_that_are_kept_are_added_as_if_at_once() -> None:
    """Protects the reported loss: kept losses of several kinds, one that is none, and a tensor that the script goes on
    to use."""
    meter = Meter(1e9)
    reused = torch.tensor(3.0)
    for number in range(PENDING + 5):
        meter.loss(reused, 2)
        meter.loss(torch.tensor(1.0, dtype=torch.bfloat16), 1)
        meter.loss(torch.tensor([float("nan") if number == 7 else 5.0], dtype=torch.float64), 4)
        reused.zero_().add_(3.0)
    meter.loss(9.0, 1)
    losses, count = meter.take_epoch(), PENDING + 5
    assert int(losses.nonfinite) == 1
    assert int(losses.samples) == count * 7 - 4 + 1
    assert losses.mean == pytest.approx((count * (6 + 1 + 20) - 20 + 9) / (count * 7 - 3))
    assert float(meter.take_epoch().samples) == 0


@pytest.mark.parametrize("ahead", [2, 3])
@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("pause", [False, True], ids=["", "with pauses"])
def test_a_device_that_is_behind_is_waited_for(step_s: float, ahead: int, pause: bool) -> None:
    """Protects what the search compares: steps that are merely enqueued are no fast ones, however long they take."""
    now = done = 0.0

    def wait() -> None:
        nonlocal now
        now = max(now, done)

    meter = Meter(2.0, lambda: now, wait)
    reports = []
    for number in range(WARM_UP + 400):
        meter.start()
        now += 0.002  # launches
        done = max(now, done) + step_s
        now = max(now, done - ahead * step_s)  # the queue is full
        report = meter.stop(TrainingProgress(), 16, 16, 1.0)
        if pause and number % 7 == 3:
            meter.settle()
            wait()  # noise is summed up, a checkpoint is copied
            now += 1.0
        if report is not None:
            wait()  # its loss is read
            reports.append(report)
    assert len(reports) >= 8
    for report in reports:
        assert report.samples / report.seconds == pytest.approx(16 / step_s, rel=0.03)


def test_what_may_hang_is_not_asked() -> None:
    """Protects the end of a rank whose peers are lost: its device never comes to the end of its queue."""
    asked = []
    meter = Meter(2.0, lambda: 0.0, lambda: asked.append(1))
    for _ in range(WARM_UP + 3):
        meter.loss(torch.tensor(2.0), 8)
        meter.stop(TrainingProgress(), 16, 16, 1.0)
    asked.clear()
    meter.forget()
    assert meter.flush() is None and asked == []
