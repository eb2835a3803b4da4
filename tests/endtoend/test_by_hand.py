"""What owners do by hand, on a real Slurm: choose a size, keep it, give it back, try a restart, ask for the wait."""

from __future__ import annotations

import json
import re

import pytest

from ones_wrapper.protocol import Hello
from tests.endtoend.harness import Harness

pytestmark = pytest.mark.cluster


def _said(harness: Harness, *words: str, check: bool = True) -> str:
    return harness.cluster.run(["slurm-ones", *words], check=check).stdout


def test_an_owner_resizes_pins_and_releases_a_job(harness: Harness) -> None:
    """Long before the next tick is due. The companion's policy would rather do something else, and the comment is as it
    was at the end."""
    job_id = harness.light("--comment=ones: gpus=1-8 batch=16-64", LIGHT_STEP_S="0.05")
    plain = harness.light("--comment=none of ours", LIGHT_STEP_S="0.05")
    harness.report(job_id, 0, lambda report: isinstance(report, Hello), "hello")
    comment = harness.job(job_id).comment
    settings = harness.settings(scope='"own"', policy='"ones"', resize="dwell_s = 300", tick_s="120")
    with harness.running(settings, "--act"):
        harness.ticks(settings, 1)
        said = _said(harness, "resize", str(job_id), "2x4")
        took = re.search(r"8 GPUs after (\d+) s", said)
        assert took is not None and int(took[1]) < 60
        job = harness.job(job_id)
        assert (job.nodes, job.gpus_per_node, job.restart, job.comment) == (2, 4, 1, comment)
        _said(harness, "pin", str(job_id), "2")
        harness.wait(job_id, lambda job: job.running and job.nodes * job.gpus_per_node == 2, "running on 2 GPUs")
        assert harness.job(job_id).comment == f"{comment} size=2"
        wrong = harness.cluster.run(["slurm-ones", "resize", str(job_id), "8"], check=False)
        assert wrong.returncode == 2 and "pinned to 2 GPUs: pin it to 8" in wrong.stderr
        assert harness.job(job_id).comment == f"{comment} size=2"
        _said(harness, "pin", str(job_id), "2")
        harness.ticks(settings, 1)
        assert harness.job(job_id).nodes * harness.job(job_id).gpus_per_node == 2
        _said(harness, "release", str(job_id))
        assert harness.job(job_id).comment == comment
    wrong = harness.cluster.run(["slurm-ones", "pin", str(job_id), "16"], check=False)
    assert wrong.returncode == 2 and "not within gpus=1-8" in wrong.stderr
    wrong = harness.cluster.run(["slurm-ones", "resize", str(plain), "2"], check=False)
    assert wrong.returncode == 2 and "did not opt in" in wrong.stderr
    assert harness.job(plain).comment == "none of ours"
    wrong = harness.cluster.run(["slurm-ones", "pin", "999999", "2"], check=False)
    assert wrong.returncode == 2 and "job 999999: Slurm does not know it: it never existed" in wrong.stderr


@pytest.mark.nightly
def test_an_owner_rehearses_a_restart_and_asks_for_the_wait(harness: Harness) -> None:
    """Without a companion. The job goes on from its checkpoint at its size, and the bill adds up."""
    job_id = harness.light("--comment=ones: gpus=1-8 batch=16-64")
    harness.report(job_id, 0, lambda report: isinstance(report, Hello), "hello")
    bill = json.loads(_said(harness, "rehearse", str(job_id), "--json"))
    job = harness.job(job_id)
    assert (job.running, job.restart, job.nodes, job.gpus_per_node) == (True, 1, 1, 1)
    hello = harness.report(job_id, 1, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello) and hello.checkpoint
    assert 0 < bill["checkpoint_s"] < bill["standstill_s"] < 120
    sizes = json.loads(_said(harness, "estimate", str(job_id), "2x4", "8", "64", "--json"))["sizes"]
    assert sizes[0]["wait_s"] is not None and sizes[2]["wait_s"] is None and sizes[2]["note"]
