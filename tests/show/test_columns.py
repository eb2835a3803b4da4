"""The columns: declared once, drawn by tables, pages and JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db import DecisionJobRecord, DecisionRecord, HealthRecord, ResizeRecord
from ones_db.reasons import NO_REASON, Reason, reason
from ones_db.shape import Shape
from slurm_ones.show import columns
from slurm_ones.show.columns import DECISION, JOB, NODE, RESIZE, ShownColumn, ShownDecision, ShownJob
from slurm_ones.show.live import as_of
from slurm_ones.show.table import as_json, fitting, measured, rows
from tests.commands import printed
from tests.db.make import job, resized_job
from tests.test_cli_top import live_of

TABLES = [columns.JOBS, columns.TOP, columns.RUNNING, columns.WAITING, columns.ENDED, columns.RESIZES, columns.DECIDED]


@pytest.mark.parametrize("declared", [JOB, NODE, RESIZE, DECISION])
def test_names_are_unique_and_explained(declared: tuple[ShownColumn[Any], ...]) -> None:
    assert len({column.name for column in declared}) == len(declared)
    assert all(column.help and not column.help.endswith(".") for column in declared)


@pytest.mark.parametrize("table", TABLES)
def test_what_is_drawn_has_a_title(table: tuple[ShownColumn[Any], ...]) -> None:
    """Protects tables from a column of which nobody knows what it is; only a title of `st` is no JSON name."""
    assert all(column.title for column in table)
    assert all(column.json or column.name == "st" for column in table)


def test_a_new_column_is_drawn_everywhere(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One declaration is enough for JSON, and its name in a table's line for terminal and page."""
    from ones_db import Store

    with Store.open(empty_url, "gres") as store:
        resized_job(store, 7)
        store.record_jobs([job(8, state="PENDING")])
    live = live_of(empty_url)
    shown = list(live.jobs)
    new: ShownColumn[ShownJob] = ShownColumn("colour", lambda one: f"red{one.job.job_id}", "its colour", "colour")
    monkeypatch.setattr("slurm_ones.show.table.JOB", (*JOB, new))
    assert [one["colour"] for one in as_json(live, shown)["jobs"]] == ["red7", "red8"]
    table, width, left_out = measured([*columns.JOBS, new], shown, None)
    assert (table.columns[-1].header, left_out) == ("colour", []) and list(table.columns[-1].cells) == ["red7", "red8"]
    assert [row[-1] for row in rows(shown, [*columns.TOP, new])] == ["red7", "red8"]
    assert measured([*columns.JOBS, new], shown, 60)[1] <= 60 < width


def test_what_is_too_wide_gives_way_in_order() -> None:
    widths = {column.name: 10 for column in columns.JOBS}
    left = [[column.name for column in fitting(columns.JOBS, widths, width)] for width in (200, 100, 60, 10, 1)]
    assert [len(names) for names in left] == [14, 8, 5, 1, 1]
    assert left[-1] == ["job_id"] and "state" in left[2]


BEGUN = DecisionJobRecord(
    7, Shape(1, 4), None, reason("in_queue", gpus=4, place=1, waiting=2), outcome=reason("begins")
)


@pytest.mark.parametrize(
    ("state", "outcome", "shown"),
    [
        ("draining", NO_REASON, "draining"),
        ("done", NO_REASON, "done"),
        ("failed", reason("batch_changes"), "its batch"),
    ],
)
def test_what_came_of_a_decision_is_what_came_of_its_resize(state: str, outcome: Reason, shown: str) -> None:
    (column,) = (column for column in DECISION if column.name == "outcome")
    resize = ResizeRecord(7, 0, Shape(1, 2), None, Shape(1, 4), None, state, 0.0, outcome=outcome)
    decision = DecisionRecord(0.0, "ones", "act", 0.1)
    assert column.text(ShownDecision(decision, BEGUN, resize=resize)).startswith(shown)
    assert column.text(ShownDecision(decision, BEGUN)) == "begins"
    assert not column.text(ShownDecision(decision, replace(BEGUN, outcome=BEGUN.reason))).strip()


def test_a_size_without_a_batch_names_none() -> None:
    (column,) = (column for column in DECISION if column.name == "shape")
    assert column.text(ShownDecision(DecisionRecord(0.0, "ones", "act", 0.1), BEGUN)) == "1x4"


def test_how_old_what_is_shown_is() -> None:
    health = HealthRecord(100.0, "act", 60.0, 100.0, 0.25, 2, 2, 6)
    assert as_of(health, 112.0) == "as the companion saw it 12 s ago"
    assert as_of(health, 400.0).endswith("; it should look every 60 s (slurm-ones status)")
    assert as_of(None, 0.0) == as_of(health._replace(tick_time=None), 0.0) == "no companion has looked yet"


def test_a_job_is_the_same_in_every_command(empty_url: str) -> None:
    from ones_db import Store

    with Store.open(empty_url, "gres") as store:
        resized_job(store, 7)
    (listed,) = printed("jobs", "--json", "--database", empty_url)
    (live,) = printed("top", "--json", "--database", empty_url)["jobs"]
    why = printed("why", "7", "--json", "--database", empty_url)["job"]
    assert listed == live == why and list(listed) == [column.name for column in JOB if column.json]
