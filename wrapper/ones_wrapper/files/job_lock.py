"""Lock of a job's directory: two jobs in it would remove and replace each other's files.

Rank 0 holds this lock, in addition to the claim of `ones-run`, since ranks may outlive a killed `ones-run`, for example
under `mpirun`. Imports only the standard library, since `ones-run` imports this module before torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

LOCK = ".lock"
WAIT_S = 5.0
"""Seconds that a new holder waits for the end of a run that still holds the directory."""


class InUseError(Exception):
    """Error: another job runs in this directory. The message says which job, and what to do."""


def lock_directory(job_dir: Path, job_id: int, wait_s: float = WAIT_S) -> int | None:
    """Lock the directory until this process ends, or until the returned handle is closed. The present holder has
    `wait_s` seconds to end.

    Returns None, without a lock, if the file system has no locks, or if an earlier run of this job holds it. Raises
    `InUseError` if another job has the lock. It is a POSIX lock: network file systems support it, and forked processes
    do not inherit it.
    """
    try:
        handle = os.open(job_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        if _lock(handle, wait_s):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{job_id} {socket.gethostname()} {os.getpid()}\n".encode(), 0)
            return handle
        held_by, host, process = _held_by(handle)
    except OSError:
        os.close(handle)  # this releases the lock, if it was taken
        return None
    os.close(handle)
    if job_id and held_by == str(job_id):
        return None
    raise InUseError(
        f"job {held_by} is running in {job_dir} (process {process} on {host}), and two jobs cannot share it: end that "
        f"one, or set ONES_JOB_DIR to another directory. If it has ended, remove {job_dir / LOCK}"
    )


def holder(job_dir: Path, wait_s: float = 0.0) -> str:
    """Return a text with job, process and host that hold the directory. Empty if the lock is free within `wait_s`
    seconds, or if the lock cannot be read. Changes nothing in the directory."""
    try:
        handle = os.open(job_dir / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return "" if _lock(handle, wait_s) else "job {0} (process {2} on {1})".format(*_held_by(handle))
    except OSError:
        return ""
    finally:
        os.close(handle)


def last_job(job_dir: Path) -> int:
    """Return the id of the job that held the directory last; 0 if unknown."""
    try:
        word = (job_dir / LOCK).read_text(errors="replace").split()[0]
        return int(word) if word.isascii() and word.isdigit() and len(word) < 16 else 0
    except (OSError, IndexError):
        return 0


def _held_by(handle: int) -> list[str]:
    line = os.pread(handle, 200, 0).decode(errors="replace").split()
    return line if len(line) == 3 else ["?", "?", "?"]


def try_lock(handle: int) -> bool | None:
    """Try to take the lock; return True on success, None if the file system has no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    except OSError:
        return None


def _lock(handle: int, wait_s: float) -> bool:
    """Take the lock within `wait_s` seconds; return True on success. Raises OSError if the file system has no locks."""
    until = time.monotonic() + wait_s
    while (locked := try_lock(handle)) is False and time.monotonic() < until:
        time.sleep(0.1)
    if locked is None:
        raise OSError("no locks")
    return locked
