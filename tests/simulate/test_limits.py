"""The whole companion on a simulated Slurm: limits of Slurm's, known before, to a policy that takes all it may; a base
block before its time limit; and a job that leaves its GPUs idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from slurm_ones.companion import Tick
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.simulate.run import AT_ONCE, WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import Request, SimulatedJob
from slurm_ones.simulate.slurm.timeline import EPOCH
from slurm_ones.simulate.training.application import Application, Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import GpuUse, Reservation
from tests.marks import nightly
from tests.simulate.harness import QUIET
from tests.simulate.test_harm import FREE, SPEC, TICK_S, WORK, Grow

pytestmark = pytest.mark.slow


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
    world = Limited(WORK, SPEC, folder, QUIET, mechanism=mechanism, conf=conf)

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


IDLE_S, GROWN_S, END_S = 1200.0, 1500.0, 6000.0


@pytest.mark.parametrize("mechanism", [Hot(launch_s=5.0), nightly(Requeue(30.0))], ids=["blocks", "requeue"])
def test_an_idle_job_shrinks_trains_on_and_does_not_grow_again(tmp_path: Path, mechanism: Mechanism) -> None:
    free = {**FREE, "limits.idle_use": 0.1, "limits.idle_s": IDLE_S}
    settings = companion_settings(SPEC, tmp_path, free, tick_s=TICK_S, policy="fifo")
    world = World(WORK, SPEC, tmp_path, QUIET, mechanism=mechanism)
    cluster, held, reasons = world.cluster, list[tuple[float, int]](), set[str]()

    def on_tick(tick: Tick) -> bool:
        running = {id_: sum(job.gpus.values()) for id_, job in cluster.jobs.items() if job.running}
        world.client.uses = {id_: GpuUse(gpus * (world.seconds < GROWN_S)) for id_, gpus in running.items()}
        held.append((world.seconds, sum(running.values())))
        reasons.update(why.code for one in tick.decided for why in one.schedule.reasons.values())
        return world.seconds > END_S

    with WarningLog().recording() as log, run_companion(world, settings, log, on_tick, Grow) as store:
        (history,) = store.histories().values()
    assert max(gpus for at, gpus in held if at < GROWN_S) == 16
    shrunk = next(at for at, gpus in held if at > GROWN_S and gpus == 1)
    assert IDLE_S <= shrunk - GROWN_S <= 2 * IDLE_S + 900
    assert all(gpus <= 1 for at, gpus in held if at > shrunk) and history.running_since
    assert {"idle_returns", "idle_stays"} & reasons


LIMIT_S, GROWS_S = 1800.0, 900.0


class LateGrow(Grow):
    """Guests that begin, and so end, later than the base."""

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        if now < EPOCH + GROWS_S:
            return Schedule({job.job_id: Allocation(job.shape, job.batch) for job in jobs if job.shape is not None})
        return super().decide(cluster, jobs, now, rng)


class Short(World):
    """A job with a limit of half an hour."""

    def _request(self, submission: Submission, app: Application) -> Request:
        return replace(super()._request(submission, app), time_limit_s=LIMIT_S)


def _bases(world: World) -> list[SimulatedJob]:
    return [job for job in world.cluster.jobs.values() if job.running and job.qos == "normal"]


@pytest.mark.parametrize("closed", [False, True], ids=["in time", "too late"])
def test_a_new_base_before_the_limit(tmp_path: Path, closed: bool) -> None:
    """All GPUs are its own guests', of which Slurm preempts one for it. If none may start in time, it goes on with its
    guests, and gets a base as soon as one may."""
    overrides = AT_ONCE | {"limits.near_limit_s": 300.0}
    settings = companion_settings(
        SPEC, tmp_path, overrides, tick_s=TICK_S, policy="fifo", guests={"gpu": {"qos": "guest"}}
    )
    conf = SlurmConf(qos=(Qos("normal", 10, ("guest",)), Qos("guest", mode="cancel", grace_s=30.0)))
    world = Short(WORK, SPEC, tmp_path, QUIET, mechanism=Hot(launch_s=5.0), conf=conf)
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
