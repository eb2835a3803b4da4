"""A resize that asks for few leaf switches, on a real Slurm with a topology."""

from __future__ import annotations

import time

import pytest

from tests.cluster.topology import leaf_switches
from tests.endtoend.harness import Harness

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_a_resized_job_waits_a_moment_for_one_leaf_switch(harness: Harness) -> None:
    """Room is left below two switches, and then below one: there it starts, with what its owner sees of the wish. A job
    that asks for something itself, for longer, keeps its own wish."""
    with leaf_switches(harness.cluster):
        first, second = (harness.rigid("--gres=gpu:4", f"--nodelist={node}") for node in ("n2", "n3"))
        harness.wait(first, lambda job: job.running, "running")
        harness.wait(second, lambda job: job.running, "running")
        job_id = harness.light()
        harness.trains(job_id)
        settings = harness.settings(taper="3.0")
        process = harness.scripted(settings, {job_id: [[2, 4, 64]]})
        waits = harness.wait(job_id, lambda job: job.pending and not job.held and job.nodes == 2, "reshaped")
        assert (waits.switches, waits.switch_wait_s) == (1, 60.0)
        time.sleep(3)  # some rounds of the scheduler, which has room on n1 and n4
        assert harness.job(job_id).pending
        harness.cluster.run(["scancel", str(second)], user="root")
        ran = harness.wait(job_id, lambda job: job.running, "running")
        assert set(ran.node_list) == {"n3", "n4"}
        assert process.wait(60) == 0, harness.companion_log(settings)
