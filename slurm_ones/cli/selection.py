"""Which jobs a command shows: squeue's options, with squeue's meaning."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from typing import Annotated

import typer

from ones_db import JobSummary
from slurm_ones.cli.common import job_number
from slurm_ones.report.text import plain
from slurm_ones.slurm.model import JobState

MeOption = Annotated[bool, typer.Option("--me", help="One's own jobs alone.")]
UsersOption = Annotated[str, typer.Option("--user", "-u", help="Jobs of these users: names, separated by commas.")]
PartitionsOption = Annotated[str, typer.Option("--partition", "-p", help="Jobs in these partitions.")]
AccountsOption = Annotated[str, typer.Option("--account", "-A", help="Jobs that are charged to these accounts.")]
StatesOption = Annotated[
    str, typer.Option("--states", "-t", help="Jobs in these states, such as PD,R or COMPLETED; all: every one.")
]
JobsOption = Annotated[str, typer.Option("--job", "-j", help="These jobs: ids, separated by commas.")]

CODES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
}
"""squeue's short names of states."""
SHORT = {name: code for code, name in CODES.items()}


@dataclass(frozen=True)
class Selection:
    """Conditions on a job; an empty one holds for all."""

    users: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    """Base states as Slurm names them."""
    jobs: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        *,
        me: bool = False,
        user: str = "",
        partition: str = "",
        account: str = "",
        states: str = "",
        jobs: str = "",
    ) -> Selection:
        """By the words of the command line. Raises `typer.BadParameter`, which names the bad word."""
        users = _words(user) | ({getpass.getuser()} if me else frozenset())
        return cls(users, _words(partition), _words(account), _states(states), frozenset(map(job_number, _words(jobs))))

    def takes(self, job: JobSummary) -> bool:
        """Whether the job is among those that are asked for."""
        pairs = (
            (job.user, self.users),
            (job.partition, self.partitions),
            (job.account, self.accounts),
            (job.state, self.states),
            (job.job_id, self.jobs),
        )
        return all(not wanted or value in wanted for value, wanted in pairs)

    @property
    def restricts(self) -> bool:
        """Whether there is a condition."""
        return self != Selection()


def _words(text: str) -> frozenset[str]:
    return frozenset(word for part in text.split(",") if (word := part.strip()))


def _states(text: str) -> frozenset[str]:
    words = frozenset(word.upper() for word in _words(text))
    if "ALL" in words:
        return frozenset()
    names = frozenset(CODES.get(word, word) for word in words)
    known = {state.value for state in JobState}
    for name in sorted(names - known):
        raise typer.BadParameter(f"{plain(name, 40)!r} is no state of a job: {', '.join(CODES)} or their long names")
    return names
