"""The benchmark of ingest, which no other test and no type checker reads."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ingest import sqlite


def test_a_small_one_runs(tmp_path: Path) -> None:
    """Protects from a benchmark that ends at an import or at a field that has no column."""
    assert {way: len(ticks) for way, ticks in sqlite(tmp_path, 2, 3, 2).items()} == dict.fromkeys(
        ("store", "executemany", "again", "from_lines"), 2
    )
