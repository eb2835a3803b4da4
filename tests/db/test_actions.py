"""What people did, what the nodes were, and what decisions weighed."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import event

from ones_db import ActionRecord, AlternativeRecord, NodeRecord, Store
from ones_db.shape import PARKED, Shape
from tests.db.make import actions, decision, job, node_changes

UP, DOWN = NodeRecord("n1", "UP", True, 4, "gpu"), NodeRecord("n1", "DOWN*", False, 4, "gpu")


def test_actions(store: Store) -> None:
    first, second = ActionRecord(1.0, "ops", "run --act", "policy ones"), ActionRecord(2.0, "ops", "stop file made")
    for one in (first, second, first, ActionRecord(2.0, "root", "stop file made"), second):
        store.add_action(one)
    assert actions(store) == [ActionRecord(2.0, "root", "stop file made"), second, first]


def test_nodes_are_stored_when_they_change(store: Store) -> None:
    """Protects each change of a node, and the database from a row a tick."""
    other = NodeRecord("n2", "UP", True, 8, "gpu,long")
    for now in (1.0, 1.0, 2.0):
        store.record_nodes(now, [UP, other])
    store.record_nodes(3.0, [DOWN, other])
    store.record_nodes(4.0, [UP])
    store.record_nodes(5.0, [UP])
    assert node_changes(store, "n1") == [(1.0, UP), (3.0, DOWN), (4.0, UP)]
    gone = other._replace(state="GONE", usable=False)
    assert node_changes(store, "n2") == [(1.0, other), (4.0, gone)]
    store.record_nodes(6.0, [UP, other])
    assert len(node_changes(store)) == 6


def test_alternatives_of_a_decision(store: Store) -> None:
    """Protects what was weighed for each job, in its order, in both ways of reading a decision."""
    store.record_jobs([job(1), job(2)])
    made = decision(1.0, 1, 2)
    weighed = (
        AlternativeRecord(Shape(1, 4), 256, 3.5),
        AlternativeRecord(Shape(2, 4), 512, 3.25),
        AlternativeRecord(PARKED, 0, 0.0),
    )
    made = replace(made, jobs=(replace(made.jobs[0], alternatives=weighed), made.jobs[1]))
    number = store.add_decision(made)
    assert store.add_decision(made) == number
    assert store.recent_decisions() == [replace(made, id=number)]
    assert store.decisions(1)[0].jobs == made.jobs[:1]
    assert store.decisions(2)[0].jobs[0].alternatives == ()


def test_decisions_are_read_in_a_few_queries(store: Store) -> None:
    store.record_jobs([job(1)])
    for n in range(20):
        store.add_decision(decision(float(n), 1))
    asked: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *said: asked.append(said[2]))
    assert len(store.decisions(1)) == 20
    assert len([sql for sql in asked if sql.startswith("SELECT")]) <= 3


def test_a_node_is_shown_as_it_is_after_the_clock_was_set_back(store: Store) -> None:
    """Not as it was while the clock was ahead; and what has not changed is not stored at each look."""
    store.record_nodes(9000.0, [UP])
    for now in (1000.0, 1060.0, 1120.0):
        store.record_nodes(now, [DOWN])
        assert store.nodes() == [DOWN]
    assert len(node_changes(store)) == 2
