"""Files of what a user may see, made from each kind of database."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_db import Store, StoreError
from ones_db.user_views import KEEP_S, MOST_DECISIONS, MOST_RESIZES, ViewSource
from tests.db.make import ask, change, decision, job, resize, said
from tests.db.owned import OWNED, fill

EMPTY = {"accounting", "checkpoints", "rollups"}
"""Tables of which nothing is shown."""


def test_a_view_has_the_users_rows_of_each_table(url: str, tmp_path: Path) -> None:
    """Protects `jobs` and `why` on PostgreSQL as on SQLite, and others' rows and texts."""
    fill(url)
    change(url, "DELETE FROM accounting")
    source = ViewSource(url, "gres")
    assert sorted(source.users(4000.0)) == ["alice", "bob"]
    for user, content in source.views(["alice", "bob"], 4000.0):
        (tmp_path / user).write_bytes(content)
    own = f"sqlite:///{tmp_path / 'alice'}"
    for table in OWNED:
        (count,) = ask(own, f"SELECT count(*) FROM {table}")[0]
        assert (count > 0) == (table not in EMPTY), table
    with Store.open(url, "gres", read_only=True) as site, Store.open(own, "", read_only=True) as view:
        assert view.job_summaries() == site.job_summaries([7])
        for part in ("runs", "blocks", "memberships", "resizes", "decisions"):
            assert getattr(view, part)(7) == getattr(site, part)(7) != [], part
    assert b"bob" not in (tmp_path / "alice").read_bytes() and b"alice" not in (tmp_path / "bob").read_bytes()
    source.close()


def test_what_changes_a_view(url: str) -> None:
    """Protects users from old news: a new decision, job, step of a resize or note is seen, and else nothing."""
    fill(url)
    change(url, "DELETE FROM accounting")
    source = ViewSource(url, "gres")
    before = source.users(4000.0)
    assert source.users(4000.0) == before
    with Store.open(url, "gres") as store:

        def changed() -> set[str]:
            nonlocal before
            now = source.users(4000.0)
            found, before = {user for user in now if now[user] != before.get(user)}, now
            return found

        store.add_decision(decision(5000.0, 7))
        assert changed() == {"alice"}
        store.record_jobs([job(20, user="bob", submit_time=3000.0)])
        assert changed() == {"bob"}
        number = store.begin_resize(resize(20, started=3500.0)).id or 0
        assert changed() == {"bob"}
        store.step_resize(number, "drained", detail=said("step 21"), time=3600.0)
        assert changed() == {"bob"}
        store.record_jobs([job(20, user="bob", submit_time=3000.0, report_note="odd")])
        assert changed() == {"bob"} and changed() == set()
    assert sorted(source.users(3600.0 + KEEP_S + 1.0)) == ["bob"]
    source.close()


def test_a_view_does_not_grow_with_the_age_of_a_job(url: str, tmp_path: Path) -> None:
    """Protects the shared file system: of what grows for ever the newest is shown."""
    with Store.open(url, "gres") as store:
        store.record_jobs([job(1), job(2)])
        for second in range(MOST_DECISIONS + 10):
            store.add_decision(decision(3000.0 + second, 1, 2))
        for number in range(MOST_RESIZES + 5):
            begun = store.begin_resize(resize(1, started=2500.0 + number))
            store.end_resize(begun.id or 0, "done", said("ok"), 2501.0 + number)
    source = ViewSource(url, "gres")
    ((_, content),) = source.views(["alice"], 4000.0)
    source.close()
    (tmp_path / "view").write_bytes(content)
    with Store.open(f"sqlite:///{tmp_path / 'view'}", "", read_only=True) as view:
        for number in (1, 2):
            assert [one.time for one in view.decisions(number, 1000)] == [
                3000.0 + second for second in reversed(range(10, MOST_DECISIONS + 10))
            ]
        assert [one.started for one in view.resizes(1)] == [2505.0 + number for number in range(MOST_RESIZES)]


def test_a_cluster_that_is_not_there(sqlite_url: str) -> None:
    """An error that says so, not an empty view."""
    source = ViewSource(sqlite_url, "other")
    with pytest.raises(StoreError, match="nothing is known of cluster 'other'"):
        source.users(0.0)
    source.close()
