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

Judge = Callable[[BaseException], tuple[int, str] | None]
"""Takes an uncaught error: the exit code and text that it shall end with, None where it says nothing special."""

_callbacks: list[AtEnd] = []
_judges: list[Judge] = []


def at_end(callback: AtEnd) -> None:
    """Have `callback` called once when the script ends; also without the node launcher, under plain
    `python`.
    """
    if not _callbacks:
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous(kind, error, trace)
            ended(*judged(error))

        sys.excepthook = hook
        atexit.register(ended, 0, "")
    _callbacks.append(callback)


def at_error(judge: Judge) -> None:
    """Have `judge` asked what an uncaught error of the script means."""
    _judges.append(judge)


def judged(error: BaseException) -> tuple[int, str]:
    """The exit code and one line for an uncaught error."""
    for judge in _judges:
        if verdict := judge(error):
            return verdict
    return 1, describe(error)


def ended(code: int, note: str) -> None:
    """The script ended; later calls have no effect."""
    callbacks = _callbacks[:]
    _callbacks.clear()
    _judges.clear()
    for callback in reversed(callbacks):
        callback(code, note)


def describe(error: BaseException) -> str:
    """One line on an error, short enough for a report."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
