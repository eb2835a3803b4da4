"""Program that ends a demo's processes after the demo died: it waits for the end of its standard input.

It needs only the standard library, so that it starts in milliseconds and uses little memory. A line `+PID` registers a
process group's leader, `-PID` removes it.
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
    """Send a signal to a process group; return False if none of its processes are left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter is how macOS names what has ended
        return False
    return True


def end(groups: Iterable[int], grace_s: float = GRACE_S) -> None:
    """End these process groups by SIGTERM, and after `grace_s` seconds by SIGKILL."""
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    until = time.monotonic() + grace_s
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def main() -> None:
    """Read lines until the end of input, when the writer is gone; then end all registered groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end(groups)


if __name__ == "__main__":
    main()
