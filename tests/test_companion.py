"""The daemon's loop: what a controller that does not answer, or a tick that fails, costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_db import JobRecord, ResizeRecord, Store, migrate
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import ConfigError, Settings
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Snapshot


class Moody:
    """A controller that fails in each of the given ways, and then answers."""

    def __init__(self, *moods: Exception) -> None:
        self.moods = list(moods)

    def snapshot(self) -> Snapshot:
        if self.moods:
            raise self.moods.pop(0)
        return Snapshot(0.0, {}, {}, {})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path / 'ones.sqlite'}"
    migrate.upgrade(url)
    with Store.open(url, "here") as opened:
        yield opened


def test_it_goes_on_after_an_outage_and_after_a_failed_tick(store: Store) -> None:
    """Neither ends the daemon: whoever it holds would stay held."""
    client = Moody(Unreachable("no answer"), ValueError("an odd job"), Unreachable("no answer"))
    companion = Companion(Settings(tick_s=0.01), client, store)  # type: ignore[arg-type]
    stop, ticks = threading.Event(), []

    def on_tick(tick: Tick) -> None:
        ticks.append(tick)
        stop.set()

    companion.run(stop, on_tick)
    assert len(ticks) == 1
    assert not client.moods


def test_it_waits_longer_each_time_but_not_while_a_job_may_be_held(store: Store) -> None:
    """Polite to a controller in trouble, and quick to release once it answers."""
    companion = Companion(Settings(tick_s=60), Moody(), store)  # type: ignore[arg-type]
    waits = [60.0]
    for _ in range(5):
        waits.append(companion._back_off(waits[-1]))
    assert waits == [60, 120, 240, 480, 600, 600]
    store.see_jobs([JobRecord(1, "train", "alice", 0.0, 1, 1, elastic=True)])
    store.begin_resize(ResizeRecord(1, 0, 1, 1, 32, 1, 2, 64, "requeuing", 0.0))
    assert companion._back_off(600.0) == 60


def test_a_policy_or_option_that_does_not_exist_is_refused(store: Store) -> None:
    """At once, and not in the first tick that has a job."""
    with pytest.raises(ConfigError, match="none of ones"):
        Companion(Settings(policy="best"), Moody(), store)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="generations"):
        Companion(Settings(policy_options={"generation": 3}), Moody(), store)  # type: ignore[arg-type]
