"""One job at a time in a directory: two would clear away and replace each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

LOCK = ".lock"
WAIT_S = 5.0
"""How long a run that is just ending may still hold the directory."""


class InUseError(Exception):
    """Another job runs in this directory; the message says which, and what to do."""


def hold(job_dir: Path, job_id: int) -> int | None:
    """Hold the directory until this process ends, or until the handle returned is closed; None where it cannot be.

    Raises `InUseError` where another job holds it. A lock is refused to nobody without need: where the file system
    has none, and where it is this very job's (an earlier run on a node that died, say), this run goes on without.
    It is one of POSIX, which network file systems know, too, and which forked processes do not keep.
    """
    try:
        handle = os.open(job_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        if _lock(handle):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{job_id} {socket.gethostname()} {os.getpid()}\n".encode(), 0)
            return handle
        said = os.pread(handle, 200, 0).decode(errors="replace").split()
    except OSError:
        os.close(handle)  # which gives the lock back, if it was there
        return None
    os.close(handle)
    holder, host, process = said if len(said) == 3 else ("?", "?", "?")
    if job_id and holder == str(job_id):
        return None
    raise InUseError(
        f"job {holder} is running in {job_dir} (process {process} on {host}), and two jobs cannot share it: end that "
        f"one, or set ONES_JOB_DIR to another directory. If it has ended, remove {job_dir / LOCK}"
    )


def _lock(handle: int) -> bool:
    """Whether it is ours now; OSError where there are no locks."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # POSIX allows either
            if time.monotonic() >= until:
                return False
        time.sleep(0.1)
