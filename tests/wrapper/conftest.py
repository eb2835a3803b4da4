"""Ranks that the tests of a file share: to start them takes longer than most of what they do. They do not stay longer:
each of gloo's threads wakes up a hundred times a second, also where nobody trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from ones_wrapper.script import source
from ones_wrapper.script.line import is_script_file
from tests import forks, loaded
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


@pytest.fixture(scope="module", autouse=True)
def _read(request: pytest.FixtureRequest) -> None:
    """Read the texts that ranks read of their scripts, which here are modules of tests: once, rather than in each."""
    if "testing" in vars(request.module):
        names = {getattr(one, "__module__", None) for one in vars(request.module).values()} & sys.modules.keys()
        for module in (sys.modules[name] for name in names | {forks.__name__, loaded.__name__}):
            if is_script_file(path := getattr(module, "__file__", None) or "<none>"):
                for read in (source.cut, source.drawn, source.ranges):
                    read(path)
                source.kept(compile("", path, "exec"))
