"""From rows of accounting to jobs with their runs: requeued runs share one job id, and Slurm uses ids again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from ones_db import AccountingJob, JobRecord, ReasonRecord, RunRecord
from ones_db.accounting import SAME_JOB_S
from ones_wrapper.hostlist import expand
from slurm_ones.reasons import reason
from slurm_ones.slurm.sacct import AccountingRow

MOST_NODES = 100_000
"""Nodes of a run whose names are kept."""


class PastJobs:
    """Rows of one span of time after another, each in that in which its run ended, turned into jobs that have ended.

    A requeued job waits here for its last run. One that has none by the last span is left out, as a later import finds
    it.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, float], AccountingRow] = {}
        """Runs of jobs that were requeued, by job id and submission."""

    @property
    def open(self) -> int:
        """Jobs that were requeued and have not ended."""
        return len({job_id for job_id, _ in self._open})

    def take(self, rows: Iterable[AccountingRow], until: float) -> list[AccountingJob]:
        """The jobs that ended in the span before `until`, by job id."""
        for row in rows:
            if row.end is None or row.end < until:
                self._open[row.job_id, row.submit] = row
        jobs: dict[int, list[AccountingRow]] = defaultdict(list)
        for row in sorted(self._open.values(), key=lambda row: (row.job_id, row.submit)):
            jobs[row.job_id].append(row)
        ended: list[AccountingJob] = []
        self._open = {}
        for rows_of_job in jobs.values():
            for one in _apart(rows_of_job):
                if one[-1].live:
                    self._open.update({(row.job_id, row.submit): row for row in one})
                else:
                    ended.append(accounting_job(one))
        return ended


def _apart(rows: Sequence[AccountingRow]) -> list[list[AccountingRow]]:
    """The rows of one job id, by submission, cut where it was given to another job.

    A requeued job is submitted anew the moment it is, within what Slurm remembers an ended job for at most.
    """
    found: list[list[AccountingRow]] = []
    for row in rows:
        last = found[-1][-1] if found else None
        if last is None or last.user != row.user or (last.end is not None and row.submit - last.end > SAME_JOB_S):
            found.append([])
        found[-1].append(row)
    return found


def accounting_job(rows: Sequence[AccountingRow]) -> AccountingJob:
    """One job that has ended, from its rows in the order of their submission."""
    first, last = rows[0], rows[-1]
    restarts = [row.restart for row in rows]
    if None in restarts or len(set(restarts)) < len(restarts):
        restarts = list(range(len(rows)))
    runs = tuple(
        RunRecord(
            job_id=row.job_id,
            restart=restart or 0,
            nodes=row.nodes,
            gpus_per_node=_each(row.gpus, row.nodes),
            node_list=_hosts(row.node_list, row.nodes),
            start_time=row.start,
            end_time=row.end,
            end_reason=row.state,
            exit_code=row.exit_code,
        )
        for row, restart in zip(rows, restarts, strict=True)
        if row.start is not None
    )
    job = JobRecord(
        job_id=first.job_id,
        name=last.name,
        user=last.user,
        submit_time=first.submit,
        requested_nodes=first.requested_nodes,
        requested_gpus_per_node=_each(first.requested_gpus or first.gpus, first.requested_nodes),
        account=last.account,
        partition=last.partition,
        restart=restarts[-1] or 0,
        refusal=ReasonRecord.of(reason("accounting_only")),
        state=last.state,
        end_time=last.end,
        exit_code=last.exit_code,
    )
    return AccountingJob(job, runs, last.time_limit_s)


def _each(gpus: int, nodes: int) -> int:
    """GPUs of each node; where they are not equally many, of the one with the most at least."""
    return -(-gpus // max(nodes, 1))


def _hosts(text: str, nodes: int) -> tuple[str, ...]:
    """The names of the nodes, none where the text does not name that many."""
    lengths = [sum(_length(piece) for piece in group.split(",")) for group in re.findall(r"\[([^\]]*)\]", text)]
    if not 0 < nodes <= MOST_NODES or prod(lengths) > MOST_NODES:
        return ()
    try:
        names = expand(text)
    except ValueError:
        return ()
    return tuple(names) if len(names) == nodes else ()


def _length(piece: str) -> int:
    low, dash, high = piece.partition("-")
    if not (low.isdigit() and (high.isdigit() or not dash)) or len(piece) > 40:
        return MOST_NODES
    return max(int(high) - int(low), 0) + 1 if dash else 1
