"""Ranks that the tests of a file share: to start them takes longer than most of what they do. They do not stay longer:
each of gloo's threads wakes up a hundred times a second, also where nobody trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wrapper.forked import Team


class Teams(dict[int, Team]):
    """Ranks in one group, by their number, started when they are first asked for."""

    def __missing__(self, world: int) -> Team:
        self[world] = Team(world)
        return self[world]

    def __getitem__(self, world: int) -> Team:
        if world in self and not all(rank.is_alive() for rank in super().__getitem__(world)._ranks):
            del self[world]  # a test that failed has ended them
        return super().__getitem__(world)

    def close(self) -> None:
        for team in self.values():
            team.close()


@pytest.fixture(scope="module")
def teams() -> Iterator[Teams]:
    found = Teams()
    yield found
    found.close()
