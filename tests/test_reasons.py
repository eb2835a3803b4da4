"""Reasons: every code is used, every use has its arguments, and sentences are right when there is one of something."""

from __future__ import annotations

import ast
import string
from collections import defaultdict
from pathlib import Path
from time import mktime, strptime

import pytest

import slurm_ones
from ones_db.reasons import CAUSES, SENTENCES, SITE_LIMITS, Reason, alone, reason, render
from slurm_ones.show.live import counted


def uses() -> dict[str, list[tuple[str, frozenset[str]]]]:
    """For each code that the product gives a reason of, where and with which arguments."""
    found: dict[str, list[tuple[str, frozenset[str]]]] = defaultdict(list)
    root = Path(slurm_ones.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reason":
                place = f"{path.relative_to(root)}:{node.lineno}"
                named = frozenset(keyword.arg or "**" for keyword in node.keywords)
                given = node.args[0]
                for code in (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,):
                    assert isinstance(code, ast.Constant), f"{place}: its code is no literal"
                    found[str(code.value)].append((place, named))
    return found


def wanted(code: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in string.Formatter().parse(SENTENCES[code]) if name)


def test_every_code_is_used_and_every_use_has_its_arguments() -> None:
    """Protects from sentences that nobody says, and from a KeyError where a reason is given."""
    found = uses()
    for code in [code for code in SENTENCES if code.endswith("_alone")]:
        # Given by `alone` in place of another, with those of its arguments that are named.
        assert wanted(code) <= wanted(code.removesuffix("_alone"))
        found[code] = [("alone", wanted(code))]
    assert found.keys() == SENTENCES.keys()
    wrong = [(code, place) for code, places in found.items() for place, named in places if named != wanted(code)]
    assert wrong == []


def test_what_is_counted_has_a_sentence() -> None:
    assert SITE_LIMITS <= CAUSES.keys() <= SENTENCES.keys()


PREEMPTED = ": Slurm preempted blocks of it"
MOMENT = strptime("2026-11-28 12:53:20", "%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    ("code", "arguments", "sentence"),
    [
        (
            "resizes_per_job",
            {"times": 1},
            "it was resized 1 time, as often as the site allows (limits.resizes_per_job)",
        ),
        ("max_open", {"resizes": 1}, "waits its turn: 1 resize is under way"),
        ("max_open", {"resizes": 4}, "waits its turn: 4 resizes are under way"),
        ("growth_rests", {"until": mktime(MOMENT)}, f"it may grow from 2026-11-28 12:53:20 on{PREEMPTED}"),
        ("growth_rests", {"until": "inf"}, f"it may grow from inf on{PREEMPTED}"),
    ],
)
def test_sentences(code: str, arguments: dict[str, int | float], sentence: str) -> None:
    assert str(reason(code, **arguments)) == sentence


def test_a_wrong_argument_is_an_error_at_once() -> None:
    for code, arguments in (("max_open", {}), ("max_open", {"resizes": 1, "more": 2}), ("no such code", {})):
        with pytest.raises(KeyError):
            reason(code, **arguments)


def test_a_code_of_a_newer_version_is_shown() -> None:
    """As a database may hold it."""
    assert render("newer", {"gpus": 2}) == "newer (gpus=2)"
    assert str(Reason("newer")) == "newer"


def test_causes_are_counted() -> None:
    assert counted(["held_by_owner", *["account_cap"] * 18]) == "18 jobs: capped by account; 1 job: held by the owner"


def test_a_job_alone_hears_of_no_others() -> None:
    """Protects an owner on an empty cluster from looking for jobs that are not there."""
    assert str(alone(reason("least_total_time"))) == "this way it is expected to end soonest"
    assert str(alone(reason("best_total", total="the sum of all jobs' speed-ups"))).endswith("this one is best")
    said = [sentence for code, sentence in SENTENCES.items() if code.endswith("_alone")]
    assert not [text for text in said if "jobs" in text or "{first}" in text or "{total}" in text]
    assert alone(reason("resize_under_way")) == reason("resize_under_way")
