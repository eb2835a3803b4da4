"""Jobs and their runs from accounting rows: requeued runs share one job id, and Slurm reuses ids.

The tasks of an array of blocks form one job with the array's id. Each start or end of a block begins another run of
this job, with the nodes and GPUs of all blocks that run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf

from ones_db import AccountingJob, JobRecord, RunRecord
from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_db.site import SAME_JOB_S
from ones_wrapper.protocol.hostlist import expand
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.slurm.sacct import AccountingRow


class PastJobs:
    """Converter from accounting rows to ended jobs. Rows are read in time spans, in order of the runs' ends.

    A requeued job's rows are kept until its last run is read. A job whose last run is missing is left to a later
    import.
    """

    def __init__(self, known: Callable[[int], bool] = lambda array: False) -> None:
        """Create the converter. `known` tells whether an array is one of blocks, since accounting seldom has
        comments."""
        self._known = lru_cache(None)(known)
        self._said: set[int] = set()
        """Arrays of blocks, as a comment in one of their rows says."""
        self._open: dict[tuple[int, int, float], AccountingRow] = {}
        """Rows of jobs that have not ended, by (id of the job or array, id of the task, submission time)."""

    @property
    def open(self) -> int:
        """Number of requeued jobs whose last run has not been read."""
        return len({job_id for job_id, _, _ in self._open})

    def _of_blocks(self, row: AccountingRow) -> bool:
        return bool(row.array) and (row.array in self._said or self._known(row.array))

    def take(self, rows: Iterable[AccountingRow], until: float) -> list[AccountingJob]:
        """Read the rows of runs that ended before `until`; return the jobs that have ended, in order of job id."""
        read = [row for row in rows if row.end is None or row.end < until]
        self._said.update(row.array for row in read if row.array and _says_blocks(row.comment))
        for row in read:
            self._open[row.array if self._of_blocks(row) else row.job_id, row.job_id, row.submit] = row
        jobs: dict[int, list[AccountingRow]] = defaultdict(list)
        for key, row in sorted(self._open.items(), key=lambda item: (item[0][0], item[1].submit, item[1].job_id)):
            jobs[key[0]].append(row)
        ended: list[AccountingJob] = []
        self._open = {}
        for job_id, rows_of_job in jobs.items():
            for one in _apart(rows_of_job):
                # The last row of each task counts; a job without tasks has one last row.
                if any(row.live for row in {row.job_id: row for row in one}.values()):
                    self._open.update({(job_id, row.job_id, row.submit): row for row in one})
                elif self._of_blocks(one[0]):
                    ended.append(job_of_blocks(job_id, one))
                else:
                    ended.append(accounting_job(one))
        return ended


def _says_blocks(comment: str) -> bool:
    # Unlike in `elastic`, a comment that is not understood does not matter here.
    with suppress(BadComment):
        optin = parse_comment(comment)
        return optin is not None and optin.blocks
    return False


def _apart(rows: Sequence[AccountingRow]) -> list[list[AccountingRow]]:
    """Divide the rows of one job id, sorted by submission, wherever a new job has reused the id. A new job has another
    user, or is submitted more than `SAME_JOB_S` after the last end."""
    found: list[list[AccountingRow]] = []
    latest = 0.0
    for row in rows:
        if not found or found[-1][-1].user != row.user or row.submit - latest > SAME_JOB_S:
            found.append([])
            latest = 0.0
        found[-1].append(row)
        latest = max(latest, inf if row.end is None else row.end)
    return found


def job_of_blocks(array: int, rows: Sequence[AccountingRow]) -> AccountingJob:
    """Return the job of an array of blocks. `rows` are those of all its ended tasks."""
    ran = [row for row in rows if row.start is not None and row.end is not None and row.end > row.start]
    first = min(ran or rows, key=lambda row: row.start or row.submit)
    last = max(ran or rows, key=lambda row: row.end or 0.0)
    times = sorted({time for row in ran for time in (row.start, row.end) if time is not None})
    runs: list[RunRecord] = []
    for start, end in pairwise(times):
        together = [row for row in ran if (row.start or 0.0) <= start and end <= (row.end or 0.0)]
        if not together:
            continue
        ends = next((row for row in together if row.end == end), None)
        names = {name for row in together for name in _hosts(row.node_list, row.nodes)}
        nodes = len(names) or sum(row.nodes for row in together)
        runs.append(
            RunRecord(
                job_id=array,
                restart=len(runs),
                shape=_shape(nodes, sum(row.gpus for row in together)),
                node_list=tuple(sorted(names)),
                start_time=start,
                end_time=end,
                end_reason=ends.state if ends else "RESIZING",
                exit_code=ends.exit_code if ends else 0,
            )
        )
    job = _job(array, first, last, max(len(runs) - 1, 0), min(row.submit for row in rows))
    end = max(row.end or 0.0 for row in rows)
    return AccountingJob(replace(job, end_time=end), tuple(runs), last.time_limit_s)


def accounting_job(rows: Sequence[AccountingRow]) -> AccountingJob:
    """Return an ended job from its rows in order of submission."""
    first, last = rows[0], rows[-1]
    restarts = [row.restart for row in rows]
    if None in restarts or len(set(restarts)) < len(restarts):
        restarts = list(range(len(rows)))
    runs = tuple(
        RunRecord(
            job_id=row.job_id,
            restart=restart or 0,
            shape=_shape(row.nodes, row.gpus),
            node_list=_hosts(row.node_list, row.nodes),
            start_time=row.start,
            end_time=row.end,
            end_reason=row.state,
            exit_code=row.exit_code,
        )
        for row, restart in zip(rows, restarts, strict=True)
        if row.start is not None
    )
    return AccountingJob(_job(first.job_id, first, last, restarts[-1] or 0, first.submit), runs, last.time_limit_s)


def _job(job_id: int, first: AccountingRow, last: AccountingRow, restart: int, submit: float) -> JobRecord:
    return JobRecord(
        job_id=job_id,
        name=last.name,
        user=last.user,
        submit_time=submit,
        requested_shape=_shape(first.requested_nodes, first.requested_gpus or first.gpus),
        account=last.account,
        partition=last.partition,
        restart=restart,
        refusal=reason("accounting_only"),
        state=last.state,
        end_time=last.end,
        exit_code=last.exit_code,
    )


def _shape(nodes: int, gpus: int) -> Shape:
    each, rest = divmod(gpus, max(nodes, 1))
    return Shape(1, gpus) if rest else Shape(nodes, each)


def _hosts(text: str, nodes: int) -> tuple[str, ...]:
    try:
        names = expand(text)
    except ValueError:
        return ()
    return tuple(names) if len(names) == nodes else ()
