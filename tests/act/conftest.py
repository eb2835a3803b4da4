"""A store for these tests, and the world in which a resize happens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ones_db import Store
from tests.act.world import CLUSTER, ONLY, World, open_copy


@pytest.fixture(scope="session")
def empty(empty_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database that knows one cluster, and nothing else."""
    path = Path(shutil.copy(empty_sqlite, tmp_path_factory.mktemp("cluster") / "ones.sqlite"))
    with Store.open(f"sqlite:///{path}", CLUSTER) as store:
        assert store.key == ONLY
    return path


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
