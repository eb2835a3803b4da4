"""One break after the other, each to the moment when all is well again."""

from __future__ import annotations

import subprocess
import time
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
    service.record = record = Record()
    recovered, faults = None, []
    try:
        service.populate()
        one.work(service)
        recovered = service.wait_healthy()
        faults = service.faults()
    except TROUBLE as error:
        faults = [f"{type(error).__name__}: {error}"]
        # What is tried next must not suffer from it.
        service.repair()
    return Outcome(one.row, one.way, record, recovered, faults)


def carry_out_task(service: ObservedService, name: str, work: Work) -> Outcome:
    """Do what the guide says one can do, and look that all is well."""
    service.record = record = Record(how="done as written")
    service.since = service.repaired_at = time.time()
    recovered, faults = None, []
    try:
        record.seen = [work(service)]
        service.repaired_at = time.time()
        recovered = service.wait_healthy()
        faults = service.faults()
    except TROUBLE as error:
        faults = [f"{type(error).__name__}: {error}"]
        service.repair()
    return Outcome(name, "", record, recovered, faults)
