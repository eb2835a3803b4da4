"""Four ranks."""

from __future__ import annotations

import pytest

from tests.wrapper.forked import Team


@pytest.fixture
def team(teams: dict[int, Team]) -> Team:
    return teams[4]
