"""One break after the other, each to the moment when all is well again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ones_db import StoreError
from tests.cluster import ClusterError
from tests.guide.breaks import Break
from tests.guide.daily import Work
from tests.guide.operators import NotSeen
from tests.guide.service import ObservedService, Record

TROUBLE = (NotSeen, ClusterError, StoreError, AssertionError, LookupError, OSError, subprocess.TimeoutExpired)


@dataclass(frozen=True)
class Outcome:
    row: str
    way: str
    record: Record
    recovered_s: float | None
    """Seconds from the break, or from what people did about it, to a healthy tick; None where there was none."""
    faults: list[str] = field(default_factory=list)
    """What was wrong, in words."""

    @property
    def name(self) -> str:
        return f"{self.row}: {self.way}" if self.way else self.row

    @property
    def fine(self) -> bool:
        return not self.faults and self.recovered_s is not None


def carry_out(service: ObservedService, one: Break) -> Outcome:
    """Break it, look for what the guide says, wait until it is well, and look at all jobs."""

    def work() -> None:
        service.populate()
        one.work(service)

    return _outcome(service, one.row, one.way, Record(), work)


def carry_out_task(service: ObservedService, name: str, work: Work) -> Outcome:
    """Do what the guide says one can do, and look that all is well."""

    def done() -> None:
        service.since = service.repaired_at = time.time()
        service.record.seen = [work(service)]
        service.repaired_at = time.time()

    return _outcome(service, name, "", Record(how="done as written"), done)


def _outcome(service: ObservedService, row: str, way: str, record: Record, work: Callable[[], None]) -> Outcome:
    service.record = record
    recovered, faults = None, []
    try:
        work()
        recovered = service.wait_healthy()
        faults = service.faults()
    except TROUBLE as error:
        faults = [f"{type(error).__name__}: {error}"]
        # What is tried next must not suffer from it.
        service.repair()
    return Outcome(row, way, record, recovered, faults)
