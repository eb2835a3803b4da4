"""What was said of deadlines."""

from __future__ import annotations

import pytest

from ones_db import PromiseRecord, Store, UnknownRecord
from ones_db.reasons import Reason
from tests.db.make import job

WHY = Reason("deadline_promised", (("gpus", 4),))


def test_the_newest_word_on_a_deadline_counts(store: Store) -> None:
    """Protects what a new companion goes on from: who was promised what, in place of what was said before."""
    store.record_jobs([job(1), job(2), job(3)])
    refused, given = PromiseRecord(1, 5000.0, 100.0, False), PromiseRecord(1, 5000.0, 200.0, True, WHY)
    store.record_promises([refused, PromiseRecord(2, 9000.0, 100.0, False)])
    store.record_promises([given])
    assert store.promises() == {1: given, 2: PromiseRecord(2, 9000.0, 100.0, False)}
    assert store.promises([1, 3]) == {1: given}


def test_an_ended_job_is_promised_nothing(store: Store) -> None:
    """But its own page still says what was; and a job that nobody knows is an error."""
    store.record_jobs([job(1)])
    given = PromiseRecord(1, 5000.0, 200.0, True, WHY)
    store.record_promises([given])
    store.record_jobs([job(1, state="COMPLETED", end_time=4000.0)])
    assert store.promises() == {}
    assert store.promises([1]) == {1: given}
    with pytest.raises(UnknownRecord):
        store.record_promises([PromiseRecord(7, 1.0, 1.0, True)])
