"""A job that leaves its GPUs idle, under the whole companion on a simulated Slurm that measures what we say."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ones.companion import Tick
from slurm_ones.simulate.run import AT_ONCE, WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.training.application import Hot, Mechanism, Requeue
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import GpuUse
from tests.marks import nightly
from tests.simulate.test_harm import SPEC, TICK_S, WORK, Grow

IDLE_S, GROWN_S, END_S = 1200.0, 1500.0, 6000.0


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [Hot(launch_s=5.0), nightly(Requeue(30.0))], ids=["blocks", "requeue"])
def test_it_shrinks_trains_on_and_does_not_grow_again(tmp_path: Path, mechanism: Mechanism) -> None:
    free = {**AT_ONCE, "limits.growth_cost": 1000.0, "limits.idle_use": 0.1, "limits.idle_s": IDLE_S}
    settings = companion_settings(SPEC, tmp_path, free, tick_s=TICK_S, policy="fifo")
    quiet = ClusterSettings(speed_noise=0.0, gradient_noise=0.0)
    world = World(WORK, SPEC, tmp_path, quiet, mechanism=mechanism)
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
