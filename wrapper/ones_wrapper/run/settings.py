"""Settings and identity of a run, and the objects that all its parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import Group
from ones_wrapper.protocol import Spec
from ones_wrapper.run.loop_state import Loop
from ones_wrapper.run.series import Open
from ones_wrapper.strategy import Strategy


@dataclass(frozen=True)
class RunSettings:
    """Arguments of `init` that are not part of the spec."""

    scale_lr: bool
    checkpoint_every_s: float | None
    write_behind: bool
    strategy: Strategy | None = None
    uneven: bool = False
    equal: bool = False
    series: Open | None = None
    tokens: Callable[[Any], Any] | None = None


def checked_spec(
    batch: int,
    max_batch: int | None,
    max_local_batch: int | None,
    epochs: int,
    max_accumulation_steps: int | None,
    multiple_of: int,
) -> Spec:
    """Return the spec for these arguments of `init`. Raises ValueError if numbers contradict each other."""
    max_batch = batch if max_batch is None else max_batch
    max_local_batch = max_batch if max_local_batch is None else max_local_batch
    if not 1 <= batch <= max_batch:
        raise ValueError(f"init: batch={batch} must be from 1 to max_batch={max_batch}")
    if max_accumulation_steps is None:
        max_accumulation_steps = max(1, -(-batch // max(max_local_batch, 1)))
    positive = {
        "max_local_batch": max_local_batch,
        "max_accumulation_steps": max_accumulation_steps,
        "multiple_of": multiple_of,
    }
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"init: {name}={value} must be 1 or more")
    if batch % multiple_of:
        raise ValueError(f"init: batch={batch} is no multiple of multiple_of={multiple_of}")
    if epochs < 0:
        raise ValueError(f"init: epochs={epochs} must be 0 or more")
    most = max_batch - max_batch % multiple_of
    return Spec(batch, most, max_local_batch, 0, epochs, max_accumulation_steps, multiple_of=multiple_of)


@dataclass(frozen=True)
class Identity:
    """Job, restart and role of a run's process."""

    job_id: int
    restart: int
    """Slurm's restart count; in a job of blocks the number of the term."""
    leads: bool = True
    """True if these ranks write the job's files, False in a block that joins others."""
    name: str = ""
    """Name of this process in a job of blocks, which stays when its rank changes. Empty in a plain job."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Identity:
        """Return the identity of a plain job's run."""
        return cls(int(env.get("SLURM_JOB_ID") or 0), int(env.get("SLURM_RESTART_COUNT") or 0))


@dataclass(frozen=True)
class Common:
    """Objects that all parts of a run share."""

    group: Group
    identity: Identity
    settings: RunSettings
    directory: Path
    spool: Path | None
    progress: TrainingProgress
    loop: Loop
