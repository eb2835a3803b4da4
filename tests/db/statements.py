"""Statements that SQLAlchemy compiles once a process: databases of tests live for a second, and to compile theirs
again would be a quarter of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from sqlalchemy import Dialect, Engine, create_engine, make_url

from ones_db import sqlite


@cache
def _kept() -> tuple[Dialect, dict[Any, Any]]:
    """SQLite as SQLAlchemy speaks to it, and the statements compiled so far."""
    engine = create_engine("sqlite://")
    with engine.connect():  # it learns of SQLite's version
        return engine.dialect, {}


@contextmanager
def shared_statements() -> Iterator[None]:
    """While it lasts, all files that are opened share them."""

    def make(url: str, *, creator: Any, poolclass: Any, execution_options: dict[str, Any]) -> Engine:
        dialect, statements = _kept()
        options = {**execution_options, "compiled_cache": statements}
        return Engine(poolclass(creator), dialect, make_url(url), execution_options=options)

    with mock.patch.object(sqlite, "create_engine", make):
        yield
