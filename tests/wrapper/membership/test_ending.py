"""The end of a rank that lost its peers, with events of a device that is late, or never comes to an end."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from ones_wrapper.devices import streams
from ones_wrapper.devices.streams import DONE_S, END_S, EndTimer, Marks
from ones_wrapper.membership import rescue
from ones_wrapper.membership.rescue import Ending
from ones_wrapper.process.exit_codes import PEER_LOST
from tests.waiting import until

CPU = torch.device("cpu")


class Event:
    """Of a step that is done at a time."""

    def __init__(self, done_at: float) -> None:
        self._done_at = done_at

    def query(self) -> bool:
        return time.monotonic() >= self._done_at


class Rank:
    """Its steps are done so many seconds after the last one was enqueued."""

    def __init__(self, done_in_s: float | None, hangs: bool = False) -> None:
        self.ends: list[int] = []
        self.wrote = self.forgot = self.said = 0
        self._hangs = hangs
        self.ending = Ending(
            CPU, self._write, self._forget, lambda seconds, code: EndTimer(0.4, code, self.ends.append)
        )
        at = time.monotonic() + (done_in_s or 0.0)
        self.ending.marks = Marks(CPU, lambda device: None if done_in_s is None else Event(at))
        self.ending.marks.step()

    def _write(self) -> None:
        self.wrote += 1
        if self._hangs:
            time.sleep(1.5)

    def _forget(self) -> None:
        self.forgot += 1

    def say(self) -> None:
        self.said += 1


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.Marks.done, "__defaults__", (0.2,))
    monkeypatch.setattr(rescue, "WAIT_S", 0.6)
    monkeypatch.setattr(rescue, "END_S", 0.4)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)


@pytest.mark.parametrize(
    ("done_in_s", "mode", "wrote"),
    [(None, "", 1), (0.0, "", 1), (0.1, "", 1), (600.0, "", 0), (0.0, "1", 0), (0.0, "2", 0), (0.0, "3", 1)],
)
def test_only_a_step_that_is_done_is_written(
    done_in_s: float | None, mode: str, wrote: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a model that is behind its progress, nor sums of aborted collectives."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", mode)
    rank = Rank(done_in_s)
    rank.ending.by_script(rank.say)
    assert (rank.wrote, rank.forgot, rank.said) == (wrote, 1 - wrote, 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_after_the_rescue_a_device_is_asked_for_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last report would wait for the collective that never ends."""
    monkeypatch.setattr(rescue, "side_stream", lambda device: nullcontext())
    rank = Rank(0.0)
    rank.ending._device = torch.device(device)
    rank.ending.by_script(rank.say)
    assert (rank.wrote, rank.forgot) == (1, int(device == "cuda"))


def test_a_stream_that_hangs_keeps_a_process_for_15_s_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the times that are shipped."""
    monkeypatch.setattr(rescue, "END_S", END_S)
    allowed: list[float] = []

    class Timer:
        """Notes when the process would be gone."""

        def __init__(self, seconds: float, code: int) -> None:
            self.allow(seconds)

        def allow(self, seconds: float) -> None:
            allowed.append(seconds)

    rank = Rank(600.0)
    rank.ending._deadline = Timer  # type: ignore[assignment]
    rank.ending.by_watch(rank.say, lambda: None)
    assert rank.wrote == 0
    assert allowed == [END_S, END_S]
    assert DONE_S + END_S <= 15.0  # each begins again, the second once the event was waited for


@pytest.mark.parametrize("watch", [True, False])
def test_what_hangs_is_ended(watch: bool) -> None:
    """A copy waits for a collective of the dead: the process is gone, whoever waits in it."""
    rank = Rank(0.0, hangs=True)
    act = (lambda: rank.ending.by_watch(rank.say, lambda: None)) if watch else (lambda: rank.ending.by_script(rank.say))
    threading.Thread(target=act, daemon=True).start()
    assert until(lambda: rank.ends) == [PEER_LOST]


def test_one_thread_writes_and_one_deadline_counts() -> None:
    """The watch notices meanwhile and ends nothing itself."""
    rank, ended = Rank(0.0), []
    rank.ending.by_script(rank.say)
    rank.ending.by_watch(rank.say, lambda: ended.append(1))
    assert (rank.wrote, rank.said, ended) == (1, 1, [])
