"""One run: a plan's cluster and jobs, the unchanged companion, and every fault that its seed holds."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ones_db import Store, StoreLost
from ones_wrapper.protocol import Checkpoint
from slurm_ones.companion import Companion, Tick
from slurm_ones.decide import make_policy
from slurm_ones.observe.reports import FUTURE_S
from slurm_ones.schedule.policy import Policy
from slurm_ones.service.daemon import Daemon
from slurm_ones.simulate.engines.companion_engine import companion_settings, fast_directory
from slurm_ones.simulate.engines.world import USER
from slurm_ones.simulate.slurm.timeline import EPOCH
from slurm_ones.slurm.model import Shape
from tests.faults import invariants
from tests.faults.bounds import Ages, bound_s
from tests.faults.chance import Chance
from tests.faults.client import Controller, FaultyClient
from tests.faults.files import FaultyFiles, faulty_access
from tests.faults.hosts import Host, HostStop
from tests.faults.kinds import HOST, Kind
from tests.faults.leading import HostLead
from tests.faults.plan import INTERVAL_S, Plan
from tests.faults.policy import Calmed, Restless
from tests.faults.stage import Stage
from tests.faults.store import FaultyStore, empty, statements_kept
from tests.faults.watch import Failures, OpenResize, Watch

CALM_TICKS = 2
"""Ticks in which nothing is to be done any more, before the companion is told to stop."""
REST_S = 12 * 3600.0
"""A companion that has not come to rest so long after the last fault never does."""
END_S = 2 * 86400.0
"""Jobs that are left alone have ended by then."""
RESTART_S = (0.0, 2.0, 10.0, 65.0, 300.0)
"""How long after its death a companion is started again."""
ABSENT_S = 4000.0


@dataclass(frozen=True)
class Result:
    """What came of a seed."""

    seed: int
    kinds: dict[Kind, int]
    """How often each kind of fault really happened."""
    broken: tuple[str, ...]
    resizes: int = 0
    seconds: float = 0.0
    """That it took."""


def run(plan: Plan, told: Callable[[str], None] | None = None) -> Result:
    """Carry the plan out; `told` hears what happens, step by step."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="slurm-ones-faults-", dir=fast_directory()) as name:
        drama = Drama(plan, Path(name), told)
        with faulty_access(drama.chance, drama.watch), statements_kept():
            drama.play()
        return Result(
            plan.seed,
            dict(drama.chance.struck),
            tuple(drama.watch.broken),
            drama.resizes,
            time.perf_counter() - began,
        )


class Drama:
    """Everything of one run."""

    def __init__(self, plan: Plan, directory: Path, told: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.chance = Chance(plan.seed, plan.rates)
        self.stage = Stage(plan, directory, self.chance)
        self.settings = companion_settings(
            plan.spec, directory, plan.settings, tick_s=INTERVAL_S, policy="fifo", seed=plan.seed
        )
        self.calm = False
        self.resizes = 0
        self._quiet = 0
        self._forward_s = 0.0
        self._database = directory / "ones.sqlite"
        shutil.copyfile(empty(), self._database)
        self._url = f"sqlite:///{self._database}"
        self._look = sqlite3.connect(self._database, isolation_level=None, check_same_thread=False)
        stage = self.stage
        self.watch = Watch(
            stage.cluster,
            stage.trainings,
            stage.stop_file,
            self._open,
            stage.lies,
            stage.consented,
            stage.reshaped,
            self._unheard,
        )
        self.controller = Controller(self.chance, self.stage.timeline)
        self.chance.meddle = self.stage.meddle
        if told is not None:
            self.chance.told = lambda text: told(f"{self.stage.seconds:8.1f} {text}")
        self.leaders: list[str] = []
        """Who took the lead, one after the other, where there are several."""
        self._acting: Host | None = None
        self.chance.dies = lambda: self._acting.die() if self._acting is not None else None
        self.watch.acting = self._usurps
        self.hosts = [Host(f"host-{i}", self.stage.timeline, self._live) for i in range(plan.companions)]
        self._ages = Ages(self.settings)
        self._daemons: dict[str, Daemon] = {}
        for at, kind in plan.happenings:
            self.stage.timeline.at(EPOCH + at, lambda kind=kind: self._happen(kind))  # type: ignore[misc]

    # -- the companion -------------------------------------------------------------------------------------------

    def _live(self, host: Host) -> None:
        """A companion's process."""
        if len(self.hosts) == 1:
            self._lead(host, None)
            return
        with closing(HostLead(host, self._url, self.settings.cluster, self.chance, self.leaders)) as lead:
            self._lead(host, lead)

    def _lead(self, host: Host, lead: HostLead | None) -> None:
        daemon = Daemon(lambda: self._make(host, lead), lead=lead, clock=host.clock, sleep=host.wait)
        self._daemons[host.name] = daemon
        daemon.run(HostStop(host), self._ticked)

    def _make(self, host: Host, lead: HostLead | None) -> Companion:
        if self.chance.strikes(Kind.STORE_LOST):
            raise StoreLost("the server cannot be reached")
        store = FaultyStore.open(self._url, self.settings.cluster, term=None if lead is None else lead.term)
        assert isinstance(store, FaultyStore)
        store.chance, store.watch = self.chance, self.watch
        client = FaultyClient(self.stage.cluster, self.controller, self.chance, self.watch, host.clock, user=USER)
        return Companion(
            self.settings,
            client,
            store,
            clock=host.clock,
            make=self._policy,
            say=lambda text: None,
            check=(lambda: None) if lead is None else lead.check,
        )

    def _usurps(self) -> str:
        """What is wrong with who acts now."""
        leader = self.leaders[-1] if self.leaders else None
        if self._acting is None or leader in (None, self._acting.name):
            return ""
        return f"{self._acting.name} acts, and {leader} leads"

    def _policy(self) -> Policy:
        policy = Restless() if self.plan.policy == "restless" else make_policy(self.plan.policy)
        return Calmed(policy, lambda: self.calm)

    def _ticked(self, tick: Tick) -> None:
        self.stage.seen_elastic = set(tick.observation.elastic)
        self.stage.seen_at = tick.observation.snapshot.time
        quiet = self.calm and not tick.begun and not self._open() and not self._deferred()
        self._quiet = self._quiet + 1 if quiet else 0
        if self._quiet >= CALM_TICKS:
            for host in self.hosts:
                host.stopped = True

    # -- what happens --------------------------------------------------------------------------------------------

    def _happen(self, kind: Kind) -> None:
        if not self.chance.on:
            return
        if kind in (Kind.CRASH, Kind.ABSENCE, *HOST):
            self._to_host(kind, self.chance.random.choice(self.hosts))
        else:
            self.stage.happen(kind)

    def _to_host(self, kind: Kind, host: Host) -> None:
        jump = self.chance.random.choice((61.0, 300.0, 1800.0, 7200.0))
        if kind is Kind.CLOCK_FORWARD:
            host.clock.off += jump
            self._forward_s += jump
        elif kind is Kind.CLOCK_BACK:
            host.clock.off -= jump
        elif not host.alive:
            return
        elif kind is Kind.RELOAD:
            self._daemons[host.name].reload()
        else:
            host.kill()
            self._died(host, ABSENT_S if kind is Kind.ABSENCE else None)
        self.chance.count(kind, host.name)

    def _died(self, host: Host, away_s: float | None = None) -> None:
        if host.failure is not None:
            self.watch.say(f"the companion died of {type(host.failure).__name__}: {host.failure}")
            host.failure = None
        away = self.chance.random.choice(RESTART_S) if away_s is None else away_s
        host.wake = self.stage.timeline.now + away

    # -- the run -------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """From the first tick to the end of the last job."""
        logger, heard = logging.getLogger("slurm_ones"), Failures(self.watch)
        logger.addHandler(heard)
        logger.propagate, before = False, logger.propagate
        try:
            self.chance.on = True
            self._until(EPOCH + self.plan.ticks * INTERVAL_S)
            self._settle_down()
            self._until(self.stage.timeline.now + REST_S)
            if not all(host.ended for host in self.hosts):
                opened = sorted(self._open())
                self.watch.say(f"the companion does not come to rest: resizes of {opened}, waits of {self._deferred()}")
                return
            self._look_over()
        finally:
            for host in self.hosts:
                host.kill()
            logger.removeHandler(heard)
            logger.propagate = before
            self._look.close()

    def _settle_down(self) -> None:
        self.chance.on = False
        self.calm = True
        self.controller.down_until = 0.0
        self.stage.calm()
        for host in self.hosts:
            if not host.alive:
                host.wake = self.stage.timeline.now

    def _until(self, time: float) -> None:
        """Let companions live until that time, or until all have ended by themselves."""
        while living := [host for host in self.hosts if not host.ended]:
            host = min(living, key=lambda host: host.wake)
            self._pass_to(min(host.wake, time))
            if host.wake > self.stage.timeline.now:
                if self.stage.timeline.now >= time:
                    return
                continue
            self._acting = host
            host.go()
            if not host.alive and not host.ended:
                self._died(host)

    def _pass_to(self, time: float) -> None:
        seconds = max(time - self.stage.timeline.now, 0.0)
        counts = not self.controller.down and any(host.alive for host in self.hosts)
        self._age(0.0)
        self.stage.pass_time(seconds)
        self._age(seconds if counts else 0.0)

    def _age(self, seconds: float) -> None:
        opened = {resize.id: job_id for job_id, resize in self._open().items()}
        struck = self.chance.struck
        for resize in self._ages.passed(seconds, opened, sum(struck.values()), struck[Kind.CLOCK_BACK]):
            self.watch.say(f"job {opened[resize]}: its resize takes longer than {bound_s(self.settings):.0f} s")

    def _look_over(self) -> None:
        """Everything is over: what is left?"""
        stage, say = self.stage, self.watch.say
        with closing(Store.open(self._url, self.settings.cluster)) as store:
            slack = self.settings.lease_s + self._forward_s
            for what in (
                *invariants.left_behind(stage, store, slack),
                *invariants.disagreements(stage, store),
                *(invariants.batches(stage, store) if self._believes() else ()),
            ):
                say(what)
            self.resizes = len(store.resizes())
        end = stage.timeline.now + END_S
        while not stage.done and stage.timeline.now < end:
            stage.pass_time(3600.0)
        stage.pass_time(60.0)
        for what in (*invariants.lost(stage), *invariants.samples(stage)):
            say(what)

    def _believes(self) -> bool:
        """No host's clock is so far behind that it takes reports for ones from the future."""
        return all(host.clock.off > -FUTURE_S for host in self.hosts)

    def _unheard(self, job_id: int, order: int) -> bool:
        """See `Watch.unheard`."""
        files, restart = self.stage.trainings[job_id].files, self.stage.cluster.jobs[job_id].restart
        if not isinstance(files, FaultyFiles):
            return False
        said = files.truth[restart][-1] if files.truth[restart] else None
        off = files.off != 0.0 or any(host.clock.off for host in self.hosts)
        return off and isinstance(said, Checkpoint) and said.order == order

    def _open(self) -> dict[int, OpenResize]:
        """The resizes under way by job, looked up past the companion's own store."""
        rows = self._look.execute(
            "SELECT jobs.job_id, resizes.id, resizes.state, order_number, "
            "old_nodes, old_gpus_per_node, new_nodes, new_gpus_per_node "
            "FROM resizes JOIN jobs ON jobs.id = resizes.job_id WHERE ended IS NULL"
        )
        return {
            row[0]: OpenResize(row[1], row[2], row[3], Shape(row[4], row[5]), Shape(row[6], row[7])) for row in rows
        }

    def _deferred(self) -> list[int]:
        return [row[0] for row in self._look.execute("SELECT job_id FROM jobs WHERE deferred_until IS NOT NULL")]
