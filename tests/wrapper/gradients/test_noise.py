"""The gradient noise scale that a run reports, and the progress that follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ones_wrapper.gradients.noise import efficiency
from ones_wrapper.protocol import Hello, Throughput
from tests.wrapper.runs import Run

NOISY = Path(__file__).parents[1] / "noisy.py"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_noise_scale_is_the_true_one(tmp_path: Path, ranks: int) -> None:
    """On one rank, on two, and on three with unequal shares: what is reported is tr(Σ)/|G|² of the per-sample
    gradients, as near as a few hundred steps tell."""
    run = Run(tmp_path, ranks=ranks, script=NOISY)
    assert run.end() == 0, run.errors
    true = json.loads((tmp_path / "true-noise").read_text())
    told = [report.noise for report in run.of(Throughput) if report.noise is not None]
    assert told[-1] == pytest.approx(true, rel=0.35)
    samples = run.of(Throughput)[-1].epoch * 4096 + run.of(Throughput)[-1].cursor
    assert run.of(Throughput)[-1].progress == samples, "at the base batch every sample counts whole"


def test_it_outlives_a_restart(tmp_path: Path) -> None:
    """The next run begins with what the last one knew, and with its progress."""
    first = Run(tmp_path, ranks=2, script=NOISY)
    assert first.end() == 0, first.errors
    second = Run(tmp_path, ranks=1, restart=1, script=NOISY)
    assert second.end() == 0, second.errors
    last, hello = first.of(Throughput)[-1], second.of(Hello)[0]
    assert hello.noise == pytest.approx(last.noise, rel=0.2)
    assert hello.progress == 3 * 4096


def test_efficiency() -> None:
    """A sample is worth less in a batch beyond the noise scale, and never more than one at the base batch."""
    assert efficiency(64, 64, 100.0) == efficiency(32, 64, 100.0) == efficiency(4096, 64, None) == 1.0
    assert efficiency(256, 64, 64.0) == pytest.approx(128 / 320)
    assert efficiency(256, 64, 1e9) == pytest.approx(1.0)
    assert efficiency(256, 64, 0.0) == pytest.approx(0.25)
