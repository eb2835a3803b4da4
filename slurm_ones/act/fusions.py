"""Sweeps that are trained as one job: a carrier trains other jobs of its sweep, and these jobs are deferred meanwhile.

The jobs of a sweep belong to one user and opted in with the same `fuse=NAME`. Each has one GPU and may not grow. To
Slurm they differ only in the values of their arguments.

The first job of a sweep that starts becomes the carrier: it writes a file in its directory that asks for other jobs.
The companion defers these jobs (`deferrals`) and names them in an order to the carrier. When a deferred job starts
later, it finds its result in its own directory, and ends with its own exit code. If it starts too early, it removes
itself from the carrier. So no failure here loses a job (`ones_wrapper.launch.fused_start`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ones_db.reasons import reason
from ones_wrapper.protocol import FUSION, MAX_LINE, MAX_SPEC, FusedMember, Fusion, Order, ProtocolError, decode_fusion
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.orders import OrderError, OrderWriter
from slurm_ones.jobs.elastic import Elastic, Observation, WholeJob
from slurm_ones.slurm.client import Refused, SlurmClient
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.untrusted_files import HasFiles, NotBelieved, job_directory, read_file

log = logging.getLogger(__name__)

ANSWERED_S = 30.0
"""Longest time, in seconds, that a carrier may take to report which jobs it trains, after it was answered. Orders to
drop jobs are repeated at this interval."""

ANSWERS = 8
"""Largest number of carriers that get their first answer in one tick; each answer queries Slurm."""
MOST = 64
"""Largest number of jobs that are trained as one, the carrier included."""
LOOKED_AT = 4 * MOST
"""Largest number of jobs that Slurm is queried about for one answer; the oldest are chosen."""
QUOTES = "\"'\\"
LONGEST = MAX_LINE // 2
"""Largest number of characters in the arguments of all jobs that one carrier trains, since they must fit one order."""


@dataclass(frozen=True)
class _Tick:
    """State of a tick while jobs are assigned to carriers."""

    seen: Observation
    busy: Collection[int]
    """Ids of jobs with an open resize."""
    ours: Collection[int]
    """Ids of jobs that a companion has deferred."""
    taken: dict[int, int] = field(default_factory=dict)
    """Carrier's id for each job that has a carrier already, by job id."""


@dataclass
class Fusions:
    """Assignment of jobs to carriers. Nothing is stored: a new companion reads the jobs' own files."""

    client: SlurmClient
    deferrals: Deferrals
    orders: OrderWriter
    clock: Callable[[], float]
    _answers: dict[tuple[int, int], tuple[float, frozenset[int]]] = field(default_factory=dict)
    """Last answer to each carrier, by (its id, its restart count): the time, and the jobs that it may train."""

    def follow(self, seen: Observation, busy: Collection[int]) -> dict[int, int]:
        """Return, for each job that must wait while a carrier trains it, the carrier's id. Jobs `busy` with a resize
        are skipped. Raises `Unreachable`."""
        carriers = {job_id: one for job_id, one in sorted(seen.elastic.items()) if carries(one)}
        alive = {(job_id, one.job.restart) for job_id, one in carriers.items()}
        self._answers = {key: value for key, value in self._answers.items() if key in alive}
        said = ((one, read_fusion(one.job)) for one in carriers.values())
        known = [(one, told) for one, told in said if told is not None and told.restart <= one.job.restart]
        ours = self.deferrals.all_ours(one.job for one in seen.elastic.values()) if known else set()
        tick = _Tick(seen, busy, ours)
        new = 0
        # Carriers that train come first, so that no job gets a second carrier. Then come carriers that were answered.
        for carrier, told in sorted(known, key=lambda each: (each[1].asks, not self._answered(each[0].job))):
            new += told.asks and not self._answered(carrier.job)
            if new > ANSWERS:
                break
            follow = self._answer if told.asks else self._members
            waits = follow(carrier, told, tick)
            tick.taken.update(dict.fromkeys(waits - tick.taken.keys(), carrier.job.job_id))
        return tick.taken

    def _answered(self, job: WholeJob) -> bool:
        return (job.job_id, job.restart) in self._answers

    def _answer(self, carrier: Elastic, told: Fusion, tick: _Tick) -> frozenset[int]:
        """Answer a carrier that asks for other jobs of its sweep; return the ids of the jobs that it may train."""
        job = carrier.job
        key = (job.job_id, job.restart)
        if key in self._answers:
            when, whom = self._answers[key]
            return whom if self.clock() - when < ANSWERED_S else frozenset()
        if job.job_id in tick.busy or job.restart:
            return frozenset()
        away = {*tick.taken, *tick.busy}
        free = [one for one in tick.seen.elastic.values() if one.job.job_id not in away]
        asked = [one.job.job_id for one in candidates(carrier, free, tick.ours, self.clock())][:LOOKED_AT]
        try:
            details = self.client.details([job.job_id, *asked]) if asked else {}
        except Refused as error:
            log.warning("job %d: the commands of its sweep could not be read: %s", job.job_id, error)
            return frozenset()
        wanted = members(details[job.job_id], details.values()) if job.job_id in details else ()
        waits = {member.job_id for member in wanted[1:] if self._defer(details[member.job_id])}
        named = tuple(member for member in wanted if member.job_id in {job.job_id, *waits})
        self._answers[key] = self.clock(), frozenset(waits)
        try:
            order = Order(self.orders.next_number(job), job.restart, members=named if waits else ())
            self.orders.write(job, order)
        except OrderError as error:
            log.warning("job %d: it asks for other jobs of its sweep, and could not be answered: %s", job.job_id, error)
            self._answers[key] = self.clock(), frozenset()
            self._release(waits)
            return frozenset()
        if waits:
            log.info("job %d: it may train %d other jobs of its sweep", job.job_id, len(waits))
        return frozenset(waits)

    def _defer(self, job: SlurmJob) -> bool:
        """Defer the job; return False if Slurm refuses."""
        try:
            self.deferrals.defer(job)
        except Refused as error:
            log.info("job %d: it is not trained within another job: %s", job.job_id, error)
            return False
        return True

    def _release(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            with suppress(Refused):  # the job is gone
                self.deferrals.release(self.client.job(job_id))

    def _members(self, carrier: Elastic, told: Fusion, tick: _Tick) -> frozenset[int]:
        """Return the ids of the jobs that the carrier reports to train, if it may train them and no other carrier does.
        Order the carrier to drop all other jobs."""
        job = carrier.job
        jobs = (tick.seen.elastic.get(id_) for id_ in told.members if id_ not in tick.taken)
        known = [one for one in jobs if one is not None]
        waits = frozenset(one.job.job_id for one in candidates(carrier, known, tick.ours, self.clock()))
        gone = frozenset(told.members) - waits
        key = (job.job_id, job.restart)
        when, named = self._answers.get(key, (0.0, frozenset()))
        unsaid = named != waits or self.clock() - when > ANSWERED_S
        if gone and unsaid and job.running and job.job_id not in tick.busy:
            self._drop(carrier, waits)
            self._answers[key] = self.clock(), waits
        return waits

    def _drop(self, carrier: Elastic, left: Collection[int]) -> None:
        job = carrier.job
        named = tuple(FusedMember(id_) for id_ in (job.job_id, *sorted(left)))
        try:
            self.orders.write(job, Order(self.orders.next_number(job), job.restart, members=named))
        except OrderError as error:
            log.warning("job %d: it could not be ordered to drop jobs of its sweep: %s", job.job_id, error)


def read_fusion(job: HasFiles) -> Fusion | None:
    """Return the job's report on the sweep that it carries; None if there is no valid report."""
    try:
        return decode_fusion(read_file(job_directory(job), job.uid, FUSION, MAX_SPEC + 1)[0])
    except (OSError, NotBelieved, ProtocolError):
        return None


def without_fused(seen: Observation, fused: Mapping[int, int]) -> Observation:
    """Return the observation with a refusal for each job in `fused` (job id → carrier's id)."""
    if not fused:
        return seen
    elastic = dict(seen.elastic)
    for job_id, carrier in fused.items():
        one = elastic[job_id]
        name = one.optin.fuse if one.optin is not None else ""
        elastic[job_id] = replace(one, refusal=reason("fused", carrier=carrier, name=name))
    return replace(seen, elastic=elastic)


# -- who may be trained within whom ------------------------------------------------------------------------------------


def carries(elastic: Elastic) -> bool:
    """Tell whether the job may be a carrier: it opted in to a sweep, has one GPU, and runs or waits for a restart."""
    job, optin = elastic.job.first, elastic.optin
    if optin is None or not optin.fuse or elastic.refusal is not None:
        return False
    if not (job.running or (job.pending and job.restart and not job.held)):
        return False
    return not job.array and elastic.shape.gpus == 1 and elastic.gpu_range == (1, 1)


def candidates(carrier: Elastic, others: Collection[Elastic], ours: Collection[int], now: float) -> list[Elastic]:
    """Return the jobs of `others` that the carrier may train, oldest first. These are pending jobs with the carrier's
    request that have never run.

    They have no hold, no dependency and no begin time, except a deferral by a companion (their ids are in `ours`).
    """
    found = []
    for other in others:
        job = other.job.first
        if other.refusal is not None or not job.pending or job.held or job.restart or job.completing:
            continue
        if job.reason in ("Dependency", "DependencyNeverSatisfied") or (
            job.eligible_time > now and other.job.job_id not in ours
        ):
            continue
        if other.job.job_id != carrier.job.job_id and _kind(other) == _kind(carrier):
            found.append(other)
    return sorted(found, key=lambda other: other.job.job_id)


def _kind(elastic: Elastic) -> tuple[object, ...]:
    job = elastic.job.first
    return (
        *(job.uid, job.account, job.partitions, job.work_dir, job.time_limit_s, job.requeue, job.batch, job.array),
        *(elastic.shape, elastic.gpu_range, elastic.optin),
    )


def members(carrier: SlurmJob, others: Collection[SlurmJob]) -> tuple[FusedMember, ...]:
    """Return the carrier and the jobs of `others` that it may train, each with its arguments; empty if it may train
    none.

    Their submit lines are equal up to the script. After it they have equally many arguments, with the same option
    names, and no two jobs have equal arguments.
    """
    first = _line(carrier)
    if first is None:
        return ()
    options, own = first
    found, seen, length = [FusedMember(carrier.job_id, own)], {own}, 0
    for job in sorted(others, key=lambda job: job.job_id):
        line = _line(job)
        if job.job_id == carrier.job_id or line is None or line[0] != options:
            continue
        words = line[1]
        if words in seen or [*map(_option, words)] != [*map(_option, own)]:
            continue
        length += sum(len(word) + 8 for word in words)
        if len(found) >= MOST or length > LONGEST:
            break
        seen.add(words)
        found.append(FusedMember(job.job_id, words))
    return tuple(found) if len(found) > 1 else ()


def _line(job: SlurmJob) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the submit line up to the script, and the arguments after it. Return None if a word may contain a space,
    since Slurm joins words by spaces."""
    line = job.submit_line
    if (
        not line.isascii()
        or not line.isprintable()
        or "  " in line
        or len(line) >= LONGEST
        or any(c in line for c in QUOTES)
    ):
        return None
    words, script = line.split(" "), job.command.rpartition("/")[2]
    place = next((i for i, word in enumerate(words) if i and word.rpartition("/")[2] == script), 0)
    return (tuple(words[: place + 1]), tuple(words[place + 1 :])) if place and script else None


def _option(word: str) -> str:
    return word.partition("=")[0] if word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "." else ""
