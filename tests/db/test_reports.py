"""What runs reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ones_db import RunReports, Store, UnknownRecord
from ones_wrapper.protocol import Batch, Bye, Checkpoint, First, Note
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from tests.db.make import SPEC, ask, change, end_run, epoch, hello, job, line, report, run, throughput

ORDER = 1_700_000_000_000
SAVED = Checkpoint("step-5", 0, 320, 5, 2**40, 0.25, order=ORDER, stall_s=0.1)
CHECKPOINT = line(5, SAVED)
BATCH = line(6, Batch(6, 128, 2.0, order=ORDER, passes=2, momentum_power=4.0))
START = {"queue_s": 4.0, "launch_s": 1.5, "import_s": 1.25, "group_s": 0.5, "load_s": 0.25}
BYE = line(8, Bye("drained", 7, exit_code=0, note="waited a minute"))
TABLES = ("clusters", "jobs", "runs", "throughput", "epochs", "checkpoints", "batch_changes")


def contents(url: str) -> dict[str, list[tuple[object, ...]]]:
    return {table: ask(url, f"SELECT * FROM {table} ORDER BY 1, 2") for table in TABLES}


def tell(store: Store) -> None:
    """Two looks at the report file of one run."""
    report(
        store,
        1,
        0,
        hello=hello(note="a checkpoint was damaged", resizes=3, **START),
        first=line(2, First(1, 0.75), 2001.75),
        throughput=[throughput(3, loss=None, nonfinite=1)],
        offset=300,
        number=3,
    )
    report(
        store,
        1,
        0,
        throughput=[throughput(4), throughput(7, batch=128, nonfinite=4)],
        epochs=[epoch(9, 0, nonfinite=5)],
        checkpoints=[CHECKPOINT],
        batches=[BATCH],
        bye=BYE,
        offset=900,
        number=9,
    )


def test_reports_of_a_run(store: Store) -> None:
    store.record_jobs([job(1)])
    store.record_runs([run(1)])
    tell(store)
    assert store.runs(1) == [
        replace(
            run(1),
            batch=64,
            lr_factor=1.0,
            checkpoint="",
            launch_s=1.5,
            group_s=0.5,
            load_s=0.25,
            end_reason="drained",
            exit_code=0,
            note="a checkpoint was damaged; waited a minute",
            epoch=1,
            cursor=0,
            step=9,
            hello_time=2001.0,
            report_time=2009.0,
            report_offset=900,
            report_number=9,
            queue_s=4.0,
            import_s=1.25,
            first_step_s=0.75,
            resizes=3,
            attempts=0,
            nonfinite=5,
            nonfinite_step=7,
            world=0,
        )
    ]
    assert store.report_positions([1]) == {1: {0: (900, 9)}}
    history = store.histories([1])[1]
    assert (history.first_loss, history.batch) == (2.0, 128)


def test_telling_it_again_changes_nothing(store: Store, url: str) -> None:
    """Protects from doubled samples when the companion died between reading a file and remembering it."""
    store.record_jobs([job(1)])
    report(store, 1, 0, spec=SPEC, offset=0, number=None)
    store.record_runs([run(1)])
    tell(store)
    before = contents(url)
    assert [len(before[table]) for table in TABLES[3:]] == [3, 1, 1, 1]
    tell(store)
    store.record_jobs([job(1)])
    store.record_runs([run(1)])
    assert contents(url) == before


def test_what_reports_hold_is_in_their_tables(store: Store, url: str) -> None:
    store.record_jobs([job(1)])
    report(store, 1, 0, spec=replace(SPEC, max_passes=4, multiple_of=8, gradient_bytes=9), offset=0, number=None)
    store.record_runs([run(1)])
    tell(store)
    asked = {
        "batch_changes": ("passes, momentum_power", [(2, 4.0)]),
        "checkpoints": ("stall_s", [(0.1,)]),
        "throughput": ("nonfinite", [(1,), (0,), (4,)]),
        "epochs": ("nonfinite", [(5,)]),
        "jobs": ("max_passes, multiple_of, gradient_bytes", [(4, 8, 9)]),
    }
    for table, (columns, expected) in asked.items():
        assert ask(url, f"SELECT {columns} FROM {table}") == expected, table
    history = store.histories([1])[1]
    assert history.spec is not None and (history.spec.max_passes, history.spec.multiple_of) == (4, 8)
    assert history.spec.gradient_bytes == 9


AGAIN = hello(20, time=2100.0, epoch=0, cursor=128, step=2, batch=32, attempt=1, launch_s=7.0, progress=100.0)


def test_ranks_that_were_started_again_within_a_run(store: Store) -> None:
    """Protects from a position, batch or end that the run lost when a rank died: its last hello counts."""
    store.record_jobs([job(1)])
    store.record_runs([run(1)])
    tell(store)
    assert store.histories([1])[1].samples == 1000
    report(store, 1, 0, hello=AGAIN, first=line(21, First(3, 2.5), 2101.0), offset=990, number=21)
    (now,) = store.runs(1)
    assert (now.epoch, now.cursor, now.step, now.progress) == (0, 128, 2 + 1, 100.0)
    assert (now.batch, now.launch_s, now.first_step_s, now.attempts) == (32, 7.0, 2.5, 1)
    assert (now.end_reason, now.exit_code, now.hello_time) == (None, None, 2001.0)
    history = store.histories([1])[1]
    assert (history.samples, history.batch, history.epochs) == (128, 32, ())
    assert (store.job_summaries([1])[0].attempts, store.job_summaries([1])[0].batch) == (1, 32)
    report(store, 1, 0, epochs=[epoch(22, 0, time=2200.0)], offset=1100, number=22)
    assert [point.time for point in store.histories([1])[1].epochs] == [2200.0]


def test_a_run_that_says_its_end_alone(store: Store) -> None:
    """A job that another one trained: how long, on whose GPU, is the note of its run."""
    store.record_jobs([job(1)])
    store.record_runs([run(1)])
    note, bye = line(1, Note("node n7: it hangs", 3)), line(2, Bye("finished", 3, 0, "job 9 trained it: 12.50 s of it"))
    report(store, 1, 0, note=note, bye=bye, offset=90, number=2)
    (found,) = store.runs(1)
    assert (found.end_reason, found.exit_code) == ("finished", 0)
    assert found.note == "node n7: it hangs; job 9 trained it: 12.50 s of it" and found.hello_time is None


def test_several_starts_told_in_any_pieces_come_to_the_same(store: Store, url: str) -> None:
    """Protects from an earlier start's words when a file is read again, or all at once after an outage."""
    store.record_jobs([job(1), job(2)])
    first, last = hello(1, launch_s=1.0), hello(6, cursor=64, step=1, attempt=2, launch_s=3.0)
    early, late = line(2, First(1, 0.5)), line(7, First(2, 0.6))
    stretches = [throughput(3, cursor=192, step=3, progress=190.0), throughput(8, cursor=128, step=2)]
    bye = line(4, Bye("error", 3, 1, "a rank died"))
    report(store, 1, 0, hello=first, first=early, throughput=stretches[:1], bye=bye, offset=50, number=4)
    report(store, 1, 0, hello=last, first=late, throughput=stretches[1:], offset=90, number=8)
    whole = {"hello": [first, last], "first": late, "throughput": stretches, "bye": bye, "offset": 90, "number": 8}
    report(store, 2, 0, **whole)
    one, other = (store.runs(n)[0] for n in (1, 2))
    assert replace(other, job_id=1, note=one.note) == one
    assert one.hello_time == first.time
    assert (one.attempts, one.cursor, one.step, one.first_step_s, one.end_reason) == (2, 128, 2, 0.6, None)
    before = contents(url)
    for job_id in (1, 2):
        report(store, job_id, 0, hello=first, first=early, throughput=stretches[:1], bye=bye, offset=50, number=4)
        report(store, job_id, 0, **whole)
    assert contents(url) == before


def test_a_late_hello_leaves_slurms_word_on_the_end(store: Store) -> None:
    """Protects how a run ended from a hello that is read after Slurm said it was over."""
    store.record_jobs([job(1)])
    store.record_runs([run(1)])
    end_run(store, 1, 0, 2900.0, "NODE_FAIL")
    report(store, 1, 0, hello=AGAIN, offset=10, number=20)
    assert (store.runs(1)[0].end_reason, store.runs(1)[0].end_time) == ("NODE_FAIL", 2900.0)


def test_a_run_that_no_snapshot_saw(store: Store) -> None:
    store.record_jobs([job(1)])
    assert store.report_positions([1]) == {1: {}}
    report(store, 1, 3, hello=hello(nodes=2, gpus_per_node=4), offset=10, number=1)
    (made,) = store.runs(1)
    assert (made.restart, str(made.shape), made.start_time) == (3, "2x4", 2001.0)
    store.record_runs([run(1, 3, 2, 4, start_time=1999.0)])
    assert store.runs(1)[0].start_time == 1999.0
    assert store.runs(1)[0].batch == 64


def test_reports_without_their_hello(store: Store) -> None:
    """Protects the rest of a file whose first line was unreadable; without a shape it teaches no
    throughput."""
    store.record_jobs([job(1)])
    report(store, 1, 0, throughput=[throughput(2)], epochs=[epoch(3, 0)], offset=10, number=3)
    history = store.histories([1])[1]
    assert history.throughput == ()
    assert [point.epoch for point in history.epochs] == [0]


def test_slurms_word_on_the_shape_comes_first(store: Store) -> None:
    store.record_jobs([job(1)])
    store.record_runs([run(1, 0, 1, 2)])
    report(store, 1, 0, hello=hello(nodes=64, gpus_per_node=8), offset=10, number=1)
    assert str(store.runs(1)[0].shape) == "1x2"


def test_the_slowest_checkpoint_by_which_a_job_changed(store: Store) -> None:
    """Of jobs of blocks whose state does not move from memory to memory, and not of long ago."""
    comments = {1: "array=blocks", 2: "array=blocks", 3: "", 4: "array=blocks"}
    store.record_jobs([job(id_, comment=f"ones: gpus=1-8 {word}") for id_, word in comments.items()])
    for id_, seconds in ((1, 30.0), (2, 90.0), (3, 60.0), (4, 40.0)):
        slow = replace(CHECKPOINT, report=replace(SAVED, seconds=seconds))
        spec = replace(SPEC, hot=id_ == 2)
        report(store, id_, 0, hello=hello(), spec=spec, checkpoints=[slow], offset=1, number=5)
    assert store.slowest_checkpoint(0.0) == (4, 40.0)
    assert store.slowest_checkpoint(CHECKPOINT.time + 1.0) is None


def test_the_checkpoint_that_answers_an_order(store: Store) -> None:
    """Protects the requeue, which must not come before the checkpoint of this very order and run."""
    store.record_jobs([job(1)])
    report(store, 1, 0, hello=hello(), checkpoints=[CHECKPOINT], offset=1, number=5)
    order = ORDER
    assert store.checkpoint_for_order(1, 0, order) == (5, 2005.0, SAVED)
    assert store.checkpoint_for_order(1, 0, order + 1) is None
    assert store.checkpoint_for_order(1, 1, order) is None


def test_the_pause_of_a_resize(store: Store) -> None:
    """Protects the cost of a resize: from the last step, where its checkpoint began, to the next run's hello."""
    store.record_jobs([job(1)])
    asked = line(5, replace(SAVED, seconds=2.5), 2100.0)
    samples = [throughput(2, time=2050.0)]
    bye = replace(BYE, time=2160.0)
    report(store, 1, 0, hello=hello(), throughput=samples, checkpoints=[asked], bye=bye, offset=1, number=8)
    assert store.pause_after(1, 0) is None
    store.record_runs([run(1, 1, start_time=2170.0)])
    assert store.pause_after(1, 0) is None
    report(store, 1, 1, hello=hello(time=2180.0), offset=1, number=1)
    assert store.pause_after(1, 0) == 2180.0 - 2097.5
    assert store.pause_after(1, -1) == 0.0
    assert store.pause_after(1, 1) is None


def test_bytes_without_a_report(store: Store) -> None:
    store.record_jobs([job(1)])
    report(store, 1, 0, hello=hello(), offset=10, number=1)
    report(store, 1, 0, offset=500, number=None)
    assert store.report_positions([1]) == {1: {0: (500, 1)}}


def test_a_spec_alone_makes_no_run(store: Store) -> None:
    """Protects a job that waits after its requeue from a run that never was."""
    store.record_jobs([job(1)])
    report(store, 1, 1, spec=SPEC, offset=0, number=None)
    assert store.runs(1) == []
    assert store.histories([1])[1].spec == SPEC


def test_many_runs_in_one_call_or_none(store: Store) -> None:
    """Protects a tick: all jobs' reports are one transaction, and one that cannot be stored leaves nothing of it."""
    store.record_jobs([job(1), job(2)])
    looks = [RunReports(n, r, 10 * n, 2, SPEC, [hello(), throughput(2)]) for n, r in ((1, 0), (1, 1), (2, 0))]
    store.add_reports(looks)
    assert store.report_positions([1, 2]) == {1: {0: (10, 2), 1: (10, 2)}, 2: {0: (20, 2)}}
    more = [RunReports(n, 0, 90, 3, lines=[throughput(3)]) for n in (1, 2, 9)]
    with pytest.raises(UnknownRecord, match="job 9"):
        store.add_reports(more)
    assert store.report_positions([1, 2]) == {1: {0: (10, 2), 1: (10, 2)}, 2: {0: (20, 2)}}


def test_a_report_that_comes_late_is_not_believed(store: Store, url: str) -> None:
    """Protects what was read already, and remembered, from a file into whose middle something was written."""
    store.record_jobs([job(1)])
    report(store, 1, 0, hello=hello(), throughput=[throughput(2), throughput(5)], offset=10, number=5)
    report(store, 1, 0, throughput=[throughput(4), throughput(6)], offset=20, number=6)
    assert [row[1] for row in contents(url)["throughput"]] == [2, 5, 6]


def test_noise_and_progress_are_the_newest(store: Store) -> None:
    """Protects progress of a run: what its hello took up, then what its last stretch said."""
    store.record_jobs([job(1)])
    report(store, 1, 0, hello=hello(noise=50.0, progress=10.0), offset=1, number=1)
    assert (store.runs(1)[0].noise, store.runs(1)[0].progress) == (50.0, 10.0)
    samples = [throughput(2, noise=60.0, progress=40.0), throughput(3, progress=70.0), throughput(4)]
    report(store, 1, 0, throughput=samples, offset=2, number=4)
    assert (store.runs(1)[0].noise, store.runs(1)[0].progress) == (60.0, 70.0)


def test_limits_of_a_strategy_come_back_as_they_were_told(store: Store) -> None:
    rows = tuple(SizeLimits(n, 1, 2, n, 3, 4, 5, 6) for n in (1, 2, 4))
    told = StrategyLimits("ring", rows, 7, False, True, ("a",), ("b", "c"), True, 9)
    store.record_jobs([job(7)])
    for limits in (told, replace(told, batch_fixed=False), None):
        report(store, 7, 0, spec=replace(SPEC, limits=limits), offset=9, number=2)
        assert store.histories([7])[7].spec == replace(SPEC, limits=limits)
        assert store.job_summaries([7])[0].limits == limits
        assert store.strategies() == ({} if limits is None else {"ring": 1})


def test_limits_that_are_not_believed_leave_nothing_known_of_the_job(store: Store, url: str) -> None:
    store.record_jobs([job(7)])
    report(store, 7, 0, spec=replace(SPEC, limits=StrategyLimits("ring")), offset=9, number=2)
    change(url, """UPDATE jobs SET limits = '{"strategy": "ring", "sizes": [{"gpus": -1, "replicas": 1}]}'""")
    with Store.open(url, store.cluster) as fresh:
        assert fresh.histories([7])[7].spec is None
        assert fresh.job_summaries([7])[0].limits is None
