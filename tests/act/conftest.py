"""A store for these tests, and the world in which a resize happens."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ones_db import Store, migrate
from tests.act.world import World


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A migrated database without rows.

    In memory where the machine has such a folder, as thousands of small writes that wait for a disk take minutes.
    """
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(dir=base) as folder:
        path = Path(folder) / "empty.sqlite"
        migrate.upgrade(f"sqlite:///{path}")
        yield path


@pytest.fixture(scope="session")
def store(empty: Path) -> Iterator[Store]:
    """One database for many resizes, each of a job of its own."""
    path = shutil.copy(empty, empty.with_name("ones.sqlite"))
    with Store.open(f"sqlite:///{path}", "fake") as store:
        yield store


@pytest.fixture
def own_store(empty: Path, tmp_path: Path) -> Iterator[Store]:
    """A database of the test's own."""
    path = shutil.copy(empty, tmp_path / "ones.sqlite")
    with Store.open(f"sqlite:///{path}", "fake") as store:
        yield store


@pytest.fixture
def make_world(store: Store, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds: `make_world(running=False, …)`."""
    with ExitStack() as stack:

        def make(**options: Any) -> World:
            return stack.enter_context(World(store, tmp_path, **options))

        yield make
