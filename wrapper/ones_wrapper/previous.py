"""What the start before this one left: when it was last heard of, and whether it failed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ones_wrapper.protocol import MAX_LINE, Bye, ProtocolError, decode_report, reports_name


@dataclass(frozen=True)
class Previous:
    """The last start's last report."""

    time: float
    """Unix time."""
    failed: bool
    """It said no goodbye, or an error's: a rank died, a node, or the network."""


def previous(job_dir: Path, restart: int) -> Previous | None:
    """The start before this one, of this run or of the one before; None where there was none that left a report."""
    for number in (restart, restart - 1):
        found = _last(job_dir / reports_name(number))
        if found is not None:
            return found
    return None


def _last(path: Path) -> Previous | None:
    """Of the last whole line of a report file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * MAX_LINE))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    for line in reversed(lines):
        try:
            if line.endswith(b"\n"):
                _, time, report = decode_report(line)
                return Previous(time, not isinstance(report, Bye) or report.reason == "error")
        except ProtocolError:
            continue
    return None
