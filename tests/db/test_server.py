"""The tests' own PostgreSQL leaves nothing behind, in memory least of all."""

from __future__ import annotations

import os
from pathlib import Path

from tests.db.server import lock, remove_left


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: not what is in use, nor what a link or another name leads to."""
    used, left, other, new = (tmp_path / name for name in ("ones-pg-used", "ones-pg-left", "other", "ones-pg-new"))
    for place in (used, left, other, new):
        (place / "data").mkdir(parents=True)
    held = [lock(place) for place in (used, left, other)]
    os.close(held[1])
    os.close(held[2])
    (tmp_path / "ones-pg-link").symlink_to(other)
    os.mkfifo(new / "lock")
    remove_left(tmp_path)
    os.close(held[0])
    assert {path.name for path in tmp_path.iterdir()} >= {"ones-pg-used", "other", "ones-pg-link"}
    assert not left.exists() and (other / "data").exists() and (used / "data").exists()
