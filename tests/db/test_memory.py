"""What a store remembers for a companion that leads: never what a write that failed may have changed."""

from __future__ import annotations

from contextlib import closing

import pytest

from ones_db import NotLeader, Store, StoreError
from ones_db.leader import LeaderLock
from tests.db.make import change, job, resize


def test_only_a_store_that_writes_alone_remembers(store: Store, url: str) -> None:
    store.record_jobs([job(1), job(2)])
    store.begin_resize(resize(1))
    with Store.open(url, "gres") as other:
        for remembers, expected in ((False, [1, 2]), (True, [1])):
            if remembers:
                store.remember()
            assert [one.job_id for one in store.open_resizes()] == [1]
            begun = other.begin_resize(resize(2, started=2600.0 + remembers))
            assert [one.job_id for one in store.open_resizes()] == expected
            other.end_resize(begun.id, "done", begun.outcome, 2700.0 + remembers)


def test_after_a_write_that_failed_all_is_asked_for_again(store: Store, url: str) -> None:
    """The server may be gone after the commit: what was written is there or not."""
    store.record_jobs([job(1)])
    store.remember()
    begun = store.begin_resize(resize(1))
    assert store.open_resizes() == [begun] and store.live_jobs() == {1} and store.resizes_of(1) == {begun.id: begun}
    with pytest.raises(StoreError, match="lost"), store._write() as connection:
        assert store._changed(connection, begun, begun, None) == begun
        raise StoreError("lost")
    change(url, "UPDATE resizes SET state = 'held'")
    change(url, "UPDATE jobs SET end_time = 2700")
    assert [one.state for one in (*store.open_resizes(), *store.resizes_of(1).values())] == ["held", "held"]
    assert store.live_jobs() == set()


def test_who_lost_the_lead_remembers_nothing(store: Store, url: str) -> None:
    store.record_jobs([job(1)])
    with closing(LeaderLock(url, "gres")) as lock:
        old = Store.open(url, "gres", term=lock.take(1.0))
        old.remember()
        begun = old.begin_resize(resize(1))
        assert old.open_resizes() == [begun]
        lock.leave(1.5)
        with Store.open(url, "gres", term=lock.take(2.0)) as new:
            new.step_resize(begun.id, "held", time=2600.0)
        with pytest.raises(NotLeader):
            old.step_resize(begun.id, "draining", time=2601.0)
        assert [one.state for one in old.open_resizes()] == ["held"]
        old.close()
