"""Which database a URL names, transactions over it, whether its schema is this version's, and rows that may be there
already. Nothing here needs alembic, so that commands start quickly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import Connection, Engine, Table, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from ones_db.backend import TOO_LARGE, UPGRADE, Backend
from ones_db.errors import SchemaError, StoreError
from ones_db.postgres import PostgreSQL
from ones_db.sqlite import SQLite
from ones_db.tables import SCHEMA_REVISION

FORMS = "write sqlite:///PATH (sqlite:////PATH from the root) or postgresql://USER@HOST/DATABASE"


def backend_of(url: str) -> Backend:
    """The database that a URL names; raises `StoreError` where it names none."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        # Not shown where it may hold a password.
        shown = "what is given" if "@" in url else repr(url)
        raise StoreError(f"{shown} is not a database URL; {FORMS}") from None
    kind = parsed.get_backend_name()
    if kind == "sqlite":
        return SQLite(parsed)
    if kind == "postgresql":
        return PostgreSQL(parsed)
    raise StoreError(f"{kind}: no database of a kind that is known here; {FORMS}")


def names_password(url: str) -> bool:
    """Whether a password is written in the URL, where lists of processes and shells' histories would show it."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return "@" in url
    return parsed.password is not None or "password" in parsed.query


def backend_behind(source: Engine | Connection) -> Backend:
    """The database behind an engine that a backend made, or behind one of its connections."""
    return cast(Backend, source.get_execution_options()["ones_backend"])


@contextmanager
def transaction(engine: Engine, *, write: bool = False) -> Iterator[Connection]:
    """One transaction; what is in it is durable when the block is left, or nothing of it happened.

    One that reads sees one moment. Writers take turns, and readers do not wait for them.
    """
    backend = backend_behind(engine)
    try:
        options = backend.options(write)
        with engine.connect().execution_options(ones_write=write, **options) as connection, connection.begin():
            yield connection
    except DBAPIError as error:
        raise backend.explained(error) from error
    except OverflowError as error:
        raise StoreError(f"{backend.place}: {TOO_LARGE}: {error}") from error


UNFINISHED = " copying"
"""Behind the revision of a database that `ones_db.copy` has begun to fill."""


def revision_of(connection: Connection, *, unfinished: bool = False) -> str | None:
    """The schema that the database says it has, None where it is empty.

    Raises `SchemaError` where it holds tables and none of ours, or a copy that was not finished, unless that is
    expected.
    """
    place = backend_behind(connection).place
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables and "clusters" in tables:
        found = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
        if found.endswith(UNFINISHED) and not unfinished:
            raise SchemaError(f"{place}: holds a copy that was not finished; run `slurm-ones db copy` again")
        return found.removesuffix(UNFINISHED)
    if tables:
        raise SchemaError(f"{place}: holds tables of another program ({', '.join(tables[:3])}); name another database")
    return None


def check_revision(connection: Connection, *, unfinished: bool = False) -> None:
    """Raise `SchemaError`, saying what to run, unless the schema is the one that this version works with."""
    place, found = backend_behind(connection).place, revision_of(connection, unfinished=unfinished)
    if found is None:
        raise SchemaError(f"{place}: an empty database; run `{UPGRADE}`")
    if found < SCHEMA_REVISION:
        raise SchemaError(
            f"{place}: schema {found} is older than {SCHEMA_REVISION}; "
            f"run `{UPGRADE}` (of a file, it makes a copy first)"
        )
    if found > SCHEMA_REVISION:
        raise SchemaError(
            f"{place}: schema {found} is newer than {SCHEMA_REVISION}, the newest that this version knows; "
            f"install the newer slurm-ones (`{UPGRADE}` goes forward only)"
        )


def add_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows that are not there; those that are stay as they are. One statement, whatever the
    number."""
    if rows:
        connection.execute(backend_behind(connection).insert(table).on_conflict_do_nothing(), rows)


def add_rows(connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
    """`add_new` for many rows, each with a value for every column of the table in its order."""
    backend_behind(connection).add_rows(connection, table, rows)


def add_or_replace(connection: Connection, table: Table, key: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or give those with the same key these values. All rows name the same columns."""
    if rows:
        statement = backend_behind(connection).insert(table)
        changed = {name: statement.excluded[name] for name in rows[0] if name not in key}
        connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=changed), rows)
