"""Which process writes the checkpoint of a membership that is lost, and how the next term waits for it.

Two empty files in the job's folder: one claims, the other says that it is over. The first of the ranks that notice
writes; no other does.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

WAIT_S = 20.0
"""How long a new leader waits for a checkpoint that another process of the term before is writing. What is written
later does not count."""


def claim(folder: Path, term: int) -> bool:
    """Whether this process writes the checkpoint: nobody else does, or did."""
    if _done(folder, term).exists():
        return False
    try:
        os.close(os.open(_path(folder, term), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def done(folder: Path, term: int) -> None:
    """It is written, or cannot be."""
    with suppress(OSError):
        _path(folder, term).rename(_done(folder, term))


def wait(folder: Path, term: int) -> None:
    """Wait until the term's checkpoint is written, where one is being written. Older terms' files are removed."""
    until = time.monotonic() + WAIT_S
    while _path(folder, term).exists() and time.monotonic() < until:
        time.sleep(0.02)
    for path in (*folder.glob("rescue-*"), *folder.glob("rescued-*")):
        number = path.name.partition("-")[2]
        if number.isdigit() and int(number) < term:
            path.unlink(missing_ok=True)


def _path(folder: Path, term: int) -> Path:
    return folder / f"rescue-{term}"


def _done(folder: Path, term: int) -> Path:
    return folder / f"rescued-{term}"
