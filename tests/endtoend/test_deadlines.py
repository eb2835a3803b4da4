"""Deadlines on a real Slurm: from the comment to the size, and what `why` and `jobs` say of them."""

from __future__ import annotations

import pytest

from ones_wrapper.protocol import Throughput
from tests.endtoend.harness import Harness
from tests.endtoend.test_limits import gpus

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_a_deadline_is_promised_and_served_or_refused(harness: Harness) -> None:
    """All GPUs are taken. A job that would end too late on its one is promised its deadline, and another one shrinks
    for it; a job that has too much to do is refused, and trains on. A companion that starts anew keeps the promise."""
    rival = harness.light("--nodes=3", "--gres=gpu:4", LIGHT_STEP_S="12", LIGHT_SCALES="1", LIGHT_EPOCHS="900")
    harness.wait(rival, lambda job: job.running, "running")
    harness.rigid("--gres=gpu:2")
    allowed, speed = "--comment=ones: gpus=1-8 batch=16-64 deadline=15m", {"LIGHT_STEP_S": "0.4", "LIGHT_SCALES": "1"}
    # An epoch takes 4 s on a GPU. Not even 5 minutes on one and the rest on eight are expected to do, eight at once
    # are; of a job not measured there yet less is expected than eight times the speed. Steps are long, so that a busy
    # machine does not make the jobs slower than the promise allows for: what the rival shows of many GPUs counts, too.
    due = harness.light(allowed, LIGHT_EPOCHS="305", **speed)
    late = harness.light(allowed, LIGHT_EPOCHS="2250", **speed)
    for job_id in (rival, due, late):
        harness.report(job_id, 0, lambda report: isinstance(report, Throughput), "throughput")
    settings = harness.settings(policy='"ones"')
    with harness.running(settings, "--act", "--own"):
        try:
            grown = harness.wait(due, lambda job: job.running and gpus(job) > 1, "running on more GPUs")
        except AssertionError as error:
            raise AssertionError(f"{harness.why(settings, due)}\n{harness.why(settings, rival)}") from error
        harness.trains(due, restart=1)
    told = harness.why(settings, due)
    (given,), (refused,) = told["deadline"], harness.why(settings, late)["deadline"]
    assert given["given"] and given["reason_code"] == "deadline_promised"
    assert not refused["given"] and refused["reason_code"] == "deadline_too_soon"
    acted = [one for one in told["decisions"] if one["acted"]]
    assert [(one["reason_code"], one["reason_arguments"]["gpus"]) for one in acted] == [("deadline_needs", gpus(grown))]
    assert gpus(harness.job(rival)) == 8 and harness.job(late).running

    with harness.running(settings, "--act", "--own"):
        harness.ticks(settings, 3)
    assert harness.why(settings, due)["deadline"] == [given]
    said = harness.cluster.run(["slurm-ones", "jobs", "--config", settings]).stdout
    lines = {line.partition(":")[0]: line for line in said.splitlines() if ": deadline " in line}
    assert ": promised (" in lines[f"job {due}"] and ": not promised (" in lines[f"job {late}"]
    text = harness.cluster.run(["slurm-ones", "why", str(due), "--config", settings]).stdout
    assert ": promised (" in text and "to end by its deadline, which is promised" in text
