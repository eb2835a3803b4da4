"""One break after the other, each to the moment when all is well again."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

from ones_db import StoreError
from tests.cluster import ClusterError
from tests.guide.breaks import Break
from tests.guide.daily import Work
from tests.guide.people import NotSeen
from tests.guide.scene import Record, Scene

TROUBLE = (NotSeen, ClusterError, StoreError, AssertionError, LookupError, OSError, subprocess.TimeoutExpired)


@dataclass(frozen=True)
class Outcome:
    """What came of a break."""

    row: str
    way: str
    record: Record
    recovered_s: float | None
    """Seconds from the break, or from what people did about it, to a healthy tick; None where there was none."""
    faults: list[str] = field(default_factory=list)
    """What was wrong, in words."""

    @property
    def name(self) -> str:
        """Row and way."""
        return f"{self.row}: {self.way}" if self.way else self.row

    @property
    def fine(self) -> bool:
        return not self.faults and self.recovered_s is not None


def carry_out(scene: Scene, one: Break) -> Outcome:
    """Break it, look for what the guide says, wait until it is well, and look at all jobs."""
    scene.record = record = Record()
    recovered, faults = None, []
    try:
        scene.populate()
        one.work(scene)
        recovered = scene.well()
        faults = scene.faults()
    except TROUBLE as error:
        faults = [f"{type(error).__name__}: {error}"]
        # What is tried next must not suffer from it.
        scene.put_right()
    return Outcome(one.row, one.way, record, recovered, faults)


def carry_out_task(scene: Scene, name: str, work: Work) -> Outcome:
    """Do what the guide says one can do, and look that all is well."""
    scene.record = record = Record(how="done as written")
    scene.since = scene.mended_at = time.time()
    recovered, faults = None, []
    try:
        record.seen = [work(scene)]
        scene.mended_at = time.time()
        recovered = scene.well()
        faults = scene.faults()
    except TROUBLE as error:
        faults = [f"{type(error).__name__}: {error}"]
        scene.put_right()
    return Outcome(name, "", record, recovered, faults)
