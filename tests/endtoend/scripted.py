"""A companion whose policy does as it is told: run inside a cluster as `python -m tests.endtoend.scripted`.

    scripted SETTINGS '{"7": [[1, 4, 32], [2, 4, 64]]}' [advise]

Job 7 is to get each shape (nodes, GPUs per node) with its global batch in turn; [0, 0, N] parks it until it has been
seen waiting N times, [0, G, 32] asks for G GPUs, wherever they lie. Ends once it had the last and no resize is open.
While there is a file `stay` next to the settings a parked job stays so, each last step is wanted again whenever it is
lost, and the companion does not end.
All else is the companion as it is.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ones_db import Store, migrate
from ones_db.shape import PARKED, Shape
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import Settings, load
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.service.daemon import Daemon
from slurm_ones.slurm.client import SlurmClient
from slurm_ones.slurm.connect import connect

Steps = dict[int, list[Allocation]]
STAY = "stay"
RETURNS = "growth_returns"
"""Why a job is fixed at a smaller size: somebody waits for its growth."""


class Scripted:
    """Gives each job of `steps` its next allocation until it has it, then the one after."""

    name = "scripted"

    def __init__(self, steps: Steps, stay: Path | None = None) -> None:
        self.steps, self._stay = steps, stay
        self._waited: Counter[int] = Counter()

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        allocations, parked = {}, set()
        for job in jobs:
            left = self.steps.get(job.job_id, [])
            if len(left) > self._stays and not job.fixed and self._has(job, left[0]):
                left.pop(0)
            if left and left[0].shape == PARKED:
                parked.add(job.job_id)
            elif left and job.shape is not None and job.fixed is not None and job.fixed.code == RETURNS:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
            elif left:
                allocations[job.job_id] = _placed(left[0], cluster.gpus_per_node)
        return Schedule(allocations, parked=frozenset(parked))

    def _has(self, job: JobView, step: Allocation) -> bool:
        if step.shape.nodes == 0 < step.shape.gpus_per_node:
            return sum(job.nodes.values()) == step.shape.gpus_per_node
        if step.shape != PARKED:
            return job.shape == step.shape
        self._waited[job.job_id] += job.shape is None
        return self._waited[job.job_id] > step.batch and not self._stays

    @property
    def _stays(self) -> bool:
        return self._stay is not None and self._stay.exists()

    @property
    def done(self) -> bool:
        """Every job has had its last allocation."""
        return not any(self.steps.values()) and not self._stays


def _placed(step: Allocation, per_node: int) -> Allocation:
    """The step, at a shape of its number of GPUs where it names none."""
    nodes, gpus = step.shape.nodes, step.shape.gpus_per_node
    if nodes:
        return step
    return Allocation(Shape(1, gpus) if gpus <= per_node else Shape(gpus // per_node, per_node), step.batch)


def steps_of(text: str) -> Steps:
    """Steps from JSON: job id to a list of (nodes, GPUs per node, batch)."""
    return {
        int(job_id): [Allocation(Shape(nodes, gpus), batch) for nodes, gpus, batch in steps]
        for job_id, steps in json.loads(text).items()
    }


def companion(settings: Settings, client: SlurmClient, store: Store, policy: Scripted, mode: str = "act") -> Companion:
    settings = settings.model_copy(update={"mode": mode, "policy": Scripted.name, "policy_options": {}})
    return Companion(settings, client, store, say=lambda line: print(line, flush=True), make=lambda: policy)


def main(path: str, steps: str, mode: str = "act") -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    policy, stop = Scripted(steps_of(steps), Path(path).with_name(STAY)), threading.Event()
    settings = load(Path(path))
    migrate.upgrade(settings.database_url)
    with Store.open(settings.database_url, settings.cluster) as store:

        def on_tick(tick: Tick) -> None:
            if policy.done and not store.open_resizes():
                stop.set()

        Daemon(lambda: companion(settings, connect(settings), store, policy, mode)).run(stop, on_tick)


if __name__ == "__main__":
    main(*sys.argv[1:])
