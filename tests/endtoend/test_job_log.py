"""What a job with loader workers leaves on a real Slurm: a log without tracebacks, and every row of a file that it held
open."""

from __future__ import annotations

import re

import pytest

from ones_wrapper.protocol import Bye
from tests.endtoend.block_site import Site
from tests.endtoend.harness import BLOCKS, HERE, Harness

pytestmark = pytest.mark.cluster
RESIZE = re.compile(r"^ones: (\d+x\d+|\d+ GPUs) → (\d+x\d+|\d+ GPUs) at step \d+: paused [\d.]+ s(.*)$", re.MULTILINE)
OURS = re.compile(r"^(ones|ones-run): ")
SLURMS = re.compile(r"^(srun: |(slurmstepd: |\[[^]]*\] )error: \*\*\* )")
"""Slurm's own words at the end of a step, which nobody can keep it from."""


def check(log: str, resizes: list[tuple[str, str]]) -> None:
    """One line each, and nothing that was not asked for."""
    assert "Traceback" not in log and "Error" not in log, log
    found = RESIZE.findall(log)
    assert [(old, new) for old, new, _ in found] == resizes, log
    assert all("times as fast" in rest for _, _, rest in found), log
    assert "Exited with exit code" not in log, log
    others = [line for line in log.splitlines() if line and not OURS.match(line) and not SLURMS.match(line)]
    assert not others, log


@pytest.mark.nightly
def test_requeued_and_cancelled(harness: Harness) -> None:
    """Protects what users read and keep of a job that is drained, requeued with more GPUs and another batch, and
    cancelled."""
    folder = harness.folder("rows")
    options = ("--comment=ones: gpus=1-4 batch=16-64", "--time=10")
    job_id = harness.submit(str(HERE / "rows.py"), f"/scratch/{folder.name}", options=options)
    harness.trains(job_id)
    harness.carry_out(harness.settings(scope='"own"'), {job_id: [[1, 2, 32]]})
    harness.trains(job_id, restart=1)
    harness.cluster.run(["scancel", str(job_id)])
    harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    log = harness.log(job_id)
    check(log, [("1x1", "1x2")])
    assert log.count("ones: batch 16 → 32 at step") == 1, log
    byes = [[r for r in harness.reports(job_id, n) if isinstance(r, Bye)] for n in (0, 1)]
    assert [bye[-1].reason for bye in byes] == ["drained", "signal"]
    assert (folder / "rows.csv").read_text().split() == [str(n) for n in range(byes[1][-1].step)]


@pytest.mark.nightly
def test_resized_while_it_trains(harness: Harness) -> None:
    """The same of a job of blocks that join and leave while it trains: a line each, in one of their logs."""
    folder = harness.folder("rows")
    options = ("--comment=ones: gpus=1-4 batch=16-64 array=blocks", "--time=10", "--cpus-per-gpu=1")
    job_id = harness.submit(str(HERE / "rows.py"), f"/scratch/{folder.name}", options=options, template=BLOCKS)
    harness.membership(job_id, lambda m: m.why == "first", "first membership")
    site = Site(harness, owner=True)
    site.resize(site.settings("dwell_s = 0"), {job_id: [[0, 2, 16], [0, 1, 16]]})
    harness.membership(job_id, lambda m: m.world == 1 and m.generation == 2, "last membership")
    harness.cluster.run(["scancel", str(job_id)])
    harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    check(harness.log(job_id), [("1x1", "2x1"), ("2x1", "1x1")])
    (bye,) = [r for r in harness.reports(job_id, 0) if isinstance(r, Bye)]
    assert bye.reason == "signal"
    assert (folder / "rows.csv").read_text().split() == [str(n) for n in range(bye.step)]
