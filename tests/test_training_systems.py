"""The figures of training strategies are collected: each system on its own, and what fails or is missing is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import systems, training_systems


@pytest.mark.slow
def test_systems_are_measured_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails, and one that leaves a figure out, cost the others nothing."""
    (tmp_path / "ring.py").write_text("def measure(): return {'max_error': 0.5, 'wire_over_formula': 1}\n")
    (tmp_path / "lsgd.py").write_text("def measure(): raise ValueError('no leader')\n")
    (tmp_path / "uneven.py").write_text("def measure(): return {'max_error': 0.25}\n")
    monkeypatch.setattr(systems, "__path__", [str(tmp_path)])
    monkeypatch.setattr(training_systems, "measured", _measured)
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["", "--json", str(found), "--only", "ring,lsgd,uneven,craig"])
    monkeypatch.setenv("FOLDER", str(tmp_path))
    assert training_systems.main() == 1
    assert json.loads(found.read_text()) == {
        "ring": {"max_error": 0.5, "wire_over_formula": 1.0},
        "uneven": {"max_error": 0.25},
    }
    told = capsys.readouterr()
    assert "| uneven | max_error | 0.25 |" in told.out
    assert "ring: memory_over_formula not measured" in told.err
    assert "lsgd: ValueError: no leader" in told.err
    assert "craig: benchmarks/systems has no craig.py" in told.err
    monkeypatch.setattr(sys, "argv", ["", "--only", "rings"])
    with pytest.raises(SystemExit):
        training_systems.main()
    assert "--only: rings is none of ring, optimus2d" in capsys.readouterr().err


def _measured(name: str) -> dict[str, float]:
    import os

    scope: dict[str, object] = {}
    exec((Path(os.environ["FOLDER"]) / f"{name}.py").read_text(), scope)
    found: dict[str, float] = scope["measure"]()  # type: ignore[operator]
    return {key: float(value) for key, value in found.items()}
