"""The companion: observe → learn → decide → act, once a tick."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ones_db import JobHistory, Store, StoreError
from slurm_ones.act.actor import Actor, Decided
from slurm_ones.act.leases import Leases
from slurm_ones.act.plan import Change
from slurm_ones.act.resize import Machine
from slurm_ones.config import ConfigError, Settings
from slurm_ones.decide import make_policy
from slurm_ones.decide.policy import Policy
from slurm_ones.learn.knowledge import Learner
from slurm_ones.observe.mail import Mail
from slurm_ones.observe.observer import Observer, Seen
from slurm_ones.observe.stopfile import StopFile
from slurm_ones.observe.views import cluster_view, job_views
from slurm_ones.slurm.client import SlurmClient, Unreachable

log = logging.getLogger(__name__)


class Stop(Protocol):
    """How `Companion.run` waits, and is told to stop: `threading.Event`, or a simulator's, in whose `wait` its time
    passes."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """Wait so many seconds, or until it is set."""


@dataclass(frozen=True)
class Tick:
    """What one tick saw and did."""

    seen: Seen
    decided: list[Decided] = field(default_factory=list)
    begun: list[Change] = field(default_factory=list)
    seconds: float = 0.0


class Companion:
    """Looks after the elastic jobs of one cluster through one client and one store.

    All that matters is in the store: a companion that is killed at any moment is succeeded by one that goes on where
    it stopped. Only one may act at a time. Raises `ConfigError` for a policy or option that does not exist.

    `clock` gives the time and `sleep` lets it pass where `Stop.wait` no longer does, after the stop. `make` makes the
    policy of a partition, where it is not the settings' own.
    """

    def __init__(
        self,
        settings: Settings,
        client: SlurmClient,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
        say: Callable[[str], None] = print,
        make: Callable[[], Policy] | None = None,
    ) -> None:
        self.settings = settings
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._observer = Observer(client, store, settings)
        self._stop_file = StopFile(settings.stop_file, store)
        self._learner = Learner(seed=settings.seed)
        self._policies: dict[str, Policy] = {}
        self._make = make or (lambda: make_policy(settings.policy, **settings.policy_options))
        try:
            self._make()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._rng = np.random.default_rng(settings.seed)
        leases = Leases(client, store, settings.lease_s, clock)
        machine = Machine(
            client=client,
            journal=store,
            reports=Mail(self._observer, store, clock),
            settings=settings.resize,
            spool=settings.spool,
            clock=clock,
            wanted=self._observer.may_resize,
            leases=leases,
        )
        self._actor = Actor(machine, store, settings, leases, clock=clock, say=say)

    def tick(self) -> Tick:
        """One round. Raises `Unreachable` when Slurm does not answer."""
        started = time.monotonic()
        self._actor.advance()
        self._stop_file.look(self._clock())
        seen = self._observer.look()
        histories = self._learn(seen)
        decided = self._decide(seen, histories)
        begun = self._actor.act(seen, histories, decided)
        return Tick(seen, decided, begun, time.monotonic() - started)

    def _learn(self, seen: Seen) -> Mapping[int, JobHistory]:
        histories = self._store.histories(list(seen.elastic))
        self._learner.finished(self._store.finished_histories())
        return histories

    def _decide(self, seen: Seen, histories: Mapping[int, JobHistory]) -> list[Decided]:
        resizes = self._store.open_resizes()
        open_jobs = {resize.job_id for resize in resizes}
        decided = []
        for partition in sorted({e.job.partition.split(",")[0] for e in seen.elastic.values()}):
            cluster = cluster_view(seen, partition, self.settings.whole_node_gpus, resizes)
            jobs = job_views(
                seen,
                partition,
                cluster,
                histories,
                self._learner,
                open_jobs,
                self.settings.resize.dwell_s,
                self._clock(),
            )
            started = time.monotonic()
            schedule = self._policy(partition).decide(cluster, jobs, self._clock(), self._rng)
            decided.append(Decided(partition, schedule, time.monotonic() - started))
        return decided

    def _policy(self, partition: str) -> Policy:
        """Each partition has a search of its own."""
        if partition not in self._policies:
            self._policies[partition] = self._make()
        return self._policies[partition]

    def run(self, stop: Stop, on_tick: Callable[[Tick], None] = lambda tick: None) -> None:
        """Tick until `stop` is set; between ticks, take resizes under way further.

        An unreachable controller or database costs the tick: the next one comes after a wait that doubles up to ten
        intervals, or after one while resizes are under way.
        Before it returns it releases the jobs that it holds, for as long as `resize.leave_s`, and lets those start that
        it keeps from starting.
        """
        wait = self.settings.interval_s
        while not stop.is_set():
            try:
                tick = self.tick()
                on_tick(tick)
                wait = self.settings.interval_s
                self._between(stop, wait)
            except (Unreachable, StoreError) as error:
                wait = self._back_off(wait)
                log.error("%s; trying again in %.0f s", error, wait)
                stop.wait(wait)
            except Exception:
                # One odd job must not leave everybody else's resizes unfinished.
                wait = self._back_off(wait)
                log.exception("this tick failed; the next one comes in %.0f s", wait)
                stop.wait(wait)
        self._leave()

    def _back_off(self, wait: float) -> float:
        """The wait after one of `wait` seconds was in vain; short while a job may stand in a hold of ours."""
        try:
            most = 1 if self._store.open_resizes() else 10
        except StoreError:
            # Nobody knows whether one does.
            most = 1
        return min(wait * 2, most * self.settings.interval_s)

    def _leave(self) -> None:
        """Take the resizes whose jobs stand in a hold of ours past their release, and end all deferrals."""
        until = self._clock() + self.settings.resize.leave_s
        try:
            while self._actor.advance(held_only=True) and self._clock() < until:
                self._sleep(min(self.settings.resize.advance_s, 1.0))
            self._actor.leave()
        except (Unreachable, StoreError) as error:
            log.error("%s; the next start finishes what is under way, and jobs kept from starting do so later", error)

    def _between(self, stop: Stop, seconds: float) -> None:
        until = self._clock() + seconds
        while not stop.is_set() and (left := until - self._clock()) > 0:
            # No longer than this, should the clock have been set back.
            left = min(left, seconds)
            if self._actor.advance():
                stop.wait(min(left, self.settings.resize.advance_s))
            else:
                stop.wait(left)
                return
