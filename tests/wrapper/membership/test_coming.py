"""What is announced of a term: what of it is believed, and what a failure leaves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.membership.coming import MOST_S, Coming, find_coming
from ones_wrapper.membership.files import COMING, HotFolder, Leader
from ones_wrapper.membership.plan import Member, Plan

PLAN = Plan(3, 2, (Member(0, 0, "0.0", 1, 1, 1), Member(1, 0, "1.0", 1, 1, 1)))
BEFORE = Leader(1, "n1", 12345, "secret", 0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> HotFolder:
    hot = HotFolder(tmp_path, 7)
    hot.prepare()
    return hot


def changed(**changes: Any) -> str:
    """An announcement with fields as they should not be."""
    data = json.loads(json.dumps(Coming(PLAN, time.time(), time.time()).fields())) | {"array": 7}
    for name, value in changes.items():
        (data if name in data else data["plan"])[name] = value
    return json.dumps(data)


def test_a_term_is_announced_until_it_begins(folder: HotFolder) -> None:
    """Nor for ever, if it never begins."""
    assert find_coming(folder, BEFORE) is None
    coming = Coming(PLAN, 5.0, time.time())
    assert folder.announce(coming.fields()) == ""
    assert find_coming(folder, None) == find_coming(folder, BEFORE) == coming
    assert find_coming(folder, Leader(2, "n1", 1, "other", 1, 0)) is None
    assert find_coming(HotFolder(folder.path.parent, 77), BEFORE) is None  # of the job that had the directory before
    assert folder.announce(Coming(PLAN, 5.0, time.time() - 2 * MOST_S - 1).fields()) == ""
    assert find_coming(folder, BEFORE) is None


@pytest.mark.parametrize(
    "change",
    [
        {"at": float("nan")}, {"at": 10**400}, {"began": "5"}, {"began": float("inf")}, {"term": "9"}, {"term": True},
        {"generation": None}, {"members": []}, {"members": 3}, {"members": [{"task": 1}]}, {"surplus": 1},
        {"plan": json.loads("[" * 900 + "]" * 900)},
    ],
)  # fmt: skip
def test_an_announcement_that_is_none(folder: HotFolder, change: dict[str, Any]) -> None:
    """Anyone of the job could write the file wrongly: that ends no start with an error."""
    (folder.path / COMING).write_text(changed())
    assert find_coming(folder, BEFORE) is not None
    (folder.path / COMING).write_text(changed(**change))
    assert find_coming(folder, BEFORE) is None


@pytest.mark.parametrize("late", [False, True])
def test_an_announcement_that_fails(folder: HotFolder, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A server may rename the file and say that it had not; no try leaves a file."""
    rename = os.replace

    def replace(self: Path, target: Path) -> None:
        if late:
            rename(self, target)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", replace)
    coming = Coming(PLAN, 5.0, time.time())
    said = folder.announce(coming.fields())
    assert ("cannot be written (Input/output error)" in said) is not late
    assert (find_coming(folder, BEFORE) == coming) is late
    assert [path.name for path in folder.path.iterdir()] == [COMING] * late
