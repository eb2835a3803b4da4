"""The companion's tick: observe → learn → rules → decide → plan → act."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from ones_db import JobHistory, ResizeRecord, Store
from ones_db.reasons import Reason
from slurm_ones.act.actor import Actor
from slurm_ones.act.arrays import GuestHolds, Leftovers, arrays_of, moving_tasks, waiting_arrays
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.fusions import Fusions, without_fused
from slurm_ones.act.holds import HeldTasks, StaleHolds
from slurm_ones.act.orders import OrderWriter
from slurm_ones.act.resize import ResizeMachine
from slurm_ones.act.transitions import State
from slurm_ones.config import ConfigError, Settings
from slurm_ones.jobs.elastic import Observation, guests_of
from slurm_ones.jobs.observer import DrainReports, Observer, StopFile
from slurm_ones.jobs.reports import read_spec
from slurm_ones.learn.learner import JobModel, Learner
from slurm_ones.learn.nodes import SlowNode, slow_nodes
from slurm_ones.learn.workload import KNOWN_S, GuestLives
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import Policy
from slurm_ones.rules.gate import PartitionRules, Round, under_way
from slurm_ones.rules.job_rules import loses_licenses
from slurm_ones.rules.plan import PartitionSchedule, PlannedChange, plans
from slurm_ones.rules.quotas import READ_S, QuotaReading
from slurm_ones.rules.views import bounds_of, cluster_view, decide_within, job_models, job_views
from slurm_ones.slurm.client import GIVES_TYPES, Refused, SlurmClient, leader_only
from slurm_ones.slurm.model import Quotas, Task
from slurm_ones.slurm.parse import enforces_limits, hides_gpus, release_of

log = logging.getLogger(__name__)

NODES_S = 300.0
"""Seconds between two updates of the slow nodes and of the guests' run times."""


@dataclass(frozen=True)
class Tick:
    """Observations, decisions and changes of one tick."""

    observation: Observation
    decided: list[PartitionSchedule] = field(default_factory=list)
    begun: list[PlannedChange] = field(default_factory=list)
    seconds: float = 0.0
    histories: Mapping[int, JobHistory] = field(default_factory=dict)
    outcomes: Mapping[int, Reason] = field(default_factory=dict)
    """Outcome of the decision for each job, by job id."""
    ended: Sequence[ResizeRecord] = ()
    """Resizes that ended since the last tick."""
    slow_nodes: Mapping[str, SlowNode] = field(default_factory=dict)
    resizing: int = 0
    """Number of resizes that were open before the decision."""


def policy_of(settings: Settings) -> Policy:
    """Make the policy that the settings name. Raises `ConfigError` for an unknown policy or option."""
    try:
        return make_policy(settings.policy, **settings.policy_options)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@contextmanager
def no_collection() -> Iterator[None]:
    """Context manager that disables Python's cyclic garbage collector, which takes a fifth of a tick with 10,000
    jobs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Companion:
    """Companion of one cluster: it observes elastic jobs, decides their sizes and resizes them.

    All essential state is in the store, so after a crash the next companion continues. Only one companion may act at a
    time: `check` raises `NotLeader` if another one leads, and is called before each change in Slurm and each order.

    `clock` returns Unix time. `make` makes the policy for a partition; by default it follows the settings. Raises
    `ConfigError` for an unknown policy or option.
    """

    def __init__(
        self,
        settings: Settings,
        client: SlurmClient,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = print,
        make: Callable[[], Policy] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        client = leader_only(client, check)
        self._client = client
        store.remember()
        self._store = store
        self._clock = clock
        self._observer = Observer(client, store, settings, clock)
        self._stop_file = StopFile(settings.stop_file, store)
        self._learner = Learner(seed=settings.seed, gpu_speeds=settings.gpu_speeds)
        self._policies: dict[str, Policy] = {}
        self._make = make or (lambda: policy_of(settings))
        self._make()
        self._rng = np.random.default_rng(settings.seed)
        deferrals = Deferrals(client, store, settings.deferral_s, clock)
        orders = OrderWriter(client, settings.spool, clock, check)
        machine = ResizeMachine(
            client=client,
            store=store,
            reports=DrainReports(self._observer, store, clock),
            settings=settings.resize,
            orders=orders,
            deferrals=deferrals,
            clock=clock,
            wanted=self._observer.may_resize,
            other_order=self._observer.other.number,
            read_spec=read_spec,
            guests=guests_of(settings),
            whole_node_gpus=settings.whole_node_gpus,
            taper=settings.taper,
        )
        self._machine = machine
        self._fusions = Fusions(client, deferrals, orders, clock)
        self._held = HeldTasks(store)
        self._stale = StaleHolds(client, store, clock)
        self._guest_holds = GuestHolds(client, self._held, clock)
        self._leftovers = Leftovers(client, store, self._held, orders, clock)
        self._actor = Actor(machine, settings, say=say)
        self._facts: dict[str, bool] = {}
        self._quotas, self._quotas_time = QuotaReading(), -math.inf
        self._slow: Mapping[str, SlowNode] = {}
        self._lives = GuestLives()
        self._slow_time = -math.inf

    @no_collection()
    def tick(self) -> Tick:
        """Run one round: observe, learn, decide, plan and act. Raises `Unreachable` if Slurm does not answer."""
        started = time.monotonic()
        self._actor.advance()
        self._stop_file.check(self._clock())
        observation = self._observer.observe()
        self._machine.seen = observation.snapshot
        resizes = self._store.open_resizes()
        fused = self._fused(observation, {resize.job_id for resize in resizes})
        observation = without_fused(observation, fused)
        histories = self._learn(observation)
        self._tidy(observation, histories, resizes)
        round_ = self._round(observation, histories, resizes)
        models = job_models(round_, self._learner)
        planned = plans(round_, lambda now, rules: self._decide(now, rules, models), begins=self._actor.acting)
        begun = self._actor.act(planned, observation, kept=fused.keys())
        outcomes, ended = self._actor.outcomes, self._machine.take_ended()
        decided = [one.decided for one in planned]
        seconds = time.monotonic() - started
        return Tick(observation, decided, begun, seconds, histories, outcomes, ended, self._slow, len(resizes))

    def _read_quotas(self, seen: Observation) -> Quotas:
        """Return Slurm's quotas with their present use. The quotas are read every few minutes."""
        now = self._clock()
        if seen.elastic and not 0.0 <= now - self._quotas_time < READ_S:
            self._quotas_time = now
            try:
                read = self._client.quotas({one.job.user for one in seen.elastic.values()} - {""})
                read = read if enforces_limits(self._client.config()) else replace(read, all=())
                self._quotas = QuotaReading.of(read, seen)
            except Refused as error:
                log.info("Slurm's quotas are not known: %s", error)
        return self._quotas.now(seen)

    def _fused(self, seen: Observation, busy: Collection[int]) -> dict[int, int]:
        if not self._actor.acting or self.settings.stopped:
            return {}
        return self._fusions.follow(seen, busy)

    def _round(
        self, observation: Observation, histories: Mapping[int, JobHistory], resizes: list[ResizeRecord]
    ) -> Round:
        blocks, optins = observation.of_blocks, [one.optin for one in observation.elastic.values() if one.optin]
        switches = {job_id: self._learner.switch_s(histories.get(job_id)) for job_id in blocks}
        licensed = any(one.job.home.licenses for one in observation.elastic.values())
        typed, client = bool(blocks) or any(optin.kinds for optin in optins), self._client
        return Round(
            observation,
            histories,
            self.settings,
            under_way(resizes),
            self._clock(),
            held={job_id: self._held.of(job_id) for job_id in blocks if self._held.ever(job_id)},
            split_nodes=not blocks or self._asked_once("split nodes", lambda: not hides_gpus(client.config())),
            promises=self._store.promises() if any(optin.deadline is not None for optin in optins) else {},
            types_given=not typed or self._asked_once("gives types", lambda: client.version() >= GIVES_TYPES),
            switches=switches,
            lives=self._lives,
            quotas=self._read_quotas(observation),
            loses_licenses=licensed
            and not self._asked_once("keeps licences", lambda: not loses_licenses(release_of(client.config()))),
        )

    def _asked_once(self, what: str, ask: Callable[[], bool]) -> bool:
        """Return Slurm's answer to the question `what`, asked only once. If Slurm refuses, return False, and ask again
        next time."""
        if what not in self._facts:
            try:
                self._facts[what] = ask()
            except Refused:
                return False
        return self._facts[what]

    def _tidy(self, seen: Observation, histories: Mapping[int, JobHistory], resizes: Sequence[ResizeRecord]) -> None:
        """Clean up after jobs of blocks: stale holds, running guests, preempted blocks, and held tasks of jobs that are
        over."""
        busy, moving = {resize.job_id for resize in resizes}, moving_tasks(resizes)
        trains = {id_: one for id_, one in seen.of_blocks.items() if id_ not in busy - moving.keys()}
        idle = [one for job_id, one in seen.of_blocks.items() if job_id not in busy]
        arrays = arrays_of(seen.snapshot.jobs.values())
        waiting = waiting_arrays(arrays)
        blocks = {job_id: one.job.blocks for job_id, one in seen.of_blocks.items()}
        for job_id, tasks in (waiting | blocks).items():
            self._held.look(job_id, tasks)
        self._release_stale(seen, busy)
        waiting = {id_: tasks for id_, tasks in waiting.items() if id_ not in busy}
        acting = self._actor.acting and not self.settings.stopped
        at_rest = {id_: tasks for id_, tasks in arrays.items() if id_ not in busy - moving.keys()}
        self._guest_holds.keep(at_rest, trains if acting else {}, seen.snapshot.partitions, moving)
        self._leftovers.cancel_waiting(waiting)
        if acting:
            self._leftovers.put_back(trains.values(), moving)
            self._leftovers.end_those_apart([(one, histories.get(one.job.job_id)) for one in idle])
        alive = {*seen.elastic, *seen.left, *waiting}
        self._held.forget(alive)
        self._leftovers.forget(alive)
        self._guest_holds.forget(alive)

    def _release_stale(self, seen: Observation, busy: Collection[int]) -> None:
        blocks = {id_: one.job.blocks for id_, one in {**seen.of_blocks, **seen.left}.items()}
        jobs = [(id_, job) for id_, job in seen.snapshot.jobs.items() if job.array_id not in blocks]
        jobs += [(id_, job) for id_, tasks in blocks.items() for job in tasks]
        jobs = [(id_, job) for id_, job in jobs if id_ not in busy]
        self._stale.release(jobs, {Task(id_, task) for id_ in blocks for task in self._held.of(id_)})

    def _learn(self, observation: Observation) -> Mapping[int, JobHistory]:
        histories = self._store.histories(list(observation.elastic))
        finished = self._store.finished_histories()
        self._learner.finished(finished)
        now = self._clock()
        if abs(now - self._slow_time) >= NODES_S:
            self._slow = slow_nodes([*finished, *histories.values()], now)
            if self.settings.guests:
                self._lives = GuestLives(self._store.guest_runs(now - KNOWN_S), now)
            self._slow_time = now
        return histories

    def _decide(self, round_: Round, rules: PartitionRules, models: Mapping[int, JobModel]) -> PartitionSchedule:
        cluster = cluster_view(round_, rules)
        jobs = job_views(round_, rules, cluster, models)
        caps, sizes = bounds_of(round_, rules, cluster, jobs)
        started = time.monotonic()
        schedule = decide_within(self._policy(rules.name), cluster, jobs, caps, sizes, round_.now, self._rng)
        views = {job.job_id: job for job in jobs}
        return PartitionSchedule(rules.name, schedule, time.monotonic() - started, views)

    def _policy(self, partition: str) -> Policy:
        if partition not in self._policies:
            self._policies[partition] = self._make()
        return self._policies[partition]

    def advance(self, *, only: Collection[State] = tuple(State)) -> int:
        """Advance the resizes that are in these states; return how many of them are still open. Raises
        `Unreachable`."""
        return self._actor.advance(only=only)

    def leave(self) -> None:
        """End all deferrals, so that waiting jobs may start. Raises `Unreachable`."""
        self._actor.leave()

    def close(self) -> None:
        """Close the database. The companion cannot be used afterwards."""
        self._store.close()

    @property
    def resizing(self) -> bool:
        """True while a resize is open."""
        return bool(self._store.open_resizes())
