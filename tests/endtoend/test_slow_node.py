"""A slow node on a real Slurm: noticed and named. It is emulated: there a step sleeps four times as long."""

from __future__ import annotations

import json

import pytest

from tests.endtoend.harness import Harness

pytestmark = pytest.mark.cluster

FAST = "n2,n3,n4"


@pytest.mark.nightly
def test_a_slow_node_is_noticed_and_named(harness: Harness) -> None:
    """Three jobs on it and one elsewhere show it; `status` and `why` name it."""

    def light(*options: str) -> int:
        return harness.light(*options, LIGHT_FAST=FAST)

    shows = [light(f"--nodelist={node}") for node in ("n1", "n1", "n2")]
    moves = light()
    harness.trains(*shows, moves)
    assert harness.job(moves).node_list == ("n1",)
    settings = harness.settings(tick_s="4")
    harness.stay(settings).touch()
    harness.scripted(settings, {moves: [[1, 2, 32]]})
    harness.trains(moves, restart=1)

    def say(*command: str) -> str:
        return harness.cluster.run(["slurm-ones", *command, "--config", settings], user="alice", check=False).stdout

    (node,) = json.loads(say("status", "--json", "--no-slurm"))["slow_nodes"]
    assert node["name"] == "n1" and node["factor"] < 0.7 and node["runs"] == 3
    assert "slow node  n1: about 0." in say("status", "--no-slurm")
    assert "node n1 is slow, as 3 runs of 1 owner showed" in say("why", str(shows[0]))
