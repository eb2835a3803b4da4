"""Jobs of blocks: what Slurm knows of their blocks, and who trained together when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db import (
    AccountingJob,
    BlockRecord,
    GuestRun,
    ReportLine,
    ResizeRecord,
    Store,
    ThroughputPoint,
    UnknownRecord,
)
from ones_db.shape import Shape
from ones_wrapper.protocol import Batch, Membership
from tests.db.make import SPEC, epoch, hello, job, line, report, run, throughput

BLOCK = BlockRecord(7, 0, 0, 100, Shape(1, 2), ("n1",), "RUNNING", 2000.0)


def member(number: int, generation: int, *blocks: int, time: float | None = None, **other: Any) -> ReportLine:
    """A report that these blocks of a GPU each train together."""
    values: dict[str, Any] = {"nodes": len(blocks), "gpus_per_node": 1, "world": len(blocks), "step": 10, "batch": 64}
    values |= {"restarts": tuple(0 for _ in blocks), "pause_s": 0.25, "why": "order"}
    return line(number, Membership(generation, blocks, **(values | other)), time)


def test_a_block_is_a_row_and_changes_in_place(store: Store) -> None:
    store.record_jobs([job(7)])
    again = replace(
        BLOCK, task=1, restart=1, slurm_id=101, node_list=("n1", "n2"), shape=Shape(2, 2), start_time=2010.0
    )
    for _ in range(2):
        store.record_blocks([again, BLOCK])
    assert store.blocks(7) == store.open_blocks() == [BLOCK, again]
    ended = replace(BLOCK, state="COMPLETED", end_time=2500.0)
    store.record_blocks([ended])
    assert store.blocks(7) == [ended, again]
    assert store.open_blocks() == [again]
    with pytest.raises(UnknownRecord):
        store.record_blocks([replace(BLOCK, job_id=8)])


def test_guests_are_found_again_with_their_ends(store: Store) -> None:
    """Protects how long guests are expected to live: all of it is recomputed from here after a restart."""
    store.record_jobs([job(7, partition="gpu")])
    guest = replace(BLOCK, task=1, slurm_id=101, guest=True)
    ended = {"COMPLETED": 2300.0, "PREEMPTED": 2500.0, "UNKNOWN": 1500.0}
    store.record_blocks(
        [BLOCK, guest, *(replace(guest, restart=i, state=s, end_time=t) for i, (s, t) in enumerate(ended.items(), 1))]
    )
    assert store.guest_runs(2000.0) == [
        GuestRun("gpu", 2000.0, None, False),
        GuestRun("gpu", 2000.0, 2300.0, False),
        GuestRun("gpu", 2000.0, 2500.0, True),
    ]
    assert [run.end_time for run in store.guest_runs(2400.0)] == [None, 2500.0]


def test_memberships_come_with_the_reports(store: Store) -> None:
    """Protects what learning and people are told: each is stored once, over all terms of a job."""
    store.record_jobs([job(7, restart=1)])
    first = member(2, 1, 0, why="first")
    grown = member(5, 2, 0, 3, order=9, bytes=600, transfer_s=0.2, ready_s=4.0)
    for _ in range(2):
        report(store, 7, 0, hello=hello(1), members=[first, grown], offset=10, number=5)
        report(store, 7, 1, hello=hello(1, time=2100.0), members=[member(2, 3, 3, time=2101.0)], offset=10, number=2)
    found = store.memberships(7)
    assert [(one.term, one.number, one.time) for one in found] == [(1, 2, 2101.0), (0, 5, 2005.0), (0, 2, 2002.0)]
    assert [one.report for one in found[1:]] == [grown.report, first.report]
    assert store.membership(7) == found[0]
    assert store.membership(7, order=9) == found[1]
    assert store.membership(7, order=8) is None
    assert store.reported([7]) == {7: 7}


def test_a_resize_by_blocks_comes_back_as_it_was(store: Store) -> None:
    """Protects the write-ahead record: a new companion finds which blocks were meant."""
    store.record_jobs([job(7)])
    meant = ResizeRecord(
        7,
        0,
        Shape(1, 1),
        64,
        Shape(2, 4),
        128,
        "preparing",
        2000.0,
        mechanism="blocks",
        added=((3, Shape(2, 4)), (5, Shape(1, 1))),
        dropped=(0, 2),
    )
    stored = store.begin_resize(meant)
    assert store.open_resizes() == [stored] == [replace(meant, id=stored.id)]
    assert store.begin_resize(meant) == stored


def test_samples_are_of_the_membership_in_force(store: Store) -> None:
    """Protects the curve of throughput from points at a size at which they were not measured."""
    store.record_jobs([job(7)])
    store.record_runs([run(7, nodes=4, gpus=1)])
    lines: list[ReportLine] = [hello(1), member(2, 1, 0, time=2002.0)]
    lines += [throughput(number, 2000.0 + number, seconds=1.0) for number in (4, 5)]
    lines += [member(6, 2, 0, 1, 2, time=2005.5, nodes=2, gpus_per_node=0), throughput(7, 2006.0, seconds=1.0)]
    lines += [throughput(8, 2007.0, seconds=1.0, samples=192)]
    look = {"spec": SPEC, "offset": 1, "number": 8}
    report(store, 7, 0, lines=lines, **look)  # type: ignore[arg-type]
    points = (
        ThroughputPoint(Shape(1, 1), 64, 64.0, 2004.0),
        ThroughputPoint(Shape(1, 1), 64, 64.0, 2005.0),
        ThroughputPoint(Shape(1, 3), 64, 192.0, 2007.0),
    )
    assert store.histories([7])[7].throughput == points
    # Read on, and anew.
    later = throughput(9, 2008.0, seconds=1.0, samples=200)
    report(store, 7, 0, lines=[later], offset=2, number=9)
    points = (*points, ThroughputPoint(Shape(1, 3), 64, 200.0, 2008.0))
    assert store.histories([7])[7].throughput == points
    store._cache.clear()
    assert store.histories([7])[7].throughput == points


def test_each_size_keeps_its_newest_samples(store: Store) -> None:
    """Protects a job that changes often from losing what it learnt at the sizes before; read at once or in parts."""
    store.record_jobs([job(7)])
    lines: list[ReportLine] = [hello(1)]
    number = 1
    for generation in range(1, 9):
        number += 1
        lines.append(member(number, generation, *range(1 + generation % 2)))
        for _ in range(7):
            number += 1
            lines.append(throughput(number, seconds=0.5, samples=64 * (1 + generation % 2) + number % 3))
    half = len(lines) // 2
    report(store, 7, 0, lines=lines[:half], offset=1, number=lines[half - 1].number)
    store.histories([7])
    report(store, 7, 0, lines=lines[half:], offset=2, number=number)
    found = store.histories([7])[7].throughput
    store._cache.clear()
    assert store.histories([7])[7].throughput == found
    assert [(one.shape.nodes, one.shape.gpus_per_node) for one in found] == [(2, 1)] * 5 + [(1, 1)] * 5


def test_moves_that_ended_on_as_many_nodes(store: Store) -> None:
    """Protects from a job that is moved again and again: those in a row count, up to one that helped."""
    store.record_jobs([job(7)])
    store.record_runs([run(7)])
    changes: list[tuple[tuple[int, ...], dict[str, Any], int]] = [
        ((0, 1), {"why": "first"}, 0),
        ((0, 2), {"order": 1}, 1),
        ((0, 3), {"order": 2}, 2),
        ((0, 3, 4), {"order": 3}, 0),
        ((0, 3, 5), {"order": 4}, 1),
        ((0, 6), {"order": 5, "nodes": 2, "gpus_per_node": 0, "world": 3}, 0),
        ((0, 7), {"why": "lost", "world": 3}, 0),
    ]
    for generation, (blocks, values, in_vain) in enumerate(changes, 1):
        lines = [member(generation, generation, *blocks, **values)]
        report(store, 7, 0, lines=lines, offset=generation, number=generation)
        assert store.histories([7])[7].changes_without_effect == in_vain


def test_what_a_change_of_blocks_costs(store: Store) -> None:
    """Protects the price that a policy weighs: pauses of ordered changes, and of those alone in which blocks joined.
    They are no interruptions, and not in the pause of requeues."""
    store.record_jobs([job(7)])
    store.record_runs([run(7)])
    lines: list[ReportLine] = [hello(1), member(2, 1, 0, time=2002.0, why="first", pause_s=0.0)]
    lines += [member(3, 2, 0, 1, time=2010.0, pause_s=0.3, order=1), member(4, 3, 0, time=2020.0, pause_s=0.1, order=2)]
    lines += [member(5, 4, 1, time=2030.0, pause_s=9.0, why="lost"), epoch(6, 0, 2035.0), epoch(7, 1, 2040.0)]
    report(store, 7, 0, spec=SPEC, lines=lines, offset=1, number=7)
    resize = ResizeRecord(
        7, 0, Shape(1, 1), 64, Shape(2, 1), 64, "preparing", 2005.0, mechanism="blocks", added=((1, Shape(1, 1)),)
    )
    resize = store.begin_resize(resize)
    store.end_resize(resize.id, "done", resize.outcome, 2011.0, 0.3)
    history = store.histories([7])[7]
    assert history.switch_s == pytest.approx(0.2) and history.join_s == pytest.approx(0.3)
    assert (history.pause_s, history.interrupted, history.resizes, history.last_resize_end) == (None, (), 1, 2011.0)
    assert history.membership == store.membership(7)
    assert history.epochs_since_change == 2
    report(store, 7, 0, lines=[member(8, 5, 1, 2, time=2036.0)], offset=2, number=8)
    assert store.histories([7])[7].epochs_since_change == 1


def test_how_long_it_ran_at_each_size(store: Store) -> None:
    """Protects what a job is asked to stay at: a term is as many sizes as it had memberships."""
    store.record_jobs([job(7, restart=1)])
    store.record_runs([run(7, nodes=2, gpus=4)])
    report(store, 7, 0, hello=hello(1), members=[member(2, 1, 0), member(3, 2, 0, 1, time=2100.0)], offset=1, number=3)
    report(store, 7, 1, hello=hello(1, time=2110.0), member=member(2, 3, 1, time=2110.0), offset=1, number=2)
    report(store, 7, 1, sample=throughput(3, 2160.0), offset=2, number=3)
    assert store.histories([7])[7].ran == ((Shape(1, 1), 100.0 + 50.0), (Shape(2, 1), 0.0))


def test_the_batch_of_a_membership_counts(store: Store) -> None:
    """Protects the batch that a policy starts from: a change of blocks may bring another, and a later change counts."""
    store.record_jobs([job(7)])
    report(store, 7, 0, hello=hello(1), member=member(2, 1, 0, batch=128), offset=1, number=2)
    assert store.histories([7])[7].batch == 128
    assert store.job_summaries([7])[0].batch == 128
    report(store, 7, 0, batch=line(3, Batch(20, 256, 1.0)), offset=2, number=3)
    assert store.histories([7])[7].batch == 256
    assert store.job_summaries([7])[0].batch == 256


def test_bars_are_cut_where_the_blocks_changed(store: Store) -> None:
    """Protects the picture of a job that changes its size without a new run."""
    store.record_jobs([job(7)])
    store.record_runs([run(7)])
    first, again = member(2, 1, 0, time=2002.0), member(4, 3, 1, 2, time=2060.0)
    report(store, 7, 0, lines=[hello(1), first, member(3, 2, 0, 1, time=2050.0), again], offset=1, number=4)
    report(store, 7, 0, lines=[member(5, 4, 2, time=2070.0)], offset=2, number=5)
    bars = [(row.shape.nodes, row.shape.gpus_per_node, row.start, row.end) for row in store.timeline()]
    assert bars == [(1, 1, 2000.0, 2050.0), (2, 1, 2050.0, 2070.0), (1, 1, 2070.0, None)]


def test_samples_of_several_sizes_are_not_put_together(store: Store) -> None:
    """Protects throughput of old jobs: rolled up, each size has the samples and seconds that it had, and learning reads
    the same as before."""
    store.record_jobs([job(7, state="COMPLETED", end_time=3000.0)])
    store.record_runs([run(7, end_time=3000.0)])
    lines: list[ReportLine] = [hello(1)]
    for number in range(2, 200):
        made = throughput(number, seconds=0.25, samples=64 * (1 + number // 50))
        lines.append(member(number, number, *range(1 + number // 50 % 2)) if number in (2, 50, 100, 150) else made)
    report(store, 7, 0, lines=lines, offset=1, number=199)

    since = "(SELECT max(m.number) FROM memberships m WHERE m.run_id = t.run_id AND m.number < t.number)"
    query = f"SELECT {since} AS since, SUM(t.samples), SUM(t.seconds) FROM throughput t GROUP BY since"

    def sizes() -> list[tuple[Any, ...]]:
        with store._read() as connection:
            return sorted(tuple(row) for row in connection.exec_driver_sql(query))

    before, learnt = sizes(), store.histories([7])[7].throughput
    (run_id,) = store.rollups_due(4000.0, 1000.0)
    assert sum(gone for _, gone in store.roll_up(run_id, 4000.0, 1000.0)) > 100
    assert sizes() == before
    store._cache.clear()
    assert store.histories([7])[7].throughput == learnt


def test_accounting_does_not_count_blocks_twice(store: Store) -> None:
    """Protects GPU-hours: accounting has a row for each block, under ids of which all but one are no job's here."""
    store.record_jobs([job(100, state="COMPLETED", end_time=2600.0)])
    blocks = [replace(BLOCK, job_id=100, task=task, slurm_id=100 + task, end_time=2500.0) for task in (0, 1)]
    store.record_blocks(blocks)
    ended = {"state": "COMPLETED", "end_time": 2500.0, "submit_time": 1100.0}
    read = [
        AccountingJob(job(id_, **ended), (run(id_, start_time=2001.0, end_time=2500.0),)) for id_ in (100, 101, 102)
    ]
    done = store.add_accounting(read)
    assert (done.companion, done.new) == (2, 1)
    assert sorted(store.jobs()) == [100, 102]
