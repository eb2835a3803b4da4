"""Creating, upgrading and recognising databases."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import make_url

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
from ones_db.engine import backend_of, transaction
from ones_db.shape import Shape
from ones_db.tables import METADATA
from tests.db.make import ask, change, job, opened, throughput
from tests.db.server import Server


def file_of(url: str) -> Path:
    """The file behind an SQLite URL."""
    return Path(backend_of(url).place)


def ours(item: Any, name: str | None, kind: str, reflected: bool, other: Any) -> bool:
    """What of a database is compared: not a server's partitions, nor the index that it alone has."""
    return not str(name).startswith(("throughput_", "ix_throughput_time"))


def test_migrations_and_models_agree(url: str) -> None:
    """Protects from a model that was changed without its migration."""
    with opened(url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_object": ours})
        assert compare_metadata(context, METADATA) == []
    assert migrate.head() == SCHEMA_REVISION == migrate.current(url)


def test_migrated_tables_are_the_models_tables_to_the_letter(sqlite_url: str, tmp_path: Path) -> None:
    """Protects what alembic's comparison does not look at: checks, partial indexes, tables without row
    ids."""
    made = f"sqlite:///{tmp_path / 'made.sqlite'}"
    engine = backend_of(made).engine("upgrade")
    with transaction(engine, write=True) as connection:
        METADATA.create_all(connection)
    engine.dispose()

    def schema(url: str) -> dict[str, str]:
        rows = ask(url, "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type != 'view'")
        # A table that was made anew by a migration has its name in quotes.
        plain = {name: sql.replace('"', "").replace(",", " , ") for name, sql in rows if "alembic" not in name}
        return {name: " ".join(sql.split()) for name, sql in plain.items()}

    assert schema(sqlite_url) == schema(made)


def test_migrated_tables_of_a_server_are_the_models_to_the_letter(postgresql_url: str, server: Server) -> None:
    """Protects the same of PostgreSQL, comments, partitions' key and index methods included."""
    name = server.fresh()
    engine = backend_of(server.url(name)).engine("upgrade")
    with transaction(engine, write=True) as connection:
        METADATA.create_all(connection)
    engine.dispose()
    only = [f"--table={table}" for table in (*METADATA.tables, "*_id_seq")]

    def schema(database: str) -> list[str]:
        # Who may see what is the views' part, and partitions come with the store.
        odd = ("ATTACH PARTITION", "ROW LEVEL SECURITY", "CREATE POLICY", "GRANT ")
        statements = server.dump(database, "--schema-only", *only).split(";\n")
        return sorted(statement for statement in statements if not any(word in statement for word in odd))

    migrated, made = schema(backend_database(postgresql_url)), schema(name)
    server.drop(name)
    assert migrated == made


def backend_database(url: str) -> str:
    """The name of a server's database."""
    found = make_url(url).database
    assert found is not None
    return found


def test_every_column_and_table_is_explained() -> None:
    """Protects the promise that each column says what it means."""
    for table in METADATA.tables.values():
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


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_several_first_starts_make_one_database(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Protects those who start two companions, or a command beside one, where there is no database yet: each waits
    for its turn, and finds it made."""
    url = f"sqlite:///{tmp_path}/ones.sqlite"
    if kind == "postgresql":
        server: Server = request.getfixturevalue("server")
        url = server.url(server.fresh())
    code = "import sys; from ones_db import Store, migrate; migrate.head(); print(flush=True); input(); "
    code += "migrate.upgrade(sys.argv[1]); Store.open(sys.argv[1], 'here')"
    starts = [
        subprocess.Popen([sys.executable, "-c", code, url], stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True)
        for _ in range(4)
    ]
    for start in starts:
        assert start.stdout is not None and start.stdout.readline() == "\n"
    # All have imported what they need, and begin in the same moment.
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("\n")
        start.stdin.flush()
    assert [start.communicate(timeout=60)[0] for start in starts] == [""] * 4
    assert [start.returncode for start in starts] == [0] * 4
    assert migrate.current(url) == SCHEMA_REVISION


def test_older_schema_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an older database from a companion that would look for columns that are not there."""
    monkeypatch.setattr("ones_db.engine.SCHEMA_REVISION", "9999")
    with pytest.raises(SchemaError, match=r"older than 9999; run `slurm-ones db upgrade`"):
        Store.open(url, "gres")


def test_a_file_is_copied_before_its_upgrade(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a site's data on the way to a newer version."""
    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(1)])
    monkeypatch.setattr("ones_db.migrate.SCHEMA_REVISION", "9999")
    migrate.upgrade(sqlite_url)
    (copy,) = file_of(sqlite_url).parent.glob("*.bak")
    assert ask(f"sqlite:///{copy}", "SELECT job_id FROM jobs") == [(1,)]


def test_an_upgrade_tells_each_step(tmp_path: Path) -> None:
    """Protects who waits for a large database from not knowing how far it is."""
    told: list[str] = []
    migrate.upgrade(f"sqlite:///{tmp_path}/ones.sqlite", lambda revision, what: told.append(f"{revision} {what}"))
    assert told[0].startswith("0001 The first schema")
    assert [line[:4] for line in told] == [f"{n:04d}" for n in range(1, int(SCHEMA_REVISION) + 1)]


def test_the_first_schema_is_upgraded_with_all_that_it_holds(tmp_path: Path) -> None:
    """Protects rows, and what hangs on them, while their table is made anew."""
    url, path = f"sqlite:///{tmp_path}/ones.sqlite", tmp_path / "ones.sqlite"
    engine = backend_of(url).engine("upgrade")
    with transaction(engine, write=True) as connection:
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
        assert store.jobs()[1].comment == "comment" and store.runs(1)[0].shape.nodes == 2
        assert store.deferrals() == {}
        assert store.runs(1)[0].progress is None
        assert store.histories([1])[1].throughput == (ThroughputPoint(Shape(2, 4), 64, 128.0, 5.0),)
        store.add_reports([RunReports(1, 0, 10, 3, lines=[throughput(3, noise=7.0, progress=60.0)])])
        assert store.histories([1])[1].noise == (NoisePoint(7.0, 2003.0),)


def test_newer_schema_is_refused(url: str) -> None:
    """Protects a database of a newer version from being written by, or downgraded to, this one."""
    change(url, "UPDATE alembic_version SET version_num = '9999'")
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


def fails(revision: str, what: str) -> None:
    """A step that cannot be told, once some are done."""
    if revision == "0003":
        raise StoreError("the disk is full, say")


def test_a_failed_upgrade_leaves_nothing(tmp_path: Path) -> None:
    """Protects from half a schema: an upgrade is one transaction, tables included."""
    url = f"sqlite:///{tmp_path}/ones.sqlite"
    with pytest.raises(StoreError, match="full"):
        migrate.upgrade(url, fails)
    assert ask(url, "SELECT count(*) FROM sqlite_master") == [(0,)]
    assert migrate.upgrade(url) == (None, SCHEMA_REVISION)


def test_a_failed_upgrade_of_a_server_leaves_nothing(server: Server) -> None:
    """Protects the same on PostgreSQL."""
    name = server.fresh()
    with pytest.raises(StoreError, match="full"):
        migrate.upgrade(server.url(name), fails)
    assert migrate.current(server.url(name)) is None
    assert migrate.upgrade(server.url(name)) == (None, SCHEMA_REVISION)
    server.drop(name)


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
        ("mysql://me:secret@host/ones", "mysql: no database of a kind"),
        ("postgresql:/me:secret@host/ones", "is not a database URL"),
        ("postgresql://me:secret@/ones?host=/nowhere", "the server is not there"),
        ("postgresql://me@/ones?host=/nowhere&password=secret", "the server is not there"),
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
