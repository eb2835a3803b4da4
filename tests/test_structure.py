"""How the code is cut: no circle of imports anywhere, and the report that measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import PACKAGES, arrows_of, circles, measure, repeated_classes, room, table
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


@pytest.mark.slow
def test_the_table() -> None:
    """One column a checkout, as docs/architecture.md shows it."""
    now = measure(REPOSITORY)
    lines = table({"before": now, "now": now}).splitlines()
    assert lines[0] == "|  | before | now |"
    assert {line.count("|") for line in lines} == {4}
    assert now["files"] > 100


def test_one_class_a_name() -> None:
    """A reader who looks a class up finds one, in all three packages; examples apart."""
    assert repeated_classes(REPOSITORY) == {}


def test_classes_of_one_name_are_found(tmp_path: Path) -> None:
    """At the top of modules, public ones alone, examples left out."""
    for package, folder in PACKAGES.items():
        (tmp_path / folder / package / "examples").mkdir(parents=True)
    (tmp_path / "slurm_ones/one.py").write_text("class A: pass\nclass B:\n    class C: pass\nclass _D: pass\n")
    (tmp_path / "db/ones_db/two.py").write_text("class A: pass\nclass C: pass\nclass _D: pass\n")
    (tmp_path / "slurm_ones/examples/three.py").write_text("class B: pass\n")
    assert repeated_classes(tmp_path) == {"A": ["slurm_ones.one", "ones_db.two"]}
