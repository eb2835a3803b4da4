"""An empty database behind each kind of store; another kind joins the list and gets every test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_db import Store, migrate


@pytest.fixture(scope="session")
def empty_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows, migrated once for all tests."""
    path = tmp_path_factory.mktemp("empty") / "ones.sqlite"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path, empty_sqlite: Path) -> str:
    assert request.param == "sqlite"
    path = tmp_path / "ones 100%.sqlite"
    shutil.copy(empty_sqlite, path)
    return f"sqlite:///{path}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, "gres") as store:
        yield store
