"""`python -m tests.demo --move`: while the demo's jobs train, its site moves from SQLite to a real PostgreSQL.

The companion is copied from while it runs, and stopped for the second copy and the change of its settings alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from sqlalchemy import text

from ones_db import Store
from ones_db.engine import backend_of
from ones_db.tables import METADATA
from slurm_ones.slurm.model import Job
from tests.db.server import ADMIN, Server
from tests.demo.scenario import DATABASE, Daemon, Outcome, operator, queue

TABLES = sorted(METADATA.tables)
RESIZES = 3
"""Done before the move begins, so that there is something to move."""


class Move:
    """Does it once, when enough has happened, and remembers what was there."""

    def __init__(self, daemon: Daemon, server: Server) -> None:
        self._daemon = daemon
        self._old = f"sqlite:///{daemon.cluster.scratch / DATABASE}"
        name = server.fresh()
        self._inside = f"postgresql://{ADMIN}@/{quote(name)}?host=/scratch/ones"
        self.url = server.url(name)
        """The new database, as the host sees it."""
        self.stopped_s = 0.0
        """For how long no companion ran."""
        self.moved: dict[str, int] = {}
        """Rows of each table at the switch."""
        self.during: list[int] = []
        """Jobs that ran before, and still when the companion was back."""
        # A server listens where it was told; a second name of its socket is what the cluster sees.
        os.link(server.place / ".s.PGSQL.5432", daemon.folder / ".s.PGSQL.5432")

    def look(self, outcomes: list[Outcome], jobs: dict[int, Job]) -> None:
        """Move, if it is time."""
        if self.moved:
            return
        with Store.open(self._old, "demo", read_only=True) as store:
            done = sum(resize.state == "done" for job_id in store.jobs() for resize in store.resizes(job_id))
        if done < RESIZES or sum(job.running for job in jobs.values()) < 2:
            return
        old = self._daemon.database
        self._copy(old)
        began = time.monotonic()
        self._daemon.stop()
        self._copy(old)
        self.moved = rows(self._old)
        self._daemon.database = self._inside
        self._daemon.start()
        self.stopped_s = time.monotonic() - began
        still = queue(self._daemon.cluster)
        self.during = [job_id for job_id, job in jobs.items() if job.running and still[job_id].running]

    def _copy(self, old: str) -> None:
        command = ["slurm-ones", "db", "copy", old, self._inside]
        self._daemon.cluster.run(command, user=operator(self._daemon.cluster))

    def faults(self) -> list[str]:
        """What of the move is not as it should be, once the demo is over."""
        if not self.moved:
            return ["the site was not moved: too few resizes"]
        now, left = rows(self.url), rows(self._old)
        found = [
            f"{table}: {left[table]} rows came to the file after the switch" for table in TABLES if left != self.moved
        ]
        found += [
            f"{table}: {now[table]} rows, {self.moved[table]} were moved"
            for table in TABLES
            if now[table] < self.moved[table]
        ]
        found += [
            f"{table}: nothing came after the switch"
            for table in ("throughput", "resizes")
            if now[table] == self.moved[table]
        ]
        with Store.open(self._old, "demo", read_only=True) as old, Store.open(self.url, "demo", read_only=True) as new:
            for job_id in self.during:
                before, after = old.runs(job_id), new.runs(job_id)
                if [run.start_time for run in before] != [run.start_time for run in after[: len(before)]]:
                    found.append(f"job {job_id}: its runs are not those of before")
                if not new.histories([job_id])[job_id].samples > old.histories([job_id])[job_id].samples:
                    found.append(f"job {job_id}: no sample came after the switch")
        return found

    def __str__(self) -> str:
        now = rows(self.url)
        came = ", ".join(
            f"{table} {self.moved[table]} + {now[table] - self.moved[table]}" for table in TABLES if now[table]
        )
        return (
            f"Moved to PostgreSQL while {len(self.during)} jobs ran; no companion for {self.stopped_s:.1f} s. "
            f"Rows, and those that came after: {came}."
        )


def rows(url: str) -> dict[str, int]:
    """How many rows each table has."""
    engine = backend_of(url).engine("read")
    try:
        with engine.connect() as connection:
            return {table: connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0 for table in TABLES}
    finally:
        engine.dispose()


@contextmanager
def server() -> Iterator[Server]:
    """A PostgreSQL for the time of the demo; raises `tests.db.server.NoServer`."""
    made = Server()
    try:
        made.create()
        yield made
    finally:
        made.remove()
