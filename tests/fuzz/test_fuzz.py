"""Every reader of what others wrote under inputs that nobody wrote in good faith: those that once broke one, and new
ones at each run, from a seed that is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzz import _parsers, input_of, replay, tried
from tests.fuzz.parsers import PARSERS, clean
from tests.marks import NIGHTLY

SAVED = sorted((Path(__file__).parent / "saved").glob("*.json"))
INPUTS = 100_000 if NIGHTLY else 500


@pytest.fixture(autouse=True, scope="module")
def _cleaned() -> Iterator[None]:
    yield
    clean()


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_what_once_broke_a_reader(path: Path) -> None:
    assert replay(path) == ""


@pytest.mark.slow
def test_new_inputs(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No exception, no hang, no flood of memory. A failure leaves a file that replays."""
    files = ["--failures", str(tmp_path / "failures"), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["fuzz", "--inputs", str(INPUTS), "--seed", str(seed), *files])
    monkeypatch.setenv("ONES_FUZZ_ROOM", "")  # which it sets
    assert fuzz.main() == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["inputs"] == INPUTS and found["exceptions"] == found["slow"] == 0
    # A slow reader's share is so small that a short run may not come to it.
    shares = {parser.name: parser.share / sum(one.share for one in _parsers()) for parser in _parsers()}
    assert set(found["per_parser"]) >= {name for name, share in shares.items() if share * INPUTS > 10}
    assert found["peak_bytes"] < found["memory_bound_bytes"]


def test_an_input_follows_from_its_seed_and_number() -> None:
    for number in range(200):
        first, second = input_of(5, number), input_of(5, number)
        assert first[0] is second[0] and first[1] == second[1]
    assert len({input_of(seed, 0)[1] for seed in range(50)}) > 25


@pytest.mark.slow
def test_a_failure_is_one_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that finds nothing because it sees nothing would say the same as one over sound readers."""

    def broken(data: bytes) -> None:
        raise KeyError(len(data))

    def endless(data: bytes) -> None:
        while data == b"{}":
            pass

    parser = PARSERS[0]
    path = tmp_path / "saved.json"
    path.write_text(json.dumps({"parser": parser.name, "number": 1, "why": "", "data": "e30="}))
    assert replay(path) == ""
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.1)
    for run, words in ((broken, "KeyError: 2"), (endless, "slow")):
        monkeypatch.setattr("tests.fuzz.parsers.PARSERS", [type(parser)(parser.name, 1.0, parser.make, run)])
        assert words in replay(path)
        assert words in tried(type(parser)(parser.name, 1.0, parser.make, run), b"{}")[0]
