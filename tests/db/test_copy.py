"""Moving a site from one database to another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ones_db import ActionRecord, AlternativeRecord, NodeRecord, RunReports, SchemaError, Store, StoreError, migrate
from ones_db.copy import copy
from ones_db.shape import PARKED, Shape
from tests.db.make import actions, ask, change, decision, job, node_changes, report, resized_job, throughput
from tests.db.server import Server
from tests.marks import nightly

JOBS = 6
SAMPLES = 120
"""Of each job, and so several pages of `PAGE`."""
PAGE = 250


def site(url: str) -> None:
    """What a site has after a while: jobs with all that hangs on them, odd names included, and a zero with a sign."""
    with Store.open(url, "gres") as store:
        for number in range(1, JOBS + 1):
            resized_job(store, number)
        store.record_jobs([job(99, name="Zoë \t\n\\N \x01 \ud800", user="о́льга")])
        made = decision(1.0, 1, 2)
        weighed = (AlternativeRecord(Shape(1, 4), 256, 3.5), AlternativeRecord(PARKED, 0, 0.0))
        store.add_decision(replace(made, score=-0.0, jobs=(replace(made.jobs[0], alternatives=weighed), made.jobs[1])))
        store.record_nodes(1.0, [NodeRecord("n1", "UP", True, 4, "gpu")])
        store.add_action(ActionRecord(1.0, "ops", "run --act", "policy ones"))
        more = [throughput(n, loss=None if n % 3 else 0.1 * n) for n in range(100, 100 + SAMPLES)]
        store.add_reports([RunReports(number, 1, 1000, 800, lines=more) for number in range(1, JOBS + 1)])


BACK = "postgresql to sqlite"
one_way = pytest.mark.parametrize(
    "ways", ["sqlite to postgresql", nightly(BACK), nightly("postgresql to postgresql")], indirect=True
)
"""A copy does the same either way; by day a site is moved both ways."""


@pytest.fixture(params=["sqlite to postgresql", BACK, nightly("postgresql to postgresql")])
def ways(
    request: pytest.FixtureRequest, server: Server, empty_postgresql: str, sqlite_url: str, tmp_path: Path
) -> Iterator[tuple[str, str]]:
    """A source that is empty and a target that is absent, or empty."""
    names = [server.fresh(empty_postgresql), server.fresh()]
    files = [sqlite_url, f"sqlite:///{tmp_path}/target.sqlite"]
    kinds = request.param.split(" to ")
    yield tuple(files[i] if kind == "sqlite" else server.url(names[i]) for i, kind in enumerate(kinds))  # type: ignore[misc]
    for name in names:
        server.drop(name)


def test_a_site_is_moved(ways: tuple[str, str]) -> None:
    """Protects every row on its way to a server and back, and the companion that goes on there."""
    source, target = ways
    site(source)
    said: list[tuple[str, str, int, int]] = []
    moved = copy(source, target, lambda *line: said.append(line), page=PAGE)
    rows = {line.table: line.rows for line in moved}
    assert rows["throughput"] == JOBS * (21 + SAMPLES) and rows["jobs"] == JOBS + 1 and rows["resizes"] == JOBS
    assert all(line.rows == line.copied for line in moved)
    for table in rows:
        assert ask(source, f"SELECT count(*) FROM {table}") == ask(target, f"SELECT count(*) FROM {table}")
    assert ("verified", "throughput", rows["throughput"], rows["throughput"]) in said
    with Store.open(source, "gres") as old, Store.open(target, "gres") as new:
        assert old.jobs() == new.jobs()
        assert old.histories() == new.histories()
        assert old.recent_decisions() == new.recent_decisions()
        assert actions(old) == actions(new) and node_changes(old) == node_changes(new)
        # It goes on: keys that the database gives itself collide with none that came.
        new.record_jobs([job(100)])
        report(new, 100, 0, throughput=[throughput(2)], offset=1, number=2)
        assert new.add_decision(decision(2.0, 100)) > 1
        assert new.histories([100])[100].samples == 128


@one_way
def test_what_is_there_already_is_left_alone(ways: tuple[str, str]) -> None:
    """Protects the switch: the second copy, once the companion has stopped, brings only what came meanwhile."""
    source, target = ways
    site(source)
    copy(source, target, page=PAGE)
    assert {line.copied for line in copy(source, target, page=PAGE)} == {0}
    with Store.open(source, "gres") as store:
        store.record_jobs([job(1, restart=1, state="COMPLETED", end_time=9000.0), job(200)])
        report(store, 200, 0, throughput=[throughput(2)], offset=1, number=2)
    copied = {line.table: line.copied for line in copy(source, target, page=PAGE)}
    assert 0 < copied["throughput"] < 2 * PAGE and copied["jobs"] == JOBS + 2 and copied["resizes"] == 0
    with Store.open(source, "gres", read_only=True) as old, Store.open(target, "gres", read_only=True) as new:
        assert old.jobs() == new.jobs()
        assert old.histories() == new.histories()


@one_way
def test_other_data_is_refused_and_kept(ways: tuple[str, str]) -> None:
    """Protects the database of another site, and what a companion wrote after the switch."""
    source, target = ways
    site(source)
    migrate.upgrade(target)
    with Store.open(target, "other") as store:
        store.record_jobs([job(1)])
    with pytest.raises(StoreError, match="holds other data"):
        copy(source, target)
    change(target, "DELETE FROM jobs")
    change(target, "DELETE FROM clusters")
    copy(source, target)
    with Store.open(target, "gres") as store:
        report(store, 1, 1, throughput=[throughput(900)], offset=2000, number=900)
    with pytest.raises(StoreError, match="holds other data, such as this row of throughput"):
        copy(source, target)
    with Store.open(target, "gres") as store:
        assert store.report_positions([1])[1][1] == (2000, 900)


COPIER = """
import sys
from ones_db.copy import copy


def say(what, table, done, total):
    print(what, table, done, total, flush=True)
    if (what, table) == ("copied", "throughput") and done >= 500:
        sys.stdin.read()  # until it is killed

copy(sys.argv[1], sys.argv[2], say, page=int(sys.argv[3]))
"""


@one_way
def test_a_copy_that_was_killed_goes_on(ways: tuple[str, str]) -> None:
    """Protects a large site from starting again, and a companion from half a database."""
    source, target = ways
    site(source)
    command = [sys.executable, "-c", COPIER, source, target, "25"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    for line in process.stdout:
        if line.startswith("copied throughput 250 "):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.stdout.close()
    process.wait()
    for read_only in (True, False):
        with pytest.raises(SchemaError, match="not finished; run `slurm-ones db copy` again"):
            Store.open(target, "gres", read_only=read_only)
    (there,) = ask(target, "SELECT count(*) FROM throughput")[0]
    assert 250 <= there < JOBS * (21 + SAMPLES)
    moved = {line.table: line for line in copy(source, target, page=25)}
    assert moved["throughput"].copied == moved["throughput"].rows - there
    with Store.open(source, "gres", read_only=True) as old, Store.open(target, "gres", read_only=True) as new:
        assert old.histories() == new.histories()


@one_way
def test_a_copy_of_what_a_companion_writes(ways: tuple[str, str]) -> None:
    """Protects a site that is copied while its companion runs: the copy is of one moment."""
    source, target = ways
    site(source)
    with Store.open(source, "gres") as store:
        number = 900

        def meanwhile(what: str, table: str, done: int, total: int) -> None:
            nonlocal number
            number += 1
            report(store, 1, 1, throughput=[throughput(number)], offset=number, number=number)

        before = ask(source, "SELECT count(*) FROM throughput")
        copy(source, target, meanwhile, page=PAGE)
        assert ask(target, "SELECT count(*) FROM throughput") == before
    copy(source, target, page=PAGE)
    assert ask(target, "SELECT count(*) FROM throughput") == ask(source, "SELECT count(*) FROM throughput")


def test_the_same_database_and_another_schema(sqlite_url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the same database"):
        copy(sqlite_url, sqlite_url)
    other = f"sqlite:///{tmp_path}/other.sqlite"
    with pytest.raises(SchemaError, match="no such database"):
        copy(other, sqlite_url)
    migrate.upgrade(other)
    change(other, "UPDATE alembic_version SET version_num = '0001'")
    with pytest.raises(SchemaError, match="older"):
        copy(other, sqlite_url)
    with pytest.raises(SchemaError, match="older"):
        copy(sqlite_url, other)
