"""The queries that researchers start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from ones_db import CheckpointRecord, Store
from tests.db.make import job, resized_job, run, told

QUERIES = Path(__file__).parents[2] / "db" / "queries"


def ask(store: Store, name: str, **values: object) -> list[dict[str, Any]]:
    with store._read() as connection:
        rows = connection.execute(text((QUERIES / name).read_text()), values).mappings().all()
    return [dict(row) for row in rows]


def test_scaling(store: Store) -> None:
    """Protects the speed-up of a job over its smallest size."""
    resized_job(store)
    small, large = ask(store, "scaling.sql", job_id=7)
    assert (small["gpus"], small["batch"], small["samples_per_s"], small["speed_up"]) == (1, 64, 128.0, 1.0)
    assert (large["gpus"], large["batch"], large["samples_per_s"], large["speed_up"]) == (4, 256, 512.0, 4.0)
    assert large["efficiency_per_gpu"] == 1.0


def test_resize_cost(store: Store) -> None:
    """Protects where the time of a resize went: the run after it, and the checkpoint that its order asked
    for."""
    resized_job(store)
    asked = CheckpointRecord(32, 2610.0, "step-21", 2, 0, 21, 1000, 1.25, order_number=9, stall_s=0.5)
    told(store, 7, 0, checkpoints=[asked], offset=200, number=32)
    (line,) = ask(store, "resize_cost.sql")
    assert (line["old_gpus"], line["new_gpus"], line["pause_s"], line["total_s"]) == (1, 4, 410.0, 510.0)
    assert (line["checkpoint_s"], line["stall_s"]) == (1.25, 0.5)
    phases = ("queue_s", "launch_s", "import_s", "group_s", "load_s", "first_step_s", "attempts")
    assert [line[phase] for phase in phases] == [105.0, 2.0, 1.5, 0.25, 0.75, 0.5, 0]


def test_gpu_hours_by_user(store: Store) -> None:
    """Protects a week's bill: runs cut at both ends, and those that have not ended."""
    resized_job(store, 7, "alice")
    store.see_jobs([job(8, user="bob")])
    store.see_runs([run(8, 0, 2, 4, start_time=0.0)])
    found = {row["user_name"]: row for row in ask(store, "gpu_hours_by_user.sql", since=2000.0, until=3900.0)}
    assert found["alice"]["gpu_hours"] == pytest.approx((900 * 1 + 900 * 4) / 3600)
    assert (found["alice"]["jobs"], found["alice"]["runs"]) == (1, 2)
    assert found["bob"]["gpu_hours"] == pytest.approx(1900 * 8 / 3600)


def test_every_query_is_tested() -> None:
    """Protects a new query from being forgotten here."""
    assert {path.name for path in QUERIES.glob("*.sql")} == {
        "scaling.sql",
        "resize_cost.sql",
        "gpu_hours_by_user.sql",
    }
