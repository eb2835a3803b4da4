"""The daemon's loop: what a controller that does not answer, or a tick that fails, costs."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ones_db import JobRecord, ResizeRecord, Store, StoreBusy
from ones_db.shape import Shape
from slurm_ones.act.transitions import NEEDS_COMPANION, State
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import ConfigError, Settings
from slurm_ones.policy.contract import Policy
from slurm_ones.rivals.ordered import Fifo
from slurm_ones.service import daemon
from slurm_ones.service.daemon import Daemon, SignalStop
from slurm_ones.service.leadership import Election
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import JobState, Snapshot
from tests.act.plain_job import Passing, PlainJob, Slurm


class Moody:
    """A controller that fails in each of the given ways, and then answers."""

    def __init__(self, *moods: Exception) -> None:
        self.moods = list(moods)

    def snapshot(self) -> Snapshot:
        if self.moods:
            raise self.moods.pop(0)
        return Snapshot(0.0, {}, {}, {})


def test_it_goes_on_after_an_outage_and_after_a_failed_tick(store: Store) -> None:
    """Neither ends the daemon: whoever it holds would stay held."""
    client = Moody(Unreachable("no answer"), ValueError("an odd job"), Unreachable("no answer"))
    companion = Companion(Settings(tick_s=0.01), client, store)  # type: ignore[arg-type]
    stop, ticks = threading.Event(), []

    def on_tick(tick: Tick) -> None:
        ticks.append(tick)
        stop.set()

    Daemon(lambda: companion).run(stop, on_tick)
    assert len(ticks) == 1
    assert not client.moods


def test_no_garbage_is_collected_within_a_tick(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it is again, also if the tick failed."""
    client = Moody(Unreachable("no answer"))
    enabled: list[bool] = []
    monkeypatch.setattr(client, "snapshot", lambda ask=client.snapshot: (enabled.append(gc.isenabled()), ask())[1])
    companion = Companion(Settings(), client, store)  # type: ignore[arg-type]
    with pytest.raises(Unreachable):
        companion.tick()
    assert gc.isenabled()
    companion.tick()
    assert enabled == [False, False] and gc.isenabled()


def test_it_waits_longer_each_time_but_not_while_a_job_may_be_held(store: Store) -> None:
    companion = Companion(Settings(tick_s=60), Moody(), store)  # type: ignore[arg-type]
    daemon, waits = Daemon(lambda: companion), [60.0]
    for _ in range(5):
        waits.append(daemon._back_off(companion, waits[-1]))
    assert waits == [60, 120, 240, 480, 600, 600]
    store.record_jobs([JobRecord(1, "train", "alice", 0.0, Shape(1, 1), elastic=True)])
    store.begin_resize(ResizeRecord(1, 0, Shape(1, 1), 32, Shape(1, 2), 64, "requeuing", 0.0))
    assert daemon._back_off(companion, 600.0) == 60


def test_a_reload_is_not_forgotten_when_it_fails(store: Store) -> None:
    """The settings before would stay in force, though the log says that new ones are: `mode = "advise"`, say."""
    made: list[int] = []
    stop, ticks = threading.Event(), []

    def make() -> Companion:
        made.append(len(made))
        if len(made) == 2:
            raise StoreBusy("locked by another process")
        return Companion(Settings(tick_s=0.01), Moody(), store)  # type: ignore[arg-type]

    daemon = Daemon(make)

    def on_tick(tick: Tick) -> None:
        ticks.append(tick)
        if len(ticks) == 1:
            daemon.reload()
        if len(made) > 2 or len(ticks) == 5:
            stop.set()

    daemon.run(stop, on_tick)
    assert (len(made), len(ticks)) == (3, 2)


def test_a_policy_or_option_that_does_not_exist_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"none of .*\bones\b"):
        Companion(Settings(policy="best"), Moody(), store)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="generations"):
        Companion(Settings(policy_options={"generation": 3}), Moody(), store)  # type: ignore[arg-type]


class StandsBy(Election):
    """Another companion leads."""

    wait_s = 0.01

    def take(self) -> bool:
        return False


LINES = 120
"""Of the daemon and of its stop, in which it waits more than once."""


def run_until_a_signal_at(number: int) -> None:
    """A daemon, in this process, that is sent SIGTERM as it is about to execute this line."""
    stop, lines = SignalStop(), 0
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wake_at_signals()

    def at(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return at

    files = {threading.__file__, daemon.__file__}
    sys.settrace(lambda frame, *_: at if frame.f_code.co_filename in files else None)
    Daemon(pytest.fail, lead=StandsBy()).run(stop)


@pytest.mark.slow
def test_a_signal_ends_it_at_any_line() -> None:
    """Of a `threading.Event`, whose lock `wait` holds in 17 of 27 lines, `set` in a handler waits for that lock for
    ever."""
    for number in range(1, LINES + 1):
        pid, began = os.fork(), time.monotonic()
        if pid == 0:
            signal.alarm(60)
            run_until_a_signal_at(number)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0 and time.monotonic() - began < 30.0, f"line {number}: {status}"


@pytest.mark.slow
def test_time_may_be_virtual(slurm: Slurm, store: Store) -> None:
    """Hours of ticks pass in no time, by the clock that was given and through the stop alone."""
    stop, ticks = Passing(slurm, 7_200.0), []
    companion = Companion(Settings(tick_s=60), slurm, store, clock=slurm.clock)
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time).run(stop, ticks.append)
    assert len(ticks) == 120 and set(stop.waits) == {60.0}


def draining(slurm: Slurm, store: Store, directory: Path) -> Companion:
    """A companion over a job that runs and is to be drained: nobody reports, so the drain is called off in 20 s."""
    slurm.add(PlainJob(directory, Shape(1, 1)))
    now = slurm.clock()
    store.record_jobs([JobRecord(1, "train", "me", slurm.job(1).submit_time, Shape(1, 1), elastic=True)])
    drain = ResizeRecord(1, 0, Shape(1, 1), 32, Shape(1, 2), 64, "draining", now)
    store.begin_resize(replace(drain, order_number=round(now * 1000), deadline=now + 20))
    settings = Settings(tick_s=60, mode="act", stop_file=directory / "stop", resize={"advance_s": 2.5})
    return Companion(settings, slurm, store, clock=slurm.clock)


def test_resizes_under_way_are_looked_at_between_ticks(slurm: Slurm, store: Store, tmp_path: Path) -> None:
    """Every advance_s, in virtual time too, until none is left; the next tick comes when it is due."""
    companion = draining(slurm, store, tmp_path)
    stop = Passing(slurm, 130.0)
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time).run(stop)
    (resize,) = store.resizes(1)
    assert str(resize.outcome) == "no checkpoint in time"
    assert stop.waits == [2.5] * 9 + [37.5, 60.0, 60.0]


def test_a_clock_that_is_set_back_keeps_no_tick_away(
    slurm: Slurm, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, ticks = Passing(slurm, 130.0), []
    companion = Companion(Settings(tick_s=60), slurm, store, clock=slurm.clock)
    monkeypatch.setattr(companion, "advance", lambda only=None: 1)

    def clock() -> float:
        return slurm.clock() - 3600.0 * bool(stop.waits)

    Daemon(lambda: companion, clock=clock, sleep=slurm.pass_time).run(stop, ticks.append)
    assert len(ticks) == 3


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_clock_that_is_set_back_delays_no_end(
    slurm: Slurm, store: Store, monkeypatch: pytest.MonkeyPatch, ticks: int
) -> None:
    """Though a resize never ends: whoever is held would stay held until systemd kills the daemon."""
    begun, limits = slurm.clock(), {"drain_timeout_s": 30, "leave_s": 20}
    companion = Companion(Settings(tick_s=60, resize=limits), slurm, store, clock=slurm.clock)
    monkeypatch.setattr(companion, "advance", lambda only=None: 1)

    def clock() -> float:
        return slurm.clock() - 3600.0 * (slurm.clock() > begun + 5)

    Daemon(lambda: companion, clock=clock, sleep=slurm.pass_time).run(Passing(slurm, 10_000.0 * ticks), ticks=ticks)
    assert slurm.clock() - begun < 100


def test_some_ticks_leave_no_job_that_waits_for_a_companion(slurm: Slurm, store: Store, tmp_path: Path) -> None:
    """Under cron: a job that was drained waits a minute for its requeue, and the next run comes in five."""
    companion = draining(slurm, store, tmp_path)
    stop, ticks = Passing(slurm, 1000.0), []
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time).run(stop, ticks.append, ticks=1)
    (resize,) = store.resizes(1)
    assert len(ticks) == 1 and str(resize.outcome) == "no checkpoint in time"
    assert sum(stop.waits) == pytest.approx(20, abs=3)


def test_some_ticks_leave_a_job_to_the_queue(slurm: Slurm, store: Store, tmp_path: Path) -> None:
    """One that waits for GPUs or trains needs nobody: the next run looks at it."""
    for state in (State.WAITING, State.STARTING, State.JOINING):
        assert state not in NEEDS_COMPANION
    companion = draining(slurm, store, tmp_path)
    (resize,) = store.open_resizes()
    for state in ("requeuing", "reshaping", "releasing", "waiting"):
        store.step_resize(resize.id, state, time=slurm.clock(), deadline=slurm.clock() + 300)
    slurm.cluster.requeue(1, hold=False)
    slurm.cluster.set_begin(1, slurm.clock() + 5000)
    stop = Passing(slurm, 1000.0)
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time).run(stop, ticks=1)
    assert stop.waits == []


def test_some_ticks_end_though_each_fails_or_another_leads(store: Store) -> None:
    """Runs of cron must not pile up."""

    class Other(Election):
        def take(self) -> bool:
            return False

    client = Moody(Unreachable("no answer"), ValueError("odd"), Unreachable("no answer"))
    companion = Companion(Settings(tick_s=0.01), client, store)  # type: ignore[arg-type]
    ticks: list[Tick] = []
    Daemon(lambda: companion).run(threading.Event(), ticks.append, ticks=2)
    assert ticks == [] and len(client.moods) == 1
    Daemon(lambda: companion, lead=Other()).run(threading.Event(), ticks.append, ticks=2)
    assert ticks == [] and len(client.moods) == 1


def test_a_policy_of_the_callers_own(store: Store) -> None:
    made: list[Policy] = []

    def make() -> Policy:
        made.append(Fifo())
        return made[-1]

    companion = Companion(Settings(policy="oracle"), Moody(), store, make=make)  # type: ignore[arg-type]
    assert companion._policy("gpu") is companion._policy("gpu") is made[-1]
    assert companion._policy("other") is made[-1] is not companion._policy("gpu")


def test_a_companion_that_is_stopped_lets_jobs_start(slurm: Slurm, store: Store, tmp_path: Path) -> None:
    """What it kept from starting need not wait for its lease to end; an owner's own begin stays."""
    for job_id in (1, 2):
        slurm.add(PlainJob(tmp_path / str(job_id), Shape(1, 1)), running=False)
        store.record_jobs([JobRecord(job_id, "train", "me", 1.0, Shape(1, 1), elastic=True)])
    begin = slurm.clock() + 5000.0
    slurm.cluster.set_begin(2, begin)
    until = slurm.clock() + 800.0
    slurm.defer(1, until)
    for job_id in (1, 2):
        store.set_deferral(job_id, until)
    stop = threading.Event()
    stop.set()
    companion = Companion(Settings(), slurm, store, clock=slurm.clock)
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time).run(stop)
    assert store.deferrals() == {}
    slurm.pass_time(1)
    assert slurm.jobs[1].state is JobState.RUNNING and slurm.jobs[2].begin == begin


def test_a_lease_outlasts_some_ticks() -> None:
    assert Settings().deferral_s == 900
    assert Settings(tick_s=600).deferral_s == 1800
