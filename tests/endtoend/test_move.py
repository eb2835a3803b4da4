"""A site outgrows its file: moved to a real PostgreSQL while its companion and a training job go on."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest

from ones_db import Store
from ones_db.tables import METADATA
from slurm_ones.act.transitions import State
from tests import waiting
from tests.db.make import ask
from tests.db.server import ADMIN, Server
from tests.endtoend.harness import DATABASE, Harness

pytestmark = pytest.mark.cluster

TABLES = sorted(METADATA.tables)
until = partial(waiting.until, within_s=90.0, look_s=0.3)


def shown(server: Server, folder: Path) -> None:
    """Show the server's socket inside the cluster too: in the folder, by a second name."""
    name = ".s.PGSQL.5432"
    try:
        os.link(server.place / name, folder / name)
    except OSError as error:
        pytest.skip(f"the socket of PostgreSQL cannot be shown in the cluster: {error}")


def copied(harness: Harness, old: str, new: str) -> dict[str, tuple[int, int]]:
    """`slurm-ones db copy`: the rows of each table, and how many of them it brought."""
    said = harness.cluster.run(["slurm-ones", "db", "copy", old, new]).stdout
    rows = {line.split()[0]: line.split()[1:3] for line in said.splitlines() if line.split()[0] in TABLES}
    assert sorted(rows) == TABLES, said
    return {table: (int(there), int(now)) for table, (there, now) in rows.items()}


@pytest.mark.nightly
def test_a_site_moves_while_its_companion_runs(harness: Harness, server: Server) -> None:
    """Protects every row on the way, those included that came during the first copy; the companion is stopped for the
    switch alone, then goes on with the same job: its samples, and with the resize of another."""
    trains = harness.submit(options=("--comment=ones: gpus=1-2 batch=16-32",))
    settings = harness.settings()
    other = harness.light("--comment=ones: gpus=1-2 batch=16-32", "--hold")
    folder = harness.cluster.scratch / Path(settings).parent.name
    shown(server, folder)
    old_inside, old = f"sqlite:////scratch/{folder.name}/{DATABASE}", f"sqlite:///{folder / DATABASE}"
    name = server.fresh()
    new_inside, new = f"postgresql://{ADMIN}@/{quote(name)}?host=/scratch/{folder.name}", server.url(name)

    with harness.running(settings, "--act", "--own"):
        harness.resize_ended(settings, trains)
        harness.trains(trains, restart=1)
        harness.ticks(settings)
        first = copied(harness, old_inside, new_inside)
        assert all(rows == now for rows, now in first.values()) and first["throughput"][0] > 0 < first["resizes"][0]
        until(lambda: ask(old, "SELECT count(*) FROM throughput")[0][0] > first["throughput"][0], "samples")
    second = copied(harness, old_inside, new_inside)
    # A page of rows that differs is stored as a whole; one that is the same is left alone.
    assert first["throughput"][0] < second["throughput"][0] and second["throughput"][1] > 0 == second["clusters"][1]
    before = {table: ask(old, f"SELECT count(*) FROM {table}") for table in TABLES}
    for table in TABLES:
        assert ask(new, f"SELECT count(*) FROM {table}") == before[table] == [(second[table][0],)], table
    (last,) = ask(new, "SELECT max(id) FROM resizes")[0]

    text = (folder / "ones.toml").read_text()
    (folder / "ones.toml").write_text(text.replace(old_inside, new_inside))
    with harness.running(settings, "--act", "--own"):
        until(lambda: ask(new, "SELECT count(*) FROM throughput") > before["throughput"], "samples on PostgreSQL")
        harness.ticks(settings)
    harness.cluster.run(["scontrol", "release", str(other)])
    harness.trains(other)
    process = harness.scripted(settings, {other: [[1, 2, 32]]})
    assert process.wait(90) == 0, harness.companion_log(settings)

    with Store.open(new, "here", read_only=True) as store, Store.open(old, "here", read_only=True) as left:
        # The job's past from before and what came since, in one; and a resize by the companion that is there now.
        was, now = left.histories([trains])[trains], store.histories([trains])[trains]
        assert now.samples > was.samples > 0
        assert set(map(str, left.resizes(trains))) <= set(map(str, store.resizes(trains)))
        runs = left.runs(trains)
        assert [run.start_time for run in runs] == [run.start_time for run in store.runs(trains)[: len(runs)]]
        assert [(resize.state, resize.id > last) for resize in store.resizes(other)] == [(State.DONE, True)]
    # Nothing came to the file any more.
    assert {table: ask(old, f"SELECT count(*) FROM {table}") for table in TABLES} == before
