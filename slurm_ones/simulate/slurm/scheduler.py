"""How Slurm chooses which waiting jobs start, and where: in order, then EASY backfill.

Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995: a job may overtake the first one that finds no room if that
starts no later for it. Ends are taken from time limits, as Slurm does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

UNLIMITED_S = 365 * 86400.0
"""What Slurm plans with for a job without a time limit."""


@dataclass(frozen=True)
class Wish:
    """A job that could start, were there room."""

    job_id: int
    least_nodes: int
    most_nodes: int
    gpus: int
    """GPUs on each node."""
    limit_s: float
    """How long it may run; 0 for no limit."""


@dataclass(frozen=True)
class Holding:
    """What a running job gives back, and when at the latest."""

    ends: float
    gpus: Mapping[str, int]


def place(wish: Wish, free: Mapping[str, int]) -> tuple[str, ...] | None:
    """Nodes for the job, where least is left over, else in the cluster's order; None where it finds no room.

    `free` has the GPUs that each node could give now, in the cluster's order.
    """
    fitting = [(gpus, i, name) for i, (name, gpus) in enumerate(free.items()) if gpus >= wish.gpus]
    if len(fitting) < wish.least_nodes:
        return None
    chosen = sorted(fitting)[: wish.most_nodes]
    return tuple(name for _, _, name in sorted(chosen, key=lambda one: one[1]))


def starts(
    queue: Sequence[Wish], free: Mapping[str, int], whole: Mapping[str, int]
) -> tuple[list[tuple[int, tuple[str, ...]]], list[int]]:
    """The jobs that start now with their nodes: the main scheduler's round; and the jobs that must wait, in order.

    `queue` is in order of priority; `whole` has the GPUs of each node when nothing runs on it: a job that would not
    fit even then holds nobody up.
    """
    left = dict(free)
    chosen: list[tuple[int, tuple[str, ...]]] = []
    for i, wish in enumerate(queue):
        nodes = place(wish, left)
        if nodes is not None:
            _take(left, nodes, wish.gpus)
            chosen.append((wish.job_id, nodes))
        elif place(wish, whole) is not None:
            return chosen, [other.job_id for other in queue[i:]]
    return chosen, []


def backfill(
    queue: Sequence[Wish], free: Mapping[str, int], whole: Mapping[str, int], running: Iterable[Holding], now: float
) -> list[tuple[int, tuple[str, ...]]]:
    """The jobs that start now with their nodes, those included that overtake the first that finds no room."""
    left, held = dict(free), list(running)
    chosen: list[tuple[int, tuple[str, ...]]] = []
    then: dict[str, int] | None = None
    begins = math.inf
    for wish in queue:
        ends = now + (wish.limit_s or UNLIMITED_S)
        # One that ends in time may use what is kept for the first.
        room = left if then is None or ends <= begins else {name: min(left[name], then[name]) for name in left}
        nodes = place(wish, room)
        if nodes is not None:
            _take(left, nodes, wish.gpus)
            if then is not None and ends > begins:
                _take(then, nodes, wish.gpus)
            held.append(Holding(ends, dict.fromkeys(nodes, wish.gpus)))
            chosen.append((wish.job_id, nodes))
        elif then is None and place(wish, whole) is not None:
            begins, then = _reserve(wish, left, held)
    return chosen


def _take(free: dict[str, int], nodes: Iterable[str], gpus: int) -> None:
    for name in nodes:
        free[name] -= gpus


def _reserve(wish: Wish, free: Mapping[str, int], held: Iterable[Holding]) -> tuple[float, dict[str, int]]:
    """When the job will start at the latest, and what is free then beside it."""
    then = dict(free)
    begins = math.inf
    for holding in sorted(held, key=lambda h: h.ends):
        for name, gpus in holding.gpus.items():
            if name in then:
                then[name] += gpus
        if (nodes := place(wish, then)) is not None:
            begins = holding.ends
            _take(then, nodes, wish.gpus)
            break
    return begins, then
