"""What the actor does with a schedule: advise or begin, order, write down, and keep its hands off."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ones_db import JobRecord, MembershipRecord, ReportLine, ResizeRecord, RunReports, Store, StoreLost
from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_wrapper.protocol import ORDERS, SPOOL_MARK, Bye, Membership, Order, directory_name, encode, spool_order_name
from slurm_ones.act.holds import HeldTasks
from slurm_ones.act.orders import OrderError, order_path, write_order
from slurm_ones.act.transitions import HOLDS_JOB, State
from slurm_ones.jobs.elastic import whole_job
from slurm_ones.policy.contract import Allocation, Promise
from slurm_ones.policy.tables import expected_gain
from slurm_ones.rules.blocks import BLOCKS, held_by_others
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import JobState
from slurm_ones.testing.rounds import job
from tests.act.bench import Bench
from tests.act.make import NOW, elastic, history


def test_a_resize_is_written_down_before_anything_is_done(own_store: Store, tmp_path: Path) -> None:
    """The record holds both shapes and batches, the order's number and its deadline; then the machine goes on."""
    bench, job_id = Bench(own_store, tmp_path), 1
    bench.add(job_id, Shape(1, 1), "n1", restart=2)
    assert bench.act({job_id: Allocation(Shape(1, 2), 64)}) == [job_id]
    (resize,) = own_store.resizes(job_id)
    assert (resize.state, resize.restart, resize.old_shape, resize.new_shape) == (
        "draining",
        2,
        Shape(1, 1),
        Shape(1, 2),
    )
    assert (resize.old_batch, resize.new_batch) == (32, 64)
    assert resize.order_number == pytest.approx(NOW * 1000, abs=100)
    assert resize.deadline == pytest.approx(NOW + 300, abs=1) and resize.decision_id is not None
    assert bench.machine.asked == [job_id] and bench.order(job_id) is None
    assert str(own_store.decisions(job_id)[0].jobs[0].outcome) == "begins"


def test_a_waiting_job_begins_with_its_hold(own_store: Store, tmp_path: Path) -> None:
    """Its restart is -1: it leaves no run."""
    bench, job_id = Bench(own_store, tmp_path), 1
    bench.add(job_id, Shape(1, 1))
    bench.act({job_id: Allocation(Shape(1, 2), 64)})
    (resize,) = own_store.resizes(job_id)
    assert (resize.state, resize.restart) == ("holding", -1)


@pytest.mark.parametrize("nodes", [(), ("n1",)])
def test_a_batch_is_named_once_the_job_has_reported_it(own_store: Store, tmp_path: Path, nodes: Sequence[str]) -> None:
    """Until then its script chooses it: a policy's placeholder would stand next to `batch unknown` in other views."""
    bench = Bench(own_store, tmp_path)
    bench.add(1, Shape(1, 1), *nodes)
    bench.histories = {1: replace(history(1, spec=None), batch=None)}
    bench.act({1: Allocation(Shape(1, 2), 64)})
    (given,) = own_store.decisions(1)[0].jobs
    assert (given.shape, given.batch) == (Shape(1, 2), None)


def test_advice_is_given_once_and_changes_nothing(own_store: Store, tmp_path: Path) -> None:
    """The same advice is not repeated each tick; another one is given."""
    bench, job_id = Bench(own_store, tmp_path, mode="advise"), 1
    bench.add(job_id, Shape(1, 1), "n1")
    for _ in range(2):
        bench.act({job_id: Allocation(Shape(1, 2), 64)})
    assert bench.said[0] == f"# job {job_id} (alice): 1x1 → 1x2, batch 32 → 64"
    assert f"scontrol requeuehold Incomplete {job_id}" in bench.said
    assert sum(line.startswith("# job") for line in bench.said) == 1
    bench.act({job_id: Allocation(Shape(1, 3), 64)})
    assert sum(line.startswith("# job") for line in bench.said) == 2
    assert own_store.resizes(job_id) == [] and bench.order(job_id) is None and bench.machine.asked == []


def test_a_batch_is_ordered_once(own_store: Store, tmp_path: Path) -> None:
    """At the same shape an order without a drain, not repeated until the batch asked for is another."""
    bench, job_id = Bench(own_store, tmp_path), 1
    bench.add(job_id, Shape(1, 1), "n1")
    bench.act({job_id: Allocation(Shape(1, 1), 64)})
    first = bench.order(job_id)
    assert (first.batch, first.drain, first.restart) == (64, False, 0)
    bench.act({job_id: Allocation(Shape(1, 1), 64)})
    assert bench.order(job_id) == first
    bench.act({job_id: Allocation(Shape(1, 1), 128)})
    assert bench.order(job_id).batch == 128 and bench.order(job_id).number > first.number
    assert own_store.resizes(job_id) == []


def test_a_batch_is_ordered_again_after_another_order(own_store: Store, tmp_path: Path) -> None:
    """A resize that was taken back ordered the old batch: the decided one is no longer in force."""
    bench, job_id = Bench(own_store, tmp_path), 1
    elastic = bench.add(job_id, Shape(1, 1), "n1")
    bench.act({job_id: Allocation(Shape(1, 1), 64)})
    write_order(elastic.job, Order(bench.order(job_id).number + 1, 0, 32), None)
    bench.act({job_id: Allocation(Shape(1, 1), 64)})
    assert bench.order(job_id).batch == 64


@pytest.mark.parametrize(
    ("members", "restarts", "named"),
    [((0, 1), (0, 0), (0, 1)), ((0, 1), (0, 1), (0,)), ((1,), (1, 1), (0, 1))],
    ids=["as reported", "one started again", "all started again"],
)
def test_a_batch_order_names_the_starts_that_train_together(
    own_store: Store, tmp_path: Path, members: tuple[int, ...], restarts: tuple[int, int], named: tuple[int, ...]
) -> None:
    """An order that took a former start's membership for today's would send the base block away."""
    bench = Bench(own_store, tmp_path)
    one = bench.add(1, Shape(1, 1), "n1")
    tasks = [
        replace(one.job.first, job_id=10 + task, array=True, array_id=1, array_tasks=(task,), restart=restart)
        for task, restart in enumerate(restarts)
    ]
    bench.jobs[1] = replace(one, job=whole_job(1, tasks))
    reported = Membership(1, members, (0,) * len(members), 1, 1, 1, 0, 32, 0.2, why="first")
    bench.histories = {1: history(1, membership=MembershipRecord(1, 0, 1, 1.0, reported))}
    bench.act({1: Allocation(Shape(1, 2), 64)})
    assert (bench.order(1).batch, bench.order(1).blocks) == (64, named) and own_store.resizes(1) == []


def test_what_the_decision_expects_goes_with_the_resize(own_store: Store, tmp_path: Path) -> None:
    """Protects the job's log: the gain is that of the resize that begins, and none where nobody knew one."""
    bench = Bench(own_store, tmp_path)
    bench.add(1, Shape(1, 1), "n1")
    bench.add(2, Shape(1, 1), "n2")
    bench.views = {1: job(1, {"n1": 1})}
    bench.act({1: Allocation(Shape(1, 2), 64), 2: Allocation(Shape(1, 2), 64)})
    (one,), (other,) = own_store.resizes(1), own_store.resizes(2)
    assert bench.machine.gains == {one.id: expected_gain(bench.views[1], Shape(1, 2), 64)} and other.id != one.id


def test_the_stop_file_stops_everything_that_would_begin(own_store: Store, tmp_path: Path) -> None:
    """Neither resizes nor batches; the decision says why."""
    bench, one, two = Bench(own_store, tmp_path), 1, 2
    (tmp_path / "stop").touch()
    bench.add(one, Shape(1, 1), "n1")
    bench.add(two, Shape(1, 1), "n2")
    assert bench.act({one: Allocation(Shape(1, 2), 64), two: Allocation(Shape(1, 1), 64)}) == []
    assert own_store.resizes(one) == [] and bench.order(two) is None
    outcome = str(own_store.decisions(one)[0].jobs[0].outcome)
    assert outcome == f"the stop file {tmp_path / 'stop'} exists: no resize begins"


def test_nothing_is_promised_where_nothing_may_be_done(own_store: Store, tmp_path: Path) -> None:
    """A deadline is not promised while the stop file is there; once it is gone, it is."""
    bench = Bench(own_store, tmp_path)
    bench.add(1, Shape(1, 1), "n1")
    bench.views[1] = replace(job(1, {"n1": 1}), deadline=2 * NOW)
    bench.promises[1] = Promise(True, reason("deadline_promised", gpus=1))
    (tmp_path / "stop").touch()
    bench.act({1: Allocation(Shape(1, 1), 32)})
    assert not own_store.promises([1])
    (tmp_path / "stop").unlink()
    bench.act({1: Allocation(Shape(1, 1), 32)})
    assert own_store.promises([1])[1].given


def test_decisions_are_stored_where_they_change(own_store: Store, tmp_path: Path) -> None:
    """With two partitions, too, a decision that says the same as its partition's last is not stored again."""
    bench, one, two = Bench(own_store, tmp_path, mode="advise"), 1, 2
    bench.add(one, Shape(1, 1), "n1")
    bench.add(two, Shape(1, 1), "n2", partitions=("other",))
    wanted = {one: Allocation(Shape(1, 2), 64), two: Allocation(Shape(1, 1), 32)}
    for _ in range(3):
        bench.act(wanted)
    assert len(own_store.decisions(one)) == len(own_store.decisions(two)) == 1


def test_the_newest_decision_says_what_keeps_a_job_now(own_store: Store, tmp_path: Path) -> None:
    """Not a dwell time that has passed, nor one before a pin; the same once more each tick is no news."""
    bench, stays = Bench(own_store, tmp_path, mode="advise"), {1: Allocation(Shape(1, 1), 32)}
    bench.add(1, Shape(1, 1), "n1")
    first, second = (reason("dwell_time", until=NOW + after, dwell_s=60.0) for after in (60.0, 90.0))
    not_possible = reason("size_not_possible", gpus=5, counts="1, 2, 4")
    for after, why, stored in (
        (0.0, first, 1),
        (30.0, second, 1),  # the moment moves: no news before the one that is stored has passed
        (61.0, second, 2),
        (62.0, second, 2),
        (63.0, not_possible, 3),
        (64.0, not_possible, 3),
        (65.0, reason("network"), 4),
        (66.0, reason("highest_index"), 4),  # a policy's reasons change each tick
    ):
        bench.now, bench.reasons = NOW + after, {1: why}
        bench.act(stays)
        assert len(own_store.decisions(1)) == stored
        if why.code != "highest_index":
            assert own_store.decisions(1)[0].jobs[0].reason.code == why.code
    told = [str(one.jobs[0].reason) for one in own_store.decisions(1)]
    assert told[1].endswith("do not allow (possible: 1, 2, 4)") and told[2] == str(second)


def begun(store: Store, job_id: int, state: State) -> ResizeRecord:
    """A resize that a companion before this one began."""
    store.record_jobs([JobRecord(job_id, "job", "alice", 1.0, Shape(1, 1))])
    return store.begin_resize(ResizeRecord(job_id, 0, Shape(1, 1), 32, Shape(1, 2), 64, state.value, NOW))


def test_one_broken_resize_does_not_stop_the_others(own_store: Store, tmp_path: Path) -> None:
    """Somebody else's job may stand in a hold of ours; only a silent controller ends the round."""
    bench, resizes = Bench(own_store, tmp_path), [begun(own_store, n, State.RELEASING) for n in (1, 2, 3)]
    bench.machine.broken = {1: RuntimeError("odd")}
    assert bench.actor.advance() == len(resizes)
    assert bench.machine.asked == [1, 2, 3]
    bench.machine.broken = {2: Unreachable("down")}
    with pytest.raises(Unreachable):
        bench.actor.advance()


@pytest.mark.parametrize("told", [True, False], ids=["answered", "the answer was lost"])
def test_what_others_hold_is_remembered_however_a_change_of_blocks_ended(
    own_store: Store, tmp_path: Path, told: bool
) -> None:
    """Also if its end was stored, and the database did not say so."""
    own_store.remember()
    held = HeldTasks(own_store)
    actor = Bench(own_store, tmp_path).actor
    own_store.record_jobs([JobRecord(1, "job", "alice", 1.0, Shape(1, 1), elastic=True)])
    resize = ResizeRecord(1, 0, Shape(1, 1), 32, Shape(1, 2), 64, "preparing", NOW, mechanism=BLOCKS, held=(1, 2))
    resize = own_store.begin_resize(resize)
    assert held.of(1) == {1, 2}

    def end(resize: ResizeRecord) -> ResizeRecord:
        ended = own_store.end_resize(resize.id, "rolled_back", held_by_others({2}), NOW + 1)
        if not told:
            raise StoreLost("the server closed the connection at the commit")
        return ended

    actor._machine.advance = end  # type: ignore[method-assign]
    actor.advance()
    assert held.of(1) == {1} and held.ever(1) == {1, 2}


def test_a_companion_that_stops_takes_care_of_held_jobs_alone(own_store: Store, tmp_path: Path) -> None:
    """Those that only wait or start are the next companion's."""
    bench = Bench(own_store, tmp_path)
    for job_id, state in enumerate((State.RESHAPING, State.WAITING, State.DRAINING)):
        begun(own_store, job_id, state)
    assert bench.actor.advance(only=HOLDS_JOB) == 1
    assert bench.machine.asked == [0]


# -- orders ----------------------------------------------------------------------------------------------------------


def test_orders_lie_where_the_companion_may_write(tmp_path: Path) -> None:
    """In the job's own directory, else in the spool, which only matters for other users' jobs."""
    job = elastic(7, Shape(1, 1), "n1", uid=os.geteuid(), work_dir=str(tmp_path)).job
    assert order_path(job, tmp_path / "spool") == tmp_path / directory_name(7) / ORDERS
    theirs = replace(job.first, uid=os.geteuid() + 1)
    in_spool = os.geteuid() != 0  # root may write into anybody's directory
    expected = tmp_path / "spool" / spool_order_name(7) if in_spool else tmp_path / directory_name(7) / ORDERS
    assert order_path(theirs, tmp_path / "spool") == expected
    assert order_path(theirs, None) == tmp_path / directory_name(7) / ORDERS


def test_an_order_is_not_written_through_a_directory_that_is_a_link(tmp_path: Path) -> None:
    """Nor where there is none; what else may lie in its way is in `tests/jobs/test_hostile.py`."""
    target, directory = tmp_path / "target", tmp_path / directory_name(7)
    target.mkdir()
    directory.symlink_to(target)
    job = elastic(7, Shape(1, 1), "n1", uid=os.geteuid(), work_dir=str(tmp_path)).job
    with pytest.raises(OrderError, match="ones-7"):
        write_order(job, Order(3, 0, 64), None)
    assert [*target.iterdir()] == []
    directory.unlink()
    with pytest.raises(OrderError, match="no such directory"):
        write_order(job, Order(3, 0, 64), None)


@pytest.mark.parametrize("way", ["stopped by its owner", "completed", "forgotten by Slurm"])
def test_nothing_is_left_of_a_job_that_ended(own_store: Store, tmp_path: Path, way: str) -> None:
    """No lease, no order in the spool that the next job with its id would obey; others keep theirs."""
    spool = tmp_path / "spool"
    spool.mkdir()
    bench = Bench(own_store, tmp_path, spool=spool)
    bench.add(1, Shape(1, 1), "n1")
    bench.add(2, Shape(1, 1), "n1")
    bench.add(3, Shape(1, 1), eligible_time=NOW - 100)
    bench.act({1: Allocation(Shape(1, 1), 64), 2: Allocation(Shape(1, 1), 64)}, 3)
    for job_id in (1, 2, 3):
        (spool / spool_order_name(job_id)).write_bytes(encode(Order(5, 0, 64)))
    (spool / "orders-mine.json").write_bytes(b"somebody's")
    assert set(own_store.deferrals()) == {3}
    told = RunReports(1, 0, 10, 2, lines=[ReportLine(2, NOW, Bye("stopped", 7, 0))])
    own_store.add_reports([told])
    for job_id in (1, 3):
        if way == "forgotten by Slurm":
            del bench.jobs[job_id]
        else:
            state = JobState.COMPLETED if way == "completed" else JobState.FAILED
            bench.change(job_id, state=state, end_time=NOW + 1)
    bench.act_on({}, {id_: e.job.first for id_, e in bench.jobs.items()}, {2: bench.jobs[2]})
    assert own_store.deferrals() == {} and own_store.open_resizes() == []
    assert {path.name for path in spool.iterdir()} == {SPOOL_MARK, spool_order_name(2), "orders-mine.json"}
    assert bench.actor._ordered.keys() == {2} and bench.slurm.deferred == [(3, 901)]


def test_a_spool_that_is_gone_is_no_reason_to_stop(own_store: Store, tmp_path: Path) -> None:
    """The other jobs are looked after."""
    bench = Bench(own_store, tmp_path, spool=tmp_path / "none")
    bench.add(1, Shape(1, 1), "n1")
    assert bench.act({1: Allocation(Shape(1, 2), 64)}) == [1]
