"""Back-off: a set of blocks is not planned again for a while, if its plan failed or its membership was soon lost.

Losses are stored in a file of the job's folder, since all blocks start again after a loss.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.membership.plan import Member

AGAIN_S, MOST_AGAIN_S = 30.0, 600.0
"""Shortest and longest wait after a failure in seconds. Each further failure doubles the wait."""
SOON_S = 60.0
"""Seconds after which the loss of a membership no longer counts as its failure. The first loss causes no wait, since
any node may fail."""
LOST = "lost.json"
_MOST_BYTES = 1 << 16
_MOST_COUNT = 100


def _name(members: Iterable[Member]) -> str:
    return "+".join(sorted(f"{member.task}.{member.restart}" for member in members))


def _wait_s(count: int) -> float:
    return min(MOST_AGAIN_S, AGAIN_S * 2.0 ** (count - 1)) if count > 0 else 0.0


class BackOff:
    """Failures known to the leader of a term: plans that failed, and memberships that were lost."""

    def __init__(self, folder: Path, array: int) -> None:
        """`folder` is the job's folder `hot/`, `array` the job's id."""
        self._path, self._array = folder / LOST, array
        self._losses = self._read()
        """Losses by the members' names: (number of losses, Unix time at which the last such membership began). Only
        memberships with new blocks count."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Failed plans by the members' names: (failures in this term, monotonic time until which the plan must
        wait)."""
        for name, (count, at) in self._losses.items():
            left_s = _wait_s(count - 1) - (time.time() - at)
            if left_s > 0:
                self._failures[name] = 0, time.monotonic() + min(left_s, MOST_AGAIN_S)
        self._began: tuple[str, float] | None = None

    def failed(self, members: Iterable[Member]) -> None:
        """Record a failed plan of these members."""
        name = _name(members)
        count = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = count, time.monotonic() + _wait_s(count)

    def refuses(self, members: Iterable[Member]) -> bool:
        """Return True if a plan of these members must wait."""
        return time.monotonic() < self._failures.get(_name(members), (0, 0.0))[1]

    def begun(self, members: Iterable[Member], grown: bool) -> None:
        """Record that these members train from now on; `grown` is True if some of them are new."""
        self._failures.clear()
        self._began = (name := _name(members)), time.monotonic()
        if grown:
            self._losses[name] = self._losses.get(name, (0, 0.0))[0] + 1, time.time()
            self._write()

    def look(self) -> None:
        """Drop the losses of the present membership after it has lasted `SOON_S` seconds."""
        if self._began is not None and time.monotonic() - self._began[1] > SOON_S:
            name, self._began = self._began[0], None
            if self._losses.pop(name, None):
                self._write()

    def stood_still(self, seconds: float) -> None:
        """Move all deadlines by the `seconds` for which this node was suspended."""
        self._failures = {name: (count, at + seconds) for name, (count, at) in self._failures.items()}
        if self._began is not None:
            self._began = self._began[0], self._began[1] + seconds

    def _read(self) -> dict[str, tuple[int, float]]:
        """Return the losses in the file; none if the file is missing or invalid."""
        try:
            data = read_json(self._path, _MOST_BYTES)
            if data["array"] != self._array:
                return {}
            found = {str(name): (int(count), float(at)) for name, (count, at) in data["losses"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return {}
        return {name: (min(count, _MOST_COUNT), at) for name, (count, at) in found.items() if count > 0}

    def _write(self) -> None:
        newest = sorted(self._losses.items(), key=lambda item: -item[1][1])[:_MOST_COUNT]
        text = json.dumps({"array": self._array, "losses": dict(newest)})
        try:
            replace_small(self._path, text.encode(), 0o600)
        except OSError:  # then the next term may plan these blocks together at once
            return
