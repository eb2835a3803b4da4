"""A drained job waits for its requeue."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ones_wrapper.boundary import Boundary
from ones_wrapper.protocol import DRAIN_WAIT_S
from ones_wrapper.signals import FLAGS

POLL_S = 0.1
"""It looks this often for a signal, for a newer order, or for the end of its patience."""


def wait_for_requeue(boundary: Boundary, number: int, goodbye: Callable[[], None]) -> str:
    """Wait after order `number`: "" when a signal asks to stop, else why to carry on. Collective.

    At a requeue `srun` leaves the ranks hardly a moment, so each calls `goodbye` as soon as it hears the signal.
    """
    wait_s = float(os.environ.get("ONES_DRAIN_WAIT_S") or DRAIN_WAIT_S)
    started = time.monotonic()
    while True:
        over = time.monotonic() - started > wait_s
        stop, carry_on = boundary.wait(number, over)
        if stop:
            return ""
        if carry_on:
            return "no requeue came" if over else "a newer order came"
        until = time.monotonic() + POLL_S
        while time.monotonic() < until and not FLAGS.stop:
            time.sleep(0.005)
        if FLAGS.stop:
            goodbye()
