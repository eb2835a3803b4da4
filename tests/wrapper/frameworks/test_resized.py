"""The frameworks' examples under `ones-run`, with the real libraries, through resizes and a kill."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.frameworks import CASES, RESIZES, Resized, Start
from ones_wrapper.protocol import Order, encode

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def through(name: str, folder: Path, *starts: Start) -> Resized:
    if CASES[name].missing:
        pytest.skip(f"{name} is not installed")
    resized = Resized(CASES[name], folder)
    resized.run(starts)
    return resized


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What the Trainer logged of its training and evaluations, without times."""
    history = json.loads((folder / "trainer-output/trainer_state.json").read_text())["log_history"]
    assert "train_loss" in history[-1]
    return [
        {k: v for k, v in entry.items() if k in ("loss", "learning_rate", "epoch", "step", "eval_loss")}
        for entry in history[:-1]
    ]


def test_trainer_through_resizes(tmp_path: Path) -> None:
    """Protects a Trainer's job: three changed lines, no sample lost or repeated, and the log of an undisturbed run,
    which a resize would otherwise begin anew.
    """
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    still, moved = tmp_path / "still", tmp_path / "moved"
    through("transformers", still, Start(1))
    assert through("transformers", moved, *RESIZES).samples() == {"samples_lost": 0, "samples_repeated": 0}
    expected, found = log_of(still), log_of(moved)
    assert [entry["step"] for entry in found] == [5, 10, 13, 15, 20, 25, 26]
    for one, other in zip(expected, found, strict=True):
        assert one == pytest.approx(other, rel=0.02)  # rank 0's share stands for a step whose log a stop interrupted
        assert one.get("learning_rate") == other.get("learning_rate")
    weights = [load_file(folder / "trainer-model/model.safetensors") for folder in (still, moved)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0.01, atol=1e-3)


def test_trainer_with_a_larger_batch(tmp_path: Path) -> None:
    """Protects what steps mean: at four times the base batch a quarter of the optimizer's steps end where all would
    have: at the same step, with the schedule at its end, and no line of the log left out.
    """
    (tmp_path / "job").mkdir()
    (tmp_path / "job/orders.json").write_bytes(encode(Order(1, 0, batch=64)))
    resized = through("transformers", tmp_path, Start(2))
    assert resized.samples() == {"samples_lost": 0, "samples_repeated": 0}
    log = log_of(resized.folder)
    assert [entry["step"] for entry in log] == [8, 12, 13, 17, 21, 25, 26]
    used = 3e-3 * (1 + math.cos(math.pi * (21 - 10) / (26 - 10))) / 2
    assert log[-2]["learning_rate"] == pytest.approx(used) and log[-1]["eval_loss"] < log[2]["eval_loss"]


def test_lightning_through_resizes(tmp_path: Path) -> None:
    """Protects a Lightning job: at most three changed lines, no sample lost or repeated, the model of an undisturbed
    run, its schedule at its end, and each epoch evaluated once.
    """
    still, moved = tmp_path / "still", tmp_path / "moved"
    through("lightning", still, Start(1))
    assert through("lightning", moved, *RESIZES).samples() == {"samples_lost": 0, "samples_repeated": 0}
    ends = [torch.load(folder / "digits.ckpt", weights_only=False) for folder in (still, moved)]
    for name, value in ends[0]["state_dict"].items():
        torch.testing.assert_close(ends[1]["state_dict"][name], value, rtol=0.01, atol=1e-3)
    for end in ends:
        assert (end["global_step"], end["lr_schedulers"][0]["last_epoch"]) == (94, 94)
    logs = [_rows(folder) for folder in (still, moved)]
    assert [row["step"] for row in logs[0] if row["train_loss"]] == [str(10 * step + 9) for step in range(9)]
    for one, other in zip(*logs, strict=True):
        assert (one["step"], one["epoch"]) == (other["step"], other["epoch"])
        if one["val_accuracy"]:
            assert float(one["val_accuracy"]) == pytest.approx(float(other["val_accuracy"]), abs=0.02)


def _rows(folder: Path) -> list[dict[str, str]]:
    """What Lightning logged, over all starts."""
    found = [csv.DictReader(path.open()) for path in sorted(folder.glob("logs/lightning_logs/*/metrics.csv"))]
    return [row for reader in found for row in reader]
