"""Reads the newest checkpoint into the page cache while torch is being imported, so that loading finds it there."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from ones_wrapper.jobdir import newest_checkpoint

SHARE = 0.25
"""Most of the free memory that a checkpoint may take; a larger one would push itself out again."""

_BLOCK = 8 << 20
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def read_ahead(job_dir: Path) -> int | None:
    """Begin to read; the process that does, or None where there is nothing to read.

    A process rather than a thread: imports hold the interpreter's lock, and a fork later wants no threads.
    """
    checkpoint = newest_checkpoint(job_dir)
    if checkpoint is None:
        return None
    try:
        files = sorted(path for path in checkpoint.iterdir() if path.is_file() and not path.is_symlink())
        size = sum(path.stat().st_size for path in files)
    except OSError:
        return None
    if size > SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return None
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with(parent)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        _read(files)
    finally:
        os._exit(0)


def _read(files: list[Path]) -> None:
    handles = []
    for path in files:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        handles.append(handle)
    buffer = bytearray(_BLOCK)
    for handle in handles:  # network file systems may not heed the advice
        while os.readv(handle, [buffer]):
            pass
        os.close(handle)
