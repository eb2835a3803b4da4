"""A long queue costs a tick no more questions than a short one."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.endtoend.harness import Harness

pytestmark = pytest.mark.cluster
HELD = "for i in $(seq {count}); do sbatch --hold {options} --output=/dev/null --wrap 'sleep 60' >/dev/null; done"
ELASTIC = "--nodes=1 --gres=gpu:1 --requeue --comment='ones: gpus=1-4'"
SHORT, LONG = (6, 4), (40, 30)
"""Held jobs that opted in, and others."""


def rpcs(harness: Harness) -> Counter[str]:
    """What slurmctld was asked so far, but for what its nodes and `sdiag` ask."""
    text = harness.cluster.run(["sdiag"], user="root").stdout
    found = re.findall(r"^\s*(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)", text, re.MULTILINE)
    return Counter({name: int(count) for name, count in found if "STATS_INFO" not in name})


def of_two_ticks(harness: Harness, elastic: int) -> Counter[str]:
    """What two ticks of a companion ask, after its start and its first two."""

    def run(ticks: int) -> Counter[str]:
        settings = harness.settings(policy='"ones"', tick_s="0.1")
        before = rpcs(harness)
        command = ["slurm-ones", "run", "--config", settings, "--advise", "--ticks", str(ticks)]
        said = harness.cluster.run(command, user="root").stdout
        assert f"waiting: {elastic} " in said
        return rpcs(harness) - before

    return run(4) - run(2)


@pytest.mark.nightly
def test_rpcs_of_a_tick_do_not_depend_on_the_queue(harness: Harness) -> None:
    """Each RPC takes slurmctld's locks: a companion that asked for each job would slow down everybody's commands."""
    asked = []
    have = (0, 0)
    for wanted in (SHORT, LONG):
        for count, options, user in (
            (wanted[0] - have[0], ELASTIC, "alice"),
            (wanted[1] - have[1], "--nodes=1", "bob"),
        ):
            harness.cluster.run(["sh", "-c", HELD.format(count=count, options=options)], user=user, timeout=300)
        have = wanted
        asked.append(of_two_ticks(harness, wanted[0]))
    short, long = asked
    assert short == long
    assert short["REQUEST_JOB_INFO"] == 2
    assert short.total() <= 2 * 8
