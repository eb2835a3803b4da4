"""Databases of released schemas, saved with the rows of a small site: `python -m tests.db.saved` adds those of the
present one, to be run once for each release that has a new schema."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ones_db import SCHEMA_REVISION, BatchRecord, CheckpointRecord, Store, migrate
from tests.db.make import ask, decision, job, resized_job, said, told
from tests.db.server import Server

SAVED = Path(__file__).with_name("saved")


def site(url: str) -> None:
    """A small site with something in every table that its schema has."""
    with Store.open(url, "gres") as store:
        resized_job(store, 7)
        resized_job(store, 8, "bob")
        store.see_jobs([job(9, name="Zoë", state="PENDING", elastic=False, refusal=said("no room"))])
        checkpoint = CheckpointRecord(32, 2610.0, "step-21", 2, 0, 21, 2**40, 1.25, order_number=9, stall_s=0.5)
        batch = BatchRecord(33, 2611.0, 22, 128, 2.0, order_number=9, passes=2, ramp=100)
        told(store, 7, 0, checkpoints=[checkpoint], batches=[batch], offset=200, number=33)
        store.add_decision(decision(2400.0, 7, 8))
        store.set_deferral(9, 5000.0)


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
