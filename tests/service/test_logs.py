"""The service's log: a line an event, no flood, and nothing in it that a terminal would obey."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.service.logs import (
    KINDS,
    LENGTH,
    MOST,
    PERIOD_S,
    LastErrorHandler,
    OneLine,
    RateLimitFilter,
    to_journal,
)


def record(text: str, *arguments: object, level: int = logging.ERROR, name: str = "daemon") -> logging.LogRecord:
    return logging.LogRecord(name, level, "x.py", 1, text, arguments, None)


@given(st.text(max_size=3 * LENGTH))
def test_an_event_is_one_printable_line(text: str) -> None:
    """Whoever wrote what is in it: a job's name with a line end would else be an event of its own."""
    for journal in (True, False):
        line = OneLine(journal=journal).format(record("job %s", text))
        assert line.isprintable() and len(line) < LENGTH + 60


def test_a_traceback_is_in_the_line() -> None:
    try:
        raise ValueError("an odd\njob")
    except ValueError as error:
        event = record("this tick failed")
        event.exc_info = (ValueError, error, error.__traceback__)
    line = OneLine(journal=True).format(event)
    assert line.startswith("<3>daemon: this tick failed: ValueError: an odd job; test_a_traceback_is_in_the_line (")


def test_the_same_complaint_comes_seldom() -> None:
    """A day of an outage at a tick a minute is a page, not a thousand lines; and none is lost count of."""
    now = 0.0
    seldom, said = RateLimitFilter(lambda: now), []
    for minute in range(24 * 60):
        now = 60.0 * minute
        event = record("no answer within %.0f s; trying again in %d s", 30.0, minute)
        if seldom.filter(event):
            said.append(event.getMessage())
    assert len(said) == 24 * MOST
    assert said[0].endswith("again in 0 s")
    assert said[MOST].endswith(f"({60 - MOST} more like it were left out)")


def test_another_complaint_passes() -> None:
    """Of other words, of another part or level; what is no complaint is what was asked for."""
    seldom = RateLimitFilter(lambda: 0.0)
    for _ in range(10):
        seldom.filter(record("disk full"))
    assert seldom.filter(record("no route to host"))
    assert seldom.filter(record("disk full", name="observer"))
    assert seldom.filter(record("disk full", level=logging.WARNING))
    assert all(seldom.filter(record("step", level=logging.INFO)) for _ in range(100))


def test_ever_new_complaints_take_no_more_memory() -> None:
    """Users choose some of the words."""
    seldom = RateLimitFilter(lambda: 0.0)
    for number in range(3 * KINDS):
        seldom.filter(record("a" * (number % 1900) + "b" * (number // 1900)))
    assert len(seldom._kinds) <= KINDS
    assert PERIOD_S >= 600


def test_the_newest_error_is_kept_for_status() -> None:
    last = LastErrorHandler()
    logger = logging.Logger("daemon")
    logger.addHandler(last)
    logger.error("job %d: first", 1)
    logger.error("job %d: second", 2)
    logger.warning("no error")
    assert last.text == "daemon: job 2: second" and last.time > 0


def test_journald_is_known_by_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it reads has its marks; a file that stderr was sent to has times instead."""
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        mine = f"{found.st_dev}:{found.st_ino}"
        assert to_journal(stream, {"JOURNAL_STREAM": mine})
        assert not to_journal(stream, {"JOURNAL_STREAM": "1:2"})
        assert not to_journal(stream, {})
