"""One run: a plan's cluster and jobs, the unchanged companion, and every fault that its seed holds."""

from __future__ import annotations

import logging
import math
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ones_db import Store, StoreLost
from ones_db.shape import Shape
from ones_wrapper.protocol import Checkpoint
from slurm_ones.act.arrays import SURE_S
from slurm_ones.companion import Companion, Tick
from slurm_ones.jobs.reports import FUTURE_S
from slurm_ones.learn.learner import JobModel
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import Policy
from slurm_ones.rules.gate import PartitionRules, Round
from slurm_ones.rules.plan import PartitionSchedule
from slurm_ones.service.daemon import Daemon
from slurm_ones.simulate.run import AT_ONCE, companion_settings, fast_directory
from slurm_ones.simulate.slurm.timeline import EPOCH
from tests.db.statements import shared_statements
from tests.faults import invariants
from tests.faults.client import Controller, FaultyClient
from tests.faults.faulty_world import FaultyWorld
from tests.faults.files import FaultyFiles, faulty_access
from tests.faults.harm import GuestCount, HarmWatch
from tests.faults.hosts import Host, HostLeadership, HostStop
from tests.faults.injector import FaultInjector
from tests.faults.kinds import BY_PREEMPTION, ON_HOST, FaultKind
from tests.faults.plan import FaultPlan
from tests.faults.random_policy import QuietPolicy, RandomPolicy
from tests.faults.safety import BlockSafety, FailureLog, OpenResize, ResizeAges, SafetyChecker, bound_s
from tests.faults.store import FaultyStore, empty_database

REST_S = 12 * 3600.0
"""A companion that has not come to rest so long after the last fault never does."""
END_S = 2 * 86400.0
"""Jobs that are left alone have ended by then."""
AGAIN_S = 7.0
"""What strikes at guests, or wants what they hold, is tried again so long after there were none."""
RESTART_S = (0.0, 2.0, 10.0, 65.0, 300.0)
"""How long after its death a companion is started again."""


@dataclass(frozen=True)
class Result:
    seed: int
    kinds: dict[FaultKind, int]
    """How often each kind of fault really happened."""
    violations: tuple[str, ...]
    resizes: int = 0
    changes_of_blocks: int = 0
    """Of these, changes of the blocks of jobs that trained, however they ended."""
    guests: GuestCount = field(default_factory=GuestCount)
    seconds: float = 0.0
    """Real seconds that it took."""


def run(
    plan: FaultPlan,
    trace: Callable[[str], None] | None = None,
    begun: Callable[[FaultRun], object] = lambda fault_run: None,
    *,
    to_the_first: bool = False,
) -> Result:
    """Carry the plan out, all of it or to the first violation; `trace` is called with what happens, step by step, and
    `begun` before the first one."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="slurm-ones-faults-", dir=fast_directory()) as name:
        fault_run = FaultRun(plan, Path(name), trace)
        begun(fault_run)
        fault_run.to_the_first = to_the_first
        with (
            suppress(FirstFound),
            faulty_access(fault_run.injector, fault_run.checker, fault_run.blocks, fault_run.world.timeline),
            shared_statements(),
        ):
            fault_run.run()
        return Result(
            plan.seed,
            dict(fault_run.injector.injected),
            tuple(fault_run.checker.violations),
            fault_run.resizes,
            fault_run.changes_of_blocks,
            fault_run.world.tally.count,
            time.perf_counter() - began,
        )


class SeededCompanion(Companion):
    """The companion, with one more read of the database for each schedule.

    Seeds were tried and kept when a tick had that read. Each read draws a random number, so without it every seed would
    stand for another run.
    """

    def _decide(self, round_: Round, rules: PartitionRules, models: Mapping[int, JobModel]) -> PartitionSchedule:
        decided = super()._decide(round_, rules, models)
        self._store.open_resizes()
        return decided


class FirstFound(BaseException):
    """A violation, of which one is enough."""


class FaultRun:
    to_the_first = False

    def __init__(self, plan: FaultPlan, directory: Path, trace: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.injector = FaultInjector(plan.seed, plan.rates)
        self.world = FaultyWorld(plan, directory, self.injector)
        self.settings = companion_settings(
            plan.spec, directory, {**AT_ONCE, **plan.settings}, tick_s=plan.interval_s, policy="fifo", seed=plan.seed
        )
        self.quiet = False
        self.resizes = self.changes_of_blocks = 0
        self._quiet_since = math.inf
        """Time of the first tick since which nothing is to be done any more."""
        self._forward_s = 0.0
        self._database = directory / "ones.sqlite"
        shutil.copyfile(empty_database(), self._database)
        self._url = f"sqlite:///{self._database}"
        self._connection = sqlite3.connect(self._database, isolation_level=None, check_same_thread=False)
        self._opened: tuple[object, dict[int, OpenResize]] = None, {}
        """The database's version, and the resizes that it then had open."""
        world = self.world
        self.checker = SafetyChecker(
            world.cluster,
            world.trainings,
            world.stop_file,
            self._open,
            world.lies,
            world.opted_in,
            world.reshaped_by_owner,
            self._unknowable,
        )
        world.block_faults.busy = lambda job_id: job_id in self._open()
        self.blocks = BlockSafety(self.checker, world.block_faults.held, world.held)
        self.controller = Controller(self.injector, self.world.timeline, plan.down_s)
        self.injector.interfere = self.world.interfere
        if trace is not None:
            self.injector.trace = lambda text: trace(f"{self.world.seconds:8.1f} {text}")
        self.leaders: list[str] = []
        """Who took the lead, one after the other, where there are several."""
        self._acting: Host | None = None
        """The host whose process runs now."""
        self.injector.on_kill = lambda: self._acting.die() if self._acting is not None else None
        self.checker.leader_problem = self._leader_problem
        self.hosts = [Host(f"host-{i}", self.world.timeline, self._run_companion) for i in range(plan.companions)]
        self._ages = ResizeAges(self.settings)
        self._harm = HarmWatch(world.cluster)
        self._daemons: dict[str, Daemon] = {}
        for at, kind in plan.events:
            self.world.timeline.at(EPOCH + at, lambda kind=kind: self._apply(kind))  # type: ignore[misc]

    # -- the companion -------------------------------------------------------------------------------------------

    def _run_companion(self, host: Host) -> None:
        if len(self.hosts) == 1:
            self._lead(host, None)
            return
        with closing(HostLeadership(host, self._url, self.settings.cluster, self.injector, self.leaders)) as lead:
            self._lead(host, lead)

    def _lead(self, host: Host, lead: HostLeadership | None) -> None:
        daemon = Daemon(lambda: self._make(host, lead), lead=lead, clock=host.clock, sleep=host.wait)
        self._daemons[host.name] = daemon
        daemon.run(HostStop(host), self._ticked)

    def _make(self, host: Host, lead: HostLeadership | None) -> Companion:
        if self.injector.injects(FaultKind.STORE_LOST):
            raise StoreLost("the server cannot be reached")
        store = FaultyStore.open(self._url, self.settings.cluster, term=None if lead is None else lead.term)
        assert isinstance(store, FaultyStore)
        store.injector, store.checker = self.injector, self.checker
        client = FaultyClient(self.world.cluster, self.controller, self.injector, self.checker, self.blocks, host.clock)
        return SeededCompanion(
            self.settings,
            client,
            store,
            clock=host.clock,
            make=self._policy,
            say=lambda text: None,
            check=(lambda: None) if lead is None else lead.check,
        )

    def _leader_problem(self) -> str:
        """What is wrong with who acts now."""
        leader = self.leaders[-1] if self.leaders else None
        if self._acting is None or leader in (None, self._acting.name):
            return ""
        return f"{self._acting.name} acts, and {leader} leads"

    def _policy(self) -> Policy:
        name = self.plan.policy
        policy = RandomPolicy(modest=name == "modest") if name in ("random", "modest") else make_policy(name)
        return QuietPolicy(policy, lambda: self.quiet)

    def _ticked(self, tick: Tick) -> None:
        self.world.observed_elastic = set(tick.observation.elastic)
        self.world.observed_at = tick.observation.snapshot.time
        opened = self._open()
        for job_id, elastic in tick.observation.elastic.items():
            if job_id not in opened:
                self.world.block_faults.note_looked_at(elastic.job.blocks if elastic.job.by_blocks else ())
        quiet = self.quiet and not tick.begun and not opened and not self._deferred()
        quiet = quiet and not (self.world.block_just_ended(12 * SURE_S) or self.world.guests_alone())
        now = self.world.timeline.now
        self._quiet_since = min(self._quiet_since, now) if quiet else math.inf
        # A companion that was away for a job's end, and whose clock is behind, counts from its own first look.
        if now - self._quiet_since > SURE_S:
            for host in self.hosts:
                # All end now: none is left to clear up after a job that ends while one sleeps or is paused.
                host.stopped, host.wake = True, now

    # -- what happens --------------------------------------------------------------------------------------------

    def _apply(self, kind: FaultKind) -> None:
        if not self.injector.enabled:
            return
        if kind in (FaultKind.CRASH, FaultKind.ABSENCE, *ON_HOST):
            self._to_host(kind, self.injector.random.choice(self.hosts))
            return
        awaits = self.plan.with_queue and kind is FaultKind.OTHER_JOB and not self.world.guests_run()
        if awaits or (not self.world.apply(kind) and kind in BY_PREEMPTION):
            self.world.timeline.after(AGAIN_S, lambda: self._apply(kind))
        elif kind is FaultKind.PREEMPTED_ALONE:
            self._to_host(FaultKind.ABSENCE, self.injector.random.choice(self.hosts))
        elif kind is FaultKind.PREEMPTED_DOWN:
            self.controller.kill()

    def _to_host(self, kind: FaultKind, host: Host) -> None:
        jump = self.injector.random.choice((61.0, 300.0, 1800.0, 7200.0))
        if kind is FaultKind.CLOCK_FORWARD:
            host.clock.jump(jump)
            self._forward_s += jump
        elif kind is FaultKind.CLOCK_BACK:
            host.clock.jump(-jump)
        elif not host.alive:
            return
        elif kind is FaultKind.RELOAD:
            self._daemons[host.name].reload()
        else:
            host.kill()
            self._died(host, self.plan.absent_s if kind is FaultKind.ABSENCE else None)
        self.injector.count(kind, host.name)

    def _died(self, host: Host, away_s: float | None = None) -> None:
        if host.failure is not None:
            self.checker.report(f"the companion died of {type(host.failure).__name__}: {host.failure}")
            host.failure = None
        away = self.injector.random.choice(RESTART_S) if away_s is None else away_s
        host.wake = self.world.timeline.now + away

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first tick to the end of the last job."""
        logger, failures = logging.getLogger("slurm_ones"), FailureLog(self.checker)
        logger.addHandler(failures)
        logger.propagate, before = False, logger.propagate
        try:
            self.injector.enabled = True
            self._until(EPOCH + self.plan.ticks * self.plan.interval_s)
            self._stop_faults()
            self._until(self.world.timeline.now + REST_S)
            if not all(host.ended for host in self.hosts):
                opened = sorted(self._open())
                self.checker.report(
                    f"the companion does not come to rest: resizes of {opened}, waits of {self._deferred()}"
                )
                return
            self._check_end()
        finally:
            for host in self.hosts:
                host.kill()
            logger.removeHandler(failures)
            logger.propagate = before
            self._connection.close()

    def _stop_faults(self) -> None:
        self.injector.enabled = False
        self.quiet = True
        self.controller.down_until = 0.0
        self.world.recover()
        for host in self.hosts:
            if not host.alive:
                host.wake = self.world.timeline.now

    def _until(self, time: float) -> None:
        """Let companions live until that time, or until all have ended by themselves."""
        while living := [host for host in self.hosts if not host.ended]:
            if self.to_the_first and self.checker.violations:
                raise FirstFound
            host = min(living, key=lambda host: host.wake)
            self._pass_to(min(host.wake, time))
            if host.wake > self.world.timeline.now:
                if self.world.timeline.now >= time:
                    return
                continue
            self._acting = host
            host.go()
            if not host.alive and not host.ended:
                self._died(host)

    def _pass_to(self, time: float) -> None:
        seconds = max(time - self.world.timeline.now, 0.0)
        counts = not self.controller.down and any(host.alive for host in self.hosts)
        self._age(0.0)
        self.world.pass_time(seconds)
        self._age(seconds if counts else 0.0)
        for what in self._harm.look():
            self.checker.report(what)

    def _age(self, seconds: float) -> None:
        opened = {resize.id: job_id for job_id, resize in self._open().items()}
        faults = self.injector.injected
        for resize in self._ages.passed(seconds, opened, sum(faults.values()), faults[FaultKind.CLOCK_BACK]):
            self.checker.report(f"job {opened[resize]}: its resize takes longer than {bound_s(self.settings):.0f} s")

    def _check_end(self) -> None:
        """Check what is left when everything is over."""
        world, report = self.world, self.checker.report
        with closing(Store.open(self._url, self.settings.cluster)) as store:
            slack = self.settings.deferral_s + self._forward_s
            for what in (
                *invariants.left_behind(world, store, slack),
                *invariants.outside_limits(world),
                *invariants.disagreements(world, store, self._clocks_trusted()),
                *(invariants.batches(world, store) if self._clocks_trusted() else ()),
            ):
                report(what)
            resizes = store.resizes()
            self.resizes = len(resizes)
            self.changes_of_blocks = sum(resize.mechanism == "blocks" for resize in resizes)
        for training in world.trainings.values():
            if isinstance(training.files, FaultyFiles):
                training.files.unread = True
        end = world.timeline.now + END_S
        while not world.done and world.timeline.now < end:
            world.pass_time(3600.0)
        world.pass_time(60.0)
        for what in (*invariants.lost(world), *invariants.samples(world)):
            report(what)

    def _clocks_trusted(self) -> bool:
        """No host's clock ever was so far behind that it took reports for ones from the future, and left them out."""
        return all(host.clock.most_behind_s < FUTURE_S for host in self.hosts)

    def _unknowable(self, job_id: int, order: int) -> bool:
        """See `SafetyChecker.unknowable`."""
        files, restart = self.world.trainings[job_id].files, self.world.cluster.jobs[job_id].restart
        if not isinstance(files, FaultyFiles):
            return False
        said = files.readable(restart)
        off = files.offset_s != 0.0 or any(host.clock.offset_s for host in self.hosts)
        return off and isinstance(said, Checkpoint) and said.order == order

    def _open(self) -> dict[int, OpenResize]:
        """The resizes under way by job, looked up past the companion's own store."""
        # It changes with each commit of another connection.
        version = self._connection.execute("PRAGMA data_version").fetchone()
        if self._opened[0] != version:
            self._opened = version, self._read_open()
        return self._opened[1]

    def _read_open(self) -> dict[int, OpenResize]:
        rows = self._connection.execute(
            "SELECT jobs.job_id, resizes.id, resizes.state, back, order_number, "
            "old_nodes, old_gpus_per_node, new_nodes, new_gpus_per_node "
            "FROM resizes JOIN jobs ON jobs.id = resizes.job_id WHERE ended IS NULL"
        )
        return {row[0]: OpenResize(*row[1:3], bool(row[3]), row[4], Shape(*row[5:7]), Shape(*row[7:9])) for row in rows}

    def _deferred(self) -> list[int]:
        return [row[0] for row in self._connection.execute("SELECT job_id FROM jobs WHERE deferred_until IS NOT NULL")]
