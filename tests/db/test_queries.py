"""The queries that researchers start from, on both databases."""

from __future__ import annotations

from typing import Any

import pytest

from ones_db import Store
from ones_db.query import Reader, saved_queries, saved_query
from ones_db.views import VIEWS
from ones_wrapper.protocol import Membership
from tests.db.make import epoch, hello, job, line, opened, report, run, throughput
from tests.db.test_views import BEGAN, DAY, fill, fill_blocks

PARAMETERS: dict[str, dict[str, Any]] = {
    "causes": {"since": 0, "until": 10 * DAY},
    "did_resizing_pay": {},
    "fastest_size": {"job_id": 7},
    "gpu_hours_by_user": {"since": 2000, "until": DAY + 1800},
    "learning_curve": {"job_id": 7},
    "queueing_by_size": {},
    "resize_phases": {},
    "resize_cost_by_job": {"user_name": "alice"},
    "speed_up": {"job_id": 7},
    "who_used_the_gpus": {"since": "1970-01-02"},
    "why": {"job_id": 7},
}


def ask(url: str, name: str, **given: Any) -> list[dict[str, Any]]:
    reader = Reader(url)
    try:
        with reader.ask(saved_query(name), PARAMETERS[name] | given) as answer:
            return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    finally:
        reader.close()


def test_every_query_is_tested() -> None:
    """Protects a new query from being forgotten here, and its reader from guessing what it is for."""
    assert set(saved_queries()) == set(PARAMETERS)
    assert all(saved_query(name).startswith("-- ") for name in saved_queries())
    assert all(told and not told.startswith("Parameter") for told in saved_queries().values())


def test_a_query_and_a_view_have_different_names() -> None:
    assert not set(saved_queries()) & set(VIEWS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_query_answers_without_rows_and_with(store: Store, url: str, name: str) -> None:
    assert ask(url, name) == []
    fill(store)
    assert ask(url, name)


def test_what_they_tell(store: Store, url: str) -> None:
    fill(store)
    assert [(row["gpus"], row["batch"]) for row in ask(url, "fastest_size")] == [(4, 256), (1, 64)]
    (cost,) = ask(url, "resize_cost_by_job")
    assert (cost["resizes"], cost["pause_s"], cost["part_of_jct"]) == (1, 410.0, pytest.approx(410 / 2593))
    (user,) = ask(url, "who_used_the_gpus")
    assert (user["user_name"], user["gpu_hours"], user["days"]) == ("bob", pytest.approx(8.0), 1)
    hours = {row["user_name"]: (row["runs"], row["gpu_hours"]) for row in ask(url, "gpu_hours_by_user")}
    assert hours == {"alice": (2, pytest.approx(3300 / 3600)), "bob": (1, pytest.approx(8.0))}
    (why,) = ask(url, "why")
    assert (why["action"], why["gpus"], why["reason"]) == ("grows", 4, "gains (why=reason 7)")
    (cause,) = ask(url, "causes")
    assert (cause["code"], cause["jobs"], cause["times"]) == ("gains", 3, 3)
    assert cause["first_time"] <= cause["last_time"]
    assert [row["epoch"] for row in ask(url, "learning_curve")] == [0, 1, 2]
    assert [(row["requested_gpus"], row["jobs"], row["queueing_s"]) for row in ask(url, "queueing_by_size")] == [
        (2, 2, pytest.approx((993 + DAY - 1800 - 1008) / 2))
    ]
    with opened(url, write=True) as connection:
        connection.exec_driver_sql("UPDATE jobs SET requested_gpus_per_node = 1")
    (paid,) = ask(url, "did_resizing_pay")
    assert (paid["resized_jobs"], paid["predicted"], paid["jct_s"]) == (1, 1, 2593.0)
    # At the size asked for it has the same wait and the same other time (test_views.test_what_if), and no pause.
    other_s = 2593 - 994 - 410 - 11.0 * 3000 / 1792
    assert paid["saved_hours"] == pytest.approx((994 + 3000 / 128 + other_s - 2593) / 3600)


def test_jobs_of_blocks_count_by_their_blocks(store: Store, url: str) -> None:
    """Protects GPU-hours and the size at each epoch from the size that a job of blocks has at its end."""
    fill_blocks(store)
    (carol,) = ask(url, "gpu_hours_by_user", until=9 * DAY)
    assert (carol["runs"], carol["gpu_hours"]) == (2, pytest.approx((200 * 1 + 310 * 4) / 3600))
    (half,) = ask(url, "gpu_hours_by_user", until=BEGAN + 100.0)
    assert half["gpu_hours"] == pytest.approx((100 * 1 + 10 * 4) / 3600)
    store.record_jobs([job(11)])
    store.record_runs([run(11, 0, 1, 4)])
    first = Membership(1, (0,), (0,), 1, 1, 1, 0, 64, 0.0, why="first")
    both = Membership(2, (0, 3), (0, 0), 2, 0, 5, 9, 64, 0.25, why="order")
    members, epochs = [line(2, first), line(4, both)], [epoch(3, 0), epoch(5, 1)]
    report(store, 11, 0, hello=hello(), members=members, epochs=epochs, offset=9, number=5)
    assert [(row["epoch"], row["gpus"]) for row in ask(url, "learning_curve", job_id=11)] == [(0, 1), (1, 5)]


def test_clusters_are_told_apart(store: Store, url: str) -> None:
    """Protects a study, whose runs are clusters with the same job ids, from figures over several of them."""
    fill(store)
    with Store.open(url, "other") as other:
        fill(other)
    for name in ("did_resizing_pay", "fastest_size", "learning_curve", "queueing_by_size", "speed_up", "why"):
        found = ask(url, name)
        mine, its = ([row for row in found if row["cluster"] == of] for of in ("gres", "other"))
        assert found == [*mine, *its] and mine == [row | {"cluster": "gres"} for row in its] != [], name
    (user,) = ask(url, "who_used_the_gpus")
    assert (user["gpu_hours"], user["days"]) == (pytest.approx(16.0), 1)


def test_the_fastest_size_is_of_the_newest_job(store: Store, url: str) -> None:
    fill(store)
    store.record_jobs([job(7, submit_time=9 * DAY)])
    store.record_runs([run(7, 0, 1, 2, start_time=9 * DAY)])
    report(store, 7, 0, hello=hello(), samples=[throughput(2)], offset=9, number=2)
    assert [row["gpus"] for row in ask(url, "fastest_size")] == [2]
