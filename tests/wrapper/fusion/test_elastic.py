"""A fused training as an elastic job: over ranks, resized, and killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.protocol import Bye, Epoch, Hello, Throughput
from tests.wrapper.runs import Run

EXAMPLE = Path(__file__).parents[3] / "wrapper/ones_wrapper/examples/fused.py"
RATES = ("--rates", "0.003", "0.01", "0.03", "0.1")


def results(folder: Path) -> dict[str, Any]:
    return {path.stem: torch.load(path) for path in sorted(folder.iterdir())}


def test_fused_members_survive_resizes(tmp_path: Path) -> None:
    """One rank, then three, then two: the members of one rank that was never disturbed, up to the order
    of sums; two are stopped on the way, and stay it."""

    def run(where: str, ranks: int, restart: int = 0, *more: str) -> Run:
        (tmp_path / where).mkdir(exist_ok=True)
        out = str(tmp_path / where / "results")
        return Run(
            *(tmp_path / where, *RATES, "--epochs=5", "--stop-after=2", "--double", f"--results={out}", *more),
            ranks=ranks,
            restart=restart,
            script=EXAMPLE,
        )

    alone = run("alone", 1)
    first = run("job", 1, 0, "--pace=0.5")
    first.wait_for(Throughput)
    first.signal(signal.SIGTERM)
    first.end()
    assert first.of(Bye)[-1].reason == "signal"
    second = run("job", 3, 1, "--pace=1")
    second.wait_for(Epoch, lambda epoch: epoch.epoch >= 2)
    second.signal(signal.SIGTERM)
    second.end()
    last = run("job", 2, 2)
    assert last.end() == 0, last.errors
    assert alone.end() == 0, alone.errors
    assert [last.of(Hello)[0].world, last.of(Hello)[0].resizes] == [2, 2]
    expected, found = results(tmp_path / "alone/results"), results(tmp_path / "job/results")
    assert list(found) == list(expected) == [f"member{i}" for i in range(4)]
    lengths = []
    for name, saved in expected.items():
        for key, tensor in saved["model"].items():
            assert tensor.dtype == torch.float64
            assert float((tensor - found[name]["model"][key]).abs().max()) < 1e-11, (name, key)
        lengths.append(saved["optimizer"]["param_groups"][0]["lr"])
        assert found[name]["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    assert lengths == pytest.approx([0.0] * 4, abs=1e-9)  # each schedule came to its end
