"""Signals set a flag; the ranks act on it together at the next step boundary.

SIGTERM and SIGUSR2 ask to stop after a checkpoint (`srun` passes on the second but not the first), SIGUSR1
asks for a checkpoint alone. Slurm may send a signal to launcher and ranks alike, so each may come twice.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from ones_wrapper.codes import STOP_CODE
from ones_wrapper.protocol import LOOK_SIGNAL

__all__ = ["CHECKPOINT", "FLAGS", "LOOK", "STOP", "STOP_CODE", "Flags"]

STOP = (signal.SIGTERM, signal.SIGUSR2)
CHECKPOINT = (signal.SIGUSR1,)
LOOK = (signal.Signals[f"SIG{LOOK_SIGNAL}"],)
"""There is an order: look for it now."""

QUIET_S = 2.0
"""A request that comes this soon after a checkpoint is the second copy of the one it answered."""


class Flags:
    """What has been asked for by signals since it was last acted on."""

    def __init__(self) -> None:
        self.stop = False
        self.checkpoint = self.look = False
        self.armed = False
        """Whether a step boundary will come that looks at the flags; where none will, a stop ends the
        script.
        """
        self._quiet_until = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler: little but flags, since it may run between any two lines of the script."""
        if number in CHECKPOINT:
            self.checkpoint = self.checkpoint or time.monotonic() > self._quiet_until
            return
        if number in LOOK:
            self.look = True
            return
        self.stop = True
        if not self.armed:
            raise SystemExit(STOP_CODE)

    def checkpoint_taken(self) -> None:
        """The request is answered."""
        self.checkpoint = False
        self._quiet_until = time.monotonic() + QUIET_S

    def install(self) -> None:
        """Take over the signals of this process (main thread only)."""
        for number in STOP + CHECKPOINT + LOOK:
            signal.signal(number, self.handle)


FLAGS = Flags()
"""The process's own: signal handlers belong to a process."""
