"""What is lost and what is doubled when things break in the middle of a call: nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ones_db import RunReports, Store, StoreError, StoreLost
from slurm_ones.companion import Companion
from slurm_ones.config import Settings
from slurm_ones.service.daemon import Daemon
from slurm_ones.slurm.model import Snapshot
from tests.db.make import ask, change, job, report, throughput
from tests.db.server import Server, may_unshare
from tests.waiting import until

SAMPLES = 400
"""Samples of a batch, enough for COPY."""

STUCK = """
CREATE FUNCTION stuck() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN IF NEW.number = 300 THEN PERFORM pg_sleep(60); END IF; RETURN NEW; END $$;
CREATE TRIGGER stuck BEFORE INSERT ON throughput FOR EACH ROW EXECUTE FUNCTION stuck();
"""

BATCH = RunReports(1, 0, 5000, SAMPLES + 1, lines=[throughput(n) for n in range(2, SAMPLES + 2)])


def count(url: str) -> tuple[int, int]:
    """Rows, and rows without their doubles."""
    ((rows, distinct),) = ask(url, "SELECT count(*), count(DISTINCT number) FROM throughput")
    return rows, distinct


def copying(url: str) -> list[tuple[int]]:
    return ask(url, "SELECT pid FROM pg_stat_activity WHERE query LIKE 'COPY throughput%%' AND state = 'active'")


@contextmanager
def in_mid_copy(store: Store, url: str) -> Iterator[list[Exception]]:
    """A batch whose COPY has stored most of its rows and stands still; gives the errors of its call once it ended."""
    change(url, STUCK)
    errors: list[Exception] = []

    def add() -> None:
        try:
            store.add_reports([BATCH])
        except Exception as error:  # shown by the test
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    until(lambda: copying(url))
    yield errors
    thread.join(120)
    assert not thread.is_alive()
    change(url, "DROP FUNCTION stuck() CASCADE")


@pytest.mark.parametrize("whole", [False, True], ids=["its connection", "its server"])
def test_a_copy_that_is_killed(postgresql_url: str, server: Server, whole: bool) -> None:
    """Protects a tick from an administrator's or a network's cut, and from a server that crashes and recovers without
    the batch: nothing of it is stored, then all of it."""
    with Store.open(postgresql_url, "gres") as store:
        store.record_jobs([job(1)])
        report(store, 1, 0, throughput=[throughput(1)], offset=1, number=1)
        with in_mid_copy(store, postgresql_url) as errors:
            if whole:
                server.stop(signal.SIGQUIT)
                with pytest.raises(StoreLost):
                    store.jobs()
                server.start()
            else:
                ((process,),) = copying(postgresql_url)
                ask(postgresql_url, f"SELECT pg_terminate_backend({process})")
        (error,) = errors
        assert isinstance(error, StoreLost) and "next call connects again" in str(error)
        assert count(postgresql_url) == (1, 1)
        assert store.report_positions([1]) == {1: {0: (1, 1)}}
        for _ in range(2):
            store.add_reports([BATCH])
            assert count(postgresql_url) == (SAMPLES + 1, SAMPLES + 1)


def test_a_server_that_is_restarted_between_calls(postgresql_url: str, server: Server) -> None:
    """Protects a companion from a night's maintenance: the next call connects again without an error."""
    with Store.open(postgresql_url, "gres") as store, Store.open(postgresql_url, "gres", read_only=True) as reader:
        store.record_jobs([job(1)])
        assert len(reader.jobs()) == 1
        server.stop()
        server.start()
        store.record_jobs([job(2)])
        assert len(reader.jobs()) == 2


class Quiet:
    """A controller of a cluster without jobs."""

    def snapshot(self) -> Snapshot:
        return Snapshot(0.0, {}, {}, {})


def test_a_companion_outlives_its_server(postgresql_url: str, server: Server) -> None:
    """Protects the jobs that a companion holds from a database that is away for some ticks: it goes on by itself."""
    with Store.open(postgresql_url, "gres") as store:
        companion = Companion(Settings(tick_s=0.05), Quiet(), store)  # type: ignore[arg-type]
        stop, ticks = threading.Event(), []
        thread = threading.Thread(target=lambda: Daemon(lambda: companion).run(stop, ticks.append))
        thread.start()
        try:
            until(lambda: ticks)
            server.stop(signal.SIGQUIT)
            time.sleep(0.5)
            assert thread.is_alive()
            server.start()
            before = len(ticks)
            until(lambda: len(ticks) > before + 1)
        finally:
            stop.set()
            thread.join(120)


def write(url: str) -> None:
    with Store.open(url, "gres") as store:
        store.add_reports([BATCH])


def test_a_writer_killed_in_mid_copy(postgresql_url: str) -> None:
    """Protects from half a batch after `kill -9`, and the next companion from waiting for what the last one asked."""
    with Store.open(postgresql_url, "gres") as store:
        store.record_jobs([job(1)])
        change(postgresql_url, STUCK)
        writer = multiprocessing.get_context("fork").Process(target=write, args=(postgresql_url,))
        writer.start()
        until(lambda: copying(postgresql_url))
        writer.kill()
        writer.join()
        until(lambda: not copying(postgresql_url))
        assert count(postgresql_url) == (0, 0)
        change(postgresql_url, "DROP FUNCTION stuck() CASCADE")
        store.add_reports([BATCH])
        assert count(postgresql_url) == (SAMPLES, SAMPLES)


MANY = 5_000
"""Samples of a batch that takes a good part of a small disk."""


def batch(number: int) -> RunReports:
    """The reports that follow those of `number - 1`."""
    first = 2 + number * MANY
    told = [throughput(n) for n in range(first, first + MANY)]
    return RunReports(1, 0, first, told[-1].number, lines=told)


def fill(store: Store) -> int:
    """Add batches until the disk is full; returns the number of the one that found no place."""
    for number in range(100):
        try:
            store.add_reports([batch(number)])
        except StoreError as error:
            assert "nothing of this call was stored" in str(error), error
            return number
    raise AssertionError("the disk was never full")


def test_a_servers_full_disk(server: Server, empty_postgresql: str) -> None:
    """Protects what was stored from a disk without room, and the batch that met it: it is stored once there is some."""
    if not server.has_small:
        pytest.skip("needs root that may mount a small disk")
    server.psql(f"CREATE TABLESPACE small LOCATION '{server.small}'")
    name = server.fresh(empty_postgresql, "TABLESPACE small")
    url = server.url(name)
    try:
        change(url, "CREATE TABLE ballast AS SELECT repeat('x', 1000) FROM generate_series(1, 22000)")
        with Store.open(url, "gres") as store:
            store.record_jobs([job(1)])
            last = fill(store)
            assert last > 0 and count(url) == (MANY * last, MANY * last)
            change(url, "DROP TABLE ballast")
            server.psql("CHECKPOINT")
            store.add_reports([batch(last)])
            assert count(url) == (MANY * (last + 1), MANY * (last + 1))
    finally:
        server.drop(name)
        server.psql("DROP TABLESPACE small")


FULL = """
import os, sys
from ones_db import Store, migrate
from tests.db.make import job
from tests.db.test_faults import MANY, batch, count, fill

url, ballast = f"sqlite:///{sys.argv[1]}/ones.sqlite", sys.argv[1] + "/ballast"
migrate.upgrade(url)
with open(ballast, "wb") as file:
    file.write(bytes(9 << 20))
with Store.open(url, "gres") as store:
    store.record_jobs([job(1)])
    last = fill(store)
    assert last > 0 and count(url) == (MANY * last, MANY * last)
    os.unlink(ballast)
    store.add_reports([batch(last)])
    assert count(url) == (MANY * (last + 1), MANY * (last + 1))
print("as it should be")
"""


def test_a_file_that_is_gone_takes_no_rows(sqlite_url: str) -> None:
    """Protects a job in the companion's hold: a record in a file without a name is lost with the process."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(1)])
        away = path.rename(path.with_name("away"))
        with pytest.raises(StoreError, match="cannot be opened"):
            store.record_jobs([job(2)])
        away.rename(path)
        store.record_jobs([job(3)])
    assert ask(sqlite_url, "SELECT job_id FROM jobs") == [(1,), (3,)]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not may_unshare(), reason="needs root that may mount a small disk")
def test_a_files_full_disk(tmp_path: os.PathLike[str]) -> None:
    mount = f"mount -t tmpfs -o size=12m tmpfs '{tmp_path}' && exec \"$@\""
    python = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(["unshare", "--mount", "sh", "-c", mount, "sh", *python], capture_output=True, text=True)
    assert done.stdout == "as it should be\n", done.stderr
