"""Blocks of a simulated job: one start of a task each, and which of them are to train together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_ones.simulate.slurm.timeline import Event

PATIENCE_S = 3.0
"""The job waits so long for the other new blocks once one is ready."""


@dataclass
class Block:
    """One start of a task."""

    task: int
    restart: int
    gpus: Mapping[str, int]
    launched: bool = False
    """Its model is built and warm: it can join, or found a membership."""
    ready_at: float = 0.0
    leaves: bool = False
    """It has seen that it is not wanted."""
    event: Event | None = None
    """What it does next."""


class JobOfBlocks(Protocol):
    """Whose blocks they are."""

    @property
    def batch(self) -> int: ...

    def block_starts(self, block: Block) -> None:
        """A task of the array runs."""

    def block_stops(self, task: int, *, killed: bool) -> float:
        """Its processes end; returns the seconds until the last is gone."""


class BlockProgram:
    """One task of the array, as Slurm runs it."""

    def __init__(self, training: JobOfBlocks, task: int) -> None:
        self._training = training
        self._task = task

    @property
    def batch(self) -> int:
        """See `Program`."""
        return self._training.batch

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        """See `Program`."""
        self._training.block_starts(Block(self._task, restart, dict(gpus)))

    def stop(self, *, killed: bool = False) -> float:
        """See `Program`."""
        return self._training.block_stops(self._task, killed=killed)


def next_members(
    wanted: Sequence[int] | None, members: Sequence[int], blocks: Mapping[int, Block], now: float
) -> tuple[int, ...] | None:
    """Who is to train next, in rank order: those that stay before those that join. None where all stays as it is.

    All `wanted` blocks that can come are waited for, or some seconds after the first; nobody leaves before. Where
    nobody says who is wanted, all that are ready join.
    """
    if wanted is None:
        wanted = sorted({*blocks, *members})
    ready = [
        blocks[task]
        for task in wanted
        if task in blocks and task not in members and blocks[task].launched and not blocks[task].leaves
    ]
    missing = len(ready) < len(set(wanted) - set(members))
    if missing and not (ready and now >= min(block.ready_at for block in ready) + PATIENCE_S - 1e-6):
        return None
    stay = [task for task in members if missing or task in wanted]
    plan = (*stay, *sorted(block.task for block in ready))
    return plan if plan and set(plan) != set(members) else None
