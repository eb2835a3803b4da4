"""A companion's process that serves real figures of simulated work, and goes on until it is ended.

`python -m tests.service.measured PORT`: the simulated Slurm, whose time runs thousands of times as fast.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ones_db import Store
from slurm_ones.companion import Tick
from slurm_ones.service.health import Health, Notifier
from slurm_ones.service.logs import LastErrorHandler
from slurm_ones.service.metrics import Metrics, serve
from slurm_ones.simulate.run import WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World

CLUSTER = ClusterSpec(2, 4)
CALLED_OFF = 8
"""The tick whose resizes are called off."""
TICK_S = 0.1
"""Seconds, by this machine's clock, that a tick takes at least: a Prometheus is to see what comes in between."""


def workload(jobs: int = 400) -> Workload:
    """More jobs than there are GPUs, of one and more GPUs."""
    kinds = {
        "cnn": build(replace(KINDS["resnet18-cifar10"], epochs=16), name="cnn"),
        "nlp": build(KINDS["bert-glue"], name="nlp", length=0.3),
    }
    names = tuple(kinds)
    asked = [(f"job-{i}", i * 120.0, names[i % 2], (1, 2, 4)[i % 3]) for i in range(jobs)]
    return Workload("small", tuple(Submission(*one, kinds[one[2]].base_batch) for one in asked), kinds)


def train(mechanism: Mechanism, most: int, metrics: Metrics) -> None:
    """A companion over a new cluster, until its jobs have ended or it has ticked so often."""
    health = Health(Notifier({}), LastErrorHandler(), metrics=metrics)
    with tempfile.TemporaryDirectory(prefix="slurm-ones-") as name, WarningLog().recording() as log:
        directory = Path(name)
        settings = companion_settings(CLUSTER, directory, {"resize.dwell_s": 60.0}, tick_s=60.0, policy="ones-sc21")
        world = World(workload(), CLUSTER, directory, ClusterSettings(), mechanism=mechanism)
        store: Store | None = None
        left = most

        def ticked(tick: Tick) -> bool:
            nonlocal left, store
            if store is None:
                store = Store.open(f"sqlite:///{directory / 'ones.sqlite'}", settings.cluster)
                health.leads(store, settings)
            health.ticked(tick)
            # Resizes that have just begun are called off, for once.
            settings.stop_file.unlink(missing_ok=True)
            if left == most - CALLED_OFF:
                settings.stop_file.touch()
            time.sleep(TICK_S)
            left -= 1
            return left == 0 or world.done

        with run_companion(world, settings, log, ticked):
            pass
        if store is not None:
            store.close()


if __name__ == "__main__":
    served = serve("127.0.0.1", int(sys.argv[1]))
    # So that both ways of a resize are there, again and again: whoever measures may have come late.
    while True:
        train(Requeue(), 25, served)
        train(Hot(launch_s=30.0), 100, served)
