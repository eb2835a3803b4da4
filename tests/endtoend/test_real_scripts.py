"""A script as users write it, on a real Slurm: what it prints and logs is that of a run that nobody disturbed."""

from __future__ import annotations

import csv
import math
import re
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


BATCH, EPOCHS, TEXT_KB = STARTS[0][1], 8, 128
"""`STARTS` are GPUs and global batches, as `benchmarks/real_scripts.py` has them without a Slurm."""
PACE_MS = 500
"""Of a step, until all of it has happened."""
ARGUMENTS = ("--batch", BATCH, "--epochs", EPOCHS, "--lr", LR, "--text-kb", TEXT_KB, "--workers", 1)


def test_a_gpt_grows_and_shrinks(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """`examples/gpt.py` in blocks through ten resizes, each with another batch: the CSV file that it holds open has
    each step once, each at the rate that the undisturbed run has at that sample; the last rate is the schedule's end,
    and the validation loss that of an undisturbed run."""
    site = Site.of(request, "gres owner", gpus=1)
    harness, given = site.harness, [*map(str, ARGUMENTS)]
    try:
        folder = harness.folder("gpt")
        inside = f"/scratch/{folder.name}"
        arguments = [HERE / "gpt_until.py", f"{inside}/hurry", "--log", f"{inside}/gpt.csv", "--pace", PACE_MS]
        options = ("--comment=ones: gpus=1-4 batch=8-64 array=blocks", "--time=30", "--cpus-per-gpu=1")
        job_id = harness.submit(*map(str, arguments), *given, options=options, template=BLOCKS)
        harness.membership(job_id, lambda m: m.why == "first", "first membership")
        steps = {job_id: [[0, gpus, batch] for gpus, batch in STARTS[1:]]}
        site.resize(site.settings("max_wait_s = 60\ndwell_s = 0"), steps, 80.0 * len(STARTS))
        (folder / "hurry").touch()
        harness.wait(job_id, lambda job: job.ended and not job.completing, "ended", 300.0)
        told, log = harness.memberships(job_id), harness.log(job_id)
        assert [m.world for m in told] == [gpus for gpus, _ in STARTS], log
        terms = len(list(harness.directory(job_id).glob("reports-*.jsonl")))
        byes = [report for report in harness.reports(job_id, terms - 1) if isinstance(report, Bye)]
        assert [bye.reason for bye in byes] == ["finished"], log
        with (folder / "gpt.csv").open(newline="") as file:
            rows = sorted((int(step), int(batch), float(lr)) for step, _, batch, _, lr, _ in csv.reader(file))
        assert [row[0] for row in rows] == list(range(byes[0].step))
        assert {row[1] for row in rows} == {batch for _, batch in STARTS}
        samples = len(library(TEXT_KB)[0])
        each, cursor, epoch = base_steps(samples, BATCH), 0, 0
        for _, batch, lr in rows:
            done = epoch * each + cursor // BATCH
            assert lr == pytest.approx(LR * scheduled(done, EPOCHS * each))
            cursor += batch
            if cursor >= samples:
                epoch, cursor = epoch + 1, 0
        assert (epoch, cursor) == (EPOCHS, 0)
        found = re.findall(r"validation loss (\S+), learning rate (\S+)", log)
        assert len(found) == EPOCHS and float(found[-1][1]) == pytest.approx(LR / 10, rel=0.01)
        assert traceback_lines(log) == 0
        quiet = outcome(tmp_path / "plain", [undisturbed(tmp_path / "plain", tuple(given))])
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
