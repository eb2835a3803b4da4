"""How fast reports go into the job database, beside the bare insertion of the same rows: an executemany into SQLite, a
COPY into PostgreSQL.

Ticks of a busy cluster: in each, so many running jobs have reported so many stretches of throughput. The store takes
each tick as the companion gives it, as one call and one transaction, with the positions and summaries of the runs; the
bare way inserts the same rows into the same table, empty, of a second database with the same settings, as one
transaction a tick. All take turns in each tick, and the ratio is the median of the ticks' own, so that a busy machine
costs all the same; `of_processor` is that ratio for SQLite in seconds of the processor, without the waits for the disk.
`rows_per_s` are of the ticks' median speeds; `again` is the price of telling the store the same ticks a second time,
which stores nothing; `from_lines` also reads and checks each report's JSON first.

PostgreSQL is the tests' own server, on this machine, with fsync on. A bare COPY gets its rows in psycopg's way
(`copy_rows`) and in the store's own binary form (`copy_stream`); the ratio is to the sooner of the two. Where there is
no server and none can be installed, the figure is null.

    python benchmarks/ingest.py --json ingest.json
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from sqlalchemy import Double

from ones_db import JobRecord, ReportLine, RunReports, Store, migrate
from ones_db.shape import Shape
from ones_db.tables import THROUGHPUT
from ones_wrapper.protocol import Hello, Throughput, decode_report, encode_report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.db.server import NoServer, Server

FIELDS = tuple(field.name for field in fields(Throughput) if field.name in THROUGHPUT.columns)
COLUMNS = ("number", "time", *FIELDS)
BARE = ("copy_rows", "copy_stream")
_values = attrgetter(*FIELDS)


def ticks(jobs: int, each: int, count: int) -> list[list[RunReports]]:
    """What the companion hands to the store in `count` ticks of 30 s."""
    told = []
    for tick in range(count):
        looks = []
        for job in range(1, jobs + 1):
            first = 2 + tick * each
            samples = [
                ReportLine(
                    number,
                    1.7e9 + 30.0 * tick + 2.0 * (number - first),
                    Throughput(
                        epoch=number // 400,
                        step=10 * number,
                        cursor=640 * (number % 400),
                        samples=640,
                        seconds=2.0 + 0.001 * (number % 7),
                        batch=64,
                        lr_factor=1.0,
                        loss=2.0 / number,
                        noise=300.0,
                        progress=600.0 * number,
                    ),
                )
                for number in range(first, first + each)
            ]
            last = samples[-1].number
            looks.append(RunReports(job, 0, 200 * last, last, lines=samples))
        told.append(looks)
    return told


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    began, busy = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - busy


def lines_of(looks: Sequence[RunReports]) -> list[bytes]:
    """The lines that jobs had written for these."""
    return [encode_report(line.number, line.time, line.report) for look in looks for line in look.lines]


def _row(run: int, line: ReportLine) -> tuple[Any, ...]:
    return (run, line.number, line.time, *_values(line.report))


class Bare:
    """The same table of the same schema, and nothing but an executemany between it and the rows."""

    def __init__(self, path: Path, jobs: int) -> None:
        migrate.upgrade(f"sqlite:///{path}")
        with Store.open(f"sqlite:///{path}", "bench") as store:
            prepare(store, jobs)
        self.connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("foreign_keys = ON", "journal_mode = WAL", "synchronous = FULL"):
            self.connection.execute(f"PRAGMA {pragma}")
        self.keys = dict(
            self.connection.execute("SELECT jobs.job_id, runs.id FROM runs JOIN jobs ON jobs.id = runs.job_id")
        )
        marks = ", ".join("?" for _ in range(len(COLUMNS) + 1))
        self.statement = f"INSERT INTO throughput (run_id, {', '.join(COLUMNS)}) VALUES ({marks})"

    def rows(self, looks: Sequence[RunReports]) -> list[tuple[Any, ...]]:
        """Ready to be inserted; making them is not the bare insert's."""
        return [_row(self.keys[look.job_id], line) for look in looks for line in look.lines]

    def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(self.statement, rows)
        self.connection.execute("COMMIT")


class BareCopy:
    """The same table of the same schema on the same server, and nothing but a COPY between it and the rows."""

    def __init__(self, url: str, jobs: int) -> None:
        import psycopg

        migrate.upgrade(url)
        with Store.open(url, "bench") as store:
            prepare(store, jobs)
        self.connection = psycopg.connect(url)
        found = self.connection.execute("SELECT jobs.job_id, runs.id FROM runs JOIN jobs ON jobs.id = runs.job_id")
        self.keys: dict[int, int] = dict(found.fetchall())
        self.connection.commit()

    def rows(self, looks: Sequence[RunReports]) -> list[tuple[Any, ...]]:
        """Ready to be copied; making them is not the bare copy's."""
        return [_row(self.keys[look.job_id], line) for look in looks for line in look.lines]

    def copy_rows(self, rows: Sequence[tuple[Any, ...]]) -> None:
        names = ", ".join(COLUMNS)
        with self.connection.cursor() as cursor, cursor.copy(f"COPY throughput (run_id, {names}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        self.connection.commit()

    def copy_stream(self, rows: Sequence[tuple[Any, ...]]) -> None:
        names = ", ".join(column.name for column in THROUGHPUT.columns)
        order = f"COPY throughput ({names}) FROM STDIN (FORMAT BINARY)"
        with self.connection.cursor() as cursor, cursor.copy(order) as copy:
            copy.set_types(["float8" if isinstance(column.type, Double) else "int8" for column in THROUGHPUT.columns])
            for row in rows:
                copy.write_row(row)
        self.connection.commit()


HELLO = Hello(1, 1, 1, 64, 1.0, 64, 512, 1000, 10, 0, 0, 0, "")


def prepare(store: Store, jobs: int) -> None:
    """Jobs that run and have said hello."""
    store.record_jobs([JobRecord(n, f"job{n}", "alice", 1.7e9, Shape(1, 1), elastic=True) for n in range(1, jobs + 1)])
    store.add_reports([RunReports(n, 0, 1, 1, lines=[ReportLine(1, 1.7e9, HELLO)]) for n in range(1, jobs + 1)])


def sqlite(folder: Path, jobs: int, each: int, count: int) -> dict[str, list[tuple[float, float]]]:
    """Rows a second of each tick, by the clock and of the processor, by way."""
    told, rows = ticks(jobs, each, count), jobs * each
    url = f"sqlite:///{folder / 'ones.sqlite'}"
    migrate.upgrade(url)
    seconds: dict[str, list[tuple[float, float]]] = {"store": [], "executemany": [], "again": [], "from_lines": []}
    with Store.open(url, "bench") as store:
        prepare(store, jobs)
        bare = Bare(folder / "bare.sqlite", jobs)
        with closing(bare.connection):
            for looks in told:
                ready = bare.rows(looks)
                lines = lines_of(looks)
                ours = timed(lambda looks=looks: store.add_reports(looks))  # type: ignore[misc]
                seconds["store"].append(ours)
                seconds["executemany"].append(timed(lambda ready=ready: bare.insert(ready)))  # type: ignore[misc]
                seconds["again"].append(timed(lambda looks=looks: store.add_reports(looks)))  # type: ignore[misc]
                read = timed(lambda lines=lines: [decode_report(line) for line in lines])  # type: ignore[misc]
                seconds["from_lines"].append((ours[0] + read[0], ours[1] + read[1]))
            stored = bare.connection.execute("SELECT COUNT(*), SUM(samples) FROM throughput").fetchone()
        with closing(sqlite3.connect(folder / "ones.sqlite")) as connection:
            assert connection.execute("SELECT COUNT(*), SUM(samples) FROM throughput").fetchone() == stored
    return {way: [(rows / clock, rows / busy) for clock, busy in times] for way, times in seconds.items()}


def postgresql(jobs: int, each: int, count: int) -> dict[str, list[tuple[float, float]]] | None:
    """The same on PostgreSQL; None where there is no server."""
    try:
        server = Server()
    except NoServer as error:
        print(error, file=sys.stderr)
        return None
    told, rows = ticks(jobs, each, count), jobs * each
    ways = ("store", "copy_rows", "copy_stream", "again")
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    try:
        server.create()
        url = server.url(server.fresh())
        migrate.upgrade(url)
        with Store.open(url, "bench") as store:
            prepare(store, jobs)
            plain, binary = (BareCopy(server.url(server.fresh()), jobs) for _ in range(2))
            with closing(plain.connection), closing(binary.connection):
                for looks in told:
                    ready = plain.rows(looks)
                    seconds["store"].append(timed(lambda looks=looks: store.add_reports(looks)))  # type: ignore[misc]
                    seconds["copy_rows"].append(timed(lambda ready=ready: plain.copy_rows(ready)))  # type: ignore[misc]
                    ready = binary.rows(looks)
                    seconds["copy_stream"].append(timed(lambda ready=ready: binary.copy_stream(ready)))  # type: ignore[misc]
                    seconds["again"].append(timed(lambda looks=looks: store.add_reports(looks)))  # type: ignore[misc]
                query = "SELECT COUNT(*), SUM(samples) FROM throughput"
                stored = plain.connection.execute(query).fetchone()
                assert binary.connection.execute(query).fetchone() == stored
            with store._read() as connection:
                assert tuple(connection.exec_driver_sql(query).one()) == stored
    finally:
        server.remove()
    return {way: [(rows / clock, rows / busy) for clock, busy in times] for way, times in seconds.items()}


def speed(ways: dict[str, list[tuple[float, float]]]) -> dict[str, int]:
    """The median rows a second of each way, by the clock."""
    return {way: round(statistics.median(clock for clock, _ in found)) for way, found in ways.items()}


def over(ours: list[tuple[float, float]], bare: list[tuple[float, float]], by: int = 0) -> float:
    """The median of the ticks' own ratios, by the clock (0) or of the processor (1)."""
    return round(statistics.median(one[by] / other[by] for one, other in zip(ours, bare, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="jobs that report in a tick")
    parser.add_argument("--each", type=int, default=15, help="reports of each in a tick")
    parser.add_argument("--ticks", type=int, default=40)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speeds = sqlite(Path(folder), asked.jobs, asked.each, asked.ticks)
    server = postgresql(asked.jobs, asked.each, asked.ticks)
    found = {
        "sqlite_over_executemany": over(speeds["store"], speeds["executemany"]),
        "of_processor": over(speeds["store"], speeds["executemany"], 1),
        "postgres_over_copy": server
        and min(over(server["store"], server[way]) for way in ("copy_rows", "copy_stream")),
        "rows_per_s": {"sqlite": speed(speeds), "postgresql": server and speed(server)},
        "rows_per_tick": asked.jobs * asked.each,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
