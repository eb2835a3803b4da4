"""A slow node on a real Slurm: noticed, said and avoided. It is emulated: there a step sleeps four times as long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.endtoend.harness import Harness
from tests.endtoend.test_park import scripted

pytestmark = pytest.mark.cluster

FAST = "n2,n3,n4"


def test_a_slow_node_is_noticed_and_left_out(harness: Harness) -> None:
    """Two jobs on it and one elsewhere show it; a third there is requeued for its new size, and starts elsewhere, where
    there was room on it. A list that Slurm keeps of a job that ran is taken back once it waits."""

    def light(*options: str) -> int:
        return harness.light(*options, LIGHT_FAST=FAST)

    shows = [light(f"--nodelist={node}") for node in ("n1", "n1", "n2")]
    moves = light()
    harness.trains(*shows, moves)
    assert harness.job(moves).node_list == ("n1",)
    settings = harness.settings(resize="avoid_slow_nodes = true", tick_s="4")
    harness.stay(settings).touch()
    scripted(harness, settings, {moves: [[1, 2, 32]]})
    harness.trains(moves, restart=1)
    job = harness.job(moves)
    assert job.gpus_per_node == 2 and job.node_list != ("n1",) and job.excluded == ("n1",)

    def say(*command: str) -> str:
        return harness.cluster.run(["slurm-ones", *command, "--config", settings], user="alice", check=False).stdout

    (node,) = json.loads(say("status", "--json", "--no-slurm"))["slow_nodes"]
    assert node["name"] == "n1" and node["factor"] < 0.7 and node["runs"] == 3
    assert "slow node  n1: about 0." in say("status", "--no-slurm")
    assert "node n1 is slow, as 3 runs of 1 owner showed" in say("why", str(shows[0]))
    told: Any = say("why", str(moves))
    assert "it asks for other nodes than n1, on which jobs are slow" in told and "is slow, as" not in told
    harness.cluster.run(["scontrol", "requeuehold", str(moves)], user="alice")
    harness.wait(moves, lambda job: job.pending and not job.excluded, "rid of its list")
