"""The job's side of the files in `protocol`: it writes reports, and reads orders and the owner's requests.

An error here never stops the training. Imports no torch.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ones_wrapper.files.small_files import read_small, replace_small
from ones_wrapper.process.log import log
from ones_wrapper.protocol import (
    MAX_LINE,
    MAX_SPEC,
    ORDERS,
    SPEC,
    Bye,
    Membership,
    Order,
    ProtocolError,
    Report,
    Spec,
    decode_order,
    decode_report,
    decode_spec,
    encode,
    encode_report,
    reports_name,
    spool_order_name,
)

POLL_S = 0.5
"""Shortest time between two reads of the orders, in seconds."""


def not_ours(path: Path) -> str:
    """Return why this user cannot use a directory as a job's directory, with a remedy; empty if the user can."""
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        return "is a link; set ONES_JOB_DIR to the directory itself"
    if not stat.S_ISDIR(state.st_mode):
        return "is not a directory; move it away"
    if state.st_uid != os.geteuid():
        return f"belongs to user {state.st_uid}, not to you; choose another directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return "is not writable; chmod u+rwx it"
    return ""


class ReportWriter:
    """Writer of one run's reports, on rank 0. Each line is one `write`, so that readers see whole lines. A line that
    does not fit on the disk is lost."""

    def __init__(self, job_dir: Path, restart: int) -> None:
        self._path = job_dir / reports_name(restart)
        self._file: int | None = None
        self._number = 0
        self._torn = False
        self._logged = False
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)
            text = self._path.read_bytes()
            self._number = text.count(b"\n")
            self._torn = bool(text) and not text.endswith(b"\n")
        except OSError as error:
            self._log_error(error)

    def _log_error(self, error: OSError) -> None:
        if not self._logged:
            log(f"reports cannot be written to {self._path} ({error.strerror}); training goes on without them")
        self._logged = True

    def send(self, report: Report) -> None:
        """Append one report; a failure is logged once and otherwise ignored."""
        if self._file is None:
            return
        self._number += 1
        line = encode_report(self._number, time.time(), report)
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(self._file, line)
        except OSError as error:
            self._log_error(error)
            return
        self._torn = written < len(line)
        self._logged = False


def write_spec(job_dir: Path, spec: Spec) -> None:
    """Replace `spec.json` atomically; a failure is logged."""
    try:
        replace_small(job_dir / SPEC, encode(spec), sync=False)
    except OSError as error:
        log(f"{job_dir / SPEC} cannot be written ({error.strerror}); the companion will not resize this job")


def read_spec(job_dir: Path) -> Spec | None:
    """Return the spec that the job's last run wrote; None if it is missing or malformed."""
    try:
        return decode_spec(read_small(job_dir / SPEC, MAX_SPEC))
    except (OSError, ValueError):
        return None


class OrderReader:
    """Reader of the newest order, from the job's directory and the site's spool."""

    def __init__(
        self,
        job_dir: Path,
        restart: int,
        spool: Path | None = None,
        job_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [job_dir / ORDERS]
        self._owners = {os.geteuid(), 0}
        if spool is not None:
            self._paths.append(spool / spool_order_name(job_id))
            try:
                self._owners.add(spool.stat().st_uid)
            except OSError as error:
                log(f"spool {spool} cannot be read ({error.strerror}); orders come only from {job_dir}")
        self._restart, self._clock = restart, clock
        self._next = -1.0
        self._logged: set[str] = set()
        self.order: Order | None = None
        """The newest order: the valid order with the highest number so far."""

    def skip_wait(self) -> None:
        """Read the files at the next `poll`, even within `POLL_S` seconds of the last read."""
        self._next = -1.0

    def poll(self) -> Order | None:
        """Return the newest order. The files are read at most every `POLL_S` seconds."""
        now = self._clock()
        if now < self._next:
            return self.order
        self._next = now + POLL_S
        for path in self._paths:
            try:
                order = decode_order(read_small(path, MAX_LINE, self._owners))
            except FileNotFoundError:
                continue
            except (ValueError, OSError) as error:
                self._log_error(path, str(error))
                continue
            newer = self.order is None or order.number > self.order.number
            if newer and order.restart <= self._restart:
                self.order = order
        return self.order

    def _log_error(self, path: Path, why: str) -> None:
        text = f"order {path} is ignored: {why}"
        if text not in self._logged and len(self._logged) < 100:
            self._logged.add(text)
            log(text)


SAVE = "ones.save"
"""Request file: write a checkpoint at the next step boundary, and continue training."""
STOP = "ones.stop"
"""Request file: write a checkpoint at the next step boundary, and end the job for good."""


class OwnerRequests:
    """Reader of the request files `SAVE` and `STOP`, on rank 0. A fulfilled request is removed, so that later runs
    ignore it."""

    def __init__(self, job_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._next = -1.0

    def due(self) -> bool:
        """Return True if the files must be read now, at most every `POLL_S` seconds."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + POLL_S
        return True

    def requested(self, name: str) -> bool:
        """Return True if a request file of this name exists, and belongs to the job's owner or root."""
        try:
            return (self._job_dir / name).lstat().st_uid in (os.geteuid(), 0)
        except OSError:
            return False

    def remove(self, name: str) -> None:
        """Remove the request file of this name; a failure is logged."""
        try:
            (self._job_dir / name).unlink(missing_ok=True)
        except OSError as error:
            log(f"{name} cannot be removed ({error.strerror}); remove it yourself, or the next run obeys it again")


def previous(job_dir: Path, restart: int) -> tuple[float, bool]:
    """Return the Unix time of the previous start's last report, in this run or the run before; 0 for none. Also return
    True if that start sent no bye, or a bye with an error."""
    for number in (restart, restart - 1):
        for when, report in reversed([*read_reports(job_dir / reports_name(number), 0, 4 * MAX_LINE)]):
            return when, not isinstance(report, Bye) or report.reason == "error"
    return 0.0, False


def last_generation(job_dir: Path, term: int) -> int:
    """Return the highest generation that the two terms before `term` reported; -1 without reports."""
    reports = (read_reports(job_dir / reports_name(number)) for number in (term - 1, term - 2))
    found = (report.generation for _, report in chain(*reports) if isinstance(report, Membership))
    return max(found, default=-1)


def read_reports(path: Path, head: int = -1, tail: int = 0) -> Iterator[tuple[float, Report]]:
    """Yield (time, report) for each line of a file. With `head` and `tail`, reads only that many bytes at its beginning
    and end, since files grow for weeks. Skips malformed lines."""
    try:
        with path.open("rb") as file:
            lines = file.read(head).splitlines()
            if tail:
                file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - tail))
                lines += file.read().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ProtocolError):
            _, when, report = decode_report(line)
            yield when, report
