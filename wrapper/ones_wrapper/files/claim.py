"""Claims on a job's directory: only one `ones-run`, or one script that `ones-run` did not start, trains there at a
time.

Two trainings in one directory would mix their reports and overwrite each other's checkpoints. So a training first
claims the directory by a line in a file. A second training ends before it changes anything. A claim ends with its
process: a POSIX lock, also on network file systems, shows if the process lives. On a file system without locks, or with
locks that only one host sees, the holder renews the claim file's time instead. Imports no torch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from ones_wrapper.files.job_lock import WAIT_S, try_lock

CLAIM = ".claim"
BEAT_S = 2.0
"""Seconds between two renewals of a claim file's time by its holder."""
WATCH_S = 3 * BEAT_S
"""Seconds without a renewal after which a holder counts as ended, unless a lock shows that it lives."""
_SETTLE_S = 0.5


class ClaimedError(Exception):
    """Error: another training holds the directory. The message says which, and what to do."""


@dataclass(frozen=True)
class Holder:
    """A process that trains in a directory, or whose ranks do."""

    job_id: int
    restart: int
    step: str
    """Slurm step of the process; empty in the batch script and outside Slurm."""
    host: str
    pid: int

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Holder:
        """Return this process as a holder."""
        job_id, restart = (int(env.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
        step = env.get("SLURM_STEP_ID", "")
        return cls(job_id, restart, step if step.isdigit() else "", socket.gethostname(), os.getpid())

    def earlier_than(self, other: Holder) -> bool:
        """Return True if this holder is an earlier run of the same job as `other`; Slurm has then ended it."""
        return bool(self.job_id) and self.job_id == other.job_id and self.restart < other.restart

    def line(self) -> str:
        return f"{self.job_id} {self.restart} {self.step or '-'} {self.host} {self.pid}\n"

    @classmethod
    def of(cls, line: str) -> Holder | None:
        """Return the holder in a claim file's line; None for a malformed line."""
        words = line.split()
        if len(words) != 5 or not all(word.isdigit() for word in (words[0], words[1], words[4])):
            return None
        return cls(int(words[0]), int(words[1]), words[2].strip("-"), words[3], int(words[4]))


class Claim:
    """Claim of this process on a directory. It ends by `release`, or with the process."""

    def __init__(self, handle: int | None, holder: Holder) -> None:
        self._handle, self._holder = handle, holder
        self._over = Event()
        if handle is not None:
            Thread(target=self._beat, name="ones-claim", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(OSError):
                if self._handle is not None:
                    os.utime(self._handle)

    def release(self) -> None:
        """Release the directory at once."""
        handle, self._handle = self._handle, None
        self._over.set()
        if handle is not None:
            with suppress(OSError):
                if _holder_in(handle) == self._holder:
                    os.ftruncate(handle, 0)
            os.close(handle)


def take_claim(directory: Path, holder: Holder, name: str = CLAIM) -> Claim:
    """Claim the directory. The present holder has `WAIT_S` seconds to end. Raises `ClaimedError`.

    An earlier run of the same job does not prevent the claim: Slurm has ended it, even if its node does not know yet.
    If the claim file cannot be opened, there is no claim, and training continues.
    """
    path, until = directory / name, time.monotonic() + WAIT_S
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError:
            return Claim(None, holder)
        locked, other = try_lock(handle), _holder_in(handle)
        free = other is None or other.earlier_than(holder)
        if locked and (free or (other is not None and other.host == holder.host)):
            break
        late = time.monotonic() >= until
        if locked is False and (not late or not free or other is None):
            os.close(handle)
            if late:
                raise ClaimedError(_refusal(directory / name, other, holder))
            time.sleep(0.1)
            continue
        if other is not None and not free:
            # Locks may reach no other host, or not exist. This process must hold none while `_beats` opens the file: a
            # lock ends with the first close.
            os.close(handle)
            if _beats(path, WATCH_S):
                raise ClaimedError(_refusal(path, other, holder))
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            if try_lock(handle) is False:
                os.close(handle)
                continue
        break
    with suppress(OSError):  # a full disk: then only the lock counts
        os.ftruncate(handle, 0)
        os.pwrite(handle, holder.line().encode(), 0)
    if locked is None:
        time.sleep(_SETTLE_S)  # another process may have found the directory free in the same moment
        other = _holder_in(handle)
        if other is not None and other != holder:
            os.close(handle)
            raise ClaimedError(_refusal(path, other, holder))
    return Claim(handle, holder)


def _holder_in(handle: int) -> Holder | None:
    try:
        return Holder.of(os.pread(handle, 400, 0).decode(errors="replace"))
    except OSError:
        return None


def _beats(path: Path, seconds: float) -> bool:
    """Return True if a holder renews the file's time. Each check opens the file, since on NFS only an open asks the
    server. Checks are counted rather than seconds, so that a pause of the machine does not end a claim."""
    first = _time(path)
    for _ in range(20):
        time.sleep(seconds / 20)
        if _time(path) != first:
            return True
    return False


def _time(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _refusal(path: Path, other: Holder | None, mine: Holder) -> str:
    directory = path.parent
    if other is None:
        return f"another training holds {directory} ({path.name}): set ONES_JOB_DIR to another directory"
    where = f"process {other.pid} on {other.host}"
    where += f", step {other.step}" if other.step else ""
    if other.job_id and other.job_id == mine.job_id:
        return (
            f"job {other.job_id} trains in {directory} already ({where}), and a second training would overwrite its "
            "checkpoints. Start the script once, with ones-run in the batch script and no srun before it. For two "
            "trainings in one job set ONES_JOB_DIR to another directory for each"
        )
    who = f"job {other.job_id} is running" if other.job_id else "a training runs"
    return (
        f"{who} in {directory} ({where}), and two cannot share it: end that one, or set ONES_JOB_DIR to another "
        "directory"
    )
