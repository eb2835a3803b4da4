"""Guards against requeues after which a job could not start again: closed partitions, reservations, lost licences.

Slurm starts no job whose time limit reaches into a reservation of its nodes. A requeue restarts the job's time limit.
So a requeued job may find no node, although there was time enough at its first start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.slurm.model import SlurmJob, Snapshot, partition_gpus

START_S = 60.0
"""Seconds from a decision to the next run's start: a checkpoint, the requeue and Slurm's next scheduling."""
LOSES_LICENSES = (25, 5, 0), (25, 11, 7)
"""First release of Slurm that forgets the licences of requeued jobs, and the first one that keeps them again."""


class ReservedNodes(NamedTuple):
    """Nodes whose reservations would begin during a run of the job begun now."""

    nodes: frozenset[str] = frozenset()
    reason: Reason | None = None
    """The earliest of these reservations, in words; None without one."""


NOTHING_AHEAD = ReservedNodes()


def ahead_of(job: SlurmJob, snapshot: Snapshot, now: float) -> ReservedNodes:
    """Return the partition's nodes with other jobs' reservations that would begin during a run begun now."""
    part = snapshot.partitions.get(job.partition)
    if part is None:
        return NOTHING_AHEAD
    last = now + START_S + (job.time_limit_s or part.max_time_s or math.inf)
    own = job.reservation.split(",")
    soon = [one for one in snapshot.reservations if now < one.start_time < last and one.name not in own]
    ours = part.node_set
    found = [one for one in soon if not ours.isdisjoint(one.node_names)]
    if not found:
        return NOTHING_AHEAD
    first = min(found, key=lambda one: (one.start_time, one.name))
    why = reason("reserved_ahead", name=first.name, minutes=(first.start_time - now) / 60.0)
    return ReservedNodes(ours.intersection(name for one in found for name in one.node_names), why)


def reserved_ahead(
    job: SlurmJob, shape: Shape, snapshot: Snapshot, whole_node_gpus: Mapping[str, int], now: float
) -> Reason | None:
    """Return what keeps a running job from starting again at this shape, on its own and free nodes: its partition, or
    a reservation. Return None if the job could start, or if neither is to blame."""
    ahead, part = ahead_of(job, snapshot, now), snapshot.partitions.get(job.partition)
    if part is not None and part.closed:
        return reason("partition_closed", partition=part.name)
    if not ahead.nodes or part is None:
        return None
    full, whole = partition_gpus(part, snapshot, whole_node_gpus)
    room = []
    for name in part.node_names:
        node, own = snapshot.nodes.get(name), name in job.node_list
        if node is not None and (node.usable or own):
            free = full * node.idle if whole else node.gpus - node.gpus_used
            has = (full if whole else job.gpus_per_node) * own
            room += [name] if free + has >= shape.gpus_per_node else []
    return ahead.reason if len({*room} - ahead.nodes) < shape.nodes <= len(room) else None


def loses_licenses(release: tuple[int, int, int]) -> bool:
    """Tell whether that release of Slurm forgets the licences of requeued jobs."""
    first, fixed = LOSES_LICENSES
    return first <= release < fixed
