"""The database, with everything that can go wrong at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from ones_db import ResizeRecord, Store, StoreBusy, StoreError, StoreLost
from slurm_ones.simulate.faults.chance import READS, Chance
from slurm_ones.simulate.faults.kinds import Kind
from slurm_ones.simulate.faults.watch import Watch


class FaultyStore(Store):
    """A store over a real database. `chance` and `watch` are set once it is open."""

    chance: Chance | None = None
    watch: Watch | None = None

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        if self.chance is not None:
            self.chance.step("read the database", reads=True)
            if self.chance.strikes(Kind.STORE_LOST, READS):
                raise StoreLost("the server closed the connection")
        with super()._read() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        chance = self.chance
        if chance is None:
            with super()._write() as connection:
                yield connection
            return
        chance.step("before a write to the database")
        if chance.strikes(Kind.STORE_BUSY):
            raise StoreBusy("locked by another process")
        if chance.strikes(Kind.STORE_LOST):
            raise StoreLost("the server closed the connection")
        with super()._write() as connection:
            yield connection
            if chance.strikes(Kind.STORE_FULL):
                raise StoreError("no space is left on its disk; nothing of this call was stored")
        if chance.strikes(Kind.STORE_LOST_DONE):
            raise StoreLost("the server closed the connection at the commit")
        chance.step("after a write to the database")

    def begin_resize(self, record: ResizeRecord) -> ResizeRecord:
        if self.watch is not None:
            self.watch.begins(record)
        made = super().begin_resize(record)
        self._tell(made)
        return made

    def step_resize(self, resize_id: int, state: str, **told: Any) -> ResizeRecord:
        made = super().step_resize(resize_id, state, **told)
        self._tell(made)
        return made

    def end_resize(
        self, resize_id: int, state: str, outcome: str, time: float, pause_s: float | None = None
    ) -> ResizeRecord:
        made = super().end_resize(resize_id, state, outcome, time, pause_s)
        self._tell(made)
        return made

    def _tell(self, record: ResizeRecord) -> None:
        if self.chance is not None:
            self.chance.told(f"    job {record.job_id}: {record.state} {record.outcome}")
