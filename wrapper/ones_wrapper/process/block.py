"""The block to which this process belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """One start of one task of a job of blocks."""

    array: int
    """Job id of the array. It is also the id of the whole job."""
    task: int
    restart: int
    """Number of times that Slurm requeued the task."""


def own_block(env: Mapping[str, str]) -> Block | None:
    """Return this process's block; None in a plain job, or if each task of the array is a job of its own."""
    if env.get("ONES_BLOCKS") != "1":
        return None
    values = [env.get(name) or "" for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")]
    values.append(env.get("SLURM_RESTART_COUNT") or "0")
    if not all(value.isascii() and value.isdigit() for value in values):
        return None
    return Block(*map(int, values))
