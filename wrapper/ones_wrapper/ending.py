"""What is to be done when the script ends, however it ends, with the exit code known.

`atexit` alone does not tell the exit code of `sys.exit(3)`, so the node launcher, which runs the script, says
it here.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

AtEnd = Callable[[int, str], None]
"""Takes the exit code and, after an uncaught error, its text."""

_callbacks: list[AtEnd] = []


def at_end(callback: AtEnd) -> None:
    """Have `callback` called once when the script ends; also without the node launcher, under plain
    `python`.
    """
    if not _callbacks:
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous(kind, error, trace)
            ended(1, describe(error))

        sys.excepthook = hook
        atexit.register(ended, 0, "")
    _callbacks.append(callback)


def ended(code: int, note: str) -> None:
    """The script ended; later calls have no effect."""
    callbacks = _callbacks[:]
    _callbacks.clear()
    for callback in reversed(callbacks):
        callback(code, note)


def describe(error: BaseException) -> str:
    """One line on an error, short enough for a report."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
