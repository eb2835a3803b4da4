"""What reading costs as the job database grows.

Two databases of one make, the smaller of which has 100,000 throughput samples; in both the same number of jobs run, all
others have ended. Each job has run twice, was resized once, and has as many samples as the next.

* `tick_ratio`: the companion's own reads of a tick, larger over smaller. Before each tick the running jobs report anew
  (untimed), then both databases are read, in turns; the ratio is the median of the ticks' own, so that a busy machine
  costs both the same. `ticks_ms` has each read by itself, `first_tick_ms` the first after a start, which reads all.
* `view_over_scan`: each view for one job (of `gpu_hours`, which tells of no job: one user) over one scan of all
  throughput samples, as the median over jobs. `view_over_own_scan`: over reading all rows of that view.
* `bytes_a_sample`: what the samples take on disk, indexes included.

    python benchmarks/queries.py --json queries.json                                # a million samples
    python benchmarks/queries.py --samples 10000000 --jobs 10000 --json queries.json
    python benchmarks/queries.py --postgresql --json queries.json                   # a server of its own, from Debian
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from ones_db import DecisionJobRecord, DecisionRecord, ReportLine, RunReports, Store, migrate
from ones_db.engine import backend_behind, backend_of, transaction
from ones_db.query import Reader, view_query
from ones_db.reasons import Reason
from ones_db.shape import Shape
from ones_db.tables import METADATA
from ones_db.views import VIEWS
from ones_wrapper.protocol import Throughput

sys.path.insert(0, str(Path(__file__).parents[1]))

TABLES = METADATA.tables
SMALL = 100_000
"""Samples of the smaller database."""
BEGIN = 1.7e9
USERS = 100
RUNNING = 50
"""Jobs that run."""
DECISIONS = 20
"""Decisions on each job."""
SCAN = "SELECT COUNT(*), SUM(samples), SUM(seconds), SUM(progress) FROM throughput"


def fill(url: str, jobs: int, each: int) -> float:
    """Fill an empty database; returns the bytes on disk of a sample."""
    engine = backend_of(url).engine("write")
    try:
        with transaction(engine, write=True) as connection:
            _fill_all_but_samples(connection, jobs, each)
        before = _size(url)
        with transaction(engine, write=True) as connection:
            _fill_samples(connection, each)
            if connection.dialect.name == "postgresql":
                # As its autovacuum does in time.
                connection.exec_driver_sql("ANALYZE")
    finally:
        engine.dispose()
    after = _size(url)
    return (after - before) / (jobs * each)


def _fill_all_but_samples(connection: Connection, jobs: int, each: int) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("jobs", "runs", "epochs", "checkpoints", "decisions", "decision_jobs", "resizes")
    }
    for n in range(1, jobs + 1):
        began, first = BEGIN + 60.0 * n, each // 3
        running = n > jobs - RUNNING
        words = {"account": f"lab{n % 7}", "partition": "gpu", "comment": "ones: gpus=1-16", "work_dir": f"/home/{n}"}
        rows["jobs"].append(
            {"id": n, "cluster_id": 1, "job_id": 1000 + n, "submit_time": began, "name": f"train{n % 40}", **words}
            | {"user_name": f"user{n % USERS}", "requested_nodes": 1, "requested_gpus_per_node": 2, "restart": 1}
            | {"elastic": True, "refusal": "", "state": "RUNNING" if running else "COMPLETED", "report_note": ""}
            | {"end_time": None if running else began + 10.0 * each + 900.0, "exit_code": None if running else 0}
            | {"base_batch": 64, "max_batch": 512, "max_local_batch": 64, "dataset": 6400, "epochs": each // 10}
            | {"max_passes": 1}
        )
        for restart, (gpus, count) in enumerate(((2, first), (4, each - first))):
            run, start = 2 * n - 1 + restart, began + 60.0 + restart * (10.0 * first + 300.0)
            told = {"launch_s": 4.0, "group_s": 1.0, "load_s": 0.5, "queue_s": 30.0, "import_s": 2.0}
            rows["runs"].append(
                {"id": run, "job_id": n, "restart": restart, "nodes": 1, "gpus_per_node": gpus, "node_list": "n1"}
                | {"start_time": start, "end_time": None, "batch": 64 * gpus, "hello_time": start + 5.0, **told}
                | {"report_time": start + 10.0 * count, "report_offset": 200 * count, "report_number": count + 20}
                | {"epoch": each // 10, "cursor": 0, "step": each, "noise": 300.0, "progress": 600.0 * each}
            )
            rows["epochs"] += [
                {"run_id": run, "number": count + k, "time": start + k, "epoch": 5 * restart + k, "step": k}
                | {"samples": 6400, "loss": 2.0 / (k + 1), "accuracy": 0.1 * k}
                for k in range(1, 6)
            ]
        rows["checkpoints"].append(
            {"run_id": 2 * n - 1, "number": first + 10, "time": began, "name": "step-1", "epoch": 1, "cursor": 0}
            | {"step": 1, "bytes": 10**9, "seconds": 3.0, "order_number": n, "stall_s": 0.5}
        )
        at = began + 10.0 * first
        rows["resizes"].append(
            {"id": n, "job_id": n, "decision_id": None, "restart": 0, "old_nodes": 1, "old_gpus_per_node": 2}
            | {"old_batch": 128, "new_nodes": 1, "new_gpus_per_node": 4, "new_batch": 256, "state": "done"}
            | {
                "order_number": n,
                "back": False,
                "started": at,
                "ended": at + 300.0,
                "outcome": "it runs",
                "pause_s": 240.0,
            }
        )
    # Each decision is on as many jobs as run at a time.
    for d in range(1, jobs * DECISIONS // RUNNING + 1):
        rows["decisions"].append(
            {"id": d, "cluster_id": 1, "time": BEGIN + 30.0 * d, "policy": "ones", "mode": "act", "seconds": 0.1}
        )
        first = (d - 1) // DECISIONS * RUNNING
        rows["decision_jobs"] += [
            {"decision_id": d, "job_id": first + k, "nodes": 1, "gpus_per_node": 4, "batch": 256, "from_nodes": 1}
            | {"from_gpus_per_node": 2, "from_batch": 128, "reason": "grows", "acted": True, "outcome": "begins"}
            for k in range(1, RUNNING + 1)
        ]
    connection.execute(TABLES["clusters"].insert(), [{"id": 1, "name": "bench"}])
    for name in ("jobs", "runs", "epochs", "checkpoints", "decisions", "decision_jobs", "resizes"):
        connection.execute(TABLES[name].insert(), rows[name])
        if "id" in TABLES[name].columns:
            backend_behind(connection).renumber(connection, TABLES[name])


def _fill_samples(connection: Connection, each: int) -> None:
    """By the database itself: the rows of a run are together, as they are once its file was read."""
    first = each // 3
    connection.exec_driver_sql(
        f"""INSERT INTO throughput (run_id, number, time, epoch, step, cursor, samples, seconds, batch, lr_factor, loss,
            noise, progress, nonfinite)
        WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {each - first})
        SELECT r.id, n, r.start_time + 10.0 * n, n / 10, 10 * n, 640 * (n - n / 10 * 10), 640, 9.9 + 0.001 * n, r.batch,
            1.0, 2.0 / n, 300.0 + n, 600.0 * n, 0
        FROM runs r CROSS JOIN numbers WHERE n <= {first} OR r.restart = 1"""
    )


def _size(url: str) -> int:
    engine = backend_of(url).engine("write")
    try:
        with transaction(engine, write=True) as connection:
            if connection.dialect.name == "postgresql":
                return int(connection.scalar(select(func.pg_database_size(func.current_database()))))
            pages = "SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)"
            return int(connection.exec_driver_sql(pages).scalar_one())
    finally:
        engine.dispose()


def report(store: Store, jobs: list[int], tick: int, each: int) -> None:
    """What the running jobs say before a tick, and what was decided on them."""
    first, now = each + 100 + tick * 3, BEGIN + 60.0 * (max(jobs) - 1000) + 1e4 + 30.0 * tick
    samples = [
        ReportLine(n, now + n - first, Throughput(0, n, 0, 640, 9.9, 256, 1.0, 1.0, 300.0, 6e5))
        for n in range(first, first + 3)
    ]
    store.add_reports([RunReports(job, 1, 10**7 + 200 * first, first + 2, lines=samples) for job in jobs])
    given = tuple(DecisionJobRecord(job, Shape(1, 4), 256, Reason("keeps")) for job in jobs)
    store.add_decision(DecisionRecord(now, "ones", "act", 0.1, jobs=given))


def reads(store: Store) -> dict[str, float]:
    """The seconds of each read of the companion's tick."""
    live = sorted(store.live_jobs())
    asked: dict[str, Callable[[], object]] = {
        "live_jobs": store.live_jobs,
        "report_positions": lambda: store.report_positions(live),
        "histories": lambda: store.histories(live),
        "finished_histories": store.finished_histories,
        "open_resizes": store.open_resizes,
        "deferrals": store.deferrals,
    }
    seconds = {}
    for name, read in asked.items():
        began = time.perf_counter()
        read()
        seconds[name] = time.perf_counter() - began
    return seconds


def ticks(urls: Mapping[str, str], jobs: Mapping[str, int], each: Mapping[str, int], count: int) -> dict[str, Any]:
    """The companion's reads on both databases, in turns."""
    told: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
    stores = {name: Store.open(url, "bench") for name, url in urls.items()}
    try:
        for tick in range(count + 1):
            for name, store in stores.items():
                running = [1000 + n for n in range(jobs[name] - RUNNING + 1, jobs[name] + 1)]
                report(store, running, tick, each[name])
            for name, store in stores.items():
                told[name].append(reads(store))
    finally:
        for store in stores.values():
            store.close()
    small, large = ([sum(tick.values()) for tick in told[name]] for name in ("small", "large"))
    return {
        "tick_ratio": _round(statistics.median(b / a for a, b in zip(small[1:], large[1:], strict=True))),
        "ticks_ms": {
            name: {read: _round(1e3 * statistics.median(tick[read] for tick in seen[1:])) for read in seen[0]}
            for name, seen in told.items()
        },
        "first_tick_ms": {"small": _round(1e3 * small[0]), "large": _round(1e3 * large[0])},
    }


def timed(reader: Reader, sql: str, **parameters: Any) -> float:
    """Seconds to ask and take all rows."""
    began = time.perf_counter()
    with reader.ask(sql, parameters) as answer:
        rows = sum(1 for _ in answer.rows)
    seconds = time.perf_counter() - began
    if not rows:
        raise RuntimeError(f"no rows: {sql} {parameters}")
    return seconds


def views(url: str, jobs: int, asked: int) -> dict[str, Any]:
    """Each view for one job, beside a scan of all samples and beside the view as a whole."""
    reader = Reader(url, timeout_s=3_600.0)
    try:
        scan = statistics.median(timed(reader, SCAN) for _ in range(3))
        one, whole = {}, {}
        for name, view in VIEWS.items():
            column = "user_name" if view.aggregate else "job_id"
            values = [f"user{n % USERS}" if view.aggregate else 1000 + n for n in _spread(jobs - RUNNING, asked)]
            sql = view_query(name, [column])
            one[name] = statistics.median(timed(reader, sql, **{column: value}) for value in values)
            whole[name] = timed(reader, view_query(name))
    finally:
        reader.close()
    return {
        "scan_s": _round(scan),
        "view_ms": {name: _round(1e3 * seconds) for name, seconds in one.items()},
        "view_over_scan": {name: _round(seconds / scan) for name, seconds in one.items()},
        "view_over_own_scan": {name: _round(seconds / whole[name]) for name, seconds in one.items()},
        "worst_view_over_scan": _round(max(one.values()) / scan),
    }


def _spread(most: int, count: int) -> list[int]:
    return [1 + k * (most - 1) // max(count - 1, 1) for k in range(count)]


def _round(value: float) -> float:
    return float(f"{value:.3g}")


@contextmanager
def databases(postgresql: bool) -> Iterator[dict[str, str]]:
    """Two empty ones."""
    with tempfile.TemporaryDirectory() as folder:
        if not postgresql:
            yield {name: f"sqlite:///{folder}/{name}.sqlite" for name in ("small", "large")}
            return
        from tests.db.server import Server

        server = Server()
        try:
            server.create()
            yield {name: server.url(server.fresh()) for name in ("small", "large")}
        finally:
            server.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="throughput samples of the larger database")
    parser.add_argument("--jobs", type=int, default=1_000, help="jobs of the larger database, more than 50")
    parser.add_argument("--ticks", type=int, default=30)
    parser.add_argument("--asked", type=int, default=20, help="jobs that each view is asked for")
    parser.add_argument("--postgresql", action="store_true", help="on a server of its own, in place of SQLite")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    each = asked.samples // asked.jobs
    jobs = {"small": max(SMALL // each, 2 * RUNNING), "large": asked.jobs}
    counts = {"small": SMALL // jobs["small"], "large": each}
    with databases(asked.postgresql) as urls:
        bytes_a_sample = 0.0
        for name, url in urls.items():
            migrate.upgrade(url)
            began = time.perf_counter()
            bytes_a_sample = fill(url, jobs[name], counts[name])
            print(f"{name}: {jobs[name] * counts[name]} samples of {jobs[name]} jobs", file=sys.stderr, end="")
            print(f", filled in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        found = {
            "database": "postgresql" if asked.postgresql else "sqlite",
            "samples": jobs["large"] * each,
            "jobs": jobs["large"],
            "running": RUNNING,
            **ticks(urls, jobs, counts, asked.ticks),
            **views(urls["large"], jobs["large"], asked.asked),
            "bytes_a_sample": round(bytes_a_sample, 1),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
