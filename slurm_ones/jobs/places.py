"""Whether the companion and a job find each other: the job's files for what it reports, the spool for orders to it."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import MAX_LINE, Hello, ProtocolError, decode_report, reports_name
from slurm_ones.jobs.eligibility import Elastic
from slurm_ones.slurm.model import Job
from slurm_ones.untrusted_files import NotBelieved, directory_of, foreign, job_directory, read_from

TICKS = 3
"""A job that runs was looked at so often in vain before it is refused: `ones-run` makes its directory before all else.
"""


class JobDirectories:
    """Refuses to resize jobs whose files are not found, or to which no order would get."""

    def __init__(self, spool: Path | None) -> None:
        self._spool = spool
        self._in_vain: dict[tuple[int, int], int] = {}
        """How often each run's files were not found."""
        self._hellos: dict[tuple[int, int], Hello] = {}
        """The first of each run, of jobs that get orders by the spool."""

    def judged(self, seen: Mapping[int, Elastic], read: Container[int], own_uid: int | None) -> dict[int, Elastic]:
        """The same jobs, some of them refused. `read` are those whose files were found before. Once a tick."""
        self._hellos = {key: hello for key, hello in self._hellos.items() if key[0] in seen}
        self._in_vain = {key: times for key, times in self._in_vain.items() if key[0] in seen}
        return {id_: self._judged(elastic, id_ in read, own_uid) for id_, elastic in seen.items()}

    def _judged(self, elastic: Elastic, read: bool, own_uid: int | None) -> Elastic:
        job = elastic.job
        if elastic.refusal or job.ended or own_uid not in (None, job.uid):
            return elastic
        return replace(elastic, refusal=self._not_found(job, read) or self._not_heard(job))

    def _not_found(self, job: Job, read: bool) -> Reason | None:
        key = job.job_id, job.restart
        problem = why_not_read(job) if job.running and not read else ""
        self._in_vain[key] = self._in_vain.get(key, 0) + 1 if problem else 0
        return reason("no_files", problem=problem) if self._in_vain[key] > TICKS else None

    def _not_heard(self, job: Job) -> Reason | None:
        """A wrapper that does not say which spool it reads is believed to read the site's."""
        if self._spool is None or not foreign(job):
            return None
        hello = self.hello(job)
        if hello is None or not hello.directory or _same(hello.spool, self._spool):
            return None
        return reason("spool_not_read", spool=str(self._spool))

    def hello(self, job: Job) -> Hello | None:
        """What the job's newest run said first, as far as it has."""
        # Of a job that was requeued, the run before tells: it had the same environment.
        for key in ((job.job_id, job.restart), (job.job_id, job.restart - 1)):
            if key not in self._hellos and key[1] >= 0 and (found := first_hello(job, key[1])) is not None:
                self._hellos[key] = found
            if key in self._hellos:
                return self._hellos[key]
        return None


def _same(said: str, spool: Path) -> bool:
    return bool(said) and os.path.normpath(said) in (os.path.normpath(spool), os.path.realpath(spool))


def why_not_read(job: Job) -> str:
    """What is wrong with the job's directory, and its path; empty where it can be read."""
    try:
        path = job_directory(job)
        with directory_of(path, job.uid):
            return ""
    except FileNotFoundError:
        return f"{path}: no such directory"
    except NotBelieved as error:
        return str(error)


def first_hello(job: Job, restart: int) -> Hello | None:
    """What a run said first; None where that is not there, or no hello."""
    try:
        with directory_of(job_directory(job), job.uid) as directory:
            text, _ = read_from(directory, reports_name(restart), job.uid, 0, MAX_LINE + 1)
        report = decode_report(text.split(b"\n", 1)[0])[2]
    except (FileNotFoundError, NotBelieved, ProtocolError):
        return None
    return report if isinstance(report, Hello) else None
