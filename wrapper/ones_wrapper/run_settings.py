"""What a run is told when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ones_wrapper.learning_rate import LrRule


@dataclass(frozen=True)
class Settings:
    """What the script asked `init` for, beside the spec."""

    rule: LrRule
    lr_ramp: int
    checkpoint_every_s: float | None
    write_behind: bool


@dataclass(frozen=True)
class Identity:
    """Which run this is."""

    job_id: int
    restart: int
    """Of a job of blocks: the term."""
    leads: bool = True
    """Whether these ranks keep the job's files; new blocks of a job that trains do not."""
    name: str = ""
    """Tells this process from others whose ranks may be the same at other times; empty where ranks stay."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Identity:
        """That of a plain job."""
        return cls(int(env.get("SLURM_JOB_ID") or 0), int(env.get("SLURM_RESTART_COUNT") or 0))
