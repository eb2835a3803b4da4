"""Log of the companion: one line per event. Repeated warnings are limited in number."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.logging import RichHandler

from slurm_ones.text import plain

LENGTH = 2_000
"""Longest line, in characters."""
FRAMES = 6
"""Number of a traceback's innermost frames that are logged."""
PERIOD_S = 3600.0
MOST = 3
"""Largest number of lines of one kind that are logged in `PERIOD_S`."""
KINDS = 1_000
"""Largest number of kinds of lines that are counted; beyond it, the kind seen longest ago is dropped."""
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Priority of each log level in the numbers of syslog(3), for `journalctl -p`."""


class OneLine(logging.Formatter):
    """Formatter that writes an event as one line of printable characters, with its traceback's innermost frames.

    With `journal`, a line begins with the priority that journald reads, and has no time, because journald adds it.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {_calls(record.exc_info[1])}"
        text = plain(f"{record.name}: {' '.join(text.split())}", LENGTH)
        if self._journal:
            return f"<{PRIORITIES.get(record.levelno, 6)}>{text}"
        return f"{self.formatTime(record)} {record.levelname} {text}"


class TerminalFormatter(logging.Formatter):
    """Formatter for a terminal, with whole tracebacks and only printable characters.

    Only an event's first line has a time and a level, so users' text with line breaks cannot look like an event.
    """

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(plain(line, LENGTH) for line in super().format(record).split("\n"))


def _calls(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    calls = " ← ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames))
    return f"{type(error).__name__}: {error}; {calls}"


@dataclass
class _LogKind:
    since: float
    passed: int = 0
    left_out: int = 0


class RateLimitFilter(logging.Filter):
    """Filter that limits warnings and errors: of each kind, it passes only the first `MOST` in each period.

    The first one of the next period says how many were left out. Two lines are of one kind if they differ only in
    numbers, such as job ids. Lower levels always pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int, str], _LogKind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        kind = (record.name, record.levelno, re.sub(r"\d+(\.\d+)?", "#", record.getMessage()[:LENGTH]))
        known = self._kinds.setdefault(kind, _LogKind(now))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        if now - known.since >= PERIOD_S:
            if known.left_out:
                record.msg = f"{record.getMessage()} ({known.left_out} more like it were left out)"
                record.args = ()
            known.since, known.passed, known.left_out = now, 0, 0
        known.passed += 1
        if known.passed <= MOST:
            return True
        known.left_out += 1
        return False


class LastErrorHandler(logging.Handler):
    """Handler that keeps the newest error for `slurm-ones status`, and counts errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text, self.time, self.count = "", 0.0, 0
        self.setFormatter(OneLine(journal=True))

    def emit(self, record: logging.LogRecord) -> None:
        self.text, self.time = self.format(record).partition(">")[2], record.created
        self.count += 1


def to_journal(stream: TextIO, environment: dict[str, str] | os._Environ[str] = os.environ) -> bool:
    """Return True if journald reads the stream (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):  # there is none, or it is closed
        return False
    return environment.get("JOURNAL_STREAM", "") == f"{found.st_dev}:{found.st_ino}"


def begin(console: Console, *, verbose: bool) -> LastErrorHandler:
    """Set up logging to stderr, in a format for the reader: a terminal, journald or a file."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(TerminalFormatter())
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(OneLine(journal=to_journal(sys.stderr)))
    handler.addFilter(RateLimitFilter())
    last = LastErrorHandler()
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler, last])
    # alembic logs every start at INFO; only `db upgrade` needs that.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return last
