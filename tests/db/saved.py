"""Databases of released schemas, saved with the rows of a small site: `python -m tests.db.saved` adds those of the
present one, to be run once for each release that has a new schema."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from ones_db import (
    SCHEMA_REVISION,
    AccountingJob,
    ActionRecord,
    AlternativeRecord,
    BlockRecord,
    HealthRecord,
    NodeRecord,
    Store,
    migrate,
)
from ones_db.leaders import begin_term
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import Batch, Checkpoint, Membership
from tests.db.make import ask, decision, job, line, opened, report, resized_job, run, said
from tests.db.server import Server

SAVED = Path(__file__).with_name("saved")


def site(url: str) -> None:
    """A small site with something in every table that its schema has."""
    with Store.open(url, "gres") as store:
        resized_job(store, 7)
        resized_job(store, 8, "bob")
        store.record_jobs([job(9, name="Zoë", state="PENDING", elastic=False, refusal=said("no room"))])
        checkpoint = line(32, Checkpoint("step-21", 2, 0, 21, 2**40, 1.25, order=9, stall_s=0.5), 2610.0)
        batch = line(33, Batch(22, 128, 2.0, order=9, passes=2, ramp=100), 2611.0)
        member = line(34, Membership(1, (0,), (0,), 1, 1, 1, 22, 128, 0.25, why="first"), 2612.0)
        report(store, 7, 0, checkpoints=[checkpoint], batches=[batch], members=[member], offset=200, number=34)
        store.record_blocks([BlockRecord(7, 0, 0, 7, Shape(1, 1), ("n1",), "COMPLETED", 2000.0, 2900.0)])
        store.add_decision(decision(2400.0, 7, 8))
        store.set_deferral(9, 5000.0)
        store.record_nodes(2000.0, [NodeRecord("n1", "UP", True, 4, "gpu")])
        store.add_action(ActionRecord(2000.0, "ops", "run --act"))
        store.record_health(HealthRecord(2000.0, "act", 30.0))
        ended = job(11, submit_time=100.0, state="COMPLETED", end_time=300.0)
        store.add_accounting([AccountingJob(ended, (run(11, start_time=200.0, end_time=300.0),))])
        weighed = (AlternativeRecord(Shape(1, 4), 256, 2.0), AlternativeRecord(PARKED, 0, 1.0))
        (given,) = decision(2450.0, 7).jobs
        store.add_decision(decision(2450.0, jobs=(replace(given, alternatives=weighed),)))
    with opened(url, write=True) as connection:
        begin_term(connection, 1, "host:1", 2000.0)
        key = connection.exec_driver_sql("SELECT min(id) FROM runs").scalar()
        connection.exec_driver_sql(f"INSERT INTO rollups VALUES ({key}, 60.0, 3)")


def save(server: Server) -> None:
    """Write both files of the present schema."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ones.sqlite"
        url = f"sqlite:///{file}"
        migrate.upgrade(url)
        site(url)
        # Into the file itself, out of the log beside it.
        ask(url, "PRAGMA user_version")
        shutil.copy(file, SAVED / f"{SCHEMA_REVISION}.sqlite")
    name = server.fresh()
    migrate.upgrade(server.url(name))
    site(server.url(name))
    (SAVED / f"{SCHEMA_REVISION}.sql").write_text(server.dump(name, "--no-privileges"))


if __name__ == "__main__":
    running = Server()
    try:
        running.create()
        save(running)
    finally:
        running.remove()
