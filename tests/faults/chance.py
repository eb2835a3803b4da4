"""Where faults strike: one source of chance a run, so that a seed gives the same run again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

from tests.faults.kinds import Kind

READS = 0.02
"""A step that only looks is struck this much more rarely than one that changes something: there are many more."""


class Crash(BaseException):
    """SIGKILL: nothing in the companion catches it."""


class Chance:
    """Decides at each step what goes wrong there, and counts what did."""

    def __init__(self, seed: int, rates: Mapping[Kind, float]) -> None:
        """`rates` are shares of the changing steps at which each kind strikes."""
        self.random = random.Random(seed)
        self.struck: Counter[Kind] = Counter()
        self.on = False
        """Faults happen. Off before the run and in the calm after it."""
        self.meddle: Callable[[int | None], None] = lambda job_id: None
        """Lets somebody else act at this very moment, on that job rather than another."""
        self.told: Callable[[str], None] = lambda text: None
        """Hears of each fault and step, for people who replay a seed."""
        self.dies: Callable[[], None] = lambda: None
        """Told before a companion is killed at a step."""
        self._rates = rates
        self._meddling = False

    def strikes(self, kind: Kind, share: float = 1.0) -> bool:
        """Whether this kind strikes now. It is counted: whoever asks lets it happen."""
        rate = self._rates.get(kind, 0.0)
        if not self.on or not rate or self.random.random() >= rate * share:
            return False
        self.count(kind)
        return True

    def count(self, kind: Kind, what: object = "") -> None:
        """It happened."""
        self.struck[kind] += 1
        self.told(f"*** {kind.value} {what}")

    def step(self, name: str, job_id: int | None = None, *, reads: bool = False) -> None:
        """A point between two steps of the companion, at which it may be killed or others may act."""
        share = READS if reads else 1.0
        if not reads:
            self.told(f"    {name}")
            if self.on and not self._meddling:
                self._meddling = True
                try:
                    self.meddle(job_id)
                finally:
                    self._meddling = False
        if self.strikes(Kind.CRASH, share):
            self.dies()
            raise Crash(name)
