"""How long the same blocks are not planned together again: after a plan of theirs failed, and after their membership
was lost soon, which is counted in the job's folder, since all of them start again then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from ones_wrapper.files.small_files import read_small, replace_small
from ones_wrapper.membership.plan import Member

AGAIN_S, MOST_AGAIN_S = 30.0, 600.0
"""How long after a failure. It doubles with each, up to the latter."""
SOON_S = 60.0
"""A membership that lasted so long is no failure. Of those that did not, one is free: a node may go at any time."""
LOST = "lost.json"
_MOST_BYTES = 1 << 16
_MOST_COUNT = 100


def _name(members: Iterable[Member]) -> str:
    return "+".join(sorted(f"{member.task}.{member.restart}" for member in members))


def _wait_s(count: int) -> float:
    return min(MOST_AGAIN_S, AGAIN_S * 2.0 ** (count - 1)) if count > 0 else 0.0


class BackOff:
    """Of the leader of one term."""

    def __init__(self, folder: Path | None = None, array: int = 0) -> None:
        """`folder` and `array` are the job's; nothing outlives the term without."""
        self._path, self._array = folder / LOST if folder is not None else None, array
        self._losses = self._read()
        """Of memberships that took blocks in: how often they began and did not last, and Unix time of the last."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Of blocks whose plan failed in this term: how often, and until when they wait."""
        for name, (count, at) in self._losses.items():
            left_s = _wait_s(count - 1) - (time.time() - at)
            if left_s > 0:
                self._failures[name] = 0, time.monotonic() + min(left_s, MOST_AGAIN_S)
        self._began: tuple[str, float] | None = None

    def failed(self, members: Iterable[Member]) -> None:
        """Their plan came to nothing."""
        name = _name(members)
        count = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = count, time.monotonic() + _wait_s(count)

    def refuses(self, members: Iterable[Member]) -> bool:
        """Whether they must wait."""
        return time.monotonic() < self._failures.get(_name(members), (0, 0.0))[1]

    def begun(self, members: Iterable[Member], grown: bool) -> None:
        """They train now; `grown` if some of them are new."""
        self._failures.clear()
        self._began = (name := _name(members)), time.monotonic()
        if grown:
            self._losses[name] = self._losses.get(name, (0, 0.0))[0] + 1, time.time()
            self._write()

    def look(self) -> None:
        """Those who train may have done so long enough."""
        if self._began is not None and time.monotonic() - self._began[1] > SOON_S:
            name, self._began = self._began[0], None
            if self._losses.pop(name, None):
                self._write()

    def stood_still(self, seconds: float) -> None:
        """The node did, for so long."""
        self._failures = {name: (count, at + seconds) for name, (count, at) in self._failures.items()}
        if self._began is not None:
            self._began = self._began[0], self._began[1] + seconds

    def _read(self) -> dict[str, tuple[int, float]]:
        """What the file says; nothing if there is none, or none that is sound."""
        if self._path is None:
            return {}
        try:
            data = json.loads(read_small(self._path, _MOST_BYTES))
            if data["array"] != self._array:
                return {}
            found = {str(name): (int(count), float(at)) for name, (count, at) in data["losses"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return {}
        return {name: (min(count, _MOST_COUNT), at) for name, (count, at) in found.items() if count > 0}

    def _write(self) -> None:
        if self._path is None:
            return
        newest = sorted(self._losses.items(), key=lambda item: -item[1][1])[:_MOST_COUNT]
        text = json.dumps({"array": self._array, "losses": dict(newest)})
        try:
            replace_small(self._path, text.encode(), 0o600)
        except OSError:  # they are planned again at once, as those that nobody knows
            return
