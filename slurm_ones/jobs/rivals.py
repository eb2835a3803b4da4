"""Two companions that look after one job: its owner's, and the site's. One of them yields.

The site's leaves a mark in its spool while it acts, and the owner's yields for every job that reads that spool. The
owner's orders lie in the job's directory, and the site's yields for a job while the newest of them is recent. Where
both begin in the same second, the job obeys the order with the higher number, and the companion that gave the other
one gives its resize up without a word to the job.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import MAX_LINE, ORDERS, SPOOL_FILE, SPOOL_MARK, Hello, Order, ProtocolError, decode_order
from ones_wrapper.protocol import spool_order_name as spool_name
from slurm_ones.jobs.eligibility import Elastic
from slurm_ones.slurm.model import Job
from slurm_ones.untrusted_files import NotBelieved, directory_of, job_directory, read_from

YIELD_S = 300.0
"""A mark, or an order, is of a companion at work for so long."""


class Rivals:
    """Looks for another companion that acts on the same jobs."""

    def __init__(self, own_uid: int | None, hello: Callable[[Job], Hello | None], clock: Callable[[], float]) -> None:
        """`own_uid` is the owner's, of an owner's companion; `hello` what a job's newest run said first."""
        self._own_uid = own_uid
        self._hello = hello
        self._clock = clock

    def judged(self, seen: Mapping[int, Elastic]) -> dict[int, Elastic]:
        """The same jobs, of which those are refused that another companion acts on."""
        return {id_: self._judged(elastic) for id_, elastic in seen.items()}

    def _judged(self, elastic: Elastic) -> Elastic:
        if elastic.refusal or elastic.job.ended:
            return elastic
        return replace(elastic, refusal=self.refusal(elastic.job))

    def refusal(self, job: Job) -> Reason | None:
        """Why this companion yields for the job; None where no other one acts on it."""
        # An order's number is the time in milliseconds; one far ahead is not of a companion.
        recent = abs(self._clock() - self.number(job) / 1000) < YIELD_S
        if self._own_uid is None:
            return reason("owner_acts", user=job.user, seconds=YIELD_S) if recent else None
        for spool in self._spools(job):
            try:
                folder, mark = spool.stat(), (spool / SPOOL_MARK).lstat()
            except OSError:
                continue
            if mark.st_uid == folder.st_uid != os.geteuid() and self._clock() - mark.st_mtime < YIELD_S:
                return reason("site_acts", user=_name(mark.st_uid))
        # One of root's needs no spool.
        return reason("site_acts", user="root") if recent and not self._spools(job) else None

    def number(self, job: Job) -> int:
        """Of the other companion's newest order to the job; 0 for none."""
        found = self._order(job)
        return found.number if found is not None else 0

    def _order(self, job: Job) -> Order | None:
        """The other companion's newest order."""
        if self._own_uid is None:
            return _read(job_directory_of(job), ORDERS, job.uid) if job.uid != os.geteuid() else None
        found = [_read(spool, spool_name(job.job_id), None) for spool in self._spools(job)]
        found.append(_read(job_directory_of(job), ORDERS, 0, job.uid))
        return max((one for one in found if one is not None), key=lambda one: one.number, default=None)

    def _spools(self, job: Job) -> list[Path]:
        """Spools that the job reads, as it said, or as the site published where it has said nothing."""
        hello = self._hello(job)
        said = hello.spool if hello is not None and hello.directory else os.environ.get("ONES_SPOOL") or _published()
        return [Path(said)] if said.startswith("/") else []


def job_directory_of(job: Job) -> Path | None:
    """The job's directory, None where what says where it is cannot be believed."""
    try:
        return job_directory(job)
    except (FileNotFoundError, NotBelieved):
        return None


def _read(folder: Path | None, name: str, uid: int | None, folder_uid: int | None = None) -> Order | None:
    """An order of that user in a folder of theirs, or of `folder_uid`; of the folder's own where none is named. None
    where that is this companion's user."""
    try:
        if folder is None:
            return None
        owner = folder.stat().st_uid if uid is None else uid
        if owner == os.geteuid():
            return None
        with directory_of(folder, owner if folder_uid is None else folder_uid) as directory:
            return decode_order(read_from(directory, name, owner, 0, MAX_LINE + 1)[0])
    except (OSError, NotBelieved, ProtocolError):
        return None


def _published() -> str:
    try:
        return Path(SPOOL_FILE).read_text()[:1000].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
