"""Scheduler of a simulated Slurm: it starts jobs in order of priority, preempts other jobs for them, and backfills.

Backfill is EASY (Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995). A later job may start early if this does not
delay the first job that does not fit. As in Slurm, a job is expected to end at its time limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from slurm_ones.policy.ledger import Ledger, Resources
from slurm_ones.simulate.slurm.nodes import Nodes, SlurmConf

UNLIMITED_S = 365 * 86400.0
"""Seconds for which Slurm expects a job without a time limit to run."""
RESOURCES, PRIORITY, LICENSES, UNAVAILABLE = "Resources", "Priority", "Licenses", "ReqNodeNotAvail"
"""Slurm's names of the reasons for which a job waits, except for limits."""


class Association(NamedTuple):
    """User, account and QOS whose limits apply to a job, and the job's licences."""

    user: str = ""
    account: str = ""
    qos: str = ""
    licenses: tuple[tuple[str, int], ...] = ()


class QueuedJob(NamedTuple):
    """A pending job in one of the partitions that it names."""

    job_id: int
    partition: str
    least_nodes: int
    most_nodes: int
    need: Resources
    """Resources that the job needs on each node."""
    limit_s: float = 0.0
    """Time limit in seconds; 0 for none."""
    only: frozenset[str] | None = None
    """Nodes on which the job may run; None for all."""
    named: frozenset[str] = frozenset()
    """Nodes that the job must get (`--nodelist`)."""
    of: Association = Association()
    most: int = 1
    """Number of the job's tasks that may start in this scheduling round."""


class RunningJob(NamedTuple):
    """Resources of a job that runs or whose processes are ending, and the time by which it ends."""

    ends: float
    held: Mapping[str, Resources]
    job_id: int = 0
    partition: str = ""
    of: Association = Association()
    started: float = 0.0
    ending: bool = False
    """True if the run is over but processes of it still exist."""

    @property
    def gpus(self) -> int:
        return sum(amount.gpus for amount in self.held.values())


class Counts:
    """GPUs and licences in use, for comparison with the limits of accounts, QOS and users."""

    def __init__(self, conf: SlurmConf, running: Iterable[RunningJob]) -> None:
        self._conf = conf
        self._gpus: Counter[tuple[str, ...]] = Counter()
        self._licenses: Counter[str] = Counter()
        for job in running:
            self.add(job.of, job.gpus)

    def copy(self) -> Counts:
        """Return a copy, on which a preemption can be tried."""
        other = Counts(self._conf, ())
        other._gpus, other._licenses = self._gpus.copy(), self._licenses.copy()
        return other

    def add(self, of: Association, gpus: int, times: int = 1) -> None:
        """Count a job's GPUs and licences as in use. With `times` = -1, count them as free again."""
        for key in (("account", of.account), ("qos", of.qos), ("user", of.qos, of.user)):
            self._gpus[key] += gpus * times
        for name, count in of.licenses:
            self._licenses[name] += count * times

    def refusal(self, job: QueuedJob) -> str:
        """Return Slurm's name of a limit that the job's start would exceed, else ""."""
        of, qos, gpus = job.of, self._conf.qos_of(job.of.qos), job.need.gpus * job.least_nodes
        limits = (
            (qos.gpus, ("qos", of.qos), "QOSGrpGRES"),
            (qos.user_gpus, ("user", of.qos, of.user), "QOSMaxGRESPerUser"),
            # A limit of the QOS takes the place of the account's.
            (0 if qos.gpus else self._conf.account_gpus.get(of.account, 0), ("account", of.account), "AssocGrpGRES"),
        )
        return next((reason for most, key, reason in limits if most and self._gpus[key] + gpus > most), "")

    def lacks_licenses(self, job: QueuedJob) -> bool:
        free = self._conf.licenses
        return any(self._licenses[name] + count > free.get(name, 0) for name, count in job.of.licenses)


def place(job: QueuedJob, free: Ledger) -> list[str] | None:
    """Return the nodes that fit the job best; None if it does not fit. Among equal nodes, the cluster's order
    decides."""
    if not job.named:
        found = free.nodes_with(job.need, job.most_nodes, only=job.only)
        return found if len(found) >= job.least_nodes else None
    may = frozenset(free) if job.only is None else job.only
    named = free.nodes_with(job.need, len(job.named), only=job.named & may)
    found = named + free.nodes_with(job.need, max(job.most_nodes - len(named), 0), only=may - job.named)
    return found if len(named) == len(job.named) and len(found) >= job.least_nodes else None


class SchedulingPass:
    """One round of the scheduler. It chooses jobs to start and jobs to preempt, and a reason for each job that
    waits."""

    def __init__(self, nodes: Nodes, conf: SlurmConf, running: Sequence[RunningJob], now: float) -> None:
        self.chosen: list[tuple[QueuedJob, tuple[str, ...]]] = []
        """Jobs to start, each with its nodes."""
        self.victims: dict[int, int] = {}
        """Jobs to preempt: id of each job, and id of the job that needs its resources."""
        self.reasons: dict[int, str] = {}
        """Reason for which each job waits, by job id."""
        self.crowded = False
        """True if jobs wait behind another job, so that backfill may start them."""
        self._nodes, self._conf, self._now = nodes, conf, now
        self._before = running
        self._running = list(running)
        self._counts = Counts(conf, running)
        self._free = nodes.ledger()
        self._starts: Counter[int] = Counter()
        self._kept: list[tuple[float, Ledger]] = []
        """Reservation for the first waiting job of each partition: the time by which it starts, and the resources that
        other jobs can use from then on."""

    # -- the two schedulers --------------------------------------------------------------------------------------

    def main(self, queue: Iterable[QueuedJob]) -> None:
        """Start jobs in order. In each partition, stop at the first job that does not fit."""
        first: set[str] = set()
        for job in queue:
            if self._starts[job.job_id] >= job.most:
                continue
            if job.partition in first:
                self.crowded = True
                self.reasons.setdefault(job.job_id, PRIORITY)
                continue
            free, before = self._free, first & self._nodes.sharing(job.partition)
            for partition in before:
                free = free.only({*free}.difference(self._nodes.partitions[partition].nodes))
            if reason := self._limit(job, free):
                self.reasons[job.job_id] = reason
                continue
            nodes = place(job, free)
            if nodes is not None:
                self._start(job, nodes)
            elif place(job, self._nodes.empty(job.partition)) is not None:
                first.add(job.partition)
                self.crowded = self.crowded or bool(before)
                self.reasons[job.job_id] = RESOURCES
                self._preempt(job, free)
            elif job.only is not None or job.named:
                self.reasons[job.job_id] = UNAVAILABLE if job.named else RESOURCES

    def backfill(self, queue: Iterable[QueuedJob]) -> None:
        """Start jobs in order. In each partition, the first job that does not fit gets a reservation, and other jobs
        may start before it."""
        first: set[str] = set()
        for job in queue:
            if self._starts[job.job_id] >= job.most or self._limit(job, self._free):
                continue
            nodes = place(job, self._room(job, self._free))
            if nodes is not None:
                self._start(job, nodes)
            elif self._preempt(job, self._free):
                continue
            elif job.partition not in first and place(job, self._nodes.empty(job.partition)) is not None:
                first.add(job.partition)
                self._kept.append(self._reserve(job))

    def _ends(self, job: QueuedJob) -> float:
        return self._now + (job.limit_s or UNLIMITED_S)

    def _limit(self, job: QueuedJob, free: Ledger) -> str:
        """Return the name of the limit that keeps the job waiting, "Licenses" if licences are missing, else ""."""
        if reason := self._counts.refusal(job):
            return reason
        if not self._counts.lacks_licenses(job):
            return ""
        if self._conf.reclaim_licenses:
            self._preempt(job, free)
        return LICENSES

    def _start(self, job: QueuedJob, nodes: list[str]) -> None:
        self._take(job, nodes)
        self._counts.add(job.of, job.need.gpus * len(nodes))
        self._starts[job.job_id] += 1
        self.chosen.append((job, self._nodes.in_order(nodes)))

    def _take(self, job: QueuedJob, nodes: list[str]) -> None:
        """Give the job these nodes for this round, whether it starts now or once jobs preempted for it have left."""
        held = dict.fromkeys(nodes, job.need)
        self._running.append(RunningJob(self._ends(job), held, job.job_id, job.partition, job.of, self._now))
        self._free.spend(nodes, job.need)
        for begins, then in self._kept:
            if self._ends(job) > begins:
                then.spend(nodes, job.need)

    def _room(self, job: QueuedJob, free: Ledger) -> Ledger:
        """Return the free resources that this job may use.

        Resources reserved for a waiting job are excluded if this job might end after that job's start.
        """
        for begins, then in self._kept:
            free = free.at_most(then) if self._ends(job) > begins else free
        return free

    def _reserve(self, job: QueuedJob) -> tuple[float, Ledger]:
        """Return the time by which the job starts, and the resources that other jobs can use from then on.

        As in Slurm, jobs that this job may preempt count as ended.
        """
        then = self._free.only(self._nodes.partitions[job.partition].nodes)
        guests = {one.job_id: one.held for one in self._preemptable(job)}
        steps = [(self._now, [*guests.values()])] if guests else []
        others = (one for one in self._running if one.job_id not in guests)
        steps += [(one.ends, [one.held]) for one in sorted(others, key=lambda one: one.ends)]
        for begins, given in steps:
            for held in given:
                then.give(held)
            if (nodes := place(job, then)) is not None:
                then.spend(nodes, job.need)
                return begins, then
        return math.inf, then

    # -- preemption ----------------------------------------------------------------------------------------------

    def _preempt(self, job: QueuedJob, free: Ledger) -> bool:
        """Choose jobs to preempt until this job fits, and keep nodes and licences for it. Return True if it will fit.

        Resources of jobs that are ending already are counted first. If the job would not fit even without all
        preemptible jobs, none is chosen.
        """
        guests = self._preemptable(job)
        if not guests:
            return False
        then, counts = free.trial(), self._counts.copy()

        def fits_without(gone: Iterable[RunningJob]) -> list[str] | None:
            for one in gone:
                then.give(one.held)
                counts.add(one.of, one.gpus, -1)
            return None if counts.lacks_licenses(job) else place(job, self._room(job, then))

        leaving = {one.job_id: one for one in self._before if one.ending or one.job_id in self.victims}
        nodes, chosen = fits_without(leaving.values()), list[RunningJob]()
        for one in guests:
            if nodes is None and one.job_id not in leaving:
                chosen.append(one)
                nodes = fits_without([one])
        if nodes is None:
            return False
        self.victims |= {one.job_id: job.job_id for one in chosen if self._needed(job, nodes, one)}
        self._take(job, nodes)
        self._counts.add(job.of, 0)
        return True

    def _needed(self, job: QueuedJob, nodes: Iterable[str], victim: RunningJob) -> bool:
        licenses = {name for name, _ in job.of.licenses} if self._counts.lacks_licenses(job) else set()
        return not victim.held.keys().isdisjoint(nodes) or any(name in licenses for name, _ in victim.of.licenses)

    def _preemptable(self, job: QueuedJob) -> list[RunningJob]:
        """Return the running jobs that this job may preempt, in order: lowest QOS priority, then fewest nodes, then, if
        so configured, the youngest first."""
        conf, parts = self._conf, self._nodes.partitions
        preempts, tier = conf.qos_of(job.of.qos).preempts, parts[job.partition].tier
        if not preempts and not any(part.preempt and part.tier < tier for part in parts.values()):
            return []

        def yields(one: RunningJob) -> bool:
            qos, part = conf.qos_of(one.of.qos), parts[one.partition]
            by_qos = one.of.qos in preempts and bool(qos.mode) and self._now - one.started >= qos.exempt_s
            return by_qos or bool(part.preempt and part.tier < tier)

        def order(one: RunningJob) -> tuple[float, ...]:
            youth = -one.started if conf.youngest_first else 0.0
            return (conf.qos_of(one.of.qos).priority, len(one.held), youth, one.job_id)

        return sorted((one for one in self._before if yields(one)), key=order)
