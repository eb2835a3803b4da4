"""Blocks that fork, join and fail again wait longer each time, whoever leads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ones_wrapper.membership.back_off import AGAIN_S, LOST, MOST_AGAIN_S, SOON_S, BackOff
from tests.wrapper.membership.test_plan import member
from tests.wrapper.membership.test_standstill import Clock

TWO = (member(0), member(1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Unix time goes with it."""
    clock, real = Clock(monkeypatch), time.time
    monkeypatch.setattr(time, "time", lambda: real() + clock.ahead)
    return clock


def waited_s(leader: BackOff, clock: Clock) -> float:
    """How long the two blocks wait, about."""
    began = clock.ahead
    while leader.refuses(TWO) and clock.ahead - began < 2 * MOST_AGAIN_S:
        clock.ahead += 1.0
    return clock.ahead - began


def test_a_membership_that_is_lost_at_once_again_and_again_waits(tmp_path: Path, clock: Clock) -> None:
    """A link that every trial passes and every step breaks: all fork, find a leader, which may be another one each
    time, and join. The first loss is free: nodes do go."""
    waits = []
    for turn in range(8):
        leader = BackOff(tmp_path, 7)
        waits.append(round(waited_s(leader, clock)))
        leader.begun(TWO if turn % 2 else TWO[::-1], grown=True)
        clock.ahead += 2.0
        leader.look()
    longest = [min(MOST_AGAIN_S, AGAIN_S * 2.0**n) for n in range(6)]
    assert waits[:2] == [0, 0] and all(abs(waits[2 + n] + 2 - each) <= 1 for n, each in enumerate(longest))


def test_what_lasted_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    """Nodes go now and then in weeks, and Slurm starts blocks again."""
    for _ in range(5):
        leader = BackOff(tmp_path, 7)
        assert not leader.refuses(TWO)
        leader.begun(TWO, grown=True)
        clock.ahead += SOON_S + 1.0
        leader.look()
    for _ in range(3):
        BackOff(tmp_path, 7).begun(TWO, grown=True)
    assert BackOff(tmp_path, 7).refuses(TWO)
    assert not BackOff(tmp_path, 7).refuses((member(0), member(2)))
    assert not BackOff(tmp_path, 8).refuses(TWO), "the directory was another job's"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"array": 7}', '{"array": 7, "losses": {"0.0+1.0": [3]}}', '{"array": 7, "losses": 1}',
             '{"array": 7, "losses": {"0.0+1.0": ["a", 0]}}', '{"array": 7, "losses": {"0.0+1.0": [1e999, 0]}}'],
)  # fmt: skip
def test_a_file_that_is_not_sound_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / LOST).write_text(text)
    leader = BackOff(tmp_path, 7)
    assert not leader.refuses(TWO)
    leader.begun(TWO, grown=True)
    assert json.loads((tmp_path / LOST).read_text())["losses"]["0.0+1.0"][0] == 1


def test_a_file_of_the_future_holds_nobody_for_ever(tmp_path: Path, clock: Clock) -> None:
    """Nodes' clocks differ."""
    (tmp_path / LOST).write_text(json.dumps({"array": 7, "losses": {"0.0+1.0": [99, time.time() + 1e6]}}))
    assert waited_s(BackOff(tmp_path, 7), clock) <= MOST_AGAIN_S + 1
