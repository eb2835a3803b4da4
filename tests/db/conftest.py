"""An empty database behind each kind of store; another kind joins the list and gets every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ones_db import Store, migrate


@pytest.fixture(params=["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    assert request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/ones 100%.sqlite"
    migrate.upgrade(url)
    return url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, "gres") as store:
        yield store
