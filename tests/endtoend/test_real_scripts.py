"""A script as users write it, on a real Slurm: what it prints and logs is that of a run that nobody disturbed."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.real_scripts import STARTS, outcome, traceback_lines, undisturbed
from ones_wrapper.gradients.schedule import base_steps
from ones_wrapper.protocol import Bye
from tests.endtoend.block_site import Site
from tests.endtoend.harness import BLOCKS, HERE
from wrapper.examples.gpt import library

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
LR = 0.003


@dataclass(frozen=True)
class Story:
    batch: int
    epochs: int
    text_kb: int
    sizes: tuple[tuple[int, int], ...]
    """GPUs and global batch, one after the other."""
    pace_ms: int
    """Of a step, until all of it has happened."""

    def arguments(self) -> tuple[str, ...]:
        given = ("--batch", self.batch, "--epochs", self.epochs, "--lr", LR, "--text-kb", self.text_kb)
        return *map(str, given), "--workers", "1"


THREE = Story(8, 20, 16, ((1, 8), (2, 16), (3, 32), (1, 24)), 1000)
TEN = Story(16, 8, 128, STARTS, 500)
"""As `benchmarks/real_scripts.py` has it without a Slurm."""


@pytest.mark.parametrize("story", [pytest.param(THREE, id="three"), pytest.param(TEN, id="ten")])
def test_a_gpt_grows_and_shrinks(request: pytest.FixtureRequest, tmp_path: Path, story: Story) -> None:
    """`examples/gpt.py` in blocks through three resizes, or ten, each with another batch: the CSV file that it holds
    open has each step once, each at the rate that the undisturbed run has at that sample, and the last rate is the
    schedule's end. After ten, the validation loss is that of an undisturbed run too."""
    site = Site.of(request, "gres owner", gpus=1)
    harness = site.harness
    try:
        folder = harness.folder("gpt")
        inside = f"/scratch/{folder.name}"
        arguments = [HERE / "gpt_until.py", f"{inside}/hurry", "--log", f"{inside}/gpt.csv", "--pace", story.pace_ms]
        options = ("--comment=ones: gpus=1-4 batch=8-64 array=blocks", "--time=30", "--cpus-per-gpu=1")
        job_id = harness.submit(*map(str, arguments), *story.arguments(), options=options, template=BLOCKS)
        harness.membership(job_id, lambda m: m.why == "first", "first membership")
        steps = {job_id: [[0, gpus, batch] for gpus, batch in story.sizes[1:]]}
        site.resize(site.settings("max_wait_s = 60\ndwell_s = 0"), steps, 80.0 * len(story.sizes))
        (folder / "hurry").touch()
        harness.wait(job_id, lambda job: job.ended and not job.completing, "ended", 300.0)
        told, log = harness.memberships(job_id), harness.log(job_id)
        assert [m.world for m in told] == [gpus for gpus, _ in story.sizes], log
        terms = len(list(harness.directory(job_id).glob("reports-*.jsonl")))
        byes = [report for report in harness.reports(job_id, terms - 1) if isinstance(report, Bye)]
        assert [bye.reason for bye in byes] == ["finished"], log
        with (folder / "gpt.csv").open(newline="") as file:
            rows = sorted((int(step), int(batch), float(lr)) for step, _, batch, _, lr, _ in csv.reader(file))
        assert [row[0] for row in rows] == list(range(byes[0].step))
        assert {row[1] for row in rows} == {batch for _, batch in story.sizes}
        samples = len(library(story.text_kb)[0])
        each, cursor, epoch = base_steps(samples, story.batch), 0, 0
        for _, batch, lr in rows:
            done = epoch * each + cursor // story.batch
            assert lr == pytest.approx(LR * scheduled(done, story.epochs * each))
            cursor += batch
            if cursor >= samples:
                epoch, cursor = epoch + 1, 0
        assert (epoch, cursor) == (story.epochs, 0)
        found = re.findall(r"validation loss (\S+), learning rate (\S+)", log)
        assert len(found) == story.epochs and float(found[-1][1]) == pytest.approx(LR / 10, rel=0.01)
        assert traceback_lines(log) == 0
        if story is TEN:
            quiet = outcome(tmp_path / "plain", [undisturbed(tmp_path / "plain", story.arguments())])
            figures = {
                "lr_end_error": abs(float(found[-1][1]) / quiet.rate - 1),
                "log_lines_lost": len({*range(byes[0].step)} - {row[0] for row in rows}),
                "loss_ratio": float(found[-1][0]) / quiet.loss,
            }
            print(figures)
            assert figures["lr_end_error"] <= 0.01 and abs(figures["loss_ratio"] - 1) <= 0.03, figures
    finally:
        harness.clear()


def scheduled(step: int, steps: int, warm_up: int = 50) -> float:
    """The script's schedule, by the steps of a run that nobody disturbs."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
