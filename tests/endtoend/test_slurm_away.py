"""Slurm's controller is gone for minutes while blocks train: they do not notice."""

from __future__ import annotations

import time

import pytest

from ones_wrapper.protocol import Throughput
from tests.endtoend.block_site import Site
from tests.endtoend.harness import LOOK_S, Harness
from tests.endtoend.light import SPEC, STEPS
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
AWAY_S = 150.0
BACK_S = 120.0
"""The companion asks less and less often; it may take so long until it sees that Slurm is back."""
TWO = "--comment=ones: gpus=1-2 batch=16-64 array=blocks"


def rates(harness: Harness, job_id: int) -> list[float]:
    """Steps per second, as the job has reported them so far: an epoch each."""
    told = [report for report in harness.reports(job_id, 0) if isinstance(report, Throughput)]
    return [report.samples / SPEC.base_batch / report.seconds for report in told]


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def status(harness: Harness, settings: str) -> tuple[int, str]:
    """`slurm-ones status`: its exit code and what it says."""
    done = harness.cluster.run(["slurm-ones", "status", "--config", settings], check=False)
    return done.returncode, done.stdout


def healthy(harness: Harness, settings: str) -> None:
    until(
        lambda: status(harness, settings)[0] == 0,
        lambda: status(harness, settings)[1] + harness.companion_log(settings)[-4000:],
        BACK_S,
        LOOK_S,
    )


def test_training_goes_on_without_slurm(harness: Harness) -> None:
    """With two blocks at the rate of before, beside a companion that waits, as `status` says. The companion goes on
    when Slurm is back, the job is resized as ever, and ends well."""
    site = Site(harness, owner=True)
    job_id = site.submit(TWO)
    settings = site.settings()
    with harness.running(settings, "--act", "--own"):
        before = harness.membership(job_id, lambda m: m.world == 2, "membership of two blocks")
        healthy(harness, settings)
        skipped = len(rates(harness, job_id))
        time.sleep(10)
        usual = middle(rates(harness, job_id)[skipped:])

        harness.cluster.kill_slurmctld()
        gone = time.monotonic()
        try:
            begun = len(rates(harness, job_id))
            while (left := gone + AWAY_S - time.monotonic()) > 0:
                time.sleep(min(left, 30.0))
                code, said = status(harness, settings)
                assert code == 1 and "does not answer" in said and "\n  Slurm: " in said, said
            told = rates(harness, job_id)[begun:]
            away_s = time.monotonic() - gone
        finally:
            harness.cluster.start_slurmctld()
        found = f"{usual:.2f} before, {middle(told):.2f} in {away_s:.0f} s without Slurm, at least {min(told):.2f}"
        print(f"steps per second: {found}\n{said}")
        # None of the time was lost either.
        assert middle(told) > 0.7 * usual and len(told) * STEPS > 0.7 * usual * away_s, found
        healthy(harness, settings)
        harness.ticks(settings, 2)
        assert harness.memberships(job_id)[-1] == before
        assert {n for n, task in harness.tasks(job_id).items() if task.state == "RUNNING"} == {*before.blocks}
    site.resize(settings, {job_id: [[0, 1, 16], [0, 2, 32]]})
    assert [m.world for m in harness.memberships(job_id)] == [1, 2, 1, 2]
    site.ends(job_id, settings)
