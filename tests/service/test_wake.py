"""An order by hand brings the next tick forward, and nobody makes the companion busy by that."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ones_db import HealthRecord, LeaderRecord, Store
from slurm_ones.cli import by_hand
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import Settings
from slurm_ones.service.daemon import Daemon
from slurm_ones.service.wake import BURST, Waking, wake
from tests.act.plain_job import Passing, Slurm
from tests.waiting import until

INTERVAL_S = 60.0


@pytest.fixture
def site(public: Path) -> Settings:
    """An operator's settings, whose users find their jobs in a folder."""
    (public / "views").mkdir()
    (public / "views").chmod(0o711)
    return Settings(views=public / "views", tick_s=INTERVAL_S)


def waking(settings: Settings, slurm: Slurm) -> Waking:
    found = Waking(clock=slurm.clock)
    found.use(settings)
    found.look()
    return found


def test_who_asks_right_after_the_first_tick_is_seen(site: Settings) -> None:
    """Protects an order that comes before the next of the looks, by whose first one changes are known."""
    assert site.wake_folder is not None
    found = Waking(look_s=600.0).start()
    found.use(site)
    until(site.wake_folder.exists, lambda: "nobody looked", 30.0, 0.01)
    found.close()


class Touched(Passing):
    """A stop in whose waits users touch the directory at these seconds, or all the time."""

    def __init__(self, slurm: Slurm, seconds: float, waking: Waking, settings: Settings, *at: float) -> None:
        super().__init__(slurm, seconds)
        self.begun, self.at, self.waking, self.settings = slurm.clock(), sorted(at), waking, settings
        self.changes = 0

    def wait(self, timeout: float) -> bool:
        ended = super().wait(timeout)
        if not self.at or self._slurm.clock() >= self.begun + self.at[0]:
            self.at = self.at[1:] or ([1e9] if self.at else [])
            assert wake(self.settings)
            # Two touches within a tick of the kernel's clock are one.
            self.changes += 1
            folder = self.settings.wake_folder
            assert folder is not None
            os.utime(folder, ns=(self.changes, self.changes))
        self.waking.look()
        return ended


@pytest.mark.parametrize(
    ("at", "ticks"),
    [
        ((1e9,), [0, 60, 120, 180, 240]),
        ((10.0,), [0, 10, 70, 130, 190, 250]),
        ((2.0,), [0, 6, 66, 126, 186, 246]),  # a moment after the tick before
        ((10.0, 30.0, 50.0), [0, 10, 30, 50, 110, 170, 230, 290]),
    ],
)
def test_an_order_is_seen_at_once(
    slurm: Slurm, site: Settings, store: Store, at: tuple[float, ...], ticks: list[int]
) -> None:
    companion = Companion(site, slurm, store, clock=slurm.clock)
    asked, seen, begun = waking(site, slurm), [], slurm.clock()

    def on_tick(tick: Tick) -> None:
        seen.append(round(slurm.clock() - begun))

    stop = Touched(slurm, ticks[-1] + 30.0, asked, site, *at)
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time, waking=asked).run(stop, on_tick)
    assert seen == ticks


def test_who_asks_all_the_time_gets_one_more_an_interval(slurm: Slurm, site: Settings, store: Store) -> None:
    companion = Companion(site, slurm, store, clock=slurm.clock)
    asked, ticks = waking(site, slurm), list[Tick]()
    stop = Touched(slurm, 100 * INTERVAL_S, asked, site)
    Daemon(lambda: companion, clock=slurm.clock, sleep=slurm.pass_time, waking=asked).run(stop, ticks.append)
    assert 100 < len(ticks) <= 2 * 100 + BURST + 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_user_touches_the_directory_and_puts_nothing_there(slurm: Slurm, site: Settings) -> None:
    asked = waking(site, slurm)
    folder = site.wake_folder
    assert folder is not None and stat.S_IMODE(folder.stat().st_mode) == 0o722
    os.utime(folder, ns=(1, 1))
    asked.look()
    asked.begins()
    slurm.pass_time(INTERVAL_S)
    assert not asked.due(INTERVAL_S)
    tries = "import os, sys\nos.setuid(65534)\nos.utime(sys.argv[1])\nopen(sys.argv[1] + '/file', 'w')"
    done = subprocess.run([sys.executable, "-c", tries, str(folder)], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr and "'/file'" in done.stderr.replace(str(folder), ""), done.stderr
    asked.look()
    assert asked.due(INTERVAL_S)


def test_a_directory_of_another_kind_is_not_believed(slurm: Slurm, site: Settings, tmp_path: Path) -> None:
    """A link in its place, or none at all: the companion looks as often as before."""
    folder = site.wake_folder
    assert folder is not None
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    asked = waking(site, slurm)
    slurm.pass_time(INTERVAL_S)
    for when in (1, 2):
        os.utime(tmp_path / "elsewhere", ns=(when, when))
        asked.look()
    assert not asked.due(INTERVAL_S)
    assert not wake(Settings())


def test_a_users_own_companion_is_woken_through_the_home(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = Settings(scope="own", database="postgresql://ones@nowhere/ones")
    assert not wake(own)
    waking(own, slurm)
    assert wake(own)
    assert own.wake_folder is not None and stat.S_IMODE(own.wake_folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("ago_s", "reached", "said"),
    [
        (10.0, True, "the companion was woken: it looks within 10 s, or in 50 s if it was woken often"),
        (55.0, True, "the companion looks in 5 s"),
        (10.0, False, "the companion looks in 50 s"),
    ],
)
def test_who_gave_an_order_reads_when_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, site: Settings, slurm: Slurm, ago_s: float, reached: bool, said: str
) -> None:
    class Read:
        def __enter__(self) -> Read:
            return self

        def __exit__(self, *_: object) -> None: ...

        def leader(self) -> LeaderRecord:
            return LeaderRecord(1, "host:1", 0.0, 990.0)

        def health(self) -> HealthRecord:
            return HealthRecord(1000.0 - ago_s, "act", INTERVAL_S, 1000.0 - ago_s, 0.5, 1, 2, 2)

    if reached:
        waking(site, slurm)
    monkeypatch.setattr(by_hand, "settings_of", lambda config: site)
    monkeypatch.setattr(by_hand, "store_of_reader", lambda settings: Read())
    monkeypatch.setattr(by_hand.time, "time", lambda: 1000.0)
    assert by_hand.next_look() == said
