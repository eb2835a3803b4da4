"""Creating, upgrading and recognising databases."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from ones_db import (
    SCHEMA_REVISION,
    NoisePoint,
    RunReports,
    SchemaError,
    Store,
    StoreError,
    ThroughputPoint,
    migrate,
)
from ones_db.engine import database_file, open_engine, transaction
from ones_db.models import Base
from tests.db.make import job, throughput


def test_migrations_and_models_agree(url: str) -> None:
    """Protects from a model that was changed without its migration."""
    path = database_file(url)
    with transaction(open_engine(path, "ro"), path) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    assert migrate.head() == SCHEMA_REVISION == migrate.current(url)


def test_migrated_tables_are_the_models_tables_to_the_letter(url: str, tmp_path: Path) -> None:
    """Protects what alembic's comparison does not look at: checks, partial indexes, tables without row
    ids."""
    migrated, made = database_file(url), tmp_path / "made.sqlite"
    engine = open_engine(made, "rwc")
    with transaction(engine, made, write=True) as connection:
        Base.metadata.create_all(connection)
    engine.dispose()

    def schema(path: Path) -> dict[str, str]:
        with sqlite3.connect(path) as connection:
            rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        # A table that was made anew by a migration has its name in quotes.
        plain = {name: sql.replace('"', "").replace(",", " , ") for name, sql in rows if "alembic" not in name}
        return {name: " ".join(sql.split()) for name, sql in plain.items()}

    assert schema(migrated) == schema(made)


def test_every_column_and_table_is_explained() -> None:
    """Protects the promise that each column says what it means."""
    for table in Base.metadata.tables.values():
        assert table.comment, table.name
        for column in table.columns:
            assert column.comment, f"{table.name}.{column.name}"
            if column.name.endswith(("time", "started", "ended", "deadline")):
                assert "Unix seconds" in column.comment, f"{table.name}.{column.name}"


def test_upgrade_creates_and_then_changes_nothing(tmp_path: Path) -> None:
    """Protects the first run (directory and file are made) and the second (no copy, no change)."""
    url = f"sqlite:///{tmp_path}/new 100%/ones.sqlite"
    assert migrate.current(url) is None
    assert migrate.upgrade(url) == (None, SCHEMA_REVISION)
    assert migrate.upgrade(url) == (SCHEMA_REVISION, SCHEMA_REVISION)
    assert list((tmp_path / "new 100%").glob("*.bak")) == []


def set_revision(url: str, revision: str) -> None:
    with sqlite3.connect(database_file(url)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))


def test_older_schema_is_refused_and_copied_before_its_upgrade(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a site's data on the way to a newer version: the command is named, and a copy comes first."""
    with Store.open(url, "gres") as store:
        store.see_jobs([job(1)])
    monkeypatch.setattr("ones_db.schema.SCHEMA_REVISION", "9999")
    monkeypatch.setattr("ones_db.migrate.SCHEMA_REVISION", "9999")
    with pytest.raises(SchemaError, match=r"older than 9999; run `slurm-ones db upgrade`"):
        Store.open(url, "gres")
    migrate.upgrade(url)
    (copy,) = database_file(url).parent.glob("*.bak")
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT job_id FROM jobs").fetchall() == [(1,)]


def test_the_first_schema_is_upgraded_with_all_that_it_holds(tmp_path: Path) -> None:
    """Protects rows, and what hangs on them, while their table is made anew."""
    url, path = f"sqlite:///{tmp_path}/ones.sqlite", tmp_path / "ones.sqlite"
    engine = open_engine(path, "rwc", foreign_keys=False)
    with transaction(engine, path, write=True) as connection:
        command.upgrade(migrate._config(connection), "0001")
    engine.dispose()
    text = ("name", "user_name", "account", "partition", "comment", "work_dir", "refusal", "state", "report_note")
    number = ("id", "cluster_id", "job_id", "submit_time", "requested_nodes", "requested_gpus_per_node", "restart")
    with sqlite3.connect(path) as rows:
        rows.execute("INSERT INTO clusters VALUES (1, 'gres')")
        columns, values = (*number, "elastic", *text), (*(1 for _ in number), True, *text)
        marks = ", ".join("?" for _ in columns)
        rows.execute(f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({marks})", values)
        columns = ("id", "job_id", "restart", "nodes", "gpus_per_node", "report_offset", "report_number")
        rows.execute(f"INSERT INTO runs ({', '.join(columns)}) VALUES (1, 1, 0, 2, 4, 9, 2)")
        rows.execute("INSERT INTO throughput VALUES (1, 2, 5.0, 0, 1, 64, 64, 0.5, 64, 1.0, NULL)")
    assert migrate.upgrade(url) == ("0001", SCHEMA_REVISION)
    with Store.open(url, "gres") as store:
        assert store.jobs()[1].comment == "comment" and store.runs(1)[0].nodes == 2
        assert store.deferrals() == {}
        assert store.runs(1)[0].progress is None
        assert store.histories([1])[1].throughput == (ThroughputPoint(2, 4, 64, 128.0, 5.0),)
        store.add_reports([RunReports(1, 0, 10, 3, throughput=[throughput(3, noise=7.0, progress=60.0)])])
        assert store.histories([1])[1].noise == (NoisePoint(7.0, 2003.0),)


def test_newer_schema_is_refused(url: str) -> None:
    """Protects a database of a newer version from being written by, or downgraded to, this one."""
    set_revision(url, "9999")
    with pytest.raises(SchemaError, match=r"newer than .* install the newer slurm-ones"):
        Store.open(url, "gres", read_only=True)
    with pytest.raises(SchemaError, match="newer"):
        migrate.upgrade(url)


def test_absent_and_empty_databases_say_what_to_run(tmp_path: Path) -> None:
    """Protects the first start from an error without a way out, and from making files by reading."""
    missing, empty = tmp_path / "missing.sqlite", tmp_path / "empty.sqlite"
    empty.touch()
    for path in (missing, empty):
        for read_only in (False, True):
            with pytest.raises(SchemaError, match="run `slurm-ones db upgrade`"):
                Store.open(f"sqlite:///{path}", "gres", read_only=read_only)
    assert not missing.exists()


def test_a_failed_upgrade_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from half a schema: an upgrade is one transaction, tables included."""
    url = f"sqlite:///{tmp_path}/ones.sqlite"

    def fails(*_: object) -> None:
        raise StoreError("the disk is full, say")

    monkeypatch.setattr("ones_db.migrate.revision_of", fails)
    with pytest.raises(StoreError, match="full"):
        migrate.upgrade(url)
    with sqlite3.connect(tmp_path / "ones.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_other_programs_files_are_left_alone(tmp_path: Path) -> None:
    """Protects whatever a mistyped path points at."""
    other, words = tmp_path / "other.sqlite", tmp_path / "words.txt"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    words.write_text("these are no tables " * 100)
    before = words.read_bytes(), other.read_bytes()
    for path, message in ((other, "tables of another program"), (words, "not an SQLite database")):
        with pytest.raises(SchemaError, match=message):
            migrate.upgrade(f"sqlite:///{path}")
        with pytest.raises(SchemaError, match=message):
            Store.open(f"sqlite:///{path}", "gres")
    assert (words.read_bytes(), other.read_bytes()) == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("ones.sqlite", "write sqlite:///PATH"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql://me:secret@host/ones", "SQLite alone"),
    ],
)
def test_bad_urls(bad: str, message: str) -> None:
    """Protects from a URL that would be misread, and keeps passwords out of messages."""
    for call in (lambda: migrate.upgrade(bad), lambda: Store.open(bad, "gres")):
        with pytest.raises(StoreError, match=message) as caught:
            call()
        assert "secret" not in str(caught.value)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """Protects from a traceback where a directory is a file, or the file is a directory."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be created"):
        migrate.upgrade(f"sqlite:///{tmp_path}/file/ones.sqlite")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreError, match="directory"):
        migrate.upgrade(f"sqlite:///{tmp_path}/directory")
