"""The queries that researchers start from, on both databases."""

from __future__ import annotations

from typing import Any

import pytest

from ones_db import Store
from ones_db.query import Reader, saved_queries, saved_query
from ones_db.views import VIEWS
from tests.db.make import opened
from tests.db.test_views import DAY, fill

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


def ask(url: str, name: str) -> list[dict[str, Any]]:
    reader = Reader(url)
    try:
        with reader.ask(saved_query(name), PARAMETERS[name]) as answer:
            return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    finally:
        reader.close()


def test_every_query_is_tested() -> None:
    """Protects a new query from being forgotten here, and its reader from guessing what it is for."""
    assert set(saved_queries()) == set(PARAMETERS)
    assert all(saved_query(name).startswith("-- ") for name in saved_queries())
    assert all(told and not told.startswith("Parameter") for told in saved_queries().values())


def test_a_query_and_a_view_have_different_names() -> None:
    """Protects `slurm-ones db query NAME` from meaning two things."""
    assert not set(saved_queries()) & set(VIEWS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_query_answers_without_rows_and_with(store: Store, url: str, name: str) -> None:
    """Protects a site's first day, and both databases' SQL."""
    assert ask(url, name) == []
    fill(store)
    assert ask(url, name)


def test_what_they_tell(store: Store, url: str) -> None:
    """Protects the answers, done by hand."""
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
