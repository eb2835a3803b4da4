"""Creating, upgrading and recognising databases."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from ones_db import SCHEMA_REVISION, SchemaError, Store, StoreError, migrate
from ones_db.engine import backend_of
from ones_db.query import Reader
from ones_db.tables import METADATA
from slurm_ones.rules.blocks import held_by_us
from tests.db.make import ask, change, opened, resized_job
from tests.db.server import Server

OPENERS: tuple[Callable[[str], object], ...] = (
    lambda url: Store.open(url, "gres"),
    lambda url: Store.open(url, "gres", read_only=True),
    Reader,
)


def file_of(url: str) -> Path:
    """The file behind an SQLite URL."""
    return Path(backend_of(url).place)


def ours(item: Any, name: str | None, kind: str, reflected: bool, other: Any) -> bool:
    """What of a database is compared: not a server's partitions, nor the index that it alone has."""
    return not str(name).startswith(("throughput_", "ix_throughput_time"))


@pytest.mark.parametrize("before", ["", migrate.FIRST])
def test_migrations_and_models_agree(url: str, before: str) -> None:
    """A new database, and one that was upgraded from the oldest schema, have what the models say."""
    if before:
        if url.startswith("postgresql"):
            change(url, "COMMENT ON TABLE jobs IS 'as an older version said'")
            change(url, "COMMENT ON COLUMN jobs.name IS NULL")
        change(url, "DROP TABLE other_gpus")
        change(url, f"UPDATE alembic_version SET version_num = '{before}'")
        assert migrate.upgrade(url) == (before, SCHEMA_REVISION)
    with opened(url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_object": ours})
        assert compare_metadata(context, METADATA) == []
    newest = ScriptDirectory(str(migrate.SCRIPTS)).get_current_head()
    assert newest == SCHEMA_REVISION == migrate.current(url)


def test_holds_of_an_older_companion_stay_ours(url: str) -> None:
    """Protects blocks that wait for another time: what an older companion held would pass for its owner's hold."""
    with Store.open(url, "gres") as store:
        for number in (7, 8, 9):
            resized_job(store, number)
    change(url, "UPDATE resizes SET mechanism = 'blocks', held = CASE id WHEN 1 THEN '1' ELSE '' END, dropped = '2,3'")
    change(url, "UPDATE resizes SET state = 'rolled_back' WHERE id = 3")
    change(url, "DROP TABLE other_gpus")
    change(url, "UPDATE alembic_version SET version_num = '0018'")
    migrate.upgrade(url)
    with Store.open(url, "gres") as store:
        held = [held_by_us([resize]) for resize in store.resizes()]
    assert held == [{1, 2, 3}, {2, 3}, set()]


def test_every_column_and_table_is_explained() -> None:
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


def unmade(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A place of that kind without tables."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/ones.sqlite"
    server: Server = request.getfixturevalue("server")
    return server.url(server.fresh())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_several_first_starts_make_one_database(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Protects those who start two companions, or a command beside one, where there is no database yet: each waits
    for its turn, and finds it made."""
    url, number = unmade(kind, tmp_path, request), 3
    forks = multiprocessing.get_context("fork")
    together = forks.Barrier(number)

    def start() -> None:
        migrate._alembic()
        together.wait(60)
        migrate.upgrade(url)
        Store.open(url, "here")

    starts = [forks.Process(target=start) for _ in range(number)]
    for one in starts:
        one.start()
    for one in starts:
        one.join(60)
    assert [one.exitcode for one in starts] == [0] * number
    assert migrate.current(url) == SCHEMA_REVISION


def test_older_schema_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an older database from a companion that would look for columns that are not there."""
    monkeypatch.setattr("ones_db.engine.SCHEMA_REVISION", "9999")
    for open_ in OPENERS:
        with pytest.raises(SchemaError, match=r"older than 9999; run `slurm-ones db upgrade`"):
            open_(url)


@pytest.fixture
def next_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The next schema, which the migration to it makes: jobs have one more column."""
    scripts = tmp_path / "migrations"
    shutil.copytree(migrate.SCRIPTS, scripts)
    revision = f"{int(SCHEMA_REVISION) + 1:04d}"
    (scripts / "versions" / f"{revision}_next.py").write_text(
        f'''"""One more column."""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{revision}", "{SCHEMA_REVISION}"


def upgrade():
    op.add_column("jobs", sa.Column("more", sa.Text(), nullable=True))
'''
    )
    monkeypatch.setattr(migrate, "SCRIPTS", scripts)
    for module in ("migrate", "engine"):
        monkeypatch.setattr(f"ones_db.{module}.SCHEMA_REVISION", revision)
    return revision


def test_a_database_is_upgraded_with_all_that_it_holds(store: Store, url: str, next_schema: str) -> None:
    """Protects rows on the way to a newer schema, and the copy of a file beforehand; each step is told."""
    resized_job(store, 7)
    store.close()
    before = ask(url, "SELECT * FROM runs"), ask(url, "SELECT * FROM throughput")
    told: list[str] = []
    changed = migrate.upgrade(url, lambda revision, what: told.append(f"{revision} {what}"))
    assert (changed, told) == ((SCHEMA_REVISION, next_schema), [f"{next_schema} One more column"])
    assert (ask(url, "SELECT * FROM runs"), ask(url, "SELECT * FROM throughput")) == before
    assert ask(url, "SELECT job_id, more FROM jobs") == [(7, None)]
    with Store.open(url, "gres") as store:
        assert [summary.job_id for summary in store.job_summaries()] == [7]
    if url.startswith("sqlite"):
        (copy,) = file_of(url).parent.glob("*.bak")
        assert ask(f"sqlite:///{copy}", "SELECT job_id FROM jobs") == [(7,)]


def test_a_copy_is_never_open_to_others(empty_sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens it while it is made could read it later."""
    path = tmp_path / "ones.sqlite"
    shutil.copy(empty_sqlite, path)
    path.chmod(0o600)
    connect = sqlite3.connect

    def connected(place: Any, **options: Any) -> sqlite3.Connection:
        assert "mode=ro" in str(place) or Path(place).stat().st_mode & 0o777 == 0o600
        return connect(place, **options)

    monkeypatch.setattr(sqlite3, "connect", connected)
    copy = backend_of(f"sqlite:///{path}").back_up("1")
    assert copy is not None and Path(copy).stat().st_mode & 0o777 == 0o600


def test_a_failed_upgrade_leaves_what_was_there(url: str, next_schema: str) -> None:
    with pytest.raises(StoreError, match="full"):
        migrate.upgrade(url, fails)
    assert migrate.current(url) == SCHEMA_REVISION and ask(url, "SELECT count(*) FROM jobs") == [(0,)]
    with pytest.raises(StoreError, match="more"):
        ask(url, "SELECT more FROM jobs")
    assert migrate.upgrade(url) == (SCHEMA_REVISION, next_schema)


def test_a_schema_that_cannot_be_upgraded_is_refused(url: str) -> None:
    """Protects whoever has a database of a far older version: it stays as it is, and the error says what to do."""
    change(url, "UPDATE alembic_version SET version_num = '0009'")
    with pytest.raises(SchemaError, match=r"older than .* run `slurm-ones db upgrade`"):
        Store.open(url, "gres")
    with pytest.raises(SchemaError, match=r"0009 is older than .* this version upgrades.*name another"):
        migrate.upgrade(url)
    assert migrate.current(url) == "0009"


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
        for open_ in OPENERS:
            with pytest.raises(SchemaError, match="`slurm-ones db upgrade`"):
                open_(f"sqlite:///{path}")
    assert not missing.exists()


def fails(revision: str, what: str) -> None:
    """A step that cannot be told once it is done."""
    raise StoreError("the disk is full, say")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_failed_upgrade_leaves_nothing(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = unmade(kind, tmp_path, request)
    with pytest.raises(StoreError, match="full"):
        migrate.upgrade(url, fails)
    assert migrate.current(url) is None
    assert migrate.upgrade(url) == (None, SCHEMA_REVISION)


def test_other_programs_files_are_left_alone(tmp_path: Path) -> None:
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
        ("mysql://me:secret@host/ones", "mysql: unknown kind of database"),
        ("postgresql:/me:secret@host/ones", "is not a database URL"),
        ("postgresql://me:secret@[::1/ones", "is not a database URL"),
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
