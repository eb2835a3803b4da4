"""A job of several models grows, moves and shrinks by blocks while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ones_wrapper.data.feed import permutation
from tests.wrapper import gan
from tests.wrapper.membership.blocks import Job
from tests.wrapper.runs import assert_exactly_once

pytestmark = pytest.mark.slow


def test_a_gan_goes_on_in_other_blocks(tmp_path: Path) -> None:
    """Protects a job of several models in blocks: each model's exchange gets the new ranks, both optimizers and the
    plain values travel, and what they end with is what one process ends with. Evaluations and the log go on, too."""
    job = Job(tmp_path / "job", epochs=20, script=Path(gan.__file__))
    job.move()
    assert_exactly_once(job.directory, job.epochs, gan.SAMPLES)
    found, counters = torch.load(job.directory / "state-0.pt")
    orders = [permutation(gan.SAMPLES, gan.SEED, epoch, True).tolist() for epoch in range(job.epochs)]
    wanted = gan.train(order[i : i + gan.BATCH] for order in orders for i in range(0, gan.SAMPLES, gan.BATCH))
    steps = job.epochs * -(-gan.SAMPLES // gan.BATCH)
    assert (job.directory / "log").read_text().split() == [str(step + 1) for step in range(steps)]
    assert counters == {"steps": steps, "seen": [steps / 2], "point": 1 - 2j}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
