"""Which database a URL names, and transactions over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from ones_db.backend import TOO_LARGE, Backend
from ones_db.errors import StoreError
from ones_db.postgres import PostgreSQL
from ones_db.sqlite import SQLite

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
