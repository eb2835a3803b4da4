"""What a live view reads at each look: the same few rows however many jobs have ended, and all of one moment."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event

from ones_db import AlternativeRecord, Store
from ones_db.shape import Shape
from tests.db.make import decision, job, resized_job, run


def ended(first: int, last: int) -> list[object]:
    """Jobs that ended one after the other."""
    return [job(n, state="COMPLETED", end_time=9000.0 + n) for n in range(first, last + 1)]


def test_the_last_ended_alone(store: Store) -> None:
    """Protects a site with a long past: those that have not ended, and so many of the others as are asked for."""
    resized_job(store, 7)
    store.record_jobs([*ended(20, 40), job(8, state="PENDING")])
    ids = [one.job_id for one in store.job_summaries(ended=3)]
    assert ids == [7, 8, 38, 39, 40]
    assert [one.job_id for one in store.job_summaries(ended=0)] == [7, 8]
    assert store.job_summaries(ended=100) == store.job_summaries()


def test_the_last_ended_of_a_user(store: Store) -> None:
    """Protects users of a busy site: however many jobs of others have ended since, their own are found."""
    store.record_jobs([job(n, user="bob", state="COMPLETED", end_time=8000.0 + n) for n in (5, 6, 7)])
    store.record_jobs([*ended(20, 40), job(8, user="bob", state="PENDING")])
    assert [one.job_id for one in store.ended_of("bob", 2)] == [6, 7]
    assert [one.job_id for one in store.ended_of("bob", 100)] == [5, 6, 7]
    assert store.ended_of("eve", 100) == []


def test_what_the_newest_decision_gave_each_job(store: Store) -> None:
    """Protects "why" of a job that the last decisions did not speak of; one that has ended has none."""
    store.record_jobs([job(7), job(8), *ended(9, 9)])
    store.add_decision(decision(100.0, 7, 8, 9))
    store.add_decision(decision(200.0, 8, seconds=0.2))
    found = store.newest_decisions()
    assert sorted(found) == [7, 8] and "reason 7" in str(found[7].reason)
    # Slurm gives the number again: what was decided of the job before it is not the new one's.
    store.record_jobs([job(7, submit_time=5000.0, state="PENDING")])
    assert sorted(store.newest_decisions()) == [8]


def test_a_few_jobs_of_each_decision(store: Store) -> None:
    """Protects the page of decisions at a large site: those that change come first, and a user's are their own."""
    store.record_jobs([job(n, user="bob" if n == 9 else "alice") for n in range(5, 10)])
    made = decision(100.0, *range(5, 10))
    kept = [replace(one, from_shape=Shape(1, 4), from_batch=256) if one.job_id < 8 else one for one in made.jobs]
    weighed = (AlternativeRecord(Shape(1, 2), 64, 1.0),)
    store.add_decision(replace(made, jobs=tuple(replace(one, alternatives=weighed) for one in kept)))
    assert [one.job_id for one in store.recent_decisions(most=3)[0].jobs] == [5, 8, 9]
    assert [one.job_id for one in store.recent_decisions(most=1, user="bob")[0].jobs] == [9]
    (bobs,) = store.recent_decisions(user="bob")
    assert [(one.job_id, one.alternatives) for one in bobs.jobs] == [(9, weighed)]
    assert [one.job_id for one in store.recent_decisions()[0].jobs] == [5, 6, 7, 8, 9]
    # Older ones, and of all only what was carried out.
    acted = decision(200.0, 5, 6)
    store.add_decision(replace(acted, jobs=tuple(replace(one, acted=one.job_id == 6) for one in acted.jobs)))
    store.add_decision(decision(300.0, 5))
    changed = store.recent_decisions(changes=True)
    assert [(one.time, [job.job_id for job in one.jobs]) for one in changed] == [(200.0, [6])]
    assert [one.time for one in store.recent_decisions(before=changed[0].id)] == [100.0]


def test_the_timeline_of_a_day(store: Store) -> None:
    """Protects the picture: runs that had ended before are left out, those of jobs that go on are not."""
    store.record_jobs([job(7), *ended(8, 9)])
    store.record_runs([run(7, start_time=100.0), run(8, start_time=100.0), run(9, start_time=100.0)])
    assert {row.job_id for row in store.timeline(9008.5)} == {7, 9}
    assert {row.job_id for row in store.timeline(9008.5, 9)} == {9}
    assert len(store.timeline()) == 3


def test_one_moment(store: Store) -> None:
    """Protects a view from figures of two moments, beside a writer that goes on."""
    store.record_jobs([job(7)])
    with store.one_moment():
        assert len(store.job_summaries()) == 1
        writer = threading.Thread(target=lambda: store.record_jobs([job(8)]))
        writer.start()
        writer.join(20)
        assert not writer.is_alive() and len(store.job_summaries(ended=5)) == 1
    assert len(store.job_summaries()) == 2


def test_no_look_goes_through_all_jobs(sqlite_url: str) -> None:
    """Protects the page of a site with 100,000 jobs in its past: SQLite finds by keys all that a view asks."""
    with Store.open(sqlite_url, "gres") as store:
        resized_job(store, 7)
    plans = []
    with (
        Store.open(sqlite_url, "gres", read_only=True) as store,
        sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as planner,
    ):

        @event.listens_for(store._engine, "before_cursor_execute")
        def _asked(connection: object, cursor: object, statement: str, parameters: object, *more: object) -> None:
            if statement.startswith("SELECT"):
                plans.extend(row[3] for row in planner.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))

        with store.one_moment():
            store.job_summaries(ended=200)
            store.newest_decisions()
            store.timeline(0.0)
            store.held()
    of_jobs = [plan for plan in plans if {"jobs", "j", "o", "later"} & {*plan.split()}]
    assert len(of_jobs) > 5
    assert [plan for plan in of_jobs if "SCAN" in plan or plan.endswith("(cluster_id=?)")] == []


@pytest.mark.parametrize("writable", [True, False])
def test_who_watches_sees_each_write(sqlite_url: str, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    """Protects viewers from a connection that stays, with what it once saw or with a file that was replaced."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Store.open(sqlite_url, "gres") as writer, Store.open(sqlite_url, "gres", read_only=True) as store:
        if not writable:
            monkeypatch.setattr("os.access", lambda place, mode: False)
        store.watch()
        assert store.job_summaries() == []
        writer.record_jobs([job(7)])
        assert [one.job_id for one in store.job_summaries()] == [7]
    before = store.stamp()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    with Store.open(f"sqlite:///{copy}", "gres") as other:
        other.record_jobs([job(8)])
    copy.rename(path)
    assert [one.job_id for one in store.job_summaries()] == [7, 8]
    assert store.stamp() is None or store.stamp() != before
    store.close()
