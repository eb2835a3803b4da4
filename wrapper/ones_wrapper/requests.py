"""What the job's owner asks for by touching a file in the job's directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ones_wrapper.mailbox import POLL_S, say

SAVE = "ones.save"
"""Take a checkpoint at the next step boundary, and train on."""
STOP = "ones.stop"
"""Take a checkpoint at the next step boundary, and end the job for good."""


class Requests:
    """Rank 0's look at the two files. An answered request is removed, so that the next run does not obey it again."""

    def __init__(self, job_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._job_dir = job_dir
        self._clock = clock
        self._next = -1.0

    def due(self) -> bool:
        """Whether it is time for another look: not at each step, for the file system's sake."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + POLL_S
        return True

    def asked(self, name: str) -> bool:
        """Whether the file is there, and is the owner's or root's."""
        try:
            return (self._job_dir / name).lstat().st_uid in (os.geteuid(), 0)
        except OSError:
            return False

    def answered(self, name: str) -> None:
        """Remove the file."""
        try:
            (self._job_dir / name).unlink(missing_ok=True)
        except OSError as error:
            say(f"{name} cannot be removed ({error.strerror}); remove it yourself, or the next run obeys it again")
