"""Slurm's own limits, known before: the whole companion on a simulated Slurm, with a policy that takes all it may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurm_ones.companion import Tick
from slurm_ones.simulate.run import AT_ONCE, WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import Request
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.training.application import Application, Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import Reservation
from tests.marks import nightly
from tests.simulate.test_harm import SPEC, TICK_S, WORK, Grow

pytestmark = pytest.mark.slow
FREE = {**AT_ONCE, "limits.growth_cost": 1000.0}


class Limited(World):
    """A job of an account, with a limit of an hour."""

    def _request(self, submission: Submission, app: Application) -> Request:
        return replace(super()._request(submission, app), account="lab", time_limit_s=3600.0)


class Ran(NamedTuple):
    """What became of the job within ten minutes."""

    gpus: int
    outcomes: set[str]
    """Codes of what was said of it."""
    resizes: list[str]
    """States in which its resizes ended."""


def ran(folder: Path, mechanism: Mechanism, conf: SlurmConf, reserved_s: float = 0.0, **settings: Any) -> Ran:
    quiet = ClusterSettings(speed_noise=0.0, gradient_noise=0.0)
    world = Limited(WORK, SPEC, folder, quiet, mechanism=mechanism, conf=conf)

    def reserve() -> None:
        begins = world.timeline.now + reserved_s
        ahead = Reservation("maint", SPEC.names, begins, begins + 3600.0)
        world.cluster.conf = replace(conf, reservations=(ahead,))

    if reserved_s:
        world.timeline.after(TICK_S / 2, reserve)  # it runs by then
    made = companion_settings(SPEC, folder, {**FREE, **settings}, tick_s=TICK_S, policy="fifo")
    outcomes = set[str]()
    ended = list[str]()

    def on_tick(tick: Tick) -> bool:
        outcomes.update(one.code for one in tick.outcomes.values())
        outcomes.update(why.code for one in tick.decided for why in one.schedule.reasons.values())
        ended.extend(one.state for one in tick.ended)
        return world.seconds > 600

    with WarningLog().recording() as log, run_companion(world, made, log, on_tick, Grow):
        pass
    return Ran(sum(sum(job.gpus.values()) for job in world.cluster.jobs.values()), outcomes, ended)


@pytest.mark.parametrize("mechanism", [nightly(Requeue()), Hot()], ids=["requeue", "blocks"])
@pytest.mark.parametrize(
    ("conf", "gpus"),
    [
        nightly(SlurmConf(), 16, id="none"),
        pytest.param(SlurmConf(account_gpus={"lab": 6}), 4, id="account"),
        nightly(SlurmConf(account_gpus={"other": 6}), 16, id="another"),
        nightly(SlurmConf(qos=(Qos(gpus=8),)), 8, id="qos"),
        pytest.param(SlurmConf(qos=(Qos(gpus=13),), account_gpus={"lab": 3}), 12, id="qos before account"),
    ],
)
def test_growth_ends_at_a_limit(tmp_path: Path, mechanism: Mechanism, conf: SlurmConf, gpus: int) -> None:
    """At the largest size within it, so that nothing has to be taken back; its owner reads whose limit that is."""
    found = ran(tmp_path, mechanism, conf)
    assert found.gpus == gpus, found
    assert {*found.resizes} == {"done"} and ("quota" in found.outcomes) == (gpus < 16), found


@pytest.mark.parametrize("mechanism", [nightly(Requeue()), Hot()], ids=["requeue", "blocks"])
@pytest.mark.parametrize(("reserved_s", "gpus"), [(1800.0, 1), (7200.0, 16)])
def test_no_hour_is_lost_to_a_reservation(tmp_path: Path, mechanism: Mechanism, reserved_s: float, gpus: int) -> None:
    """A job of an hour grows if it could start again before all nodes are reserved, and else trains on."""
    found = ran(tmp_path, mechanism, SlurmConf(), reserved_s)
    assert found.gpus == gpus and ("done" in found.resizes) == (gpus > 1), found
    assert not {*found.resizes} - {"done"}


@pytest.mark.parametrize(("factor", "most"), [(1.0, 2), (1000.0, 16)])
def test_growth_that_is_charged_is_bounded(tmp_path: Path, factor: float, most: int) -> None:
    found = ran(tmp_path, Hot(), SlurmConf(), **{"limits.growth_cost": factor})
    assert found.gpus <= most and ("growth_cost" in found.outcomes) == (factor == 1.0), found
