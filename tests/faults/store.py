"""The database, with everything that can go wrong at it."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from ones_db import ResizeRecord, Store, StoreBusy, StoreError, StoreLost, migrate
from ones_db.reasons import Reason
from slurm_ones.simulate.run import fast_directory
from tests.faults.injector import READS, FaultInjector
from tests.faults.kinds import FaultKind
from tests.faults.safety import SafetyChecker


class FaultyStore(Store):
    """A store over a real database. `injector` and `checker` are set once it is open."""

    injector: FaultInjector | None = None
    checker: SafetyChecker | None = None

    _recalls = False

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        if not self._recalls:
            self._strike_reader()
        with super()._read() as connection:
            yield connection

    def _recall(self, question: str, about: Collection[Any], ask: Callable[..., Any]) -> dict[Any, Any]:
        # Also if nothing is read: else each seed would stand for another run than it was kept for.
        self._strike_reader()
        self._recalls = True
        try:
            return super()._recall(question, about, ask)
        finally:
            self._recalls = False

    def _strike_reader(self) -> None:
        if self.injector is not None:
            self.injector.step("read the database", reads=True)
            if self.injector.injects(FaultKind.STORE_LOST, READS):
                raise StoreLost("the server closed the connection")

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        injector = self.injector
        if injector is None:
            with super()._write() as connection:
                yield connection
            return
        injector.step("before a write to the database")
        if injector.injects(FaultKind.STORE_BUSY):
            raise StoreBusy("locked by another process")
        if injector.injects(FaultKind.STORE_LOST):
            raise StoreLost("the server closed the connection")
        with super()._write() as connection:
            yield connection
            if injector.injects(FaultKind.STORE_FULL):
                raise StoreError("no space is left on its disk; nothing of this call was stored")
        if injector.injects(FaultKind.STORE_LOST_DONE):
            raise StoreLost("the server closed the connection at the commit")
        injector.step("after a write to the database")

    def begin_resize(self, record: ResizeRecord) -> ResizeRecord:
        if self.checker is not None:
            self.checker.check_begin(record)
        made = super().begin_resize(record)
        self._trace(made)
        return made

    def step_resize(self, resize_id: int, state: str, **values: Any) -> ResizeRecord:
        made = super().step_resize(resize_id, state, **values)
        self._trace(made)
        return made

    def end_resize(
        self, resize_id: int, state: str, outcome: Reason, time: float, pause_s: float | None = None
    ) -> ResizeRecord:
        made = super().end_resize(resize_id, state, outcome, time, pause_s)
        self._trace(made)
        return made

    def _trace(self, record: ResizeRecord) -> None:
        if self.injector is not None:
            self.injector.trace(f"    job {record.job_id}: {record.stage} {record.outcome!s}")


@cache
def empty_database() -> Path:
    """A database with its tables, made once a process."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-ones-faults-", dir=fast_directory()))
    migrate.upgrade(f"sqlite:///{directory / 'empty.sqlite'}")
    with closing(sqlite3.connect(directory / "empty.sqlite")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return directory / "empty.sqlite"
