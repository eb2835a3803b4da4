"""The companion that drives the real Slurm, unchanged, on a simulated cluster in virtual time."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ones_db import Store, migrate
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import Settings
from slurm_ones.policies import make_policy
from slurm_ones.schedule.policy import ClusterView, JobView, Policy, Schedule
from slurm_ones.service.daemon import Daemon
from slurm_ones.simulate.engines.invariants import InvariantViolated, violations
from slurm_ones.simulate.engines.outcome import Outcome
from slurm_ones.simulate.engines.world import (
    PARTITION,
    REQUEUE,
    ClusterSpec,
    VirtualStop,
    World,
    asked_shape,
    job_outcome,
    run_segments,
    total_goodput,
)
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.workloads.workload import Workload, check_fits

ORACLES = frozenset({"srtf", "srsf"})
"""Policies that know how long jobs truly still need."""

MOST_S = 60 * 86400.0
"""Simulated time after which jobs that have not ended are given up."""

SHARED_MEMORY = Path("/dev/shm")
NEEDED_BYTES = 256 << 20
"""Bytes that several simulations side by side take with ease: each some 20 MB."""

DEFAULTS: dict[str, Any] = {"cluster": "simulated", "mode": "act"}
"""Settings of the companion in simulations, the same for all policies; whatever is not named is as shipped."""
AT_ONCE: dict[str, float] = {
    "resize.dwell_s": 0.0,
    "resize.max_open": 64,
    "resize.settle_s": 0.0,
    "limits.near_end_s": 0.0,
    "limits.near_limit_s": 0.0,
}
"""Overrides with which nothing keeps a policy from resizing a job; as `--set` of `slurm-ones simulate` they are given
one by one. Tables made before these were options have them."""


class SimulationFailed(Exception):
    """The companion, or its policy, failed at a tick; the cause is the exception that it raised."""


class WarningLog(logging.Handler):
    """Collects the companion's warnings, and the first exception that it logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        self.failure: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            self.failure = self.failure or record.exc_info[1]

    def check(self) -> None:
        """Raise `SimulationFailed` if something was not meant to happen: the real companion would go on."""
        if self.failure is not None:
            raise SimulationFailed(f"{type(self.failure).__name__}: {self.failure}") from self.failure

    @contextmanager
    def recording(self) -> Iterator[WarningLog]:
        """Collect what is logged meanwhile, in place of where the process logs."""
        logger = logging.getLogger("slurm_ones")
        logger.addHandler(self)
        logger.propagate, before = False, logger.propagate
        try:
            yield self
        finally:
            logger.removeHandler(self)
            logger.propagate = before


class Oracle:
    """A policy whose jobs come with the seconds that they truly still need."""

    def __init__(self, policy: Policy, world: World) -> None:
        self.name = policy.name
        self._policy = policy
        self._world = world

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `schedule.policy.Policy`."""
        known = [replace(job, true_remaining_s=self._remaining(job.job_id)) for job in jobs]
        return self._policy.decide(cluster, known, now, rng)

    def _remaining(self, job_id: int) -> float:
        training = self._world.trainings[job_id]
        app, asked = training.application, training.submission
        shape = asked_shape(asked.gpus, self._world.spec)
        batch = float(min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch))
        gpus = min(shape.gpus, app.max_gpus)
        return app.seconds(shape.nodes, gpus, batch, training.position.progress, app.total * asked.epochs)


def companion_settings(spec: ClusterSpec, directory: Path, overrides: Mapping[str, Any], **own: Any) -> Settings:
    """The companion's settings: `DEFAULTS`, what the simulation decides, and overrides such as `resize.dwell_s`.

    Raises pydantic's ValidationError, a ValueError, for what no setting is.
    """
    values: dict[str, Any] = {**DEFAULTS, **own, "stop_file": directory / "stop"}
    if spec.whole_nodes:
        values["whole_node_gpus"] = {PARTITION: spec.gpus_per_node}
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        if section:
            values[section] = {**values.get(section, {}), name: value}
        elif isinstance(value, Mapping):
            values[name] = {**values.get(name, {}), **value}
        else:
            values[name] = value
    return Settings.model_validate(values)


def over(world: World, tick: Tick, most_s: float = MOST_S) -> bool:
    """Whether a simulation is at its end: all jobs have ended and the companion knows it, or they are given up."""
    return (world.done and not tick.observation.elastic) or world.seconds > most_s


@contextmanager
def run_companion(
    world: World,
    settings: Settings,
    log: WarningLog,
    on_tick: Callable[[Tick], bool],
    make: Callable[[], Policy] | None = None,
) -> Iterator[Store]:
    """Run a companion on the world, with a new database in its directory, until `on_tick` returns True.

    The block then has the database. `make` makes the policy in place of the settings' own. Raises `SimulationFailed`.
    """
    stop = VirtualStop(world, settings.interval_s, settings.resize.advance_s, log.check)

    def ticked(tick: Tick) -> None:
        stop.ticked()
        if on_tick(tick):
            stop.set()

    url = f"sqlite:///{world.directory / 'ones.sqlite'}"
    migrate.upgrade(url)
    with Store.open(url, settings.cluster) as store:
        companion = Companion(settings, world.client, store, clock=world.timeline, make=make)
        Daemon(lambda: companion, clock=world.timeline, sleep=world.pass_time).run(stop, ticked)
        log.check()
        yield store


def run(
    policy: str,
    options: Mapping[str, Any],
    workload: Workload,
    cluster: ClusterSpec,
    *,
    interval_s: float = 60.0,
    resize_s: float | None = 30.0,
    resize: str = REQUEUE,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    cluster_settings: ClusterSettings = ClusterSettings(),
    on_time: Callable[[float, int], None] | None = None,
    make: Callable[[], Policy] | None = None,
    most_s: float = MOST_S,
) -> Outcome:
    """The workload to its end under a policy, by name and options, or as `make` makes it.

    `resize` is how jobs change size: `requeue`, which costs `resize_s` (None for each application's own), or `hot`
    as jobs of blocks, of which `resize_s` is the cost of a start. `on_time` is called at each tick, with the simulated
    seconds and how many jobs have ended. Raises `BadInput` for a job that fits the cluster at no size, ValueError for a
    policy, option or setting that does not exist, `SimulationFailed`, and `InvariantViolated` where a job was lost or
    left held, or the database disagrees with the cluster.
    """
    check_fits(workload, cluster.gpus)
    began = time.perf_counter()
    made = make or (lambda: make_policy(policy, **options))
    made()
    decisions: list[float] = []
    goodput: list[tuple[float, float]] = []
    presence: list[tuple[float, int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="slurm-ones-", dir=fast_directory()) as name,
        WarningLog().recording() as log,
    ):
        directory = Path(name)
        merged = companion_settings(cluster, directory, settings or {}, tick_s=interval_s, policy=policy, seed=seed)
        world = World(workload, cluster, directory, cluster_settings, resize_s=resize_s, resize=resize, seed=seed)

        def on_tick(tick: Tick) -> bool:
            decisions.extend(decided.seconds for decided in tick.decided)
            goodput.append((world.seconds, total_goodput(world) / cluster.gpus))
            presence.append((world.seconds, world.cluster.live))
            if on_time is not None:
                on_time(world.seconds, world.ended)
            return over(world, tick, most_s)

        oracle = (lambda: Oracle(made(), world)) if policy in ORACLES else made
        with run_companion(world, merged, log, on_tick, oracle) as store:
            world.pass_time(cluster_settings.ending_s)
            faults = violations(world, store) if world.done else []
            promises = store.promises([*world.job_ids.values()])
        if faults:
            raise InvariantViolated("; ".join(faults))
        return Outcome(
            policy=policy,
            workload=workload.name,
            seed=seed,
            gpus=cluster.gpus,
            jobs=tuple(job_outcome(world, submission, presence, promises) for submission in workload.submissions),
            segments=tuple(run_segments(world)),
            decision_s=tuple(decisions),
            goodput=tuple(goodput),
            wall_s=time.perf_counter() - began,
            notes=_notes(world, log),
        )


def fast_directory() -> str | None:
    """A directory in memory, where there is one with room: files there cost little, and are not meant to stay."""
    roomy = (
        SHARED_MEMORY.is_dir()
        and os.access(SHARED_MEMORY, os.W_OK)
        and shutil.disk_usage(SHARED_MEMORY).free > NEEDED_BYTES
    )
    return str(SHARED_MEMORY) if roomy else None


def _notes(world: World, log: WarningLog) -> tuple[str, ...]:
    notes = []
    if not world.done:
        notes.append(f"{len(world.trainings) - world.ended} jobs had not ended after {world.seconds:.0f} s")
    if log.warnings:
        notes.append(f"{len(log.warnings)} warnings of the companion, the first: {log.warnings[0]}")
    lost = sum(training.lost_samples for training in world.trainings.values())
    if lost:
        notes.append(f"{lost} samples were used again after runs that ended without a checkpoint")
    return tuple(notes)
