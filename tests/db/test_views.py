"""The views: what they tell, the same on both databases, and through indexes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ones_db import BlockRecord, Store
from ones_db.query import Reader, view_query
from ones_db.shape import Shape
from ones_db.views import VIEWS, spelled
from ones_wrapper.protocol import Checkpoint, Membership
from ones_wrapper.protocol.fields import TINY
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from tests.db.make import (
    SPEC,
    ask,
    change,
    decision,
    end_run,
    hello,
    job,
    line,
    opened,
    report,
    resize,
    resized_job,
    run,
    said,
    throughput,
)

TYPES = {"int": int, "float": float, "text": str, "bool": int, "time": float, "said": str, "day": str}
DAY = 86_400.0


def fill(store: Store) -> None:
    """A job that was resized and completed, one that runs, one that waits, one that never was resized."""
    resized_job(store)
    asked = line(32, Checkpoint("step-21", 2, 0, 21, 1000, 1.25, order=9, stall_s=0.5), 2610.0)
    rows = tuple(SizeLimits(n, 1, together=n, data_bytes=2**52) for n in (1, 2))
    told = replace(SPEC, limits=StrategyLimits('ring "4096"', rows))
    report(store, 7, 0, checkpoints=[asked], offset=200, number=32, spec=told)
    report(
        store, 7, 1, throughput=[throughput(5, time=3511.0, samples=256, batch=256, noise=192.0)], offset=60, number=5
    )
    end_run(store, 7, 1, 3600.0, "COMPLETED")
    store.record_jobs(
        [job(7, restart=1, submit_time=2901.0, state="COMPLETED", end_time=3600.0, requested_shape=Shape(1, 1))]
    )
    store.record_jobs([job(8, user="bob", account="lab"), job(9, name="waits ✓", state="PENDING", elastic=False)])
    store.record_runs([run(8, 0, 2, 4, start_time=DAY - 1800.0)])
    report(
        store,
        8,
        0,
        spec=SPEC,
        hello=hello(time=DAY, batch=128),
        throughput=[throughput(2, time=DAY + 60, gpu_use=0.5, gpu_memory=7)],
        offset=9,
        number=2,
    )
    store.record_runs([run(9, 0, start_time=None)])
    store.add_decision(decision(2400.0, 7, 9))
    store.add_decision(decision(DAY + 3600.0, 8))
    rolled_back = store.begin_resize(resize(8, started=DAY + 100.0, old_shape=Shape(2, 4)))
    store.end_resize(rolled_back.id, "rolled back", said("it never drained"), DAY + 200.0)


BEGAN = 3 * DAY


def fill_blocks(store: Store) -> None:
    """A job of blocks: one trains alone, another one of four GPUs joins after 100 s, the first one is lost 100 s later;
    both trained in term 0, the second one goes on in term 1 and ends at 400 s."""
    asked = {"requested_shape": Shape(1, 1), "submit_time": BEGAN - 50.0}
    store.record_jobs([job(10, user="carol", restart=1, **asked)])
    blocks = [
        BlockRecord(10, 0, 0, 10, Shape(1, 1), ("n1",), "COMPLETED", BEGAN, BEGAN + 200.0),
        BlockRecord(10, 3, 0, 13, Shape(1, 4), ("n2",), "COMPLETED", BEGAN + 90.0, BEGAN + 400.0),
    ]
    store.record_blocks(blocks)
    store.record_runs([run(10, 0, 1, 4, start_time=BEGAN), run(10, 1, 1, 4, start_time=None)])
    number = store.begin_resize(
        resize(10, started=BEGAN + 80.0, new_batch=64, mechanism="blocks", added=((3, Shape(1, 4)),), state="preparing")
    ).id
    store.step_resize(number, "opening", time=BEGAN + 81.0, order_number=77)
    store.end_resize(number, "done", said("trains on 2 blocks"), BEGAN + 101.0, pause_s=0.25)
    first = Membership(1, (0,), (0,), 1, 1, 1, 0, 64, 0.0, why="first")
    both = Membership(2, (0, 3), (0, 0), 2, 0, 5, 9, 64, 0.25, 600, 0.2, 8.0, 77, "order")
    alone = Membership(3, (3,), (0,), 1, 4, 4, 20, 64, 1.5, why="lost")
    lines = [line(2, first, BEGAN + 5.0), line(4, both, BEGAN + 100.0)]
    # The blocks changed within the second one.
    times = ((3, 50, 64), (5, 105, 64), (6, 115, 320))
    samples = [throughput(number, BEGAN + at, seconds=10.0, samples=count) for number, at, count in times]
    look = {"spec": SPEC, "offset": 1}
    report(store, 10, 0, hello=hello(time=BEGAN + 4.0), members=lines, samples=samples, number=6, **look)  # type: ignore[arg-type]
    lines = [line(2, alone, BEGAN + 200.0)]
    sample = throughput(3, BEGAN + 300, seconds=10.0, samples=256)
    report(store, 10, 1, hello=hello(time=BEGAN + 200.0), members=lines, sample=sample, number=3, offset=1)
    ended = job(10, user="carol", restart=1, state="COMPLETED", end_time=BEGAN + 400.0, **asked)
    store.record_jobs([ended])


def rows(url: str, name: str, **where: Any) -> list[dict[str, Any]]:
    reader = Reader(url)
    try:
        with reader.ask(view_query(name, list(where)), where) as answer:
            return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    finally:
        reader.close()


def some(row: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


@pytest.mark.slow
def test_columns_are_as_told(store: Store, url: str) -> None:
    """Protects documents and frames from a column that is not there or of another kind."""
    fill(store)
    fill_blocks(store)
    for name, view in VIEWS.items():
        found = rows(url, name)
        assert found, name
        for row in found:
            assert list(row) == [column.name for column in view.columns]
            for column in view.columns:
                assert row[column.name] is None or type(row[column.name]) is TYPES[column.kind], (name, column.name)


def test_both_databases_tell_the_same(sqlite_url: str, postgresql_url: str) -> None:
    for url in (sqlite_url, postgresql_url):
        with Store.open(url, "gres") as store:
            fill(store)
            fill_blocks(store)
    for name in VIEWS:
        one, other = rows(sqlite_url, name), rows(postgresql_url, name)
        assert len(one) == len(other) > 0
        for row, same in zip(one, other, strict=True):
            assert row.keys() == same.keys()
            for column, value in row.items():
                exact = value is None or isinstance(value, str)
                assert same[column] == (value if exact else pytest.approx(value, rel=1e-12)), (name, column)


def test_job_summary(store: Store, url: str) -> None:
    """Protects JCT, queueing, sizes, GPU-hours, resizes and pause of a job that was resized once, done by hand."""
    fill(store)
    resized, running, waiting = rows(url, "job_summary")
    assert some(resized, "job_id", "jct_s", "queueing_s", "runs", "sizes") == (7, 2593.0, 993.0, 2, "1x1 > 1x4")
    assert some(resized, "running_s", "smallest_gpus", "largest_gpus", "resizes", "pause_s") == (1500, 1, 4, 1, 410.0)
    assert resized["gpu_hours"] == pytest.approx((900 * 1 + 600 * 4) / 3600)
    assert some(resized, "submitted", "started", "ended") == (
        "1970-01-01 00:16:47",
        "1970-01-01 00:33:20",
        "1970-01-01 01:00:00",
    )
    assert some(resized, "accuracy", "elastic", "requested_gpus") == (0.6, 1, 2)
    # As far as is known: up to the last decision.
    assert some(running, "running_s", "end_time", "jct_s", "resizes") == (5400.0, None, None, 0)
    assert some(waiting, "start_time", "sizes", "runs", "gpu_hours", "elastic") == (None, None, 0, None, 0)


def test_run_timeline(store: Store, url: str) -> None:
    """Protects the bars of a timeline: one that was requeued, one that ended, one that goes on."""
    fill(store)
    found = [some(row, "job_id", "restart", "gpus", "start_time", "end_time") for row in rows(url, "run_timeline")]
    assert found == [(7, 0, 1, 2000.0, 2900.0), (7, 1, 4, 3000.0, 3600.0), (8, 0, 8, DAY - 1800, None)]


def test_scaling(store: Store, url: str) -> None:
    """Protects speed-up and efficiencies over the job's own smallest size, and one job from another's."""
    fill(store)
    small, large = rows(url, "scaling", job_id=7)
    assert some(small, "gpus", "batch", "reports", "samples_per_s", "speed_up") == (1, 64, 20, 128.0, 1.0)
    assert some(large, "gpus", "batch", "reports", "samples_per_s", "speed_up") == (4, 256, 2, 512.0, 4.0)
    assert some(large, "gpu_efficiency", "statistical_efficiency") == (1.0, pytest.approx((192 + 64) / (192 + 256)))
    assert large["goodput"] == pytest.approx(512 * 256 / 448)
    assert small["goodput"] is None
    (other,) = rows(url, "scaling", job_id=8)
    assert (other["speed_up"], len(rows(url, "scaling"))) == (1.0, 3)


def test_scaling_on_two_kinds(store: Store, url: str) -> None:
    """Protects a job's speed-up from a faster kind of GPU."""
    store.record_jobs([job(5)])
    for restart, (kind, gpus, samples) in enumerate([("v100", 1, 64), ("v100", 2, 96), ("h100", 2, 640)]):
        store.record_runs([run(5, restart, 1, gpus, kind=kind)])
        report(store, 5, restart, throughput=[throughput(2, samples=samples)], offset=5, number=2)
    found = [some(row, "kind", "gpus", "speed_up", "gpu_efficiency") for row in rows(url, "scaling", job_id=5)]
    assert found == [("h100", 2, 1.0, 1.0), ("v100", 1, 1.0, 1.0), ("v100", 2, 1.5, 0.75)]


def test_scaling_of_a_job_id_that_was_used_again(store: Store, url: str) -> None:
    """Protects a job from being measured against an older one that had its id."""
    for submitted, samples in ((1000.0, 64), (9000.0, 640)):
        store.record_jobs([job(5, submit_time=submitted)])
        store.record_runs([run(5)])
        report(store, 5, 0, throughput=[throughput(2, samples=samples)], offset=5, number=2)
    first, second = rows(url, "scaling", job_id=5)
    assert (first["samples_per_s"], second["samples_per_s"]) == (128.0, 1280.0)
    assert (first["speed_up"], second["speed_up"]) == (1.0, 1.0)


def test_resize_cost(store: Store, url: str) -> None:
    """Protects where the time of a resize went: the run after it, and the checkpoint that its order asked for."""
    fill(store)
    line, rolled_back = rows(url, "resize_cost")
    assert some(line, "old_gpus", "new_gpus", "pause_s", "total_s") == (1, 4, 410.0, 510.0)
    assert some(line, "checkpoint_s", "stall_s", "queue_s", "launch_s", "import_s") == (1.25, 0.5, 105.0, 2.0, 1.5)
    assert some(line, "group_s", "load_s", "first_step_s", "attempts") == (0.25, 0.75, 0.5, 0)
    assert some(rolled_back, "job_id", "state", "queue_s", "total_s") == (8, "rolled back", None, 100.0)


def test_gpu_hours(store: Store, url: str) -> None:
    """Protects a day's bill: a run over midnight counts on both days, what goes on as far as is known."""
    fill(store)
    found = [some(row, "user_name", "account", "day", "jobs", "runs") for row in rows(url, "gpu_hours")]
    assert found == [
        ("alice", "", "1970-01-01", 1, 2),
        ("bob", "lab", "1970-01-01", 1, 1),
        ("bob", "lab", "1970-01-02", 1, 1),
    ]
    hours = [row["gpu_hours"] for row in rows(url, "gpu_hours")]
    assert hours == pytest.approx([3300 / 3600, 0.5 * 8, 1.0 * 8])


def test_idle_gpus(store: Store, url: str) -> None:
    """Hours of what was measured alone, by the GPUs of the time, and what of them used less than a tenth."""
    fill(store)
    used = ((0.0, 9), (0.05, None), (0.65, 5), (None, None))
    lines = [
        throughput(3 + n, time=DAY + 70 + n, seconds=900.0, gpu_use=use, gpu_memory=memory)
        for n, (use, memory) in enumerate(used)
    ]
    report(store, 8, 0, throughput=lines, offset=99, number=6)
    (row,) = rows(url, "idle_gpus")
    assert some(row, "user_name", "account", "day", "jobs", "gpu_memory") == ("bob", "lab", "1970-01-02", 1, 9)
    hours = (row["gpu_hours"], row["idle_gpu_hours"])
    assert (*hours, row["gpu_use"]) == pytest.approx((0.75 * 8, 0.5 * 8, 0.7 / 3), rel=1e-3)


# Times are Unix seconds: they differ by nothing, or by what such numbers can tell apart.
SPAN = st.tuples(st.integers(0, 20 * 86_400_000), st.integers(0, 6 * 86_400_000), st.integers(1, 9)).map(
    lambda span: (span[0] / 1000, span[1] / 1000, span[2])
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SPAN, min_size=1, max_size=6))
def test_days_add_up_to_runs(store: Store, url: str, spans: list[tuple[float, float, int]]) -> None:
    """Protects from GPU-hours that are lost or counted twice at midnights, however long runs are."""
    with opened(url, write=True) as connection:
        for table in ("runs", "jobs"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    store.record_jobs([job(number, submit_time=0.0) for number in range(len(spans))])
    store.record_runs(
        [run(n, 0, 1, gpus, start_time=began, end_time=began + s) for n, (began, s, gpus) in enumerate(spans)]
    )
    days = rows(url, "gpu_hours")
    assert sum(row["gpu_hours"] for row in days) == pytest.approx(sum(s * g for _, s, g in spans) / 3600, abs=1e-6)
    assert all(row["gpu_hours"] <= 24 * sum(gpus for _, _, gpus in spans) + 1e-6 for row in days)


def test_decisions_explained(store: Store, url: str) -> None:
    """Protects the reason that a user reads, and the word for what was done."""
    fill(store)
    first, second, third = rows(url, "decisions_explained")
    assert some(first, "job_id", "action", "from_gpus", "gpus", "reason") == (7, "grows", 1, 4, "gains (why=reason 7)")
    assert some(second, "job_id", "name") == (9, "waits ✓")
    assert some(third, "time", "policy", "mode", "acted") == (DAY + 3600, "ones", "act", 0)


def test_what_if(store: Store, url: str) -> None:
    fill(store)
    assert rows(url, "what_if")[0]["predicted_jct_s"] is None
    with opened(url, write=True) as connection:
        connection.exec_driver_sql("UPDATE jobs SET requested_gpus_per_node = 1")
    (line,) = rows(url, "what_if")
    # Three epochs of a thousand samples at 128/s, after the first hello at 2001.
    assert some(line, "samples", "samples_per_s", "wait_s", "jct_s") == (3000.0, 128.0, 994.0, 2593.0)
    # After it: 22 reports of 0.5 s on 1792 of those samples, the resize's pause of 410 s, and what neither of them is.
    assert line["other_s"] == pytest.approx(2593 - 994 - 410 - 11.0 * 3000 / 1792)
    assert line["predicted_jct_s"] == pytest.approx(994 + 3000 / 128 + line["other_s"])
    assert line["speed_up"] == pytest.approx(line["predicted_jct_s"] / 2593)


def test_a_job_that_never_changed_gained_nothing(store: Store, url: str) -> None:
    """Protects the gain from what no size changes: first step, evaluation and end count on both sides."""
    store.record_jobs([job(7, requested_shape=Shape(1, 1))])
    samples = [throughput(n, time=1020.0 + n, seconds=1.0, samples=64) for n in range(2, 12)]
    report(store, 7, 0, spec=SPEC, hello=hello(time=1010.0), throughput=samples, offset=9, number=12)
    end_run(store, 7, 0, 1100.0, "COMPLETED")
    store.record_jobs([job(7, requested_shape=Shape(1, 1), state="COMPLETED", end_time=1100.0)])
    (line,) = rows(url, "what_if")
    assert line["predicted_jct_s"] == pytest.approx(line["jct_s"])
    assert some(line, "resizes", "speed_up") == (0, None)


def test_one_job_is_found_through_indexes(store: Store, url: str) -> None:
    fill(store)
    with opened(url) as connection:
        for name in VIEWS.keys() - {"gpu_hours", "idle_gpus"}:
            query = view_query(name, ["job_id"]).replace(":job_id", "7")
            if url.startswith("sqlite"):
                plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}")]
                # Of tables, only that of the clusters is read as a whole.
                read = {line.split()[1] for line in plan if line.startswith("SCAN")}
                assert read <= {"c", "v", "m", "s", "w"} | {word for word in read if word.startswith("(")}, plan
            else:
                connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
                plan = [row[0] for row in connection.exec_driver_sql(f"EXPLAIN {query}")]
                assert not re.search(r"Seq Scan on (?!clusters)", "\n".join(plan)), plan


@pytest.mark.parametrize("odd", [TINY, 2.0**53])
def test_what_a_job_reports_breaks_no_view(store: Store, url: str, odd: float) -> None:
    """Protects everybody's answers from one job that reports numbers at the ends of what is taken, in 1970."""
    fill(store)
    before = {name: len(rows(url, name)) for name in VIEWS}
    store.record_jobs([job(66, submit_time=DAY)])
    reported = [
        throughput(n, time=0.0, seconds=odd, noise=odd, progress=odd, gpu_use=odd, samples=2**53 - n, batch=2**53 - 1)
        for n in range(2, 1200)
    ]
    started = hello(time=0.0, launch_s=odd, queue_s=odd, nodes=2**53, gpus_per_node=2**53, batch=2**53 - 1)
    huge = 2**53
    joined = [
        line(
            n,
            Membership(huge, (huge,), (huge,), huge, n % 2, huge, huge, huge, odd, huge, odd, odd, huge),
            DAY * (n - 1200),
        )
        for n in (1200, 1201)
    ]
    report(store, 66, 0, spec=SPEC, hello=started, throughput=reported, members=joined, offset=9, number=1201)
    for name in VIEWS:
        assert len(rows(url, name)) >= before[name]
    (bill,) = rows(url, "run_timeline", job_id=66)
    assert bill["running_s"] <= 3600.0


def test_words_are_spelled_inside_out() -> None:
    """Protects SQL with one such word inside another, and words that only end alike."""
    assert spelled("whole(latest(a, (b))) + allatest(c)", "postgresql") == (
        "CAST(floor(greatest(a, (b))) AS BIGINT) + allatest(c)"
    )


def test_a_job_of_blocks_in_all_views(store: Store, url: str) -> None:
    """Protects researchers: sizes, GPU-hours, throughput and cost of a job that changed while it ran are those that it
    had at each time."""
    fill_blocks(store)
    held = (200.0 + 4 * 310.0) / 3600.0
    (whole,) = rows(url, "job_summary")
    assert some(whole, "sizes", "smallest_gpus", "largest_gpus", "resizes", "runs") == ("1x1 > 1x5 > 1x4", 1, 5, 1, 2)
    assert whole["gpu_hours"] == pytest.approx(held) and whole["running_s"] == pytest.approx(315.0)
    blocks = rows(url, "block_timeline")
    assert [some(row, "task", "gpus", "running_s", "state") for row in blocks] == [
        (0, 1, 200.0, "COMPLETED"),
        (3, 4, 310.0, "COMPLETED"),
    ]
    assert sum(row["gpu_hours"] for row in blocks) == pytest.approx(held)
    (used,) = rows(url, "gpu_hours")
    assert used["gpu_hours"] == pytest.approx(held) and used["runs"] == 2
    members = rows(url, "membership_timeline")
    assert [some(row, "term", "generation", "blocks", "gpus", "lasted_s", "why") for row in members] == [
        (0, 1, "0", 1, 100.0, "first"),
        (0, 2, "0,3", 5, 15.0, "order"),
        (1, 3, "3", 4, 200.0, "lost"),
    ]
    terms = rows(url, "run_timeline")
    assert [row["gpu_hours"] * 3600.0 for row in terms] == pytest.approx([100.0 + 5 * 15.0, 800.0])
    speeds = rows(url, "scaling")
    assert [some(row, "nodes", "gpus", "samples_per_s", "reports") for row in speeds] == [
        (1, 1, 6.4, 1),
        (1, 4, 25.6, 1),
        (1, 5, 32.0, 1),
    ]
    (cost,) = rows(url, "resize_cost")
    assert some(cost, "mechanism", "added", "dropped", "pause_s") == ("blocks", "3:1x4", "", 0.25)
    assert some(cost, "ready_s", "transfer_s", "bytes", "launch_s", "queue_s") == (8.0, 0.2, 600, None, None)
    (paid,) = rows(url, "what_if")
    assert some(paid, "resizes", "by_blocks", "samples_per_s", "measured_s") == (1, 1, 6.4, 10.0)
    # As in the file that a user sees, which has the newest memberships: what it lacks is not the next one's.
    change(url, "DELETE FROM memberships WHERE generation = 1")
    for number in range(100, 105):
        change(
            url,
            f"INSERT INTO memberships SELECT run_id, {number}, time + 1e6, generation, blocks, restarts, nodes, "
            "gpus_per_node, world, step, batch, pause_s, bytes, transfer_s, ready_s, order_number, why "
            "FROM memberships WHERE generation = 2 AND number < 100",
        )
    assert max(row["lasted_s"] for row in rows(url, "membership_timeline", term=0)) == 15.0


def test_sizes_of_a_strategy(sqlite_url: str) -> None:
    """One row for each number of GPUs that it can use, none of a job that is plainly data parallel."""
    with Store.open(sqlite_url, "gres") as store:
        fill(store)
        assert store.strategies() == {}  # the job with one has ended
    found = ask(sqlite_url, "SELECT job_id, strategy, gpus, together, data_bytes FROM size_limits ORDER BY gpus")
    assert [tuple(row) for row in found] == [(7, 'ring "4096"', 1, 1, 2**52), (7, 'ring "4096"', 2, 2, 2**52)]
