"""A script as users write it, on a real Slurm: what it prints and logs is that of a run that nobody disturbed."""

from __future__ import annotations

import csv
import math
import re

import pytest

from ones_wrapper.examples.gpt import library
from ones_wrapper.protocol import Bye
from ones_wrapper.schedule import base_steps
from tests.endtoend.block_site import Site
from tests.endtoend.harness import BLOCKS, HERE

pytestmark = pytest.mark.cluster
BASE, EPOCHS, LR = 8, 20, 0.003


def test_a_gpt_grows_and_shrinks(request: pytest.FixtureRequest) -> None:
    """`examples/gpt.py` in blocks, 1 → 2 → 3 → 1 GPUs and three batches: the CSV file that it holds open has each step
    once, each at the rate that the undisturbed run has at that sample, and the last rate is the schedule's end."""
    site = Site.of(request, "gres owner", gpus=1)
    harness = site.harness
    try:
        folder = harness.folder("gpt")
        inside = f"/scratch/{folder.name}"
        arguments = [HERE / "gpt_until.py", f"{inside}/hurry", "--log", f"{inside}/gpt.csv", "--pace", 1000]
        arguments += ["--batch", BASE, "--epochs", EPOCHS, "--lr", LR, "--text-kb", 16, "--workers", 1]
        options = ("--comment=ones: gpus=1-4 batch=8-32 array=blocks", "--time=10", "--cpus-per-gpu=1")
        job_id = harness.submit(*map(str, arguments), options=options, template=BLOCKS)
        harness.membership(job_id, lambda m: m.why == "first", "first membership")
        steps = {job_id: [[0, 2, 16], [0, 3, 32], [0, 1, 24]]}
        site.resize(site.settings("max_wait_s = 60\ndwell_s = 0"), steps, 240.0)
        (folder / "hurry").touch()
        harness.wait(job_id, lambda job: job.ended and not job.completing, "ended", 120.0)
        told, log = harness.memberships(job_id), harness.log(job_id)
        assert [m.world for m in told] == [1, 2, 3, 1], log
        terms = len(list(harness.directory(job_id).glob("reports-*.jsonl")))
        byes = [report for report in harness.reports(job_id, terms - 1) if isinstance(report, Bye)]
        assert [bye.reason for bye in byes] == ["finished"], log
        with (folder / "gpt.csv").open(newline="") as file:
            rows = sorted((int(step), int(batch), float(lr)) for step, _, batch, _, lr, _ in csv.reader(file))
        assert [row[0] for row in rows] == list(range(byes[0].step))
        assert {row[1] for row in rows} == {8, 16, 32, 24}
        samples = len(library(16)[0])
        each, cursor, epoch = base_steps(samples, BASE), 0, 0
        for _, batch, lr in rows:
            assert lr == pytest.approx(LR * scheduled(epoch * each + cursor // BASE, EPOCHS * each))
            cursor += batch
            if cursor >= samples:
                epoch, cursor = epoch + 1, 0
        assert (epoch, cursor) == (EPOCHS, 0)
        rates = re.findall(r"validation loss \S+, learning rate (\S+)", log)
        assert len(rates) == EPOCHS and float(rates[-1]) == pytest.approx(LR / 10, rel=0.01)
        assert "Traceback" not in log
    finally:
        harness.clear()


def scheduled(step: int, steps: int, warm_up: int = 50) -> float:
    """The script's schedule, by the steps of a run that nobody disturbs."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
