"""A store for these tests, and the world in which a resize happens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ones_db import Store, migrate
from tests.act.world import World, open_copy


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


@pytest.fixture
def own_store(empty: Path, tmp_path: Path) -> Iterator[Store]:
    """A database of the test's own."""
    with open_copy(empty, tmp_path) as store:
        yield store


@pytest.fixture
def make_world(empty: Path, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds: `make_world(running=False, …)`."""
    with ExitStack() as stack:

        def make(**options: Any) -> World:
            return stack.enter_context(World(empty, tmp_path, **options))

        yield make
