"""An empty database behind each kind of store; another kind joins the list and gets every test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_db import Store, migrate
from tests.conftest import served
from tests.db.server import Server

SQLITE_BY_DAY = frozenset(
    f"test_{name}.py"
    for name in (
        *("accounting", "actions", "blocks", "decisions", "frames", "history", "jobs", "live", "memory", "queries"),
        *("reports", "resizes", "retention", "user_files", "views"),
    )
)
"""Files whose statements are those of both kinds of store: by day they ask one, but for `TOGETHER`."""
TOGETHER = frozenset(
    {
        "test_a_user_gets_their_own_rows",
        "test_a_view_has_the_users_rows_of_each_table",
        "test_every_query_answers_without_rows_and_with",
        "test_one_open_resize_a_job",
        "test_stopped_in_the_middle",
        "test_the_companion_goes_on_writing",
        "test_odd_numbers_stop_nothing",
        "test_what_a_job_reports_breaks_no_view",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        ours = item.path.parent == Path(__file__).parent and item.path.name in SQLITE_BY_DAY
        if ours and params.get("url") == "postgresql" and item.originalname not in TOGETHER:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL that runs as long as the tests, and that no cluster uses."""
    yield from served(in_memory=True)


@pytest.fixture(scope="session")
def empty_postgresql(server: Server) -> str:
    """A database of the server without rows, migrated once for all tests; others are made from it."""
    name = server.fresh()
    migrate.upgrade(server.url(name))
    return name


@pytest.fixture
def sqlite_url(tmp_path: Path, empty_sqlite: Path) -> str:
    """An empty database in a file, of this test alone."""
    path = tmp_path / "ones 100%.sqlite"
    shutil.copy(empty_sqlite, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgresql_url(server: Server, empty_postgresql: str) -> Iterator[str]:
    """An empty database of the server, of this test alone."""
    name = server.fresh(empty_postgresql)
    yield server.url(name)
    server.drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind."""
    found = request.getfixturevalue(f"{request.param}_url")
    assert isinstance(found, str)
    return found


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, "gres") as store:
        yield store
