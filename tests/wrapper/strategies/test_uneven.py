"""Uneven ranks: shares by speed, the gradient that they give, and what a job of them promises."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.feed import Cut, accumulation_count, plan
from ones_wrapper.data.shares import Shares
from ones_wrapper.data.uneven import BOUND, STEPS, UNIT, WARM_UP, OwnTime, Uneven, counts, taken_s

SPEEDS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6)


@given(speeds=SPEEDS, total=st.integers(1, 300), least=st.integers(1, 40), more=st.data())
def test_shares_are_complete_within_memory_and_waste_no_rank(
    speeds: list[float], total: int, least: int, more: st.DataObject
) -> None:
    """All samples go to somebody, nobody gets more than it holds, and each rank has one where there are enough."""
    world = len(speeds)
    most = tuple(least + more.draw(st.integers(0, 30)) for _ in speeds)
    passes = accumulation_count(total, world, least)
    found = Shares(tuple(speeds), most).samples(total, passes)
    assert sum(found) == total and len(found) == world
    assert all(samples <= cap * passes for samples, cap in zip(found, most, strict=True))
    assert sum(1 for samples in found if samples) == min(total, world) and found[0] > 0


@given(speeds=st.lists(st.floats(0.1, 9.0), min_size=2, max_size=3), total=st.integers(3, 14), cap=st.integers(5, 14))
def test_no_other_shares_end_earlier(speeds: list[float], total: int, cap: int) -> None:
    """Against all shares there are, of those that give each rank a sample and fit."""
    world = len(speeds)

    def ends(samples: tuple[int, ...]) -> float:
        return max(each / speed for each, speed in zip(samples, speeds, strict=True))

    cap = max(cap, -(-total // world))
    every = [one for one in product(range(1, cap + 1), repeat=world) if sum(one) == total]
    found = Shares(tuple(speeds), (cap,) * world).samples(total, 1)
    assert ends(found) <= min(map(ends, every)) * (1 + 1e-12)


def test_ranks_that_hold_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks hold 12 samples in 2 passes, and the step has 13"):
        Shares((1.0, 2.0), (4, 2)).samples(13, 2)


@given(
    speeds=SPEEDS,
    samples=st.integers(1, 120),
    batch=st.integers(1, 60),
    least=st.integers(1, 9),
    room=st.integers(0, 9),
)
def test_passes_of_uneven_shares_use_each_sample_once(
    speeds: list[float], samples: int, batch: int, least: int, room: int
) -> None:
    """Exactly once over the epoch, as many passes on each rank as with even shares, none larger than a rank holds."""
    world = len(speeds)
    shares = Shares(tuple(speeds), (least,) + (least + room,) * (world - 1))
    ranks = [list(plan(0, samples, Cut(batch, world, rank, least, uneven=shares))) for rank in range(world)]
    even = [list(plan(0, samples, Cut(batch, world, rank, least))) for rank in range(world)]
    assert [one.count for one in ranks[0]] == [one.count for one in even[0]]
    used: list[int] = []
    for parts in zip(*ranks, strict=True):
        assert len({(one.index, one.count, one.share.total, one.largest) for one in parts}) == 1
        assert parts[0].largest == max(one.largest for one in parts) <= least + room
        used += [p for one in parts for p in range(one.start, one.start + one.samples)]
        assert all(0 <= one.start < samples for one in parts)
    assert sorted(used) == list(range(samples))


class Ranks:
    """Several ranks' measurements in one process: each step takes a constant, and a time for each sample."""

    def __init__(self, fixed: list[float], each: list[float], noise: float, total: int, most: int) -> None:
        self.fixed, self.each, self.noise, self.total, self.most = fixed, each, noise, total, most
        self.random = random.Random(0)
        self.uneven = [Uneven(torch.device("cpu"), most) for _ in each]
        self.changes = 0

    @property
    def samples(self) -> tuple[int, ...]:
        return counts(self.uneven[0].shares, self.total, len(self.each), 1)

    def time(self, samples: tuple[int, ...]) -> float:
        return max(a + b * n for a, b, n in zip(self.fixed, self.each, samples, strict=True))

    def round(self) -> None:
        """So many steps as a measurement takes, and what the ranks then agree on."""
        world, held = len(self.each), self.samples
        for rank, one in enumerate(self.uneven):
            for _ in range(WARM_UP + STEPS):
                took = (self.fixed[rank] + self.each[rank] * held[rank]) * self.random.uniform(1, 1 + self.noise)
                one.watch.taken = partial(partial, taken_s, took, ())  # type: ignore[method-assign]
                one.step(held[rank])
        told = [one.proposal(rank, world) for rank, one in enumerate(self.uneven)]
        agreed = [max(slot) for slot in zip(*told, strict=True)]
        changed = {one.agreed(agreed, self.total, 1) for one in self.uneven}
        assert len(changed) == 1 and len({one.shares for one in self.uneven}) == 1, "the ranks disagree"
        self.changes += changed.pop()
        assert sum(self.samples) == self.total


@given(data=st.data(), world=st.integers(2, 5))
def test_ranks_come_to_end_together(data: st.DataObject, world: int) -> None:
    """Whatever their speeds and constant parts, within ten measurements the step is as short as any shares make it,
    but for what a change must gain, and what a measurement is off; no change more than doubles a share's weight."""
    each = data.draw(st.lists(st.floats(1e-3, 1e-2), min_size=world, max_size=world))
    fixed = data.draw(st.lists(st.floats(0.0, 0.05), min_size=world, max_size=world))
    ranks = Ranks(fixed, each, 0.02, 240, 240)
    for _ in range(10):
        before = ranks.uneven[0].shares
        ranks.round()
        now = ranks.uneven[0].shares
        if now is not None:
            old = before.speeds if before is not None else (1.0,) * world
            assert all(1 / BOUND <= new / was <= BOUND for new, was in zip(now.speeds, old, strict=True))
    ideal = (240 + sum(a / b for a, b in zip(fixed, each, strict=True))) / sum(1 / b for b in each)
    assert ranks.time(ranks.samples) <= 1.15 * max(ideal, *fixed) + max(each)


def test_even_ranks_are_left_alone_and_changed_speeds_are_followed() -> None:
    """What differs by a few per cent is no reason to cut the data anew; a rank that slows down by half is."""
    ranks = Ranks([0.001] * 4, [0.001] * 4, 0.04, 64, 64)
    for _ in range(20):
        ranks.round()
    assert ranks.changes == 0 and ranks.uneven[0].shares is None
    ranks.each[1] = 0.003
    for _ in range(6):
        ranks.round()
    assert ranks.samples[1] in (6, 7, 8) and ranks.changes <= 4
    ranks.each[1] = 0.001
    for _ in range(8):
        ranks.round()
    assert max(ranks.samples) <= 17  # one above even: more would be worth a change


def test_a_slot_is_empty_until_enough_was_measured() -> None:
    one = Uneven(torch.device("cpu"), 9)
    assert one.proposal(0, 1) == []
    assert one.proposal(1, 2) == [0, 0, 0, 9]
    assert not one.agreed([5, 0, 9, 9], 16, 1) and one.shares is None


def test_a_watch_leaves_waiting_out() -> None:
    """Own time is up to the last gradient, once more after each exchange, and without an evaluation in between."""
    now = [0.0]
    watch = OwnTime(torch.device("cpu"), lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    watch.start()
    after(2.0)
    watch.arrived()
    after(1.0)
    watch.arrived()
    after(10.0)  # the exchange
    watch.exchanged()
    after(0.5)
    assert watch.taken()() == 3.0
    watch.leave_out(0.25)  # a second model: half a second so far, half of it an evaluation
    after(4.0)
    watch.arrived()
    assert watch.taken()() == 7.25
    watch.start()
    assert watch.taken()() == 0.0


class Kernel:
    """The event at the end of a step's kernels, on a GPU that ends them so many steps later."""

    def __init__(self, now: list[int], behind: int) -> None:
        self._now, self._at = now, now[0] + behind

    def query(self) -> bool:
        return self._now[0] >= self._at

    def elapsed_time(self, end: Kernel) -> float:
        assert end.query(), "torch raises an error"
        return 400.0


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_gpu_that_is_behind_is_measured(behind: int) -> None:
    """Protects `uneven=True` in a loop that never waits for its GPU: a step's time is read once the step is done."""
    one, now = Uneven(torch.device("cpu"), 9), [0]
    for step in range(WARM_UP + STEPS + behind):
        event = Kernel(now, behind)
        one.watch.taken = partial(partial, taken_s, 0.001, [(event, event)])  # type: ignore[method-assign]
        one.step(4)
        now[0] = step + 1
        assert one.proposal(1, 2)[1] == (round(0.1 / UNIT) if step >= WARM_UP + STEPS + behind - 1 else 0)


def test_a_sharded_model_is_refused() -> None:
    """Its ranks wait for each other all the time, so what one measures is not its own."""

    def body() -> None:
        with pytest.raises(ValueError, match=r"uneven=True goes with job\.ddp: in FsdpExchange ranks wait"):
            ones.init(batch=4, uneven=True).fsdp(torch.nn.Linear(2, 2))

    testing.run(body, ranks=1)
