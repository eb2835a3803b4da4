"""The harness of `make gpu` with stubs for checks: whatever one does, the others run, and all is reported."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.harness import Lab, Result, Site, run_all
from tests.cluster.paths import REPOSITORY
from tests.gpu.stubs import table
from tests.waiting import until

STUBS = "tests.gpu.stubs:TABLE"


def gone(pid: str) -> bool:
    """Also one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_one_check_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an hour of a card: what hangs is killed with all it started, what crashes is named, the rest run."""
    note = tmp_path / "note"
    monkeypatch.setenv("ONES_STUB_NOTE", str(note))
    said: list[str] = []
    results = run_all(table(note), Site(1, table=STUBS), lambda one: said.append(one.name))
    assert {one.name: one.state for one in results} == {
        "passes": "passed", "crashes": "crashed", "raises": "failed", "skips": "skipped", "hangs": "timed out",
        "slow": "failed", "last": "passed", "several": "skipped", "people": "skipped",
    }  # fmt: skip
    by_name = {one.name: one for one in results}
    whys = {"crashes": "signal 6", "raises": "stubbed", "skips": "copy engine", "slow": "s: 1.5, not ≤ 1",
            "several": "needs 2 GPUs, and 1 are", "people": "two networks"}  # fmt: skip
    assert all(text in by_name[name].why for name, text in whys.items()), by_name
    assert by_name["passes"].seen[1] == {"what": "s", "value": 1.5, "bound": "≤ 2", "kept": True}
    assert sorted(said) == sorted(by_name)
    until(lambda: all(map(gone, note.read_text().split())))


def test_all_ends_in_time(tmp_path: Path) -> None:
    """Protects those who lent the card: at the end of the time what runs is killed, and nothing begins."""
    checks = [one for one in table(tmp_path / "note") if one.name in ("hangs", "last")]
    results = run_all(checks, Site(1, table=STUBS, until=time.monotonic() + 0.4), lambda one: None)
    assert [(one.state, one.why.splitlines()[0]) for one in results][1] == ("skipped", "no time was left")
    assert results[0].state == "timed out"


def test_only_what_a_cpu_can_show_counts_in_a_rehearsal(tmp_path: Path) -> None:
    for rehearsal in (False, True):
        lab = Lab(1, rehearsal, tmp_path)
        lab.measure("s", 3.0, most=2.0)
        lab.require("code", 1, 0)
        assert [one["kept"] for one in lab.seen] == [rehearsal, False]
    assert lab.size(4096, 4) == 4


@pytest.mark.parametrize(
    ("gpus", "rehearsal", "ranks", "env"),
    [
        (1, False, 1, {}),
        (1, False, 2, {"ONES_SHARE_GPUS": "1", "ONES_BACKEND": "gloo"}),
        (2, False, 2, {}),
        (2, True, 2, {"ONES_DEVICE": "cpu", "ONES_BACKEND": "gloo"}),
    ],
)
def test_ranks_share_a_card_if_there_are_too_few(
    gpus: int, rehearsal: bool, ranks: int, env: dict[str, str], tmp_path: Path
) -> None:
    assert Lab(gpus, rehearsal, tmp_path).env(ranks) == env


def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A Python that answers as one with another torch would."""
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "torch is missing"),
        ('echo \'{"torch": "2.13", "nccl": "", "gpus": 0, "cards": [], "said": "too old"}\'', "torch 2.13; too old"),
    ],
)
def test_without_a_gpu_it_says_what_would_run(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python(tmp_path, monkeypatch, script)
    out = tmp_path / "gpu.json"
    assert command.main(["--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert said in printed and "\n0 checks run" in printed
    assert all(f"\n{check.name} " in printed for check in CHECKS)
    found = json.loads(out.read_text())
    assert (found["run"], found["gpus"], len(found["checks"])) == (0, 0, len(CHECKS))


def test_a_check_that_fails_fails_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python(tmp_path, monkeypatch, 'echo \'{"torch": "2.13", "nccl": "2.30", "gpus": 1, "cards": ["H"], "said": ""}\'')
    states = {"G4": Result("G4", "passed"), "G5": Result("G5", "crashed", "signal 6")}
    monkeypatch.setattr(command, "run_all", lambda checks, site, say: [states[one.name] for one in checks])
    assert command.main(["G4"]) == 0
    assert command.main(["G4", "G5"]) == 1
    assert "1 × H, torch 2.13, NCCL 2.30" in (printed := capsys.readouterr().out) and "G5 crashed:\nsignal 6" in printed
    assert command.main(["G4", "--rehearse"]) == 0
    assert "\n0 checks run (a rehearsal" in capsys.readouterr().out


def test_the_documents_have_the_table() -> None:
    text = (REPOSITORY / "docs" / "gpu.md").read_text()
    assert command.docs_table(CHECKS) in text, "python -m benchmarks.gpu --table"


def test_each_defect_has_a_test_or_a_check() -> None:
    text = (REPOSITORY / "docs" / "gpu.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert sorted(int(number) for row in rows for number in re.findall(r"\d+", row[0])) == list(range(1, 31))
    names = {check.name for check in CHECKS}
    for row in rows:
        cited = re.findall(r"\b[GB]\d+\b", row[-1])
        assert set(cited) <= names
        assert cited or "`tests/" in row[-1], row
