"""Records to fill a store with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from ones_db import (
    ActionRecord,
    DecisionJobRecord,
    DecisionRecord,
    JobRecord,
    NodeRecord,
    ReportLine,
    ResizeRecord,
    RunRecord,
    RunReports,
    Store,
)
from ones_db.engine import backend_of, transaction
from ones_db.reasons import Reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Epoch, First, Hello, Report, Spec, Throughput


@contextmanager
def opened(url: str, *, write: bool = False) -> Iterator[Connection]:
    """A connection to the database itself, past the store."""
    engine = backend_of(url).engine("write" if write else "read")
    try:
        with transaction(engine, write=write) as connection:
            yield connection
    finally:
        engine.dispose()


def ask(url: str, sql: str) -> list[tuple[Any, ...]]:
    with opened(url) as connection:
        return [tuple(row) for row in connection.exec_driver_sql(sql)]


def change(url: str, sql: str) -> None:
    """Do as the statement says."""
    with opened(url, write=True) as connection:
        connection.exec_driver_sql(sql)


def actions(store: Store) -> list[ActionRecord]:
    """What people did, newest first."""
    query = "SELECT time, user_name, action, detail FROM actions ORDER BY time DESC, id DESC"
    with store._read() as connection:
        return [ActionRecord(*row) for row in connection.exec_driver_sql(query)]


def node_changes(store: Store, name: str = "") -> list[tuple[float, NodeRecord]]:
    """What one node was, or all were, from when on; oldest first."""
    query = (
        "SELECT c.time, n.name, c.state, c.usable, c.gpus, c.partitions "
        "FROM node_changes c JOIN nodes n ON n.id = c.node_id ORDER BY c.time, n.id"
    )
    with store._read() as connection:
        found = [(time, NodeRecord(*node)) for time, *node in connection.exec_driver_sql(query)]
    return [(time, node) for time, node in found if name in ("", node.name)]


def end_run(store: Store, job_id: int, restart: int, time: float, why: str) -> None:
    store.record_runs([RunRecord(job_id, restart, end_time=time, end_reason=why)])


def said(text: str) -> Reason:
    """A reason of which the sentence alone is known."""
    return Reason(text)


SPEC = Spec(base_batch=64, max_batch=512, max_local_batch=128, dataset=1000, epochs=10)


def job(job_id: int, **other: Any) -> JobRecord:
    values: dict[str, Any] = {
        "name": f"job{job_id}",
        "user": "alice",
        "submit_time": 1000.0 + job_id,
        "requested_shape": Shape(1, 2),
        "elastic": True,
        "state": "RUNNING",
    }
    return JobRecord(job_id, **(values | other))


def run(job_id: int, restart: int = 0, nodes: int = 1, gpus: int = 1, **other: Any) -> RunRecord:
    values: dict[str, Any] = {"start_time": 2000.0 + 1000 * restart, "node_list": ("n1",)}
    return RunRecord(job_id, restart, Shape(nodes, gpus), **(values | other))


def line(number: int, report: Report, time: float | None = None) -> ReportLine:
    """A report as a run's file has it; its time is by its number where none is given."""
    return ReportLine(number, 2000.0 + number if time is None else time, report)


def hello(number: int = 1, time: float = 2001.0, **other: Any) -> ReportLine:
    values: dict[str, Any] = {
        "nodes": 1,
        "gpus_per_node": 1,
        "world": 0,
        "batch": 64,
        "lr_factor": 1.0,
        "base_batch": 64,
        "max_batch": 512,
        "dataset": 1000,
        "epochs": 10,
        "epoch": 0,
        "cursor": 0,
        "step": 0,
        "checkpoint": "",
    }
    return line(number, Hello(**(values | other)), time)


def throughput(number: int, time: float | None = None, **other: Any) -> ReportLine:
    values: dict[str, Any] = {
        "epoch": 0,
        "step": number,
        "cursor": 64 * number,
        "samples": 64,
        "seconds": 0.5,
        "batch": 64,
        "lr_factor": 1.0,
        "loss": 2.0,
    }
    return line(number, Throughput(**(values | other)), time)


def epoch(number: int, which: int, time: float | None = None, **other: Any) -> ReportLine:
    values: dict[str, Any] = {"epoch": which, "step": number, "samples": 1000, "loss": 1.0, "accuracy": 0.5}
    return line(number, Epoch(**(values | other)), time)


def report(
    store: Store,
    job_id: int,
    restart: int,
    *,
    offset: int,
    number: int | None,
    spec: Spec | None = None,
    **kinds: ReportLine | Sequence[ReportLine],
) -> None:
    """Store what one look at a run's report file found, of whatever kinds, in the order of their numbers."""
    lines = [one for kind in kinds.values() for one in ([kind] if isinstance(kind, ReportLine) else kind)]
    lines.sort(key=lambda one: one.number)
    store.add_reports([RunReports(job_id, restart, offset, number, spec, lines)])


def resize(job_id: int, **other: Any) -> ResizeRecord:
    values: dict[str, Any] = {
        "restart": 0,
        "old_shape": Shape(1, 1),
        "old_batch": 64,
        "new_shape": Shape(1, 4),
        "new_batch": 256,
        "state": "ordered",
        "started": 2500.0,
    }
    return ResizeRecord(job_id, **(values | other))


def decision(time: float, *job_ids: int, **other: Any) -> DecisionRecord:
    jobs = tuple(
        DecisionJobRecord(job_id, Shape(1, 4), 256, Reason("gains", (("why", f"reason {job_id}"),)), Shape(1, 1), 64)
        for job_id in job_ids
    )
    values: dict[str, Any] = {"policy": "ones", "mode": "act", "seconds": 0.1, "score": 3.5, "jobs": jobs}
    return DecisionRecord(time, **(values | other))


def resized_job(store: Store, job_id: int = 7, user: str = "alice") -> None:
    """A job that trained two epochs on one GPU, was resized to four, and completed its third epoch there."""
    store.record_jobs([job(job_id, user=user)])
    store.record_runs([run(job_id, 0, 1, 1)])
    report(
        store,
        job_id,
        0,
        spec=SPEC,
        hello=hello(),
        throughput=[throughput(n, epoch=(n - 2) // 10) for n in range(2, 22)],
        epochs=[epoch(30, 0, accuracy=0.3), epoch(31, 1, accuracy=0.4, loss=0.9)],
        offset=100,
        number=31,
    )
    number = store.begin_resize(resize(job_id, started=2500.0)).id
    store.step_resize(number, "drained", detail=said("step 21"), time=2600.0, order_number=9)
    end_run(store, job_id, 0, 2900.0, "REQUEUED")
    store.record_jobs([job(job_id, user=user, restart=1, submit_time=2901.0)])
    store.record_runs([run(job_id, 1, 1, 4, start_time=3000.0)])
    report(
        store,
        job_id,
        1,
        hello=hello(
            time=3010.0,
            gpus_per_node=4,
            batch=256,
            lr_factor=4.0,
            epoch=2,
            step=21,
            checkpoint="step-21",
            queue_s=105.0,
            launch_s=2.0,
            import_s=1.5,
            group_s=0.25,
            load_s=0.75,
            resizes=1,
        ),
        first=line(4, First(22, 0.5), 3010.5),
        throughput=[throughput(2, time=3011.0, epoch=2, cursor=256, step=22, samples=256, batch=256)],
        epochs=[epoch(3, 2, time=3500.0, step=30, accuracy=0.6, loss=0.7)],
        offset=50,
        number=4,
    )
    store.end_resize(number, "done", said("running at 1x4"), 3010.0, pause_s=410.0)
