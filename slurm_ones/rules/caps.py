"""Caps: upper limits on the total GPUs of the elastic jobs of a user, an account or a partition.

A cap bounds only growth. A job may always have the GPUs that its user asked for, and the GPUs that it has. It grows
further only while all jobs under the cap together stay within it.

A strict cap follows from a quota of Slurm's own, under which even a job of its requested size may wait. So it also
limits the GPUs that the user asked for. No cap shrinks a running job, even if the cap was lowered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ones_db.reasons import Reason, reason
from slurm_ones.config import LimitSettings
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.policy.ledger import Ledger
from slurm_ones.policy.shapes import shape_of
from slurm_ones.policy.tables import build_tables
from slurm_ones.rules.blocks import hot
from slurm_ones.slurm.model import Queue


@dataclass(frozen=True)
class Cap:
    """Upper limit on the total GPUs of some jobs, beyond which none of these jobs grows."""

    gpus: int
    """GPUs that `jobs` may have together. It may be below 0, since GPUs of other jobs under the same limit are
    subtracted."""
    jobs: frozenset[int]
    reason: Reason
    """Reason that is shown to the jobs' owners."""
    strict: bool = False
    """True if the cap also limits the GPUs that a job asked for."""
    dearer: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Relative GPU-hours of a sample at each allowed (kind, size) that exceeds the factor; only for a cap on cost."""


class CappedJob(NamedTuple):
    """An elastic job with its number of GPUs, and the queues (partition, QOS, account) in which it would get further
    GPUs."""

    elastic: Elastic
    queues: tuple[Queue, ...]
    gpus: int
    """Larger of the job's GPUs now and after its open resize."""

    @classmethod
    def of(cls, one: Elastic, guests: Queue | None, asked: int, gpus: int) -> CappedJob:
        """Return the job with its queues. If the job grows by guests, its GPUs beyond `asked` come from the queue
        `guests`."""
        own = Queue.of(one.job.home)
        if guests is None or not (one.takes_guests and hot(one)):
            return cls(one, (own,), gpus)
        beyond = own._replace(**{name: value for name, value in guests._asdict().items() if value})
        return cls(one, (beyond,) if one.shape.gpus >= asked else (own, beyond), gpus)


def caps_of(
    here: Mapping[int, CappedJob], there: Sequence[CappedJob], limits: LimitSettings, partition: str, gpus: int
) -> tuple[Cap, ...]:
    """Return the site's caps on the jobs `here`, in a partition of `gpus` GPUs: the caps of the partition, users and
    accounts. Jobs `there` are in other partitions; they count towards the caps of users and accounts."""
    caps = []
    if here and limits.share < 1:
        share = int(limits.share * gpus + 1e-9)
        caps.append(Cap(share, frozenset(here), reason("partition_share", gpus=share, partition=partition)))
    for kind, general, own in (
        ("user", limits.gpus_per_user, limits.gpus_of_user),
        ("account", limits.gpus_per_account, limits.gpus_of_account),
    ):
        mine: dict[str, set[int]] = defaultdict(set)
        for job_id, job in here.items():
            mine[getattr(job.elastic.job.home, kind)].add(job_id)
        elsewhere: Counter[str] = Counter()
        for job in there:
            elsewhere[getattr(job.elastic.job.home, kind)] += job.gpus
        for name, jobs in sorted(mine.items()):
            if name and (most := own.get(name, general)) is not None:
                setting = f"limits.gpus_of_{kind}" if name in own else f"limits.gpus_per_{kind}"
                why = (
                    reason("user_cap", user=name, gpus=most, setting=setting)
                    if kind == "user"
                    else reason("account_cap", account=name, gpus=most, setting=setting)
                )
                caps.append(Cap(most - elsewhere[name], frozenset(jobs), why))
    return tuple(caps)


class CapUse:
    """GPUs of all jobs under each cap, updated while changes are planned."""

    def __init__(self, caps: Sequence[Cap], have: Mapping[int, int]) -> None:
        self._have = dict(have)
        self._caps = caps
        self._left = [cap.gpus - sum(have.get(job_id, 0) for job_id in cap.jobs) for cap in caps]
        self._of: dict[int, list[int]] = defaultdict(list)
        """Indices of the caps that bind each job, by job id."""
        for place, cap in enumerate(caps):
            for job_id in cap.jobs:
                self._of[job_id].append(place)

    def count(self, job_id: int, gpus: int) -> None:
        """Set the job's count to `gpus` GPUs."""
        more = gpus - self._have.get(job_id, 0)
        self._have[job_id] = gpus
        for place in self._of.get(job_id, ()):
            self._left[place] -= more

    def count_at_least(self, job_id: int, gpus: int) -> None:
        """Raise the job's count to `gpus` GPUs if it is lower. (During a resize a job may hold more GPUs than before
        and after it.)"""
        self.count(job_id, max(gpus, self._have.get(job_id, 0)))

    def hindering(self, job_id: int, gpus: int, due: int) -> Cap | None:
        """Return the first cap that would be exceeded if this job had `gpus` GPUs; None without one. Up to `due` GPUs
        only strict caps count."""
        more = gpus - self._have.get(job_id, 0)
        for place in self._of.get(job_id, ()):
            cap = self._caps[place]
            if (gpus > due or (cap.strict and more > 0)) and more > self._left[place]:
                return cap
        return None


def entitled(job: JobView) -> int:
    """Return the GPUs that only a strict cap can deny the job: the larger of its request and its present GPUs."""
    return max(job.requested, job.shape.gpus if job.shape is not None else 0)


def narrowed(jobs: Sequence[JobView], caps: Sequence[Cap]) -> Sequence[JobView]:
    """Return the jobs without sizes that the caps forbid even with all other running jobs at their smallest size. Each
    job keeps its smallest size, and all sizes up to its present one."""
    if not caps:
        return jobs
    least = {job.job_id: min(job.limits.gpus, default=0) for job in jobs if job.shape is not None}
    use = CapUse(caps, least)
    return [_narrowed(job, use) for job in jobs]


def _narrowed(job: JobView, use: CapUse) -> JobView:
    counts, due, held = job.limits.gpus, entitled(job), job.shape.gpus if job.shape is not None else 0
    if not counts or use.hindering(job.job_id, counts[-1], due) is None:
        return job
    stays = max(held, counts[0])
    gpus = tuple(n for n in counts if n <= stays or use.hindering(job.job_id, n, due) is None)
    return replace(job, limits=replace(job.limits, gpus=gpus))


def capped(cluster: ClusterView, jobs: Sequence[JobView], schedule: Schedule, caps: Sequence[Cap]) -> Schedule:
    """Return the schedule in which no job grows beyond its caps. Jobs that were submitted earlier grow first.

    A job beyond its caps gets the largest size within them, or else keeps its GPUs. Any job whose new size then does
    not fit keeps its GPUs too. If no cap is exceeded, the same schedule is returned.
    """
    if not caps:
        return schedule
    by_id = {job.job_id: job for job in sorted(jobs, key=lambda job: (job.submitted, job.job_id))}
    given = {id_: got for id_, got in schedule.allocations.items() if id_ in by_id}
    refused: dict[int, Reason] = {}
    while True:
        changed = _cut(cluster, by_id, given, schedule.parked, caps, refused)
        if not changed and not refused:
            return schedule
        odd = _without_room(cluster, list(by_id.values()), given)
        if odd is None:
            break
        refused.setdefault(odd, reason("no_room_under_cap"))
        _keep(by_id[odd], given)
    return replace(
        schedule,
        allocations={
            id_: given.get(id_, got) for id_, got in schedule.allocations.items() if id_ in given or id_ not in by_id
        },
        reasons={**schedule.reasons, **refused},
        refused={**schedule.refused, **refused},
    )


def _cut(
    cluster: ClusterView,
    jobs: Mapping[int, JobView],
    given: dict[int, Allocation],
    parked: frozenset[int],
    caps: Sequence[Cap],
    refused: dict[int, Reason],
) -> bool:
    """Reduce the allocations `given` to what the caps allow; return True if one was changed."""
    due = {id_: entitled(job) for id_, job in jobs.items()}
    held = {id_: job.shape.gpus if job.shape is not None else due[id_] for id_, job in jobs.items()}
    use = _use(caps, jobs, given, parked, due, strict=False)
    strict = _use(caps, jobs, given, parked, held, strict=True)
    changed = False

    def hindering(id_: int, gpus: int) -> Cap | None:
        return use.hindering(id_, gpus, due[id_]) or strict.hindering(id_, gpus, due[id_])

    for id_, job in jobs.items():
        got = given.get(id_)
        if got is None or got.shape.gpus <= held[id_]:
            continue
        cap = hindering(id_, got.shape.gpus)
        if cap is not None:
            refused[id_] = cap.reason
            changed = True
            _keep(job, given)
            now = job.shape.gpus if job.shape is not None else 0
            for gpus, batch in sorted(sizes_of(cluster, job, got.kind).items(), reverse=True):
                smaller = shape_of(_part(cluster, got.kind), gpus)
                if now < gpus < got.shape.gpus and hindering(id_, gpus) is None and smaller is not None:
                    given[id_] = Allocation(smaller, batch, kind=got.kind)
                    break
        gpus = given[id_].shape.gpus if id_ in given else due[id_]
        use.count(id_, gpus)
        strict.count(id_, gpus)
    return changed


def _use(
    caps: Sequence[Cap],
    jobs: Mapping[int, JobView],
    given: Mapping[int, Allocation],
    parked: frozenset[int],
    least: Mapping[int, int],
    *,
    strict: bool,
) -> CapUse:
    # A waiting job that may start counts with the GPUs that it asks for.
    have = {id_: least[id_] if job.shape is None and id_ not in parked else 0 for id_, job in jobs.items()}
    have |= {id_: min(got.shape.gpus, least[id_]) for id_, got in given.items()}
    return CapUse([cap for cap in caps if cap.strict == strict], have)


def sizes_of(cluster: ClusterView, job: JobView, kind: str = "") -> dict[int, int]:
    """Return the job's batch at each size that it can have on this cluster. With `kind`, only GPUs of this kind are
    used."""
    if kind:
        job = job.on_kind(kind, runs=cluster.kinds_held(job) == (kind,))
    tables = build_tables(_part(cluster, kind), [job])
    return {int(n): int(b) for n, b in zip(tables.sizes, tables.batch[0], strict=True) if b > 0}


def _part(cluster: ClusterView, kind: str) -> ClusterView:
    return cluster.of_kind(kind) if kind else cluster


def _keep(job: JobView, given: dict[int, Allocation]) -> None:
    if job.shape is not None:
        given[job.job_id] = Allocation(job.shape, job.batch)
    else:
        given.pop(job.job_id, None)


def _stays(cluster: ClusterView, job: JobView, got: Allocation | None) -> bool:
    if got is None or job.shape != got.shape:
        return False
    return not got.kind or cluster.kinds_held(job) == (got.kind,)


def _without_room(cluster: ClusterView, jobs: Sequence[JobView], given: Mapping[int, Allocation]) -> int | None:
    """Return the id of a job whose allocation does not fit next to the other allocations; None if all fit."""
    staying = [job for job in jobs if _stays(cluster, job, given.get(job.job_id))]
    kept = {job.job_id for job in staying}
    moving = [job for job in jobs if job.job_id in given and job.job_id not in kept]
    # A policy names the kind for all jobs that move, or for none.
    room = {
        kind: Ledger.of_cluster(_part(cluster, kind), staying) for kind in {given[job.job_id].kind for job in moving}
    }

    def order(job: JobView) -> tuple[bool, int, int]:
        gpus = given[job.job_id].shape.gpus
        return gpus > (job.shape.gpus if job.shape else 0), -gpus, job.job_id

    for job in sorted(moving, key=order):
        got = given[job.job_id]
        if not room[got.kind].take(got.shape):
            return job.job_id
    return None
