"""A job of guests keeps a base block: a new one before the time limit of the one before, or as soon as it may start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slurm_ones.companion import Tick
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.simulate.run import AT_ONCE, WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import Request, SimulatedJob
from slurm_ones.simulate.slurm.timeline import EPOCH, ClusterSettings
from slurm_ones.simulate.training.application import Application, Hot, Submission
from slurm_ones.simulate.world import World
from tests.simulate.test_harm import SPEC, TICK_S, WORK, Grow

LIMIT_S, GROWS_S = 1800.0, 900.0


class LateGrow(Grow):
    """Guests that begin, and so end, later than the base."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        if now < EPOCH + GROWS_S:
            return Schedule({job.job_id: Allocation(job.shape, job.batch) for job in jobs if job.shape is not None})
        return super().decide(cluster, jobs, now, rng)


class Limited(World):
    """A job with a time limit."""

    def _request(self, submission: Submission, app: Application) -> Request:
        return replace(super()._request(submission, app), time_limit_s=LIMIT_S)


def _bases(world: World) -> list[SimulatedJob]:
    return [job for job in world.cluster.jobs.values() if job.running and job.qos == "normal"]


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True], ids=["in time", "too late"])
def test_a_new_base_before_the_limit(tmp_path: Path, closed: bool) -> None:
    """All GPUs are its own guests', of which Slurm preempts one for it. If none may start in time, it goes on with its
    guests, and gets a base as soon as one may."""
    overrides = AT_ONCE | {"limits.near_limit_s": 300.0}
    settings = companion_settings(
        SPEC, tmp_path, overrides, tick_s=TICK_S, policy="fifo", guests={"gpu": {"qos": "guest"}}
    )
    conf = SlurmConf(qos=(Qos("normal", 10, ("guest",)), Qos("guest", mode="cancel", grace_s=30.0)))
    quiet = ClusterSettings(speed_noise=0.0, gradient_noise=0.0)
    world = Limited(WORK, SPEC, tmp_path, quiet, mechanism=Hot(launch_s=5.0), conf=conf)
    without, first = list[float](), set[int]()

    def on_tick(tick: Tick) -> bool:
        now, bases = world.seconds, _bases(world)
        first.update(job.job_id for job in bases if now < 600.0)
        if closed and LIMIT_S - 400.0 <= now < LIMIT_S - 400.0 + TICK_S:
            for name in world.cluster.nodes.names():
                world.cluster.drain(name)
        if closed and LIMIT_S + 300.0 <= now < LIMIT_S + 300.0 + TICK_S:
            for name in world.cluster.nodes.names():
                world.cluster.resume(name)
        if now > 600.0:
            without.extend([] if bases else [now])
            assert any(job.running for job in world.cluster.jobs.values()), f"it stands still after {now:.0f} s"
        return now > LIMIT_S + 700.0

    with WarningLog().recording() as log, run_companion(world, settings, log, on_tick, LateGrow):
        pass
    assert bool(without) is closed, without
    assert all(LIMIT_S <= now < LIMIT_S + 600.0 for now in without)
    assert len(first) == 1 and not first & {job.job_id for job in _bases(world)}
    (training,) = world.trainings.values()
    assert len(training.members) > 1 and training.term >= 1
