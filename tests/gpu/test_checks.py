"""The checks themselves: their table, that each can fail, and their code on the CPU."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import blocks, state
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.harness import Lab, Site, load, run_all
from benchmarks.gpu.work import perceptron

RUN = [check for check in CHECKS if not check.by_hand]


def test_the_table() -> None:
    """22 checks of one GPU in seven processes, 16 of more; each names its code, or why people have to do it."""
    names = [*(f"G{n}" for n in range(1, 23)), *(f"B{n}" for n in range(1, 17))]
    assert [check.name for check in CHECKS] == names
    assert len({check.process for check in CHECKS if check.name.startswith("G")}) == 7
    for check in CHECKS:
        assert bool(check.function) != bool(check.by_hand)
    for check in RUN:
        inspect.signature(load(check.function)).bind(None, **check.options)


FLAT = torch.cat([one.flatten() for one in perceptron().parameters()])
BITS = [torch.zeros(3)] * 9


@pytest.mark.parametrize(
    ("name", "answers", "kept"),
    [
        ("G4", [[((900, 30), (940, 36))]], True),
        ("G4", [[((900, 30), (1500, 36))]], False),
        ("G5", [[((900, 30), (940, 60))]], False),
        ("G6", [[(1.2, 0.1, 2.0)]], True),
        ("G6", [[(6.0, 0.1, 2.0)]], False),
        ("G6", [[(1.2, 0.9, 2.0)]], False),
        ("G7", [[(0, 100 << 20)], [(150 << 20, 0)]], True),
        ("G7", [[(0, 100 << 20)], [(1024 << 20, 0)]], False),
        ("G8", [[FLAT + 1], [FLAT + 1]], True),
        ("G8", [[FLAT + 1], [FLAT + 1.001]], False),
        ("G8", [[FLAT], [FLAT]], False),
        ("G9", [[BITS], [BITS], [BITS], [BITS]], True),
        ("G9", [[BITS], [BITS], [BITS], [[torch.ones(3)] * 9]], False),
        ("G10", [[False]], False),
        ("G11", [[(4e9, 5.0, (3.0, 0.4), 1.5, 2.0, 4.1e9)]], True),
        ("G11", [[(4e9, 5.0, (3.0, 0.4), 1.5, 2.0, 8.0e9)]], False),
        ("G11", [[(4e9, 5.0, (3.0, 2.0), 1.5, 2.0, 4.1e9)]], False),
        ("G11", [[(4e9, 5.0, (3.0, 0.4), 1.5, 3.1, 4.1e9)]], False),
        ("G12", [[(3000, 0.9)]], True),
        ("G12", [[(8192, 0.3)]], False),
        ("G14", [[1.01]], True),
        ("G14", [[1.28]], False),
        ("G15", [[0]], False),
        ("G16", [[1.2]], False),
        ("G17", [[(30, 45), (30, 15)]], True),
        ("G17", [[(30, 30), (30, 30)]], False),
        ("G19", [[(True, 2.0, 200.0), (True, 2.0, 0.0)], [(True, 26.0, 200.0), (True, 0.6, 0.0)]], True),
        ("G19", [[(True, 2.0, 9e3), (True, 2.0, 0.0)], [(True, 26.0, 200.0), (True, 0.6, 0.0)]], False),
        ("G21", [[(2, [1.0])], [(0, [1.0])]], True),
        ("G21", [[(3, [1.0])], [(0, [1.0])]], False),
        ("G21", [[(0, [1.0])], [(0, [1.0])]], False),
        ("G22", [[3.0], [3.01]] * 3, True),
        ("G22", [[3.0], [3.01], [3.0], [3.2], [3.0], [3.0]], False),
        ("B8", [[0.0, 0.1]], False),
    ],
)  # fmt: skip
def test_a_card_that_misbehaves_is_seen(
    name: str, answers: list[list[Any]], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With answers in place of ranks: those of a card as it should be, and of one with the defect."""
    given = iter(answers)
    monkeypatch.setattr(Lab, "ranks", lambda self, *arguments, **options: next(given))
    check, lab = next(one for one in CHECKS if one.name == name), Lab(1, False, tmp_path)
    load(check.function)(lab, **check.options)
    assert lab.seen and all(one["kept"] for one in lab.seen) == kept, lab.seen
    assert next(given, None) is None


def test_sent_bytes_tell_their_places() -> None:
    """Protects G19 from a transfer that mixes tensors up."""
    one, other = state._bytes(1000, 0, torch.device("cpu")), state._bytes(1000, 1, torch.device("cpu"))
    assert not torch.equal(one, other) and not torch.equal(one[:500], one[500:])


@pytest.mark.nightly
@pytest.mark.parametrize("process", dict.fromkeys(check.process for check in RUN))
def test_the_code_of_each_check_runs(process: str) -> None:
    """Protects the minutes of a card from a slip that only shows there: all runs on the CPU, at small sizes."""
    checks = [check for check in RUN if check.process == process]
    results = run_all(checks, Site(0, rehearsal=True), lambda one: None)
    assert {one.name: one.state for one in results} == {check.name: "passed" for check in checks}, results


@pytest.mark.nightly
def test_three_gigabytes_reach_a_newcomer_that_needs_33_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects states of gigabytes: senders once gave up after 20 s, and training stood still again and again."""
    monkeypatch.setattr("tests.wrapper.membership.blocks.TIMEOUT_S", 600.0)  # a busy machine
    monkeypatch.setattr("tests.wrapper.membership.forked.ForkedBlock.end.__defaults__", (600.0,))
    lab = Lab(0, True, tmp_path)
    blocks.slow_newcomer(lab, 3.0, 33.0)
    assert all(one["kept"] for one in lab.seen), lab.seen
