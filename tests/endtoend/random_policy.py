"""A companion that resizes all the time: `slurm-ones run` with a policy that resizes at random.

    python -m tests.endtoend.random_policy FOLDER [OPTIONS OF slurm-ones run]

Run inside a cluster. All but the policy is the companion as it is. By files in FOLDER a test controls it: while there
is a file `quiet` the policy changes nothing, and the companion stops at the point that the file `gate` names until the
file `reached`, which says whose resize it was, is removed again. Such a point is a state of a resize, just after it was
written down, or `after CALL`: a change of the client's that Slurm has just taken.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ones_db import Store
from ones_db.shape import Shape
from slurm_ones.act import arrays
from slurm_ones.cli import main as slurm_ones
from slurm_ones.policies import POLICIES
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.connect import why_not_pyslurm
from slurm_ones.slurm.model import JobKey, Task
from tests.cluster import linux

QUIET, GATE, REACHED, AWAY = "quiet", "gate", "reached", "away"
AGAIN_S = 0.5
"""A companion that ended is started again after this long."""
GATE_S = 30.0
"""How long a companion stands at its gate at most."""
APART_S = 10.0
"""How long a block may run apart: less than a fault's judge waits for."""
WRITES = ("begin_resize", "step_resize", "end_resize")
CHANGES = ("requeue_hold", "hold", "hold_waiting", "reshape", "release", "defer", "reuse", "throttle")
KEEP, PARK = 0.5, 0.12
"""Shares of the jobs that a schedule leaves alone, and parks."""


@dataclass(frozen=True)
class Options:
    folder: str = ""


class RandomPolicy:
    """Any valid shape, at any time."""

    name = "random"
    options_type = Options

    def __init__(self, options: Options) -> None:
        self._quiet_file = Path(options.folder) / QUIET

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        quiet = self._quiet_file.exists()
        allocations: dict[int, Allocation] = {}
        parked: set[int] = set()
        for job in jobs:
            kept = quiet or bool(job.fixed) or rng.random() < KEEP
            if not kept and rng.random() < PARK:
                parked.add(job.job_id)
            elif not kept:
                allocations[job.job_id] = _any(job, cluster, rng)
            elif job.shape is not None:
                allocations[job.job_id] = Allocation(job.shape, job.batch)
        return Schedule(allocations, parked=frozenset(parked))


def _any(job: JobView, cluster: ClusterView, rng: np.random.Generator) -> Allocation:
    per_node = max(cluster.gpus_per_node, 1)
    shapes = [
        Shape(nodes, gpus // nodes)
        for gpus in job.limits.gpus
        for nodes in range(1, len(cluster.nodes) + 1)
        if gpus % nodes == 0 and gpus // nodes <= per_node
    ]
    batches = np.arange(job.limits.min_batch, job.limits.max_batch + 1, 16)
    shape = shapes[int(rng.integers(len(shapes)))] if shapes else Shape(1, 1)
    return Allocation(shape, int(rng.choice(batches)))


class Gate:
    """Where the companion stops."""

    def __init__(self, folder: Path) -> None:
        self._asked, self._reached = folder / GATE, folder / REACHED

    def __call__(self, at: str, job_id: int) -> None:
        try:
            if self._asked.read_text() != at:
                return
            self._asked.unlink()
        except FileNotFoundError:
            return
        half = self._reached.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({"at": at, "job": job_id}))
        half.rename(self._reached)
        until = time.monotonic() + GATE_S
        while self._reached.exists() and time.monotonic() < until:
            time.sleep(0.02)

    def install(self) -> None:
        """At every write of a resize, and every change of Slurm's."""
        for name in WRITES:
            setattr(Store, name, self._after_write(getattr(Store, name)))
        clients: list[type[Any]] = [CommandClient]
        if not why_not_pyslurm():
            from slurm_ones.slurm.pyslurm import PySlurmClient

            clients.append(PySlurmClient)
        for client in clients:
            for name in CHANGES:
                setattr(client, name, self._after_change(name, getattr(client, name)))

    def _after_write(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            record = write(*arguments, **options)
            self(record.stage, record.job_id)
            return record

        return wrapped

    def _after_change(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(client: Any, key: JobKey, *arguments: Any, **options: Any) -> Any:
            result = change(client, key, *arguments, **options)
            self(f"after {name}", key.array if isinstance(key, Task) else key)
            return result

        return wrapped


def supervise(folder: Path, work: Callable[[], object]) -> NoReturn:
    """Do the work in a child, and in a new one whenever it has ended, as systemd would; but not before the time that
    is named in the file `away`. The imports were done once, so that a new one is there at once."""
    while True:
        child = os.fork()
        if child == 0:
            linux.die_with_parent(signal.SIGKILL)
            work()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(AGAIN_S)
        stay_away(folder)


def stay_away(folder: Path) -> None:
    """Wait until the time that a fault wrote down."""
    with suppress(FileNotFoundError):
        time.sleep(max(0.0, float((folder / AWAY).read_text()) - time.time()))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    Gate(folder).install()
    POLICIES[RandomPolicy.name] = RandomPolicy
    arrays.APART_S = APART_S
    sys.argv[:2] = ["slurm-ones", "run"]
    if "NOTIFY_SOCKET" not in os.environ:
        supervise(folder, slurm_ones)
    stay_away(folder)
    slurm_ones()
