"""Jobs that wait for a partition's GPUs and cannot be resized: what they need, and who comes before whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ones_db.shape import PARKED, Shape
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.rules.blocks import Moves, training
from slurm_ones.slurm.model import Job, Partition, Snapshot

Rank = tuple[int, int]
"""Place in Slurm's order, the smallest first: the negative priority, and the job id."""

FOR_ROOM = frozenset({"Resources", "Priority", "None", ""})
"""Slurm's reasons of jobs that wait for nothing but room. Others say what it would not start them for: a dependency, a
begin time, a hold, a limit of their QOS or association, constraints that no node meets."""
MOST = 50
"""Rigid jobs that are made room for at once, the first in Slurm's order."""


@dataclass(frozen=True)
class PendingJob:
    """A rigid job that could start, were there room."""

    job_id: int
    nodes: int
    gpus_per_node: int
    rank: Rank
    limit_s: float = math.inf
    """How long it may run."""
    kind: str = ""
    """Type of GPU that it asks for; empty for any."""


@dataclass(frozen=True)
class Release:
    """GPUs that a running job gives back, and in how many seconds at the latest."""

    after_s: float
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class RigidDemand:
    """The rigid jobs that wait for a partition's GPUs."""

    pending: Sequence[PendingJob] = ()
    """By rank."""
    free: Mapping[str, int] = field(default_factory=dict)
    """GPUs that are free on each node that takes jobs, or are about to be through resizes under way."""
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    """Of the elastic jobs."""
    releases: Sequence[Release] = ()
    """Of the jobs that run."""


def rigid_jobs(snapshot: Snapshot, partition: str, elastic: Mapping[int, Elastic]) -> list[Job]:
    """Jobs that wait for room in this partition, among others, and did not opt in or are refused.

    One that is trained within another is none: it waits for that job, not for room."""
    return [
        job
        for job in snapshot.jobs.values()
        if job.pending
        and not job.held
        and not job.completing
        and job.reason in FOR_ROOM
        and ((one := _elastic_of(job, elastic)) is None or (one.refusal and one.refusal.code != "fused"))
        and partition in job.partitions
    ]


def _elastic_of(job: Job, elastic: Mapping[int, Elastic]) -> Elastic | None:
    """The elastic job that it is, or is a block of."""
    one = elastic.get(job.array_id)
    return one if one is not None and one.blocks else elastic.get(job.job_id)


def rigid_demand(
    snapshot: Snapshot,
    partition: Partition,
    elastic: Mapping[int, Elastic],
    targets: Mapping[int, Shape],
    free: Mapping[str, int],
    full: int,
    whole: bool,
    moves: Mapping[int, Moves] | None = None,
) -> RigidDemand:
    """What rigid jobs need that name this partition first, and what there is for them.

    `targets` are the shapes that resizes under way head for, `free` the GPUs of each node that none of them needs;
    `full` the GPUs of a full node, and `whole` whether nodes are handed out so; `moves` the blocks that join and leave
    in those of jobs of blocks.
    """
    rigid = [
        job
        for job in rigid_jobs(snapshot, partition.name, elastic)
        if job.partition == partition.name and job.eligible_time <= snapshot.time
    ]
    found = (_pending_job(job, partition, full, whole) for job in sorted(rigid, key=_rank))
    pending = [job for job in found if job is not None][:MOST]
    if not partition.up or not pending:
        return RigidDemand()
    usable = {name: gpus for name, gpus in free.items() if snapshot.nodes[name].usable}
    _add_given_up(targets, elastic, usable, moves or {})
    ranks = {job_id: _rank(one.job) for job_id, one in elastic.items()}
    return RigidDemand(pending, usable, ranks, _releases(snapshot, full if whole else 0))


def _rank(job: Job) -> Rank:
    """Slurm's order: by priority, and of equal ones who was submitted first, which job ids tell."""
    return -job.priority, job.job_id


def _pending_job(job: Job, partition: Partition, full: int, whole: bool) -> PendingJob | None:
    """What the job needs; None where that is nothing, or more than the partition could ever give."""
    each = _gpus_of_each(job, job.nodes, full if whole else 0)
    possible = 0 < each <= full and 0 < job.nodes <= min(partition.max_nodes or math.inf, len(partition.node_names))
    if not possible or (partition.max_time_s and job.time_limit_s > partition.max_time_s):
        return None
    # Of several types nothing is said of which nodes give which: any counts.
    kind = job.kind if job.of_one_kind else ""
    return PendingJob(job.job_id, job.nodes, each, _rank(job), job.time_limit_s or math.inf, kind)


def _gpus_of_each(job: Job, nodes: int, whole: int) -> int:
    """GPUs that it takes of each of its nodes: `whole` where nodes are handed out so."""
    return whole or job.gpus_per_node or -(-job.gpus_total // max(nodes, 1))


def _add_given_up(
    targets: Mapping[int, Shape],
    elastic: Mapping[int, Elastic],
    free: dict[str, int],
    moves: Mapping[int, Moves],
) -> None:
    """Add what jobs that are being shrunk will give up, so that nobody is asked for it a second time."""
    for job_id, target in targets.items():
        one = elastic.get(job_id)
        if one is not None and job_id in moves:
            for block in training(one, None):
                for name in block.nodes if block.task in moves[job_id].dropped else ():
                    if name in free:
                        free[name] += block.shape.gpus_per_node
            continue
        if one is None or not one.job.running or target.gpus >= one.shape.gpus:
            continue
        # Of several nodes it keeps the first.
        kept = dict.fromkeys(list(one.holdings)[: target.nodes], target.gpus_per_node) if target != PARKED else {}
        for name, gpus in one.holdings.items():
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
