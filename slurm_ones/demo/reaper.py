"""Ends the processes of a demo that died: run as a program, it waits for the end of its standard input.

It needs only the standard library, and no import of ours: it starts in milliseconds and holds no memory worth the name.
A line `+PID` names the leader of a process group, `-PID` says that it has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 6.0
"""Time that a process may take to end before it is killed."""
_LOOK_S = 0.05


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if nothing of it is left to send one to."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter is how macOS names what has ended
        return False
    return True


def end(groups: Iterable[int], grace_s: float = GRACE_S) -> None:
    """End these process groups: by SIGTERM, and what is left after `grace_s` seconds by SIGKILL."""
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    until = time.monotonic() + grace_s
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def main() -> None:
    """Read lines until there are no more: whoever wrote them is gone."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end(groups)


if __name__ == "__main__":
    main()
