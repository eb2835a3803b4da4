"""Databases that earlier releases left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import inspect

from ones_db import SCHEMA_REVISION, Store, migrate
from tests.db.make import ask, job, opened, report, throughput
from tests.db.saved import SAVED
from tests.db.server import Server


@pytest.fixture(params=sorted(path.name for path in SAVED.iterdir()))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The schema and the URL of a database of that release."""
    file = SAVED / request.param
    if file.suffix == ".sqlite":
        shutil.copy(file, tmp_path)
        yield file.stem, f"sqlite:///{tmp_path / file.name}"
    else:
        server: Server = request.getfixturevalue("server")
        name = server.fresh()
        server.psql(file.read_text(), name)
        yield file.stem, server.url(name)
        server.drop(name)


def rows(url: str, columns: dict[str, list[str]]) -> dict[str, list[tuple[object, ...]]]:
    """Those columns of each table, in an order of their own."""
    found = {}
    for table, names in columns.items():
        listed = ", ".join(f'"{name}"' for name in names)
        found[table] = sorted(ask(url, f"SELECT {listed} FROM {table}"), key=repr)
    return found


def test_every_released_schema_is_upgraded(saved: tuple[str, str]) -> None:
    """Protects sites that come from a release: every row and value is there afterwards, and the companion goes on."""
    schema, url = saved
    with opened(url) as connection:
        tables = inspect(connection)
        columns = {
            table: [column["name"] for column in tables.get_columns(table)]
            for table in tables.get_table_names()
            # Until 0008 a month's samples had a partition of their own on PostgreSQL.
            if table != "alembic_version" and not table.startswith("throughput_")
        }
    before = rows(url, columns)
    assert len(before["throughput"]) == 42 and all(before.values())
    assert migrate.upgrade(url) == (schema, SCHEMA_REVISION)
    assert rows(url, columns) == before
    with Store.open(url, "gres") as store:
        assert [summary.job_id for summary in store.job_summaries()] == [7, 8, 9]
        assert store.histories([7])[7].pause_s == 410.0
        assert all(told.spec is None or told.spec.multiple_of == 1 for told in store.histories([7, 8, 9]).values())
        assert store.deferrals() == {9: 5000.0}
        store.record_jobs([job(10)])
        report(store, 10, 0, throughput=[throughput(2)], offset=1, number=2)
        assert store.histories([10])[10].samples == 128


def test_the_present_schema_knows_where_it_came_from() -> None:
    """Protects from a release whose database nobody kept."""
    for schema in ("0004", "0008", "0009"):
        assert {path.suffix for path in SAVED.glob(f"{schema}.*")} == {".sqlite", ".sql"}
