"""Program that ends a demo's processes if the demo dies: then the reaper's standard input closes.

It needs only the standard library, so it starts in milliseconds and uses little memory. It reads lines: `+PID` adds a
process group, given its leader, and `-PID` removes it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 6.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK_S = 0.05


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group. Return False if all its processes have ended."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter is how macOS names what has ended
        return False
    return True


def end(groups: Iterable[int], grace_s: float = GRACE_S) -> None:
    """End these process groups by SIGTERM, then by SIGKILL `grace_s` seconds later."""
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    until = time.monotonic() + grace_s
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def main() -> None:
    """Read lines until the demo has ended or died, then end the remaining process groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end(groups)


if __name__ == "__main__":
    main()
