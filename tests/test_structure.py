"""How the code is cut: no circle of imports anywhere, and the report that measures it."""

from __future__ import annotations

import pytest

from benchmarks.structure import arrows_of, circles, measure, room, table
from tests.cluster.paths import REPOSITORY


def test_no_circle_of_imports() -> None:
    """Neither of modules nor of rooms; imports inside functions and for type checking count."""
    arrows = arrows_of(REPOSITORY)
    assert len(arrows) > 300
    assert circles(arrows) == []
    assert circles({(room(one), room(other)) for one, other in arrows if room(one) != room(other)}) == []


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ("ab bc", []),
        ("ab bc ca cd", ["abc"]),
        ("ab ba bc cd dc", ["ab", "cd"]),
        ("ab ac bd cd", []),
        ("ab bc cd db da", ["abcd"]),
    ],
)
def test_circles(arrows: str, found: list[str]) -> None:
    """Groups in which everyone reaches everyone."""
    assert sorted("".join(sorted(group)) for group in circles((one, other) for one, other in arrows.split())) == found


def test_the_table() -> None:
    """One column a checkout, as docs/architecture.md shows it."""
    now = measure(REPOSITORY)
    lines = table({"before": now, "now": now}).splitlines()
    assert lines[0] == "|  | before | now |"
    assert {line.count("|") for line in lines} == {4}
    assert int(now["files"]) > 100
