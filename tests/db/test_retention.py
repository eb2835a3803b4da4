"""Old samples become fewer; nothing that learning reads changes, and nothing of a job that has not ended."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from ones_db import ReportLine, RunReports, Store, retention
from ones_db.retention import Ages, maintain
from ones_db.tables import THROUGHPUT
from ones_wrapper.protocol import Membership
from ones_wrapper.protocol.fields import TINY
from slurm_ones.learn.learner import Learner
from tests.db.make import SPEC, decision, epoch, hello, job, line, report, resize, run, said, throughput

DAY = 86_400.0
END = 50_000.0
NOW = END + 100 * DAY
MINUTES = Ages(minutes_s=7 * DAY, hours_s=1000 * DAY)
HOURS = Ages(minutes_s=7 * DAY, hours_s=30 * DAY)


def samples(store: Store) -> list[dict[str, Any]]:
    """All samples, in the order of their runs and reports."""
    with store._read() as connection:
        query = select(THROUGHPUT).order_by(THROUGHPUT.c.run_id, THROUGHPUT.c.number)
        return [dict(row) for row in connection.execute(query).mappings()]


def sums(store: Store) -> dict[tuple[int, int, int], tuple[int, float, int, float]]:
    """Of each run, batch and epoch: samples, seconds, steps whose loss is no number, loss times finite samples."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])
    for row in samples(store):
        into = found[row["run_id"], row["batch"], row["epoch"]]
        into[0] += row["samples"]
        into[1] += row["seconds"]
        into[2] += row["nonfinite"] or 0
        into[3] += (row["loss"] or 0.0) * max(row["samples"] - (row["nonfinite"] or 0) * row["batch"], 0)
    return {key: (int(a), b, int(c), d) for key, (a, b, c, d) in found.items()}


def train(store: Store, job_id: int, seed: int, *, ended: bool = True, count: int = 600) -> None:
    """A job of two runs at two shapes, with a sample every ten seconds, changing its batch now and then."""
    rng = random.Random(seed)
    store.record_jobs([job(job_id)])
    store.record_runs([run(job_id, 0, 1, 2), run(job_id, 1, 2, 4, start_time=20_000.0)])
    for restart, start in ((0, 2000.0), (1, 20_000.0)):
        found, step, cursor = [], 0, 0
        for n in range(count):
            batch = 64 if restart == 0 or n % 200 < 120 else 128
            step, cursor = step + 5, (cursor + 5 * batch) % 30_000
            found.append(
                throughput(
                    n + 2,
                    time=start + 10.0 * (n + 1),
                    epoch=n // 100,
                    step=step,
                    cursor=cursor,
                    samples=5 * batch,
                    seconds=rng.uniform(0.5, 2.0) if n % 170 else 0.0,
                    batch=batch,
                    loss=None if n % 13 == 0 else rng.uniform(0.1, 3.0),
                    noise=rng.uniform(450.0, 500.0) if n > 99 else None,
                    progress=320.0 * n,
                    nonfinite=5 if n % 13 == 0 else int(n % 29 == 0),
                    gpu_use=(None, 0.05, rng.uniform(0.2, 0.9))[n // 70 % 3],
                    gpu_memory=rng.randrange(99) if n % 5 else None,
                )
            )
        ends = [epoch(count + 2 + e, e, time=start + 1000.0 * (e + 1)) for e in range(count // 100)]
        report(
            store,
            job_id,
            restart,
            spec=SPEC,
            hello=hello(time=start),
            throughput=found,
            epochs=ends,
            offset=100,
            number=ends[-1].number,
        )
    if ended:
        store.record_jobs([job(job_id, restart=1, state="COMPLETED", end_time=END, exit_code=0)])


def learned(url: str) -> tuple[Any, list[Any]]:
    """What a companion that starts now learns: the histories, and speeds that its models predict."""
    with Store.open(url, "gres", read_only=True) as store:
        histories = store.finished_histories()
    learner = Learner()
    learner.finished(histories)
    known = [learner.about(history) for history in histories]
    nodes, gpus, batches = (np.array(values) for values in ([1, 1, 2, 4], [1, 2, 8, 16], [64, 128, 256, 512]))
    return histories, [
        (
            one.throughput.throughput(nodes, gpus, batches).tolist(),
            one.throughput.uncertainty(nodes, gpus, batches).tolist(),
            one.efficiency.efficiency(batches).tolist(),
            one.progress,
        )
        for one in known
    ]


@pytest.mark.parametrize("ages", [MINUTES, HOURS], ids=["minutes", "hours"])
def test_learning_reads_the_same_before_and_after(store: Store, url: str, ages: Ages) -> None:
    """Protects what the companion knows: every history and every model stays as it was, to the bit."""
    for job_id in (1, 2):
        train(store, job_id, job_id)
    before, rows, totals = learned(url), len(samples(store)), sums(store)
    done = maintain(store, ages, now=NOW, sleep=lambda _: None)
    assert learned(url) == before
    assert done.removed == rows - len(samples(store)) > rows // 2
    for key, (used, seconds, nonfinite, loss) in sums(store).items():
        assert (used, nonfinite) == (totals[key][0], totals[key][2])
        assert (seconds, loss) == pytest.approx((totals[key][1], totals[key][3]))
    assert store.pause_after(1, 0) is not None and store.job_summaries()[0].samples_per_s


def test_the_views_tell_the_same(store: Store) -> None:
    """Protects what people were told of a job from changing with its age: sums to the rounding, efficiency nearly."""
    train(store, 1, 1)
    views = ("job_summary", "run_timeline", "gpu_hours", "idle_gpus", "what_if", "scaling")
    before = {name: view(store, name) for name in views}
    maintain(store, HOURS, now=NOW, sleep=lambda _: None)
    assert len(before["scaling"]) == 3
    for name, rows in before.items():
        for old, new in zip(rows, view(store, name), strict=True):
            for column in set(old) - {"reports"}:
                near = 1e-3 if column in ("statistical_efficiency", "goodput") else 1e-9
                same = new[column] == old[column] or new[column] == pytest.approx(old[column], rel=near)
                assert same, (name, column, old[column], new[column])


def test_a_sample_in_which_blocks_changed(store: Store) -> None:
    """Protects the throughput of a size from a sample that is partly of another, which would roll up into it."""
    store.record_jobs([job(1)])
    store.record_runs([run(1, start_time=2000.0)])
    both = Membership(2, (0, 1), (0, 0), 2, 1, 2, 9, 64, 0.25, why="order")
    found = [throughput(n, time=2000.0 + 10 * n, seconds=10.0, samples=64 * n) for n in range(3, 60)]
    report(store, 1, 0, hello=hello(), members=line(2, both, 2025.0), samples=found, offset=9, number=60)
    store.record_jobs([job(1, state="COMPLETED", end_time=END)])
    before = view(store, "scaling")
    assert maintain(store, HOURS, now=NOW, sleep=lambda _: None).removed > 0
    (old,), (new,) = before, view(store, "scaling")
    assert (new["samples_per_s"], new["measured_s"]) == pytest.approx((old["samples_per_s"], old["measured_s"]))


def view(store: Store, name: str) -> list[dict[str, Any]]:
    with store._read() as connection:
        rows = [dict(row) for row in connection.exec_driver_sql(f"SELECT * FROM {name}").mappings()]
    return sorted(rows, key=lambda row: [str(row.get(c)) for c in ("job_id", "restart", "gpus", "batch", "day")])


def test_a_rolled_up_sample(store: Store) -> None:
    """Protects what a minute says: sums, means by samples, and the position at its end."""
    store.record_jobs([job(1)])
    found = [
        throughput(2, time=60.0, samples=100, seconds=1.0, loss=1.0, noise=10.0, progress=5.0),
        throughput(3, time=80.0, samples=300, seconds=2.0, loss=2.0, noise=30.0, progress=9.0, lr_factor=2.0),
        throughput(4, time=119.0, samples=128, seconds=3.0, loss=4.0, noise=20.0, progress=None, nonfinite=1),
        throughput(5, time=120.0, samples=1, seconds=1.0),
        *(throughput(n, time=1000.0 + n) for n in range(6, 6 + retention.KEPT)),
    ]
    report(store, 1, 0, hello=hello(), throughput=found, offset=9, number=50)
    store.record_jobs([job(1, state="COMPLETED", end_time=END)])
    maintain(store, MINUTES, now=NOW, sleep=lambda _: None)
    minute, alone, *newest = samples(store)
    assert (minute["number"], minute["time"], minute["step"], minute["cursor"]) == (4, 119.0, 4, 256)
    assert (minute["samples"], minute["seconds"], minute["nonfinite"], minute["progress"]) == (528, 6.0, 1, 9.0)
    assert minute["loss"] == pytest.approx((100 * 1.0 + 300 * 2.0 + 64 * 4.0) / 464)
    assert minute["noise"] == pytest.approx((1.0 * 10.0 + 2.0 * 30.0 + 3.0 * 20.0) / 6.0)
    assert minute["lr_factor"] == 1.0
    assert alone["number"] == 5 and len(newest) == retention.KEPT


@pytest.mark.parametrize(("odd", "many"), [(TINY, 1), (2.0**53, 2**53)])
def test_odd_numbers_stop_nothing(store: Store, odd: float, many: int) -> None:
    """Protects maintenance from a job's numbers whose products, quotients and sums are too small or too large."""
    store.record_jobs([job(1)])
    odds = [throughput(n, time=1.0, seconds=odd, loss=odd, noise=odd, samples=many) for n in range(2, 1200)]
    report(store, 1, 0, hello=hello(), throughput=odds, offset=9, number=1200)
    store.record_jobs([job(1, state="COMPLETED", end_time=END)])
    assert maintain(store, HOURS, now=NOW, sleep=lambda _: None).removed > 0


def test_again_and_from_a_replayed_file(store: Store) -> None:
    """Protects from work done twice, and from rolled-up samples coming back when a file is read again."""
    train(store, 1, 1)
    maintain(store, MINUTES, now=NOW, sleep=lambda _: None)
    after = samples(store)
    assert maintain(store, MINUTES, now=NOW, sleep=lambda _: None) == retention.Done()
    store.add_reports([RunReports(1, 0, 100, 601, lines=[throughput(n) for n in range(2, 602)])])
    assert samples(store) == after
    hours = maintain(store, HOURS, now=NOW, sleep=lambda _: None)
    assert 0 < len(samples(store)) == len(after) - hours.removed < len(after)


def test_jobs_that_have_not_ended_and_young_ones_stay(store: Store) -> None:
    """Protects a running job: nothing of it is touched, however old its samples are."""
    train(store, 1, 1, ended=False)
    train(store, 2, 2)
    before = samples(store)
    assert maintain(store, MINUTES, now=END + 7 * DAY, sleep=lambda _: None) == retention.Done()
    done = maintain(store, MINUTES, now=NOW, sleep=lambda _: None)
    runs = {row["run_id"] for row in before[:1200]}
    assert [row for row in samples(store) if row["run_id"] in runs] == before[:1200]
    assert done.runs == 2


def test_a_job_that_comes_back_to_life_stays(store: Store) -> None:
    """Protects a job that is requeued after its end, while maintenance is under way."""
    train(store, 1, 1)
    (first, *_), before = store.rollups_due(NOW, 60.0), samples(store)
    store.record_jobs([job(1, restart=2, state="PENDING")])
    assert list(store.roll_up(first, NOW, 60.0)) == []
    assert samples(store) == before


def test_two_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects samples from maintenance that goes on with what it read before another one rolled them up further."""
    monkeypatch.setattr(retention, "GROUPS_AT_ONCE", 20)
    train(store, 1, 1)
    first = store.rollups_due(NOW, 60.0)[0]
    minutes, before = store.roll_up(first, NOW, 60.0), sums(store)
    next(minutes)
    assert list(store.roll_up(first, NOW, 3600.0))
    after = samples(store)
    assert list(minutes) == [] and samples(store) == after
    assert {key: value[0] for key, value in sums(store).items()} == {key: value[0] for key, value in before.items()}


def test_short_runs_are_rolled_up_without_rests(store: Store) -> None:
    """Protects a site's first night from a rest for each of very many short runs."""
    for job_id in range(1, 9):
        train(store, job_id, job_id, count=100)
    rests: list[float] = []
    assert maintain(store, HOURS, now=NOW, sleep=rests.append).runs == 16
    assert all(rest > retention.REST_S for rest in rests)


def test_stopped_in_the_middle(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects maintenance that is killed, between the transactions of a run too: it ends where it would have."""
    monkeypatch.setattr(retention, "GROUPS_AT_ONCE", 20)
    monkeypatch.setattr(retention, "REST_S", 0.0)
    train(store, 1, 1)
    train(store, 2, 1)
    totals = sums(store)

    def killed(_: float) -> None:
        if len(samples(store)) < 1500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maintain(store, MINUTES, now=NOW, sleep=killed)
    assert 1000 < len(samples(store)) < 1500
    maintain(store, MINUTES, now=NOW, sleep=lambda _: None)
    by_run: dict[int, list[Any]] = defaultdict(list)
    for row in samples(store):
        by_run[row["run_id"]].append(tuple(row.values())[1:])
    pieces = list(by_run.values())
    # Both jobs trained the same: stopped or not comes to the same.
    assert len(pieces[0]) == len(pieces[2]) and len(pieces[1]) == len(pieces[3])
    assert {key: value[0] for key, value in sums(store).items()} == {key: value[0] for key, value in totals.items()}


def test_random_reports(store: Store) -> None:
    rng = random.Random(7)
    store.record_jobs([job(1)])
    found: list[ReportLine] = []
    for n in range(2, 800):
        found.append(
            throughput(
                n,
                time=rng.choice([rng.uniform(0, 500), 10.0 * n]),
                epoch=rng.randrange(2),
                samples=rng.randrange(1000),
                seconds=rng.choice([0.0, rng.random()]),
                batch=rng.choice([32, 64]),
                loss=rng.choice([None, rng.random()]),
                nonfinite=rng.randrange(3),
            )
        )
    report(store, 1, 0, spec=SPEC, hello=hello(), throughput=found, epochs=[epoch(900, 0)], offset=1, number=900)
    store.record_jobs([job(1, state="COMPLETED", end_time=END)])
    totals, history = sums(store), store.finished_histories()
    maintain(store, HOURS, now=NOW, sleep=lambda _: None)
    store._cache.clear()
    assert store.finished_histories() == history
    for key, value in sums(store).items():
        assert value[0] == totals[key][0] and value[1] == pytest.approx(totals[key][1])


def test_the_companion_goes_on_writing(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the companion from waiting for maintenance: its writes get in between, and none fails."""
    monkeypatch.setattr(retention, "REST_S", 0.0)
    for job_id in range(1, 6):
        train(store, job_id, job_id)
    store.record_jobs([job(9)])
    store.record_runs([run(9)])
    stop = threading.Event()
    written = []

    def companion() -> None:
        with Store.open(url, "gres") as mine:
            while not stop.is_set():
                n = len(written) + 2
                mine.add_reports([RunReports(9, 0, n, n, lines=[throughput(n)])])
                written.append(n)

    thread = threading.Thread(target=companion)
    thread.start()
    try:
        done = maintain(store, MINUTES, now=NOW, sleep=lambda seconds: time.sleep(max(seconds, 0.01)))
    finally:
        stop.set()
        thread.join()
    assert done.removed > 0 and len(written) > 1
    assert store.report_positions([9])[9][0][1] == written[-1]


def test_decisions_are_forgotten_when_that_is_asked(store: Store) -> None:
    """Protects decisions that led to something, those of living jobs, and what resizes cost."""
    store.record_jobs([job(1), job(2)])
    idle = store.add_decision(decision(100.0, 1))
    both = store.add_decision(decision(200.0, 1, 2))
    made = decision(300.0, 1)
    acted = store.add_decision(replace(made, jobs=(replace(made.jobs[0], acted=True),)))
    led = store.add_decision(decision(400.0, 1))
    number = store.begin_resize(resize(1, decision_id=led)).id
    store.end_resize(number, "done", said("it runs"), 2600.0, pause_s=5.0)
    store.record_jobs([job(1, state="COMPLETED", end_time=END)])
    asked = Ages(minutes_s=DAY, hours_s=DAY, forget_s=50 * DAY)
    assert maintain(store, MINUTES, now=NOW, sleep=lambda _: None).rows == 0
    promised = maintain(store, asked, dry=True, now=NOW)
    done = maintain(store, asked, now=NOW, sleep=lambda _: None)
    assert (done.jobs, done.rows) == (promised.jobs, promised.rows) == (1, 4)
    assert [d.id for d in store.decisions(1)] == [led, acted]
    assert [d.id for d in store.recent_decisions()] == [led, acted, both] and idle not in {led, acted, both}
    assert store.resizes(1)[0].pause_s == 5.0 and store.resize_steps(number) == []
    assert maintain(store, asked, now=NOW, sleep=lambda _: None).jobs == 0
