"""How the code is cut: no circle of imports anywhere, and the report that measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import PACKAGES, circles, measure, repeated_classes, table
from tests.cluster.paths import REPOSITORY


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
    assert sorted("".join(sorted(group)) for group in circles((one, other) for one, other in arrows.split())) == found


@pytest.mark.slow
def test_the_table() -> None:
    """One column a checkout, as docs/architecture.md shows it; no circle of imports, and no class name twice."""
    now = measure(REPOSITORY)
    lines = table({"before": now, "now": now}).splitlines()
    assert lines[0] == "|  | before | now |"
    assert {line.count("|") for line in lines} == {4}
    assert now["files"] > 100 and now["import arrows between modules"] > 300
    assert [now[f"circles of {what}"] for what in ("modules", "rooms")] == [0, 0]
    assert now["class names that occur more than once"] == 0, repeated_classes(REPOSITORY)


def test_classes_of_one_name_are_found(tmp_path: Path) -> None:
    for package, folder in PACKAGES.items():
        (tmp_path / folder / package / "examples").mkdir(parents=True)
    (tmp_path / "slurm_ones/one.py").write_text("class A: pass\nclass B:\n    class C: pass\nclass _D: pass\n")
    (tmp_path / "db/ones_db/two.py").write_text("class A: pass\nclass C: pass\nclass _D: pass\n")
    (tmp_path / "slurm_ones/examples/three.py").write_text("class B: pass\n")
    assert repeated_classes(tmp_path) == {"A": ["slurm_ones.one", "ones_db.two"]}
