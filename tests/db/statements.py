"""Statements that SQLAlchemy compiles once a process, and what it asks of a PostgreSQL that it does not know: databases
of tests live for a second, and to do it again for each would be a third of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from sqlalchemy import URL, Dialect, Engine, create_engine, event, make_url

from ones_db import postgres, sqlite

_STATEMENTS: dict[Any, Any] = {}
_SERVERS: list[Dialect] = []
"""PostgreSQL as SQLAlchemy speaks to it, once it has met one. Those of the tests are of one version."""


@cache
def _file() -> Dialect:
    engine = create_engine("sqlite://")
    with engine.connect():  # it learns of SQLite's version
        return engine.dialect


def _sqlite(url: str, *, creator: Any, poolclass: Any, execution_options: dict[str, Any]) -> Engine:
    options = {**execution_options, "compiled_cache": _STATEMENTS}
    return Engine(poolclass(creator), _file(), make_url(url), execution_options=options)


def _postgresql(url: URL, *, execution_options: dict[str, Any], **more: Any) -> Engine:
    options = {**execution_options, "compiled_cache": _STATEMENTS}
    engine = create_engine(url, execution_options=options, _initialize=not _SERVERS, **more)
    if _SERVERS:
        engine.dialect = engine.pool._dialect = _SERVERS[0]
    else:
        event.listen(engine, "connect", lambda *met: _SERVERS.append(engine.dialect), once=True)
    return engine


@contextmanager
def shared_statements() -> Iterator[None]:
    """While it lasts, all databases that are opened share them."""
    with mock.patch.object(sqlite, "create_engine", _sqlite), mock.patch.object(postgres, "create_engine", _postgresql):
        yield
