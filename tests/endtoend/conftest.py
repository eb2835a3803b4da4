"""The cluster `gres` as its users see it; each test leaves it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.endtoend.desk import Desk


@pytest.fixture
def desk(gres: Cluster) -> Iterator[Desk]:
    desk = Desk(gres)
    yield desk
    desk.clear()


@pytest.fixture
def old_desk(old: Cluster) -> Iterator[Desk]:
    desk = Desk(old)
    yield desk
    desk.clear()
