"""Resizes: intents that must be there after any crash."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ones_db import ResizeConflict, ResizeStepRecord, Store, UnknownRecord
from ones_db.shape import Shape
from tests.db.make import decision, job, resize, said


def test_a_resize_from_its_beginning_to_its_end(store: Store, url: str) -> None:
    """Protects what a companion that starts finds: the state, the deadline, and every step with its time."""
    store.record_jobs([job(1), job(2)])
    asked = store.add_decision(decision(2400.0, 1))
    meant = resize(1, decision_id=asked)
    number = store.begin_resize(meant).id
    stands = store.step_resize(number, "draining", detail=said("order 9"), time=2501.0, order_number=9, deadline=2561.0)
    with Store.open(url, "gres") as again:
        opened = replace(meant, id=number, state="draining", order_number=9, deadline=2561.0)
        assert again.open_resizes() == again.resizes(1) == [opened] == [stands]
    store.step_resize(number, "held", time=2502.0)
    ended = store.end_resize(number, "done", said("running at 1x4"), 2510.0, pause_s=8.5)
    assert store.open_resizes() == []
    closed = replace(opened, state="done", deadline=None, ended=2510.0, outcome=said("running at 1x4"), pause_s=8.5)
    assert store.resizes(1) == store.resizes() == [closed] == [ended]
    assert store.resizes(2) == []
    assert store.resize_steps(number) == [
        ResizeStepRecord(number, 0, "ordered", 2500.0, said("")),
        ResizeStepRecord(number, 1, "draining", 2501.0, said("order 9")),
        ResizeStepRecord(number, 2, "held", 2502.0, said("")),
        ResizeStepRecord(number, 3, "done", 2510.0, said("running at 1x4")),
    ]


def test_one_open_resize_a_job(store: Store, url: str) -> None:
    store.record_jobs([job(1), job(2)])
    first = store.begin_resize(resize(1)).id
    with Store.open(url, "gres") as other:
        with pytest.raises(ResizeConflict, match=rf"job 1: resize {first} is open \(state ordered\)"):
            other.begin_resize(resize(1, started=2501.0))
        other.begin_resize(resize(2))
    store.end_resize(first, "rolled_back", said("waited too long"), 2600.0)
    assert store.begin_resize(resize(1, started=2700.0)).id != first


def test_every_call_may_be_made_again(store: Store) -> None:
    store.record_jobs([job(1)])
    number = store.begin_resize(resize(1)).id
    assert store.begin_resize(resize(1)).id == number
    for _ in range(2):
        store.step_resize(number, "held", time=2501.0)
    for _ in range(2):
        store.end_resize(number, "done", said(""), 2502.0)
    assert [step.state for step in store.resize_steps(number)] == ["ordered", "held", "done"]
    assert store.begin_resize(resize(1)).id == number


def test_what_has_ended_stays_so(store: Store) -> None:
    store.record_jobs([job(1)])
    number = store.begin_resize(resize(1)).id
    store.end_resize(number, "done", said(""), 2502.0)
    with pytest.raises(ResizeConflict, match="has ended"):
        store.step_resize(number, "held", time=2503.0)
    with pytest.raises(ResizeConflict, match="has ended"):
        store.end_resize(number, "failed", said(""), 2503.0)
    with pytest.raises(ResizeConflict, match="same moment"):
        store.begin_resize(resize(1, new_shape=Shape(1, 2)))


def test_unknown_resizes_are_named(store: Store) -> None:
    for call in (
        lambda: store.step_resize(7, "held", time=1.0),
        lambda: store.end_resize(7, "done", said(""), 1.0),
        lambda: store.resize_steps(7),
    ):
        with pytest.raises(UnknownRecord, match="resize 7"):
            call()


def test_resizes_that_interrupted_a_job_are_told_apart(store: Store) -> None:
    """Limits count those that cost it time: not one that was called off, nor one of a job that waited."""
    store.record_jobs([job(1)])
    ends = [
        ("done", 8.0, 0),
        ("rolled_back", None, 1),
        ("abandoned", None, 2),
        ("abandoned", 60.0, 2),
        ("done", None, -1),
    ]
    for number, (state, pause_s, restart) in enumerate(ends):
        begun = store.begin_resize(resize(1, started=2500.0 + number, restart=restart))
        store.end_resize(begun.id, state, said(""), 2600.0 + number, pause_s=pause_s)
    assert store.histories([1])[1].interrupted == (2500.0, 2501.0, 2503.0)
