"""Where faults are injected: one source of random numbers a run, so that a seed gives the same run again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

from tests.faults.kinds import FaultKind

READS = 0.02
"""Faults at steps that only read are this much rarer than at those that change something, of which there are fewer."""


class Crash(BaseException):
    """SIGKILL: nothing in the companion catches it."""


class FaultInjector:
    """Decides at each step what goes wrong there, and counts what did."""

    def __init__(self, seed: int, rates: Mapping[FaultKind, float]) -> None:
        """`rates` are shares of the changing steps at which each kind is injected."""
        self.random = random.Random(seed)
        self.injected: Counter[FaultKind] = Counter()
        self.enabled = False
        """Faults happen. Off before the run, and when it is to come to rest."""
        self.interfere: Callable[[int | None], None] = lambda job_id: None
        """Lets somebody else act at this very moment, on that job where one is given."""
        self.trace: Callable[[str], None] = lambda text: None
        """Called with each fault and step, for people who replay a seed."""
        self.on_kill: Callable[[], None] = lambda: None
        """Called before a companion is killed at a step."""
        self._rates = rates
        self._interfering = False

    def injects(self, kind: FaultKind, share: float = 1.0) -> bool:
        """Whether this kind is injected now. It is counted: the caller makes it happen."""
        rate = self._rates.get(kind, 0.0)
        if not self.enabled or not rate or self.random.random() >= rate * share:
            return False
        self.count(kind)
        return True

    def count(self, kind: FaultKind, what: object = "") -> None:
        self.injected[kind] += 1
        self.trace(f"*** {kind.value} {what}")

    def step(self, name: str, job_id: int | None = None, *, reads: bool = False) -> None:
        """A point between two steps of the companion, at which it may be killed or others may act."""
        share = READS if reads else 1.0
        if not reads:
            self.trace(f"    {name}")
            if self.enabled and not self._interfering:
                self._interfering = True
                try:
                    self.interfere(job_id)
                finally:
                    self._interfering = False
        if self.injects(FaultKind.CRASH, share):
            self.on_kill()
            raise Crash(name)
