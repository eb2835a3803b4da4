"""Signals set a flag; the ranks act on it together at the next step boundary.

SIGTERM and SIGUSR2 ask to stop after a checkpoint (`srun` passes on the second but not the first), SIGUSR1
asks for a checkpoint alone. Slurm may send the same signal to launcher and ranks, so each may come twice.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGUSR2)
CHECKPOINT = (signal.SIGUSR1,)


class Flags:
    """What has been asked for by signals since it was last acted on."""

    def __init__(self) -> None:
        self.stop = False
        self.checkpoint = False
        self.armed = False
        """Whether a step boundary will come that looks at the flags; before that, a stop ends the process at
        once.
        """

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler: nothing but flags, since it may run between any two lines of the script."""
        if number in CHECKPOINT:
            self.checkpoint = True
            return
        self.stop = True
        if not self.armed:
            os._exit(128 + signal.SIGTERM)

    def install(self) -> None:
        """Take over the signals of this process (main thread only)."""
        for number in STOP + CHECKPOINT:
            signal.signal(number, self.handle)


FLAGS = Flags()
"""The process's own: signal handlers belong to a process."""
