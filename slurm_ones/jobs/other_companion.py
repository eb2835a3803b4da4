"""Agreement between a job's two companions, its owner's and the site's: only one of them resizes it.

While the site's companion acts, it keeps touching a file in its spool, the mark. The owner's companion yields on every
job that reads orders from a spool with a recent mark. It writes its own orders into the job's directory; the site's
companion yields on a job with a recent order there.

If both start in the same second, the job obeys the order with the higher number. The companion of the lower number
gives up its resize without notifying the job.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import MAX_LINE, ORDERS, SPOOL_FILE, SPOOL_MARK, Hello, ProtocolError, decode_order
from ones_wrapper.protocol import spool_order_name as spool_name
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.untrusted_files import NotBelieved, job_directory, read_file, status_of

YIELD_S = 300.0
"""Largest age, in seconds, of an order or of a spool's mark (`SPOOL_MARK`) that shows that a companion is active."""


class OtherCompanion:
    """Check that gives a refusal to each job that another companion resizes."""

    def __init__(
        self, own_uid: int | None, hello: Callable[[WholeJob], Hello | None], clock: Callable[[], float]
    ) -> None:
        """Create the check. `own_uid` is the user of an owner's companion, None for the site's. `hello` returns the
        first report of a job's newest run."""
        self._own_uid = own_uid
        self._hello = hello
        self._clock = clock

    def refusal(self, job: WholeJob) -> Reason | None:
        """Return the reason to leave the job to another companion; None if no other companion resizes it."""
        # An order's number is its time in milliseconds. A number far ahead was not written by a companion.
        recent = abs(self._clock() - self.number(job) / 1000) < YIELD_S
        if self._own_uid is None:
            return reason("owner_acts", user=job.user, seconds=YIELD_S) if recent else None
        for spool in self._spools(job):
            try:
                folder = status_of(spool, job.uid)
                mark = status_of(spool / SPOOL_MARK, job.uid, follow=False)
            except (OSError, NotBelieved):
                continue
            if mark.st_uid == folder.st_uid != os.geteuid() and self._clock() - mark.st_mtime < YIELD_S:
                return reason("site_acts", user=login_of(mark.st_uid))
        # A companion of root needs no spool.
        return reason("site_acts", user="root") if recent and not self._spools(job) else None

    def number(self, job: WholeJob) -> int:
        """Return the number of the other companion's newest order to the job; 0 for none."""
        spools = self._spools(job) if self._own_uid is not None else []
        numbers = [_number(spool, spool_name(job.job_id), None) for spool in spools]
        writer = job.uid if self._own_uid is None else 0
        if writer != os.geteuid():
            with suppress(FileNotFoundError, NotBelieved):
                numbers.append(_number(job_directory(job), ORDERS, writer, job.uid))
        return max(numbers, default=0)

    def _spools(self, job: WholeJob) -> list[Path]:
        hello = self._hello(job)
        named = hello.spool if hello is not None and hello.directory else os.environ.get("ONES_SPOOL") or _published()
        return [Path(named)] if named.startswith("/") else []


def _number(folder: Path, name: str, uid: int | None, folder_uid: int | None = None) -> int:
    """Return the number of the order in `folder` that the user `uid` wrote (by default the owner of `folder`). Return 0
    without one, or if this process runs as that user."""
    try:
        owner = status_of(folder, os.geteuid()).st_uid if uid is None else uid
        if owner == os.geteuid():
            return 0
        text, _ = read_file(folder, owner if folder_uid is None else folder_uid, name, MAX_LINE + 1, owner)
        return decode_order(text).number
    except (OSError, NotBelieved, ProtocolError):
        return 0


def _published() -> str:
    try:
        return Path(SPOOL_FILE).read_text()[:1000].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def login_of(uid: int) -> str:
    """Return the login name of a user id, or the id as text if no user has it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
