"""The columns: declared once, drawn by tables, pages and JSON."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_ones.show import columns
from slurm_ones.show.columns import DECISION, JOB, NODE, RESIZE, ShownColumn, ShownJob
from slurm_ones.show.table import as_json, fitting, measured, rows
from tests.commands import printed
from tests.db.make import job, resized_job
from tests.test_cli_top import live_of

TABLES = [columns.JOBS, columns.TOP, columns.RUNNING, columns.WAITING, columns.ENDED, columns.RESIZES, columns.DECIDED]


@pytest.mark.parametrize("declared", [JOB, NODE, RESIZE, DECISION])
def test_names_are_unique_and_explained(declared: tuple[ShownColumn[Any], ...]) -> None:
    """A script finds one meaning behind a name."""
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
    """The job's number never does."""
    widths = {column.name: 10 for column in columns.JOBS}
    left = [[column.name for column in fitting(columns.JOBS, widths, width)] for width in (200, 100, 60, 10, 1)]
    assert [len(names) for names in left] == [14, 8, 5, 1, 1]
    assert left[-1] == ["job_id"] and "state" in left[2]


def test_a_job_is_the_same_in_every_command(empty_url: str) -> None:
    """Protects scripts from three forms of one job."""
    from ones_db import Store

    with Store.open(empty_url, "gres") as store:
        resized_job(store, 7)
    (listed,) = printed("jobs", "--json", "--database", empty_url)
    (live,) = printed("top", "--json", "--database", empty_url)["jobs"]
    why = printed("why", "7", "--json", "--database", empty_url)["job"]
    assert listed == live == why and list(listed) == [column.name for column in JOB if column.json]
