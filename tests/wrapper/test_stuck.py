"""The search for ranks that wait for each other for ever: while a rank trains it costs it no thread and no file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_wrapper.membership.board import Board
from ones_wrapper.membership.link import Link
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.script import stuck
from ones_wrapper.script.stuck import PREFIX, Counts, Watch
from tests.waiting import until


class Rank:
    """Rank 0 of two, in a step; the other one writes what it waits for."""

    def __init__(self, directory: Path) -> None:
        self.steps, self.found = 4, list[tuple[str, int]]()
        self.own, self.other = directory / f"{PREFIX}0", directory / f"{PREFIX}1"
        self.watch = Watch(directory, 0, 2, "here", self.now, lambda *found: self.found.append(found))

    def now(self) -> Counts:
        return self.steps, self.steps, self.steps, 0.01

    def is_behind(self) -> None:
        self.other.write_text(f"here\n1\n{self.steps}\n{self.steps + 1}\n{self.steps + 1}\n\n (a.py:9)")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(stuck, "STILL_S", 0.3)
    monkeypatch.setattr(Watch, "POLL_S", 0.05)
    made = Rank(tmp_path)
    yield made
    made.watch.close()


def comparing() -> int:
    return [one.name for one in threading.enumerate()].count("ones-places")


def test_a_rank_that_trains_has_no_thread_and_reads_no_file(rank: Rank) -> None:
    rank.is_behind()
    until_s = time.monotonic() + 3 * stuck.STILL_S
    while time.monotonic() < until_s:
        rank.watch.look()
        assert not comparing() and not rank.own.exists() and not rank.found
        rank.steps += 1
        time.sleep(stuck.Watch.POLL_S)


def test_files_that_hang_hold_up_nobody_who_looks(rank: Rank) -> None:
    """A heartbeat's thread looks, whose rank would count as lost. Once there is progress, nothing of it is left."""
    os.mkfifo(rank.other)
    until(lambda: rank.watch.look() or comparing())
    until(rank.own.exists)
    before = time.monotonic()
    for _ in range(10):
        rank.watch.look()
    assert time.monotonic() - before < 0.2 and comparing() == 1
    rank.steps += 1
    os.close(os.open(rank.other, os.O_WRONLY))  # the file system is back
    until(lambda: not comparing())
    assert not rank.own.exists()
    rank.other.unlink()
    rank.is_behind()
    until(lambda: rank.watch.look() or rank.found)


@pytest.mark.parametrize("over", [False, True])
def test_the_thread_of_the_heartbeats_looks(rank: Rank, over: bool) -> None:
    """Also after the training, when a rank may wait for others in the script's own evaluation."""
    board = Board.hosted(JobNetwork.here(), 0)
    link = Link(board.again(), "1.0-0", lambda: False, lambda why: None)
    link.watch = rank.watch
    link.start()
    if over:
        link.stop()
        time.sleep(0.3)
    rank.is_behind()
    until(lambda: rank.found)
    assert "rank 0 made 1 backward pass(es) fewer than rank 1" in rank.found[0][0]
    time.sleep(0.3)
    assert len(rank.found) == 1
    link.stop()
    rank.watch.close()
    link.join(5.0)
    assert not link.is_alive()
