"""Jobs that wait for a partition's GPUs and cannot be resized: what they need, and who comes before whom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ones_db import ResizeRecord
from slurm_ones.observe.eligibility import Elastic, Observation
from slurm_ones.rules.reserved import holdings, set_aside, target_of
from slurm_ones.rules.rigid import Claim, Rank, Release, Waiting
from slurm_ones.slurm.gpus import free_gpus, partition_gpus
from slurm_ones.slurm.model import PARKED, Job, Partition, Snapshot

FOR_ROOM = frozenset({"Resources", "Priority", "None", ""})
"""Slurm's reasons of jobs that wait for nothing but room. Others say what it would not start them for: a dependency, a
begin time, a hold, a limit of their QOS or association, constraints that no node meets."""
MOST = 50
"""Rigid jobs that are made room for at once, the first in Slurm's order."""


def rigid_jobs(snapshot: Snapshot, partition: str, elastic: Mapping[int, Elastic]) -> list[Job]:
    """Jobs that wait for room in this partition, among others, and did not opt in or are refused."""
    return [
        job
        for job in snapshot.jobs.values()
        if job.pending
        and not job.held
        and not job.completing
        and job.reason in FOR_ROOM
        and ((one := elastic.get(job.job_id)) is None or one.refusal)
        and partition in job.partition.split(",")
    ]


def waiting(
    seen: Observation, partition: str, whole_node_gpus: Mapping[str, int], resizes: Iterable[ResizeRecord] = ()
) -> Waiting:
    """What rigid jobs need in the first partition that they name, and what there is for them."""
    snapshot = seen.snapshot
    part = snapshot.partitions.get(partition)
    if part is None or not part.up:
        return Waiting()
    full, whole = partition_gpus(part, snapshot, whole_node_gpus)
    rigid = [
        job
        for job in rigid_jobs(snapshot, partition, seen.elastic)
        if job.partition.split(",")[0] == partition and job.eligible_time <= snapshot.time
    ]
    found = (_claim(job, part, full, whole) for job in sorted(rigid, key=_rank))
    claims = [claim for claim in found if claim is not None][:MOST]
    if not claims:
        return Waiting()
    free = {
        name: gpus
        for name, gpus in free_gpus(snapshot, partition, whole_node_gpus).items()
        if snapshot.nodes[name].usable
    }
    resizes = list(resizes)
    set_aside(resizes, seen.elastic, free)
    _about_to_be_free(resizes, seen.elastic, free)
    ranks = {job_id: _rank(one.job) for job_id, one in seen.elastic.items()}
    return Waiting(claims, free, ranks, _releases(snapshot, full if whole else 0))


def _rank(job: Job) -> Rank:
    """Slurm's order: by priority, and of equal ones who was submitted first, which job ids tell."""
    return -job.priority, job.job_id


def _claim(job: Job, partition: Partition, full: int, whole: bool) -> Claim | None:
    """What the job needs; None where that is nothing, or more than the partition could ever give."""
    each = _gpus_of_each(job, job.nodes, full if whole else 0)
    possible = 0 < each <= full and 0 < job.nodes <= min(partition.max_nodes or math.inf, len(partition.node_names))
    if not possible or (partition.max_time_s and job.time_limit_s > partition.max_time_s):
        return None
    return Claim(job.job_id, job.nodes, each, _rank(job), job.time_limit_s or math.inf)


def _gpus_of_each(job: Job, nodes: int, whole: int) -> int:
    """GPUs that it takes of each of its nodes: `whole` where nodes are handed out so."""
    return whole or job.gpus_per_node or -(-job.gpus_total // max(nodes, 1))


def _about_to_be_free(resizes: Iterable[ResizeRecord], elastic: Mapping[int, Elastic], free: dict[str, int]) -> None:
    """Add what jobs that are being shrunk will give up, so that nobody is asked for it a second time."""
    for resize in resizes:
        one, target = elastic.get(resize.job_id), target_of(resize)
        if one is None or not one.job.running or target.gpus >= one.shape.gpus:
            continue
        # Of several nodes it keeps the first.
        kept = dict.fromkeys(list(holdings(one))[: target.nodes], target.gpus_per_node) if target != PARKED else {}
        for name, gpus in holdings(one).items():
            if name in free:
                free[name] += max(gpus - kept.get(name, 0), 0)


def _releases(snapshot: Snapshot, whole: int) -> tuple[Release, ...]:
    """What running jobs give back by their time limits."""
    return tuple(
        Release(
            max(job.start_time + job.time_limit_s - snapshot.time, 0.0),
            dict.fromkeys(job.node_list, _gpus_of_each(job, len(job.node_list), whole)),
        )
        for job in snapshot.jobs.values()
        if job.running and job.time_limit_s and job.node_list
    )
