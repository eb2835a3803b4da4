"""What learning and the tables get to see."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from ones_db import (
    RESIZE_OVERTAKEN,
    EpochPoint,
    NoisePoint,
    PlacedPoint,
    RunReports,
    Store,
    ThroughputPoint,
    TimelineRow,
)
from ones_db.history import SPARE, HistoryCache
from ones_db.reasons import Reason
from ones_db.shape import Shape
from tests.db.make import SPEC, epoch, hello, job, report, resize, resized_job, run, said, throughput


def test_history_of_a_resized_job(store: Store) -> None:
    resized_job(store)
    history = store.histories([7])[7]
    assert history.spec == SPEC
    assert history.epochs == (
        EpochPoint(0, 1.0, 0.3, 2030.0, 0),
        EpochPoint(1, 0.9, 0.4, 2031.0, 0),
        EpochPoint(2, 0.7, 0.6, 3500.0, 1),
    )
    assert history.throughput == (
        *(ThroughputPoint(Shape(1, 1), 64, 128.0, 2000.0 + n) for n in range(17, 22)),
        ThroughputPoint(Shape(1, 4), 256, 512.0, 3011.0),
    )
    assert history.placed == (
        PlacedPoint(0, ("n1",), 1, 64, 128.0, 2021.0),
        PlacedPoint(1, ("n1",), 4, 256, 512.0, 3011.0),
    )
    assert history.samples == 3 * 1000
    assert (history.batch, history.first_loss) == (256, 2.0)
    assert (history.ended_runs_s, history.running_since) == (900.0, 3000.0)
    assert history.running_s(3100.0) == 1000.0
    assert (history.resizes, history.last_resize_end, history.epochs_since_change) == (1, 3010.0, 1)


def test_histories_of_all_and_of_those_finished(store: Store) -> None:
    """Protects which jobs are learned from while they run, and which once they are done."""
    for number in (1, 2, 3, 4):
        resized_job(store, number)
    store.record_jobs(
        [
            job(2, restart=1, state="COMPLETED", end_time=4000.0),
            job(3, restart=1, state="COMPLETED", end_time=5000.0),
            job(4, restart=1, state="CANCELLED", end_time=6000.0),
            job(5, elastic=False),
            job(6, state="COMPLETED", end_time=7000.0),
            job(8, state="PENDING"),
        ]
    )
    assert list(store.histories()) == [1, 8]
    assert [history.job.job_id for history in store.finished_histories()] == [3, 2]
    assert [history.job.job_id for history in store.finished_histories(1)] == [3]
    assert store.finished_histories(1)[0].running_since is None
    assert store.finished_histories(1)[0].running_s(9000.0) == 900.0 + 2000.0
    assert store.histories([]) == {} == store.histories([99])


def test_a_job_that_has_shown_nothing(store: Store) -> None:
    """Protects a job in its first minute from gaps that are no numbers."""
    store.record_jobs([job(1)])
    history = store.histories()[1]
    assert (history.spec, history.epochs, history.throughput, history.samples) == (None, (), (), 0.0)
    assert (history.batch, history.running_s(5.0), history.resizes) == (None, 0.0, 0)
    (summary,) = store.job_summaries()
    assert (summary.shape, summary.running, summary.samples_per_s, summary.jct_s) == (None, False, None, None)


def test_work_lost_with_a_checkpoint_counts_once(store: Store) -> None:
    """Protects progress from being counted twice when a run goes back to an older checkpoint."""
    store.record_jobs([job(1)])
    report(store, 1, 0, spec=SPEC, offset=0, number=None)
    report(store, 1, 0, hello=hello(), epochs=[epoch(2, 0, loss=5.0), epoch(3, 1), epoch(4, 2)], offset=1, number=4)
    assert store.histories()[1].samples == 3000
    back = hello(epoch=1, cursor=500, time=4000.0)
    report(store, 1, 1, hello=back, offset=1, number=1)
    history = store.histories()[1]
    assert history.samples == 1500
    assert [(point.epoch, point.restart) for point in history.epochs] == [(0, 0)]
    report(store, 1, 1, epochs=[epoch(2, 1, accuracy=0.7)], offset=2, number=2)
    history = store.histories()[1]
    assert history.samples == 2000
    assert [(point.epoch, point.restart, point.accuracy) for point in history.epochs] == [(0, 0, 0.5), (1, 1, 0.7)]


def test_samples_without_a_spec(store: Store) -> None:
    """Protects progress of a job whose spec could not be believed: the epochs say how long they were."""
    store.record_jobs([job(1)])
    samples, ends = [throughput(4, epoch=2, cursor=128)], [epoch(2, 0), epoch(3, 1)]
    report(store, 1, 0, hello=hello(), throughput=samples, epochs=ends, offset=1, number=4)
    assert store.histories()[1].samples == 2128


def test_only_the_newest_samples_of_each_shape_and_batch(store: Store) -> None:
    """Protects from learning a speed that is out of date, and from an empty stretch."""
    store.record_jobs([job(1)])
    store.record_runs([run(1, 0, 1, 2), run(1, 1, 2, 4), run(1, 2, 1, 2)])
    for restart in range(3):
        samples = [
            throughput(number, time=1000.0 * restart + number, samples=100 * restart + number, seconds=1.0)
            for number in range(2, 10)
        ]
        empty = throughput(10, time=1000.0 * restart + 10, seconds=0.0)
        other = throughput(11, time=1000.0 * restart + 11, batch=128, samples=7, seconds=1.0)
        report(store, 1, restart, throughput=[*samples, empty, other], offset=1, number=11)
    found: dict[tuple[int, int, int], list[float]] = {}
    for point in store.histories()[1].throughput:
        found.setdefault((point.shape.nodes, point.shape.gpus_per_node, point.batch), []).append(point.samples_per_s)
    assert found == {
        (1, 2, 64): [205.0, 206.0, 207.0, 208.0, 209.0],
        (2, 4, 64): [105.0, 106.0, 107.0, 108.0, 109.0],
        (1, 2, 128): [7.0, 7.0],
        (2, 4, 128): [7.0],
    }


def test_a_resize_that_was_rolled_back(store: Store) -> None:
    """Protects the dwell time: it is no resize, but it interrupted the job."""
    resized_job(store)
    number = store.begin_resize(resize(7, started=3600.0, restart=1)).id
    store.end_resize(number, "rolled_back", said("waited too long"), 3700.0)
    history = store.histories([7])[7]
    assert (history.resizes, history.last_resize_end, history.epochs_since_change) == (1, 3700.0, 0)
    assert history.failures == 1


def test_only_resizes_that_interrupted_the_job_count(store: Store) -> None:
    """Protects the number of restarts: being parked is one, and the reshape of the job that waits is none."""
    resized_job(store)
    parked = store.begin_resize(resize(7, started=3600.0, restart=1, new_shape=Shape(0, 0))).id
    store.end_resize(parked, "done", said("it is parked"), 3610.0)
    again = store.begin_resize(resize(7, started=3700.0, restart=-1)).id
    store.end_resize(again, "done", said("it waits at its new shape"), 3701.0)
    assert store.histories([7])[7].resizes == store.job_summaries([7])[0].resizes == 2


def test_failures_are_counted_since_the_last_success(store: Store) -> None:
    resized_job(store)
    for number, state in enumerate(("abandoned", "rolled_back", "done", "abandoned", "rolled_back", "rolled_back")):
        opened = store.begin_resize(resize(7, started=4000.0 + number, restart=1)).id
        store.end_resize(opened, state, said(""), 4000.5 + number)
    assert store.histories([7])[7].failures == 3


def test_runs_whose_end_nobody_saw(store: Store) -> None:
    """Protects run times: of a requeued run Slurm does not tell the end, and a job in the queue does not run."""
    store.record_jobs([job(1)])
    store.record_runs([run(1, 0, start_time=1000.0)])
    report(store, 1, 0, hello=hello(time=1010.0), epochs=[epoch(2, 0, time=1400.0)], offset=1, number=2)
    history = store.histories()[1]
    assert (history.ended_runs_s, history.running_since) == (0.0, 1000.0)
    store.record_jobs([job(1, restart=1, state="PENDING")])
    history = store.histories()[1]
    assert (history.ended_runs_s, history.running_since) == (400.0, None)
    assert (store.timeline()[0].end, store.job_summaries()[0].running) == (1400.0, False)
    store.record_jobs([job(1, restart=2)])
    store.record_runs([run(1, 1, start_time=1500.0), run(1, 2, start_time=1600.0)])
    history = store.histories()[1]
    assert (history.ended_runs_s, history.running_since) == (400.0, 1600.0)
    assert [row.end for row in store.timeline()] == [1400.0, 1500.0, None]


def test_summary_of_a_resized_job(store: Store) -> None:
    resized_job(store)
    store.begin_resize(resize(7, started=3600.0, restart=1))
    (line,) = store.job_summaries()
    assert (line.shape, line.batch, line.running) == (Shape(1, 4), 256, True)
    assert (line.samples_per_s, line.epoch, line.epochs, line.cursor, line.dataset) == (512.0, 3, 10, 0, 1000)
    assert (line.resizes, line.resizing, line.pause_s) == (1, "ordered", 410.0)
    assert (line.loss, line.accuracy, line.start_time) == (0.7, 0.6, 2000.0)
    store.record_jobs([job(7, restart=2)])
    store.record_runs([run(7, 2, gpus=2, start_time=4000.0)])
    (line,) = store.job_summaries()
    assert (line.shape, line.samples_per_s, line.batch, line.epoch) == (Shape(1, 2), None, 256, 3)
    store.record_jobs([job(7, restart=2, state="COMPLETED", end_time=5007.0)])
    (line,) = store.job_summaries([7])
    assert (line.jct_s, line.running) == (4000.0, False)
    assert store.job_summaries([8]) == []


def test_timeline(store: Store) -> None:
    resized_job(store)
    assert store.timeline() == [
        TimelineRow(7, "job7", "alice", "", 2, 0, Shape(1, 1), 2000.0, 2900.0),
        TimelineRow(7, "job7", "alice", "", 2, 1, Shape(1, 4), 3000.0, None),
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.histories(),
        lambda store: store.histories(list(range(1, 201))),
        lambda store: store.finished_histories(),
        lambda store: store.job_summaries(),
        lambda store: store.timeline(),
        lambda store: store.recent_decisions(),
        lambda store: store.record_jobs([replace(seen, state="FAILED") for seen in store.jobs().values()]),
    ],
)
def test_the_number_of_statements_does_not_depend_on_the_number_of_jobs(
    store: Store, read: Callable[[Store], object]
) -> None:
    """Protects a tick on a busy cluster: at 200 jobs as many statements as at 10."""
    statements: list[str] = []

    @event.listens_for(store._engine, "before_cursor_execute")
    def _count(connection: object, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    def fill(first: int, last: int) -> None:
        numbers = range(first, last)
        store.record_jobs([job(number) for number in numbers])
        store.record_runs([run(number) for number in numbers])
        for number in numbers[:10]:
            report(store, number, 0, hello=hello(), throughput=[throughput(2)], offset=1, number=2)

    counts = []
    for first, last in ((1, 11), (11, 201)):
        fill(first, last)
        statements.clear()
        read(store)
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 7


@pytest.mark.slow
def test_what_is_remembered_is_what_is_there(store: Store, url: str) -> None:
    """Protects from a memory that lies: after every write, by whichever process, a fresh store reads the same."""
    rng = random.Random(0)
    store.record_jobs([job(n) for n in (1, 2, 3)])
    report(store, 1, 0, spec=SPEC, offset=0, number=None)
    numbers: Counter[tuple[int, int]] = Counter()
    with Store.open(url, "gres") as other:
        for step in range(40):
            which, restart = rng.choice((1, 2, 3)), rng.choice((0, 1, 2))
            writer = rng.choice((store, other))
            n = numbers[which, restart] = numbers[which, restart] + 3
            noise = rng.choice((None, float(step)))
            samples = [throughput(n, time=float(step), batch=rng.choice((64, 128)), noise=noise, progress=noise)]
            ends = [epoch(n + 1, rng.randrange(4), time=float(step))]
            first = [hello(epoch=rng.randrange(3), gpus_per_node=restart + 1)] if n == 3 else []
            report(writer, which, restart, hello=first, throughput=samples, epochs=ends, offset=n, number=n + 2)
            if step % 10 == 9:
                writer.record_jobs([job(which, state="COMPLETED", end_time=float(step))])
            with Store.open(url, "gres", read_only=True) as fresh:
                assert store.histories([1, 2, 3]) == fresh.histories([1, 2, 3])
                assert store.finished_histories() == fresh.finished_histories()


def test_nothing_new_is_the_same_object(store: Store) -> None:
    """Protects a tick from learning again what it has learned: identity says that nothing changed."""
    resized_job(store)
    resized_job(store, 8)
    store.record_jobs([job(8, restart=1, state="COMPLETED", end_time=4000.0)])
    before, finished = store.histories([7])[7], store.finished_histories()
    assert store.histories([7])[7] is before
    assert store.finished_histories() is finished
    report(store, 7, 1, throughput=[throughput(9, batch=256)], offset=60, number=9)
    assert store.histories([7])[7] is not before
    assert store.finished_histories() is finished


def test_only_new_reports_are_read(sqlite_url: str) -> None:
    """Protects a tick in a long job's last hour: it reads the rows that came since, not all of them."""
    rows: list[int] = []

    def steps() -> int:
        rows.append(1)
        return 0

    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(1)])
        samples = [throughput(n) for n in range(2, 3000)]
        report(store, 1, 0, hello=hello(), throughput=samples, offset=1, number=2999)
        store.histories()
        report(store, 1, 0, throughput=[throughput(3000, samples=128)], offset=2, number=3000)
        with store._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.set_progress_handler(steps, 100)
        assert store.histories()[1].throughput[-1].samples_per_s == 256.0
    assert len(rows) < 30, "a scan of 3000 samples takes SQLite tens of thousands of steps"


def test_noise_and_progress(store: Store) -> None:
    """Protects statistical efficiency and progress: the newest figures over all runs, and none above what was used."""
    store.record_jobs([job(1)])
    noisy = [throughput(n, noise=float(n), progress=60.0 * n) for n in range(2, 12)]
    report(store, 1, 0, spec=SPEC, hello=hello(), throughput=noisy, offset=1, number=11)
    history = store.histories()[1]
    assert history.noise == tuple(NoisePoint(float(n), 2000.0 + n) for n in range(4, 12))
    assert (history.samples, history.progress, history.first_batch) == (704.0, 660.0, 64)
    back = hello(time=4000.0, batch=128, cursor=100, progress=90.0)
    report(store, 1, 1, hello=back, offset=1, number=1)
    history = store.histories()[1]
    assert (history.samples, history.progress, history.first_batch, history.batch) == (100.0, 90.0, 64, 128)
    report(store, 1, 1, throughput=[throughput(2, cursor=300, progress=1e9)], offset=2, number=2)
    assert store.histories()[1].progress == 300.0


def test_the_pause_of_a_jobs_own_resizes(store: Store) -> None:
    """Protects what a resize is expected to cost: the last few that took effect, not parks nor starts."""
    resized_job(store)
    assert store.histories([7])[7].pause_s == 410.0
    kinds = (("done", 1, 1, 20.0), ("done", 1, 0, 999.0), ("done", -1, 1, 999.0), ("rolled_back", 1, 1, 999.0))
    for number, (state, restart, nodes, pause) in enumerate((*kinds, ("done", 1, 1, 30.0), ("done", 1, 1, 40.0))):
        opened = store.begin_resize(resize(7, started=4000.0 + number, restart=restart, new_shape=Shape(nodes, 4))).id
        store.end_resize(opened, state, said(""), 4000.5 + number, pause_s=pause)
    assert store.histories([7])[7].pause_s == 30.0


def test_ranks_that_are_not_its_gpus_teach_nothing(store: Store) -> None:
    """Protects what is learned from a script that something else than ones-run started: the speed of 2 ranks is not
    that of the 4 GPUs that the job has, and the newest run that spoke says whether it is still so."""
    store.record_jobs([job(1)])
    store.record_runs([run(1, gpus=2), run(1, restart=1, gpus=4)])
    first = [hello(world=2), throughput(2), throughput(3)]
    store.add_reports([RunReports(1, 0, 10, 3, None, first)])
    assert store.histories([1])[1].misfit is None
    store.add_reports([RunReports(1, 1, 10, 3, None, first)])
    known = store.histories([1])[1]
    assert known.misfit == (2, 4)
    assert {point.shape for point in known.throughput} == {Shape(1, 2)}
    store.record_runs([run(1, restart=2, gpus=4)])
    assert store.histories([1])[1].misfit == (2, 4)
    store.add_reports([RunReports(1, 2, 10, 1, None, [hello(world=4)])])
    assert store.histories([1])[1].misfit is None


def test_steps_since_the_size_changed(store: Store) -> None:
    """By the job's own count; a restart at the same size is no change."""
    store.record_jobs([job(7)])
    found = []
    for restart, gpus, step in ((0, 1, 40), (1, 1, 60), (2, 4, 75), (3, 4, 90)):
        store.record_runs([run(7, restart, 1, gpus, start_time=2000.0 + restart)])
        report(store, 7, restart, throughput=[throughput(2, step=step)], offset=9, number=2)
        found.append(store.histories([7])[7].steps_since_change)
    assert found == [None, None, 15, 30]


def test_looks_compile_no_statement_anew(store: Store) -> None:
    """Protects the length of a tick and the memory of a companion: SQLAlchemy keeps hundreds of compiled statements."""
    store.record_jobs([job(n) for n in (1, 2)])
    store.record_runs([run(n) for n in (1, 2)])
    for n in (1, 2):
        report(store, n, 0, offset=1, number=1, hello=hello())
    kept = []
    for look in range(6):
        for n in (1, 2):
            report(store, n, 0, offset=2 + look, number=2 + look, line=throughput(2 + look))
        store.histories([1, 2])
        cache = store._engine._compiled_cache
        assert cache is not None
        kept.append(len(cache))
    assert kept[-1] == kept[2]


def test_a_resize_that_a_start_overtook_is_none(store: Store) -> None:
    """Protects a job that just started from a wait that nothing is the reason of; what a drained job loses counts."""
    resized_job(store)
    before = store.histories([7])[7]
    why = Reason(RESIZE_OVERTAKEN)
    waited = store.begin_resize(resize(7, started=3600.0, restart=-1)).id
    store.end_resize(waited, "abandoned", why, 3601.0)
    assert store.histories([7])[7] == before
    drained = store.begin_resize(resize(7, started=3700.0, restart=1)).id
    store.end_resize(drained, "abandoned", why, 3701.0)
    assert store.histories([7])[7].failures == 1


def test_jobs_that_went_are_forgotten() -> None:
    """Protects a companion that lives for months; and jobs asked for in turns, tick by tick, from being read anew."""
    cache = HistoryCache()
    finished = list(range(1_000_000, 1_000_200))
    for first in range(0, 20 * SPARE, 10):
        live = list(range(first, first + 50))
        kept = cache.of(live)
        cache.of(finished)
        now = cache.of(live)
        assert all(now[key] is kept[key] for key in live)
        assert len(cache._jobs) <= len(finished) + SPARE
    assert 0 not in cache._jobs


def test_a_large_site_is_remembered_whole() -> None:
    cache = HistoryCache()
    live, finished = list(range(5000)), list(range(10_000, 10_200))
    kept = cache.of(live)
    cache.of(finished)
    now = cache.of(live)
    assert all(now[key] is kept[key] for key in live)
