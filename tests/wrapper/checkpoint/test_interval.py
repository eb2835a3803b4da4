"""How often to save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.checkpoint import interval
from ones_wrapper.checkpoint.interval import failure_rate, interval_s


def cost(every: float, stall: float, between: float) -> float:
    """Share of time lost at this interval: the stalls, and half an interval at each failure."""
    return stall / every + (every / 2 + stall) / between


@given(st.floats(0.5, 60), st.floats(3_600, 3e6))
def test_interval_loses_about_the_least(stall: float, between: float) -> None:
    """Protects the optimum: no other interval within the bounds loses much less."""
    chosen = interval_s(stall, between)
    best = min(
        cost(min(interval.MOST_S, max(interval.LEAST_S, chosen * 2.0 ** (n / 4))), stall, between)
        for n in range(-12, 13)
    )
    assert cost(chosen, stall, between) <= best * 1.03


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_interval_is_dalys(monkeypatch: pytest.MonkeyPatch, hours: float, minutes: float) -> None:
    """Protects the formula: the optima that the paper gives for dumps of 5 minutes (captions of its figures 3 to 5)."""
    monkeypatch.setattr(interval, "MOST_S", 1e9)
    assert interval_s(300.0, hours * 3_600) / 60 == pytest.approx(minutes, rel=0.006)


@given(st.floats(0, 1e9), st.floats(0, 1e12))
def test_interval_stays_within_bounds(stall: float, between: float) -> None:
    """Protects from figures out of nothing: no stall measured yet, or failures all the time."""
    assert interval.LEAST_S <= interval_s(stall, between) <= interval.MOST_S


@given(st.integers(0, 50), st.floats(0, 1e7), st.integers(1, 512))
def test_failure_rate_rises_with_failures_and_nodes(failures: int, trained_s: float, nodes: int) -> None:
    """Protects the direction: failures raise it, quiet time lowers it, and it is never zero."""
    rate = failure_rate(failures, trained_s, nodes)
    assert 0 < rate < failure_rate(failures + 1, trained_s, nodes)
    assert failure_rate(failures, trained_s + 3_600, nodes) < rate
    assert failure_rate(0, 0.0, 2 * nodes) == pytest.approx(2 * failure_rate(0, 0.0, nodes))


def test_own_failures_outweigh_the_prior() -> None:
    """Protects jobs on bad nodes: five failures in five days on one node are one in a few days, not one in months."""
    assert 1 / failure_rate(5, 5 * 86_400.0, 1) < 6 * 86_400
