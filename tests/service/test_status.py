"""`slurm-ones status`, the settings in force, and the figures for Prometheus."""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ones_db import HealthRecord, ResizeRecord, Store
from ones_db.leader import LeaderLock
from ones_db.reasons import reason
from ones_db.records import JobRecord
from ones_db.shape import Shape
from slurm_ones.cli import app
from slurm_ones.cli.status import NEVER, examine, lines
from slurm_ones.companion import Tick
from slurm_ones.config import FIXED_KEYS, ConfigError, ReloadableSettings, Settings, parse
from slurm_ones.jobs.elastic import Observation
from slurm_ones.service import health as service_health
from slurm_ones.service.health import Health, Notifier
from slurm_ones.service.logs import LastErrorHandler
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import Snapshot
from tests.prometheus import free_port

CLI = CliRunner()


def problems(url: str, now: float) -> str:
    return " | ".join(examine(Settings(database=url), ask_slurm=False, now=now).problems)


def test_what_is_wrong_is_told(url: str) -> None:
    with Store.open(url, "here") as store:
        assert problems(url, 1000.0) == NEVER
        with LeaderLock(url, "here") as lock:
            assert lock.take(1000.0) == 1
            store.record_health(HealthRecord(1000.0, "act", 60.0))
            assert problems(url, 1010.0) == ""
            assert problems(url, 1179.0) == ""
            lock.beat(1300.0)
            assert "no tick yet, though" in problems(url, 1300.0)
            store.record_health(HealthRecord(1300.0, "act", 60.0, 1300.0, 0.5, 3, 1, 12))
            assert problems(url, 1310.0) == ""
            lock.beat(1600.0)
            store.record_health(HealthRecord(1600.0, "act", 60.0, 1300.0, 0.5, 3, 1, 12, "no answer", 1590.0))
            told = problems(url, 1600.0)
            assert "the last tick was 5 m 00 s ago, and should come every 60 s" in told
            assert "last error, 10 s ago: no answer" in told
            assert f"{lock.holder} sent its last heartbeat 15 m 00 s ago" in problems(url, 2500.0)
            lock.leave(2600.0)
        assert "the last one stopped 1 m 00 s ago" in problems(url, 2660.0)


def test_a_spool_that_jobs_do_not_read_is_told(url: str) -> None:
    """One job may be its owner's mistake; several are a site that has not published its spool."""
    deaf = reason("spool_not_read", spool="/shared/spool")
    with Store.open(url, "here") as store, LeaderLock(url, "here") as lock:
        lock.take(1000.0)
        store.record_health(HealthRecord(1000.0, "act", 60.0))
        jobs = [
            JobRecord(i, "train", "me", 900.0, Shape(1, 1), state="RUNNING", elastic=False, refusal=deaf)
            for i in (1, 2)
        ]
        store.record_jobs(jobs[:1])
        assert problems(url, 1010.0) == ""
        store.record_jobs(jobs)
        told = (
            "2 jobs do not read the spool, so that no order reaches them: write /shared/spool to /etc/slurm-ones/spool"
        )
        assert told in problems(url, 1010.0)


def test_files_that_do_not_answer_are_told(url: str) -> None:
    silent = [reason("files_silent", problem=f"the file system /{name} has not answered since 12:00") for name in "aab"]
    with Store.open(url, "here") as store, LeaderLock(url, "here") as lock:
        lock.take(1000.0)
        store.record_health(HealthRecord(1000.0, "act", 60.0))
        jobs = [
            JobRecord(i, "train", "me", 900.0, Shape(1, 1), state="RUNNING", elastic=False, refusal=why)
            for i, why in enumerate(silent, 1)
        ]
        store.record_jobs(jobs)
        told = problems(url, 1010.0)
        assert "/a has not answered since 12:00: 2 jobs left alone until it does" in told
        assert "/b has not answered since 12:00: 1 job left alone until it does" in told


def test_where_none_has_run_it_says_what_starts_one(tmp_path: Path) -> None:
    """A fresh login is no fault, though the exit code is that of one."""
    found = examine(Settings(database=f"sqlite:///{tmp_path / 'none.sqlite'}"), ask_slurm=False)
    assert not found.healthy and lines(found, asked=False)[0] == NEVER
    assert NEVER.startswith("no companion has run here yet") and "slurm-ones run --own --act" in NEVER
    silent = replace(found, problems=("Slurm: no answer", NEVER))
    assert lines(silent, asked=False)[:3] == ["NOT HEALTHY", "  Slurm: no answer", f"  {NEVER}"]


def test_for_people_and_for_monitoring(url: str, tmp_path: Path) -> None:
    """Exit code and JSON say the same; what is under way and the last error are shown, without their escapes."""
    config = tmp_path / "ones.toml"
    config.write_text(f'database = "{url}"\n')
    with Store.open(url, "here") as store:
        store.record_jobs([JobRecord(7, "train", "alice", 1.0, Shape(1, 1), elastic=True)])
        store.begin_resize(ResizeRecord(7, 0, Shape(1, 1), 32, Shape(2, 4), 64, "draining", 900.0))
        store.record_health(HealthRecord(1.0, "act", 60.0, 1.0, 0.5, 3, 1, 12, "a \x1b[31mred\x1b[0m word", 1.0))
        with LeaderLock(url, "here") as lock:
            lock.take(1.0)
            done = CLI.invoke(app, ["status", "--no-slurm", "--config", str(config), "--json"])
            shown = CLI.invoke(app, ["status", "--no-slurm", "--config", str(config)])
    assert done.exit_code == shown.exit_code == 1
    told = json.loads(done.stdout)
    assert told["healthy"] is False and told["last"]["gpus"] == 12 and told["leader"]["term"] == 1
    assert told["resizes"][0]["change"] == "1x1 → 2x4, batch 32 → 64"
    assert "job 7 1x1 → 2x4, batch 32 → 64, draining" in shown.stdout and "\x1b[31m" not in shown.stdout


def test_settings_are_read_again_or_refused_as_a_whole(tmp_path: Path) -> None:
    """A bad value, or a key that cannot change, leaves all others too as they were."""
    file = tmp_path / "ones.toml"
    file.write_text("tick_s = 60")
    current = ReloadableSettings(lambda: parse(file.read_text(), "ones.toml"))
    assert current.reload() == []
    file.write_text("tick_s = 30\n[resize]\ndwell_s = 10")
    assert current.reload() == ["tick_s", "resize.dwell_s"]
    for text, words in (
        ("tick_s = 0", "tick_s: Input should be greater than 0"),
        ("tick = 1", "unknown key tick (did you mean tick_s?)"),
        ('tick_s = 5\ncluster = "other"\nclient = "command"', "cluster: cannot change while the companion runs"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            current.reload()
        assert words in str(refused.value)
        assert (current.settings.tick_s, current.settings.resize.dwell_s) == (30, 10)
    assert "client: cannot change" in str(refused.value)
    assert set(FIXED_KEYS) <= set(Settings.model_fields)


def tick() -> Tick:
    return Tick(Observation(Snapshot(0.0, {}, {}, {}), {}), seconds=0.25)


def test_ticks_and_errors_are_written_down(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, with the newest of each; a database that cannot be written to costs nothing but a line in the log."""
    last = LastErrorHandler()
    with Store.open(url, "here") as store:
        monkeypatch.setattr(service_health, "time", SimpleNamespace(time=lambda: 500.0, monotonic=time.monotonic))
        health = Health(Notifier({}), last)
        health.leads(store, Settings(mode="act"))
        assert store.health() == HealthRecord(500.0, "act", 60.0)
        health.ticked(tick())
        assert store.health() == HealthRecord(500.0, "act", 60.0, 500.0, 0.25, 0, 0, 0)
        error = {"name": "daemon", "msg": "no answer", "levelno": logging.ERROR, "created": 490.0}
        last.handle(logging.makeLogRecord(error))
        health.watchdog_ping()
        found = store.health()
        assert found is not None and (found.error, found.error_time, found.tick_time) == (last.text, 490.0, 500.0)
    with Store.open(url, "here", read_only=True) as closed:
        health.leads(closed, Settings())


def test_prometheus_finds_figures_on_this_machine_alone() -> None:
    """At the port that was asked for, not on the network; a port that is taken is a setting that is refused."""
    pytest.importorskip("prometheus_client")
    from slurm_ones.service.metrics import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port := free_port()))
        probe.listen()
        with pytest.raises(ConfigError, match=f"metrics_port: port {port}"):
            serve("127.0.0.1", port)
    figures = serve("127.0.0.1", port)
    figures.ticked(500.0, tick())
    figures.failed(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert "slurm_ones_last_tick_timestamp_seconds 500.0" in text and "slurm_ones_errors_total 1.0" in text
    assert "slurm_ones_ticks_total 1.0" in text and "python_info" not in text


def test_a_reading_error_of_slurm_is_a_problem(url: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def nowhere(settings: Settings) -> None:
        raise Unreachable("scontrol: no answer within 30 s")

    monkeypatch.setattr(sys.modules["slurm_ones.cli.status"], "connect", nowhere)
    with Store.open(url, "here"):
        found = examine(Settings(database=url))
    assert found.problems[0] == "Slurm: scontrol: no answer within 30 s" and len(found.problems) == 2
