"""Ranks in containers on a real Slurm: two nodes, each with a container of namespaces of its own (`unshare`)."""

from __future__ import annotations

import pytest

from ones_wrapper.protocol import Checkpoint, Hello
from tests.endtoend.harness import LOOK_S, Harness
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

RUNTIME = "unshare --user --map-current-user --pid --fork --mount-proc"
"""Hands on no signal, and leaves its processes when it is killed."""


def ranks(harness: Harness) -> list[int]:
    """Processes of the training on the nodes, by the host's numbers."""
    command = ["pgrep", "-u", "alice", "-f", "ones_wrapper.launch.node"]
    return [int(pid) for pid in harness.cluster.run(command, user="root", check=False).stdout.split()]


def test_ranks_in_containers(harness: Harness) -> None:
    """Signals reach them through the runtime, a killed one starts again from the checkpoint, and none outlives its
    job."""
    job_id = harness.submit(options=("--nodes=2", "--gres=gpu:2"), ONES_CONTAINER=RUNTIME)
    harness.trains(job_id)
    hello = harness.report(job_id, 0, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello) and hello.world == 4
    harness.cluster.run(["scancel", "--batch", "--signal=USR1", str(job_id)], user="alice")
    harness.report(job_id, 0, lambda report: isinstance(report, Checkpoint), "checkpoint")
    harness.cluster.run(["pkill", "-9", "-o", "-u", "alice", "-x", "unshare"], user="root")
    harness.report(job_id, 0, lambda report: isinstance(report, Hello) and report.attempt == 1, "second start")
    harness.trains(job_id)
    harness.cluster.run(["scancel", str(job_id)], user="alice")
    harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    # What was killed takes a moment to be gone.
    until(lambda: not ranks(harness), lambda: harness.log(job_id), 20.0, LOOK_S)
