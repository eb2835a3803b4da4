"""One acting companion: the daemon acts while it leads, and nothing reaches Slurm or a job without the lead."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ones_db import JobRecord, NotLeader, ResizeRecord, Store, StoreLost
from ones_db.shape import Shape
from ones_wrapper.protocol import ORDERS
from slurm_ones.act.transitions import State
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import ConfigError, Settings
from slurm_ones.service.daemon import PING_S, Daemon
from slurm_ones.slurm.client import READS, SlurmClient, leader_only
from slurm_ones.slurm.model import JobState, Task
from tests.act.plain_job import Passing, PlainJob, Slurm


class Seasons:
    """A lead by the clock: held from each `since` to its `until`. As the real one, it says once that it was lost."""

    wait_s = 2.0

    def __init__(self, clock: Callable[[], float], *spans: tuple[float, float]) -> None:
        self._clock = clock
        self._began = clock()
        self._spans = spans
        self._mine: tuple[float, float] | None = None
        self.left = 0

    def _now(self) -> tuple[float, float] | None:
        now = self._clock() - self._began
        return next((span for span in self._spans if span[0] <= now < span[1]), None)

    def take(self) -> bool:
        if self._mine is not None and self._now() != self._mine:
            self._mine = None
            return False
        self._mine = self._now()
        return self._mine is not None

    def check(self) -> None:
        if self._mine is None or self._now() != self._mine:
            raise NotLeader("another one leads")

    def leave(self) -> None:
        self.left += 1


def maker(slurm: Slurm, url: str, **settings: Any) -> tuple[Callable[[], Companion], list[Companion]]:
    """What makes companions over stores of their own, and those that it made."""
    made: list[Companion] = []

    def make() -> Companion:
        made.append(Companion(Settings(**settings), slurm, Store.open(url, "here"), clock=slurm.clock))
        return made[-1]

    return make, made


def test_one_that_does_not_lead_does_nothing(slurm: Slurm, url: str) -> None:
    """Protects jobs from two companions: it asks for the lead and waits, ticks from the moment it has it, and is made
    anew each time, since what it knew may be old. What it does not have it does not give back by leaving jobs."""
    make, made = maker(slurm, url, tick_s=10)
    began, ticks = slurm.clock(), list[float]()
    lead = Seasons(slurm.clock, (20, 55), (80, 101))
    stop = Passing(slurm, 130)
    daemon = Daemon(make, lead=lead, clock=slurm.clock, sleep=slurm.pass_time)
    daemon.run(stop, lambda tick: ticks.append(slurm.clock() - began))
    assert ticks == [20, 30, 40, 50, 80, 90, 100]
    assert len(made) == 2 and lead.left == 1


def test_the_lead_may_change_hands_in_a_moment(slurm: Slurm, url: str) -> None:
    """Protects from a companion that lost the lead and had it back before it looked: it is made anew."""
    make, made = maker(slurm, url, tick_s=10)
    lead = Seasons(slurm.clock, (0, 15), (15, 60))
    Daemon(make, lead=lead, clock=slurm.clock).run(Passing(slurm, 50))
    assert len(made) == 2


def test_a_lead_of_which_nobody_can_say(slurm: Slurm, url: str) -> None:
    """Protects the daemon from a database that is away while it stands by: it asks again."""
    make, made = maker(slurm, url, tick_s=10)

    class Away(Seasons):
        def take(self) -> bool:
            if self._clock() < self._began + 30:
                raise StoreLost("the server is not there")
            return super().take()

    Daemon(make, lead=Away(slurm.clock, (0, 100)), clock=slurm.clock).run(Passing(slurm, 50))
    assert len(made) == 1


def under_way(slurm: Slurm, store: Store, directory: Path, state: State) -> int:
    """A job that is held by us in the middle of a resize; the resize's id."""
    slurm.add(PlainJob(directory, Shape(1, 1)))
    job = slurm.job(1)
    store.record_jobs([JobRecord(1, "train", "me", job.submit_time, Shape(1, 1), elastic=True)])
    now = slurm.clock()
    record = ResizeRecord(1, 0, Shape(1, 1), 32, Shape(1, 2), 64, state.value, now, order_number=1, deadline=now + 60)
    return store.begin_resize(record).id


def test_one_that_lost_the_lead_in_a_tick_gives_no_order(
    slurm: Slurm, url: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Protects from the broad `except` that keeps one odd job from holding up others: losing the lead is none of
    those. Nothing is written for the job, nothing asked of Slurm, nothing stored, and the next tick is another's."""
    under_way(slurm, store, tmp_path, State.DRAINING)
    lead = Seasons(slurm.clock)

    class Late(Seasons):
        def take(self) -> bool:
            return super().take() or True if not ticks and not asked else super().take()

    asked: list[str] = []
    ticks: list[Tick] = []

    def check() -> None:
        asked.append("check")
        lead.check()

    late = Late(slurm.clock)
    settings = Settings(tick_s=10, mode="act", stop_file=tmp_path / "stop")
    made = Companion(settings, slurm, store, clock=slurm.clock, check=check)
    with caplog.at_level(logging.WARNING):
        Daemon(lambda: made, lead=late, clock=slurm.clock, sleep=slurm.pass_time).run(Passing(slurm, 30), ticks.append)
    assert asked == ["check"] and not ticks
    assert not (tmp_path / ORDERS).exists() and not list(tmp_path.glob("**/orders*"))
    (resize,) = store.resizes(1)
    assert resize.state == State.DRAINING and resize.ended is None
    assert slurm.jobs[1].state is JobState.RUNNING
    assert "another one leads" in caplog.text and "Traceback" not in caplog.text


CHANGES: dict[str, tuple[Any, ...]] = {
    "submit": (Path("job.sh"),),
    "requeue_hold": (1,),
    "hold": (1,),
    "reshape": (1, Shape(1, 2)),
    "release": (1,),
    "defer": (1, 5.0),
    "signal": (1, "USR1"),
    "hold_waiting": (1,),
    "reuse": (Task(1, 2),),
    "throttle": (1, 0),
    "few_switches": (1, 1),
    "cancel_waiting": (1,),
}


class Recorder:
    """A client that does nothing and remembers what it was asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Callable[..., None]:
        return lambda *arguments, **options: self.calls.append(call)


def test_every_call_is_a_read_or_fenced() -> None:
    """Protects a call that a later client brings from going past the fence without a thought."""
    calls = {name for name, member in inspect.getmembers(SlurmClient) if not name.startswith("_")}
    assert calls == READS | set(CHANGES) and READS.isdisjoint(CHANGES)


@pytest.mark.parametrize("call", [*sorted(CHANGES), "of_tomorrow"])
def test_no_change_without_the_lead(call: str) -> None:
    """Protects Slurm from each kind of command of one that does not lead; one that loses the lead while Slurm obeys
    finds out."""
    client, answers = Recorder(), [False]

    def check() -> None:
        if not answers.pop(0):
            raise NotLeader("another one leads")

    fenced = leader_only(client, check)  # type: ignore[arg-type]
    with pytest.raises(NotLeader):
        getattr(fenced, call)(*CHANGES.get(call, ()))
    assert client.calls == [] and answers == []
    answers += [True, True]
    getattr(fenced, call)(*CHANGES.get(call, ()))
    assert client.calls == [call]
    answers[:] = [True, False]
    with pytest.raises(NotLeader):
        getattr(fenced, call)(*CHANGES.get(call, ()))
    assert answers == []


def test_reading_asks_nobody() -> None:
    """Protects the number of questions: one that only looks may."""
    client = Recorder()

    def never() -> None:
        raise AssertionError

    fenced = leader_only(client, never)  # type: ignore[arg-type]
    fenced.version(), fenced.config(), fenced.snapshot(), fenced.job(1), fenced.details([1])
    assert client.calls == ["version", "config", "snapshot", "job", "details"] and fenced.name == "recorder"


def test_a_reload_makes_the_companion_anew(slurm: Slurm, url: str) -> None:
    """Protects the settings in force from a bad file; a good one counts from the next tick, which does not wait for
    the interval."""
    tick_s, faults, made = [10.0], list[str](), list[Companion]()

    def make() -> Companion:
        if faults:
            raise ConfigError(faults.pop())
        made.append(Companion(Settings(tick_s=tick_s[0]), slurm, Store.open(url, "here"), clock=slurm.clock))
        return made[-1]

    began, ticks = slurm.clock(), list[float]()
    daemon = Daemon(make, clock=slurm.clock, sleep=slurm.pass_time, watchdog_ping=lambda: None)

    def on_tick(tick: Tick) -> None:
        ticks.append(slurm.clock() - began)
        if len(ticks) == 3:
            faults.append("ones.toml: unknown key polcy")
            daemon.reload()
        if len(ticks) == 5:
            tick_s[0] = 25.0
            daemon.reload()

    daemon.run(Passing(slurm, 100), on_tick)
    assert ticks == [0, 10, 20, 20, 30, 30, 55, 80]
    assert [one.settings.tick_s for one in made] == [10.0, 25.0] and not faults


def test_a_companion_that_cannot_be_made_at_all_is_said_at_once(url: str) -> None:

    def make() -> Companion:
        raise ConfigError("polcy")

    with pytest.raises(ConfigError):
        Daemon(make).run(Passing(Slurm(), 10))


def test_the_pulse_is_felt(slurm: Slurm, url: str) -> None:
    """Protects a healthy daemon from its watchdog: in a wait of minutes, of one that leads or stands by, it is felt
    each `PING_S` seconds; and the ticks come when they would without it."""
    make, _ = maker(slurm, url, tick_s=60)
    began, felt, ticks = slurm.clock(), list[float](), list[float]()
    daemon = Daemon(
        make,
        lead=Seasons(slurm.clock, (30, 1000)),
        watchdog_ping=lambda: felt.append(slurm.clock()),
        clock=slurm.clock,
        sleep=slurm.pass_time,
    )
    stop = Passing(slurm, 400)
    daemon.run(stop, lambda tick: ticks.append(slurm.clock() - began))
    assert max(later - earlier for earlier, later in itertools.pairwise(felt)) <= PING_S
    assert max(stop.waits) == PING_S and ticks == [30, 90, 150, 210, 270, 330, 390]
