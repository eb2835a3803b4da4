"""Samples in one table, and in a partition for each month: what PostgreSQL takes for both, side by side.

    python benchmarks/partitions.py --rows 10000000

Twelve months of runs of 2,000 samples each, the layout of the schema before 0009 beside that since. Timed are the load,
a tick (1,000 new samples of 200 runs, then the newest samples of each), one run's whole curve, a month's GPU time, and
the deletion of the oldest month's samples with the vacuum that follows. Ratios are one table over partitions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.db.server import Server

MONTHS, EACH = 12, 2_000
COLUMNS = """run_id bigint NOT NULL, number bigint NOT NULL, time double precision NOT NULL, epoch bigint NOT NULL,
 step bigint NOT NULL, cursor bigint NOT NULL, samples bigint NOT NULL, seconds double precision NOT NULL,
 batch bigint NOT NULL, lr_factor double precision NOT NULL, loss double precision, noise double precision,
 progress double precision, nonfinite bigint, PRIMARY KEY (run_id, number)"""
ROW = "i * 2.0 + {month} * 2.6e6, n / 100, n, n * 64, 64, 2.0, 64, 1.0, 0.5, 100.0, n * 64.0, NULL"
MONTH = 1 << 24


def create(connection: psycopg.Connection, name: str, *, parts: bool) -> None:
    connection.execute(f"CREATE TABLE {name} ({COLUMNS})" + (" PARTITION BY RANGE (run_id)" if parts else ""))
    for month in range(MONTHS + 1) if parts else ():
        bounds = f"FROM ({month * MONTH}) TO ({(month + 1) * MONTH})"
        connection.execute(f"CREATE TABLE {name}_{month} PARTITION OF {name} FOR VALUES {bounds}")
    connection.execute(f"CREATE INDEX {name}_time ON {name} USING brin (time)")


def load(connection: psycopg.Connection, name: str, month: int, runs: int) -> None:
    connection.execute(
        f"INSERT INTO {name} SELECT {month * MONTH} + i, n, {ROW.format(month=month)} "
        f"FROM generate_series(1, {EACH}) n, generate_series(1, {runs}) i"
    )


def tick(connection: psycopg.Connection, name: str, month: int, runs: list[int], number: int) -> None:
    with connection.cursor().copy(f"COPY {name} FROM STDIN") as copy:
        for run in runs:
            for n in range(number, number + 5):
                at = month * 2.6e6 + n * 2.0
                copy.write_row((month * MONTH + run, n, at, 1, n, 64, 64, 2.0, 64, 1.0, 0.5, 1.0, 1.0, None))
    for run in runs:
        query = f"SELECT * FROM {name} WHERE run_id = %s AND number > %s ORDER BY number"
        connection.execute(query, (month * MONTH + run, number - 50)).fetchall()


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--ticks", type=int, default=20)
    options = parser.parse_args()
    runs = max(options.rows // EACH // MONTHS, 200)
    found: dict[str, dict[str, list[float]]] = {"one": {}, "months": {}}

    def note(name: str, what: str, seconds: float) -> None:
        found[name].setdefault(what, []).append(seconds)

    server = Server()
    try:
        server.create()
        with psycopg.connect(server.url(server.fresh()), autocommit=True) as connection:
            for name in found:
                create(connection, name, parts=name == "months")
            for month in range(MONTHS):
                for name in found if month % 2 else reversed(found):
                    note(name, "load a month", timed(lambda n=name, m=month: load(connection, n, m, runs)))  # type: ignore[misc]
            for name in found:
                connection.execute(f"ANALYZE {name}")
            draw = random.Random(0)
            newest = MONTHS - 1
            reporting = draw.sample(range(1, runs + 1), min(200, runs))
            for number in range(options.ticks):
                for name in found if number % 2 else reversed(found):
                    n = EACH + 1 + 5 * number
                    note(name, "tick", timed(lambda a=name, n=n: tick(connection, a, newest, reporting, n)))  # type: ignore[misc]
                    run = draw.randrange(MONTHS) * MONTH + draw.randrange(1, runs + 1)
                    curve = f"SELECT batch, avg(samples / seconds) FROM {name} WHERE run_id = {run} GROUP BY batch"
                    note(name, "one run's curve", timed(lambda q=curve: connection.execute(q).fetchall()))  # type: ignore[misc]
            for month in range(0, MONTHS, 3):
                for name in found:
                    span = f"time BETWEEN {month * 2.6e6} AND {(month + 1) * 2.6e6}"
                    use = f"SELECT sum(seconds) FROM {name} WHERE {span}"
                    note(name, "a month by time", timed(lambda q=use: connection.execute(q).fetchall()))  # type: ignore[misc]
            for name in found:
                old = f"DELETE FROM {name} WHERE run_id < {MONTH}"
                note(name, "delete the oldest month", timed(lambda q=old: connection.execute(q)))  # type: ignore[misc]
                note(name, "vacuum", timed(lambda a=name: connection.execute(f"VACUUM {a}")))  # type: ignore[misc]
    finally:
        server.remove()
    table = Table("", "one table, s", "a partition a month, s", "ratio")
    for what, ours in found["one"].items():
        theirs = found["months"][what]
        one, months = statistics.median(ours), statistics.median(theirs)
        table.add_row(f"{what} ({len(ours)})", f"{one:.4f}", f"{months:.4f}", f"{one / months:.2f}")
    Console(width=100).print(f"{runs * EACH * MONTHS:,} samples in each", table)


if __name__ == "__main__":
    main()
