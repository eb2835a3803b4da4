"""The cluster `gres` as its users see it; each test leaves it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.endtoend.harness import Harness


@pytest.fixture
def harness(gres: Cluster) -> Iterator[Harness]:
    harness = Harness(gres)
    yield harness
    harness.clear()


@pytest.fixture
def old_harness(old: Cluster) -> Iterator[Harness]:
    harness = Harness(old)
    yield harness
    harness.clear()
