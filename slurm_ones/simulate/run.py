"""Simulation of a workload to its end in virtual time, under the companion or an oracle."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
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
from slurm_ones.policy.contract import ClusterView, JobView, Policy, Schedule
from slurm_ones.service.daemon import Daemon
from slurm_ones.simulate.invariants import InvariantViolated, violations
from slurm_ones.simulate.oracle import IMMEDIATE, Oracle, Placement, remaining_s
from slurm_ones.simulate.outcome import Outcome, RunFigures
from slurm_ones.simulate.slurm.cluster import Faults
from slurm_ones.simulate.slurm.nodes import SlurmConf
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.simulate.spec import PARTITION, ClusterSpec
from slurm_ones.simulate.training.application import Mechanism, Requeue
from slurm_ones.simulate.workloads.profiles import Workload, check_fits
from slurm_ones.simulate.world import World

GIVEN_TRUE_TIMES = frozenset({"srtf", "srsf"})
"""Names of the policies that are given each job's true remaining time."""

MOST_S = 60 * 86400.0
"""Simulated seconds after which a simulation is stopped, even if jobs have not ended."""

SHARED_MEMORY = Path("/dev/shm")
NEEDED_BYTES = 256 << 20
"""Free bytes that a directory must have, enough for several parallel simulations of about 20 MB each."""

DEFAULTS: dict[str, Any] = {"cluster": "simulated", "mode": "act"}
"""Companion settings of every simulation. All other settings have their usual defaults."""
AT_ONCE: dict[str, float] = {
    "resize.dwell_s": 0.0,
    "resize.max_open": 64,
    "resize.settle_s": 0.0,
    "limits.near_end_s": 0.0,
    "limits.near_limit_s": 0.0,
}
"""Settings without delays, under which a policy may resize any job at any time. The older tables of our benchmarks were
made with them. On the command line each is a `--set` option of `slurm-ones simulate`."""


class SimulationFailed(Exception):
    """Error: the companion or its policy raised an exception, the `__cause__`, at a tick."""


class WarningLog(logging.Handler):
    """Log handler that keeps the companion's warnings, and the first exception that the companion logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        self.failure: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            self.failure = self.failure or record.exc_info[1]

    def check(self) -> None:
        """Raise `SimulationFailed` if an exception was logged. A real companion would log it and continue."""
        if self.failure is not None:
            raise SimulationFailed(f"{type(self.failure).__name__}: {self.failure}") from self.failure

    @contextmanager
    def recording(self) -> Iterator[WarningLog]:
        """Context in which this handler, and no other, gets the companion's log records."""
        logger = logging.getLogger("slurm_ones")
        logger.addHandler(self)
        logger.propagate, before = False, logger.propagate
        try:
            yield self
        finally:
            logger.removeHandler(self)
            logger.propagate = before


class Clairvoyant:
    """Wrapper of a policy that adds each job's true remaining seconds to its view."""

    def __init__(self, policy: Policy, world: World) -> None:
        self.name = policy.name
        self._policy = policy
        self._world = world

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        trainings, view = self._world.trainings, self._world.spec.view
        known = [replace(job, true_remaining_s=remaining_s(trainings[job.job_id], view)) for job in jobs]
        return self._policy.decide(cluster, known, now, rng)


def companion_settings(spec: ClusterSpec, directory: Path, overrides: Mapping[str, Any], **own: Any) -> Settings:
    """Return the companion's settings. `overrides`, such as `resize.dwell_s`, replace the simulation's `own` settings,
    and these replace `DEFAULTS`.

    Raises pydantic's ValidationError, a ValueError, for unknown or invalid settings.
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


class VirtualStop:
    """Stand-in for `daemon.Stop`, whose `wait` lets virtual time pass.

    Between two ticks the companion checks open resizes every `advance_s` seconds. To save time, the simulation skips
    these checks until an event has changed a job. So a resize that times out may be noticed late: at the check after
    the next event, or at the next tick.
    """

    def __init__(self, world: World, interval_s: float, advance_s: float, check: Callable[[], None]) -> None:
        """Call `check` each time before virtual time passes. An exception of `check` ends the simulation."""
        self._world = world
        self._interval_s = interval_s
        self._advance_s = advance_s
        self._check = check
        self._next_tick = 0.0
        self._set = False

    def set(self) -> None:
        """Make the companion stop."""
        self._set = True

    def ticked(self) -> None:
        """Note that a tick has ended, so the next tick is one interval from now."""
        self._next_tick = self._world.timeline.now + self._interval_s

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        self._check()
        world, begun = self._world, self._world.timeline.now
        left = self._next_tick - begun
        if timeout <= self._advance_s < left:
            world.pass_time(left, until_change=True)
            looks = math.ceil((world.timeline.now - begun) / self._advance_s - 1e-9)
            rest = begun + min(max(looks, 1) * self._advance_s, left) - world.timeline.now
            world.pass_time(max(rest, 0.0))
        else:
            world.pass_time(timeout)
            if world.cluster.empty:
                world.skip_idle(self._interval_s)
        return self._set


def over(world: World, tick: Tick, most_s: float = MOST_S) -> bool:
    """Return True if a simulation is over: more than `most_s` seconds have passed, or nothing is left to do.

    Nothing is left to do once all jobs have ended, the companion has noticed this, and no resize is under way.
    """
    return (world.done and not tick.observation.elastic and not tick.resizing) or world.seconds > most_s


@contextmanager
def run_companion(
    world: World,
    settings: Settings,
    log: WarningLog,
    on_tick: Callable[[Tick], bool],
    make: Callable[[], Policy] | None = None,
) -> Iterator[Store]:
    """Context that runs a companion on the world until `on_tick` returns True, and yields the companion's database.

    The database is new. It is in the world's directory if the settings name no other. `make` returns the policy;
    without it, the settings name the policy. Raises `SimulationFailed`.
    """
    stop = VirtualStop(world, settings.interval_s, settings.resize.advance_s, log.check)

    def ticked(tick: Tick) -> None:
        stop.ticked()
        if on_tick(tick):
            stop.set()

    url = settings.database or f"sqlite:///{world.directory / 'ones.sqlite'}"
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
    oracle: Placement | None = None,
    interval_s: float = 60.0,
    mechanism: Mechanism = Requeue(),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    cluster_settings: ClusterSettings = ClusterSettings(),
    on_time: Callable[[float, int], None] | None = None,
    make: Callable[[], Policy] | None = None,
    faults: Faults | None = None,
    conf: SlurmConf = SlurmConf(),
    most_s: float = MOST_S,
) -> Outcome:
    """Simulate a workload to its end under a policy: the one with this name and these options, or what `make` returns.

    By default the companion resizes the jobs. With the mechanism `Hot`, elastic jobs are jobs of blocks. If `oracle`
    names a placement, an `Oracle` replaces the companion: only starts and resizes take time, and `settings` and
    `cluster_settings` are ignored. `faults` are injected into the simulated Slurm, and `conf` is its configuration.
    `on_time` is called at each tick with the simulated seconds and the number of ended jobs.

    Raises `BadInput` if a job is too large for the cluster, and ValueError for an unknown policy, option or setting.
    Raises `SimulationFailed` if the companion or the policy fails, and `InvariantViolated` if a job or its record is
    wrong at the end.
    """
    check_fits(workload, cluster.gpus)
    made = make or (lambda: make_policy(policy, **options))
    if oracle is not None:
        world = World(
            workload, cluster, Path(), IMMEDIATE, mechanism=mechanism, seed=seed, timeline=Timeline(0.0), oracle=True
        )
        figures = RunFigures(world, on_time)
        seer = Oracle(world, made(), oracle, seed)
        while not world.done and world.seconds < most_s:
            figures.tick()
            figures.decisions.extend(seer.tick())
            world.pass_time(interval_s)
            if not world.cluster.live:
                world.skip_idle(interval_s)
        return figures.outcome(policy, seed, seer.promises)
    made()
    with (
        tempfile.TemporaryDirectory(prefix="slurm-ones-", dir=fast_directory()) as name,
        WarningLog().recording() as log,
    ):
        directory = Path(name)
        merged = companion_settings(cluster, directory, settings or {}, tick_s=interval_s, policy=policy, seed=seed)
        world = World(
            workload, cluster, directory, cluster_settings, mechanism=mechanism, seed=seed, faults=faults, conf=conf
        )
        figures = RunFigures(world, on_time)

        def on_tick(tick: Tick) -> bool:
            figures.decisions.extend(decided.seconds for decided in tick.decided)
            figures.tick()
            return over(world, tick, most_s)

        makes = (lambda: Clairvoyant(made(), world)) if policy in GIVEN_TRUE_TIMES else made
        with run_companion(world, merged, log, on_tick, makes) as store:
            world.pass_time(cluster_settings.ending_s)
            wrong = violations(world, store) if world.done else []
            promises = {job_id: one.given for job_id, one in store.promises([*world.job_ids.values()]).items()}
        if wrong:
            raise InvariantViolated("; ".join(wrong))
        return figures.outcome(policy, seed, promises, _notes(world, log))


def fast_directory() -> str | None:
    """Return a directory in memory with enough space for the simulation's files; None if there is none."""
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
