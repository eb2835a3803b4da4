"""The watch over those who wait: it sees a job that waits for guests too long, and no other."""

from __future__ import annotations

import pytest

from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from tests.faults.harm import HarmWatch
from tests.simulate.harness import Harness

GUEST = Qos("guest", 0, mode="cancel", grace_s=30.0)


def found_in(harness: Harness, seconds: int) -> list[str]:
    """What the watch says while time passes."""
    watch = HarmWatch(harness.cluster)
    found = []
    for _ in range(seconds // 5):
        harness.wait(5)
        found += watch.look()
    return found


@pytest.mark.parametrize(
    ("lists", "asked", "harmed"),
    [
        ((), {"nodes": 1, "gpus": 1}, True),
        (("guest",), {"nodes": 1, "gpus": 1}, False),
        # It would not fit beside the others either; it asks for what the cluster has not; it is a guest itself.
        ((), {"nodes": 4, "gpus": 4}, False),
        ((), {"nodes": 5, "gpus": 1}, False),
        ((), {"nodes": 1, "gpus": 1, "qos": "guest"}, False),
        ((), {"nodes": 1, "gpus": 1, "hold": True}, False),
    ],
)
def test_harm_is_seen(lists: tuple[str, ...], asked: dict[str, object], harmed: bool) -> None:
    """`lists` are those whom an ordinary job preempts, and no more than grace time is waited for."""
    harness = Harness(conf=SlurmConf(qos=(Qos("normal", 10, lists), GUEST)))
    harness.running(1, 4)
    harness.running(3, 4, qos="guest", stop_s=20.0)
    harness.submit(**asked)  # type: ignore[arg-type]
    assert bool(found_in(harness, 300)) == harmed
