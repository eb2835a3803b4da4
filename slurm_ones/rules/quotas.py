"""Slurm's limits of accounts, QOS, users and jobs (GrpTRES, MaxTRESPU, MaxTRESPA, MaxTRESPJ), as caps on growth.

A job that would exceed such a quota waits with a reason like Assoc… or QOS…, even if GPUs are idle. So does a requeued
job, which has given up its old GPUs. Quotas are read every few minutes; between readings their use is computed from the
jobs that start and end. A growing job is assumed to take as many CPUs and as much memory per GPU as now, and no further
licences.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ones_db.reasons import Reason, reason
from slurm_ones.jobs.elastic import Elastic, Observation
from slurm_ones.rules.blocks import hot
from slurm_ones.rules.caps import Cap, CappedJob
from slurm_ones.slurm.model import Quota, Quotas, SlurmJob, Snapshot

READ_S = 600.0
"""Seconds between two readings of Slurm's quotas."""
_WORDS = {"cpu": "CPUs", "mem": "MB of memory", "node": "nodes"}

Holder = tuple[str, str, str, str, str]
"""Key of a quota: resource, QOS, account, user, partition. "" stands for any."""


@dataclass(frozen=True)
class QuotaReading:
    """Quotas as Slurm showed them, and how much of each the observed jobs used then."""

    quotas: Quotas = field(default_factory=Quotas)
    held: Mapping[Holder, int] = field(default_factory=dict)

    @classmethod
    def of(cls, quotas: Quotas, seen: Observation) -> QuotaReading:
        """Return a reading with these quotas and their use by the observed jobs."""
        return cls(quotas, _held(quotas, seen))

    def now(self, seen: Observation) -> Quotas:
        """Return the quotas with their present use: exact for observed jobs, as last read for all others."""
        if not self.quotas.all:
            return self.quotas
        held = _held(self.quotas, seen)
        changed = (
            one._replace(used=max(one.used + held.get(_holder(one), 0) - self.held.get(_holder(one), 0), 0))
            for one in self.quotas.all
        )
        return replace(self.quotas, all=tuple(changed))


def quota_caps(
    here: Mapping[int, CappedJob], there: Iterable[CappedJob], quotas: Quotas, snapshot: Snapshot
) -> tuple[Cap, ...]:
    """Return the caps that quotas set on the jobs `here` in a partition. Jobs `there` are in other partitions; GPUs
    that they are about to add count as used."""
    caps: list[Cap] = []
    for job_id, one in here.items():
        part = snapshot.partitions.get(one.elastic.partition)
        if part is not None and part.max_nodes and not hot(one.elastic):
            why = reason("partition_nodes", partition=part.name, nodes=part.max_nodes)
            caps.append(Cap(part.max_nodes * one.elastic.gpus_per_node, frozenset({job_id}), why, strict=True))
    if not quotas.all:
        return tuple(caps)
    shared: dict[Quota, dict[int, float]] = defaultdict(dict)
    for job_id, one in here.items():
        for quota, each in _binding(one, quotas, snapshot):
            if not quota.per_job:
                shared[quota][job_id] = each
            elif not hot(one.elastic):  # each block is a job of its own for Slurm
                caps.append(Cap(int(quota.most / each + 1e-9), frozenset({job_id}), _words(quota), strict=True))
    about: Counter[Quota] = Counter()
    for one in there:
        more = one.gpus - _gpus_now(one.elastic)
        for quota, each in _binding(one, quotas, snapshot) if more > 0 else ():
            about[quota] += math.ceil(each * more)
    return (*caps, *(_shared(quota, needs, here, about[quota]) for quota, needs in shared.items()))


def _shared(quota: Quota, needs: Mapping[int, float], jobs: Mapping[int, CappedJob], about: int) -> Cap:
    """Return the cap that follows from the unused part of a quota. Each further GPU counts with the largest of `needs`,
    the amounts that the jobs' GPUs need."""
    left = max(quota.most - quota.used - about, 0)
    now = sum(_gpus_now(jobs[job_id].elastic) for job_id in needs)
    return Cap(now + int(left / max(needs.values()) + 1e-9), frozenset(needs), _words(quota), strict=True)


def _words(quota: Quota) -> Reason:
    whose = f"QOS {quota.qos}" if quota.qos else f"account {quota.account}"
    if quota.user:
        whose = f"user {quota.user} in {whose}"
    elif quota.qos and quota.account:
        whose = f"account {quota.account} in {whose}"
    what = "GPUs" if quota.resource.startswith("gres/gpu") else _WORDS[quota.resource]
    if quota.per_job:
        return reason("quota_of_job", whose=whose, most=quota.most, what=what)
    return reason("quota", whose=whose, most=quota.most, what=what, left=max(quota.most - quota.used, 0))


def _binding(one: CappedJob, quotas: Quotas, snapshot: Snapshot) -> Iterator[tuple[Quota, float]]:
    """Yield (quota, amount that one more GPU takes) for each quota that limits the job's growth."""
    own = one.elastic.job.home
    for queue in one.queues:
        job = replace(own, qos=queue.qos, account=queue.account, partitions=tuple(queue.partition.split(",")))
        part = snapshot.partitions.get(job.partition)
        for quota in quotas.of(job, part.qos if part is not None else ""):
            if each := _with_each_gpu(one.elastic, quota.resource):
                yield quota, each


def _with_each_gpu(elastic: Elastic, resource: str) -> float:
    if resource == "node":
        return 1.0 / max(elastic.gpus_per_node, 1)
    parts = elastic.job.running_blocks or (elastic.job.first,)
    gpus = sum(elastic.shape_of(part).gpus for part in parts)
    return sum(amount_of(part, resource) for part in parts) / max(gpus, 1)


def amount_of(job: SlurmJob, resource: str) -> int:
    """Return the amount of the resource that the job has or asks for; 0 for a resource that does not depend on GPUs."""
    if resource.startswith("gres/gpu"):
        _, _, kind = resource.partition(":")
        return job.gpus if kind in ("", job.kind) else 0
    return {"cpu": job.cpus, "mem": job.memory_mb * job.nodes, "node": job.nodes}.get(resource, 0)


def _gpus_now(elastic: Elastic) -> int:
    return elastic.shape.gpus if elastic.job.running else 0


# -- what is held ------------------------------------------------------------------------------------------------------


def _holder(quota: Quota) -> Holder:
    return quota.resource, quota.qos, quota.account, quota.user, quota.partition


def _held(quotas: Quotas, seen: Observation) -> Counter[Holder]:
    """Return what observed jobs use of each quota. Each block of a job counts in its own queue."""
    found: Counter[Holder] = Counter()
    wanted = {_holder(one) for one in quotas.all if not one.per_job}
    resources = {name for name, *_ in wanted}
    of_partition = {name: part.qos for name, part in seen.snapshot.partitions.items()}
    above: dict[str, Collection[str]] = {}
    for part in seen.snapshot.jobs.values() if wanted else ():
        if not part.running:
            continue
        if part.account not in above:
            above[part.account] = quotas.above(part.account)
        association = quotas.association(part.account, part.user, part.partition)
        whose = _whose(part, of_partition.get(part.partition, ""), above[part.account], association)
        for name in resources:
            amount = amount_of(part, name)
            found.update({key: amount for one in whose if amount and (key := (name, *one)) in wanted})
    return found


def _whose(
    job: SlurmJob, partition_qos: str, above: Collection[str], association: str
) -> Sequence[tuple[str, str, str, str]]:
    """Return QOS, account, user and partition of each quota that counts this job."""
    own = [("", account, "", "") for account in (job.account, *above)]
    own.append(("", job.account, job.user, association))
    for qos in {job.qos, partition_qos} - {""}:
        own += [(qos, "", "", ""), (qos, "", job.user, ""), (qos, job.account, "", "")]
    return own
