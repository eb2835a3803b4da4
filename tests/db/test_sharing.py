"""Several processes on one database, and what is left of one that was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

from ones_db import Store, StoreBusy, StoreError
from tests.db.make import ask, change, job, report, resized_job, throughput

pytestmark = pytest.mark.slow

WRITER = """
import sys
from ones_db import ReportLine, ResizeRecord, RunReports, Store
from ones_db.shape import Shape
from ones_wrapper.protocol import Throughput

store = Store.open(sys.argv[1], "gres")
number = store.begin_resize(ResizeRecord(1, 0, Shape(1, 1), 64, Shape(1, 4), 256, "ordered", 0.0)).id
for n in range(2, 10**9):
    samples = [ReportLine(10 * n + k, 1.0, Throughput(0, n, 0, 64, 1.0, 64, 1.0)) for k in range(10)]
    store.add_reports([RunReports(1, 0, 100 * n, 10 * n + 9, lines=samples)])
    print("reports", n, flush=True)
    store.step_resize(number, f"state {n}", time=float(n), order_number=n)
    print("step", n, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_returned(store: Store, url: str) -> None:
    """Protects the promise that acts rest on: what a call stored is there after `kill -9`, and nothing in
    halves."""
    store.record_jobs([job(1)])
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(41)]
    os.kill(writer.pid, signal.SIGKILL)
    said += writer.stdout.read().splitlines(keepends=True)
    writer.stdout.close()
    writer.wait()
    acknowledged = {"reports": 0, "step": 0}
    for line in said:
        if line.endswith("\n"):
            kind, count = line.split()
            acknowledged[kind] = int(count)
    assert acknowledged["reports"] >= 20
    with Store.open(url, "gres") as again:
        offset, number = again.report_positions([1])[1][0]
        last = offset // 100
        assert acknowledged["reports"] <= last <= acknowledged["reports"] + 1
        assert number == 10 * last + 9
        (resize,) = again.open_resizes()
        reached = resize.order_number or 0
        assert acknowledged["step"] <= reached <= acknowledged["step"] + 1
        assert len(again.resize_steps(resize.id)) == reached
    assert ask(url, "SELECT count(*), count(DISTINCT number) FROM throughput") == [(10 * (last - 1), 10 * (last - 1))]
    if url.startswith("sqlite"):
        assert ask(url, "PRAGMA integrity_check") == [("ok",)]


def test_writes_are_flushed(sqlite_url: str) -> None:
    """Protects from settings under which a power cut undoes a call that returned."""
    with Store.open(sqlite_url, "gres") as store, store._engine.connect() as connection:
        pragmas = ("synchronous", "journal_mode", "foreign_keys")
        found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas}
    assert found == {"synchronous": 2, "journal_mode": "wal", "foreign_keys": 1}


def test_a_server_flushes_what_it_is_told_to(postgresql_url: str) -> None:
    """Protects from a server that was set to answer before it wrote."""
    change(
        postgresql_url,
        "DO $$BEGIN EXECUTE 'ALTER DATABASE ' || quote_ident(current_database()) || "
        "' SET synchronous_commit = off'; END$$",
    )
    with Store.open(postgresql_url, "gres") as store, store._write() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
        assert connection.exec_driver_sql("SHOW fsync").scalar() == "on"


def test_readers_do_not_wait_for_a_writer(store: Store, url: str) -> None:
    """Protects `slurm-ones jobs` while the companion is in the middle of a write, which it must not see."""
    store.record_jobs([job(1)])
    with Store.open(url, "gres", read_only=True) as reader, store._write() as connection:
        connection.exec_driver_sql("UPDATE jobs SET name = 'half'")
        read: list[str] = []
        thread = threading.Thread(target=lambda: read.append(reader.jobs()[1].name))
        thread.start()
        thread.join(timeout=60.0)
        assert read == ["job1"]


def test_fifty_readers_do_not_hold_up_a_writer(store: Store, url: str) -> None:
    """Protects a tick from a class of researchers: fifty questions that stay open, each seeing its own moment."""
    store.record_jobs([job(1)])
    with ExitStack() as stack:
        connections = []
        for _ in range(50):
            reader = stack.enter_context(Store.open(url, "gres", read_only=True))
            connections.append(stack.enter_context(reader._read()))
            assert connections[-1].exec_driver_sql("SELECT count(*) FROM jobs").scalar() == 1
        took = []
        for n in range(2, 12):
            began = time.monotonic()
            report(store, 1, 0, throughput=[throughput(n)], offset=n, number=n)
            store.record_jobs([job(n)])
            took.append(time.monotonic() - began)
        assert median(took) < 1.0  # readers hold up each; a machine that stands still holds up one
        counts = {connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar() for connection in connections}
    assert counts == {1}
    assert len(store.jobs()) == 11


def test_two_writers_take_turns(store: Store, url: str) -> None:
    """Protects a second writer (another cluster's companion, a maintenance command) from losing or
    blocking."""
    store.record_jobs([job(1), job(2)])
    errors: list[Exception] = []

    def write(number: int) -> None:
        try:
            with Store.open(url, "gres") as mine:
                for n in range(2, 32):
                    report(mine, number, 0, throughput=[throughput(n)], offset=n, number=n)
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.report_positions([1, 2]) == {1: {0: (31, 31)}, 2: {0: (31, 31)}}


def test_a_lock_that_is_not_let_go(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the companion from waiting for ever, and says who may be the cause."""
    monkeypatch.setattr("ones_db.backend.BUSY_S", 0.05)
    with Store.open(url, "gres") as other, store._write():
        with pytest.raises(StoreBusy, match="second companion"):
            other.record_jobs([job(1)])
        assert other.jobs() == {}
    store.record_jobs([job(1)])


def test_a_reader_cannot_write(store: Store, url: str) -> None:
    with Store.open(url, "gres", read_only=True) as reader:
        with pytest.raises(StoreError, match="opened for reading"):
            reader.record_jobs([job(1)])
        with pytest.raises(StoreError, match="may not write"), reader._read() as connection:
            connection.exec_driver_sql("DELETE FROM clusters")


READER = """
import os, sys
import sqlalchemy.dialects.sqlite
from ones_db import Store

os.setgid(65534)
os.setuid(65534)

with Store.open(sys.argv[1], "gres", read_only=True) as store:
    print(len(store.job_summaries()), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_users_read_while_the_companion_runs_and_when_it_does_not(empty_sqlite: Path, public: Path) -> None:
    """Protects `slurm-ones jobs` of ordinary users, who may not write where the database lies."""
    url = f"sqlite:///{shutil.copy(empty_sqlite, public / 'ones 100%.sqlite')}"

    def read() -> str:
        reader = subprocess.run(
            [sys.executable, "-c", READER, url], capture_output=True, text=True, check=False, cwd="/"
        )
        return reader.stdout + reader.stderr

    with Store.open(url, "gres") as store:
        resized_job(store)
        assert read() == "1\n"
    assert read() == "1\n"
    with Store.open(url, "gres", read_only=True) as ours:
        ours.jobs()
    assert read() == "1\n"
