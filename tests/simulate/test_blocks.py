"""A simulated job of blocks: it changes its size while it trains, and goes on when a block is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_db.shape import Shape
from ones_wrapper.protocol import (
    ORDERS,
    SPEC,
    Batch,
    Bye,
    Checkpoint,
    Hello,
    Membership,
    Order,
    Report,
    decode_report,
    decode_spec,
    encode,
    reports_name,
)
from slurm_ones.simulate.invariants import order_of_samples
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import BLOCKS, World
from slurm_ones.slurm.model import JobState, Task
from tests.simulate.harness import QUIET

WORK = Workload("one", (Submission("job", 0.0, "nlp", 1, 16, elastic=True),), {"nlp": build(KINDS["bert-glue"])})
LAUNCH_S = 15.0
HOT = Hot(launch_s=LAUNCH_S)
GROW_S = HOT.grow_s(WORK.applications["nlp"])


class Bench:
    """One job of blocks on a cluster, and the test in the companion's place."""

    def __init__(self, directory: Path) -> None:
        self.world = World(WORK, ClusterSpec(4, 4), directory, QUIET, mechanism=HOT)
        (self.job_id,) = self.world.job_ids.values()
        training = self.world.trainings[self.job_id]
        assert training.hot is not None
        self.training = training
        self.number = 0
        self.wait(30)
        self.world.client.hold(self.job_id)
        self.world.client.release(Task(self.job_id, 0), start_now=False)
        self.world.client.throttle(self.job_id, 0)

    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def order(self, *tasks: int, **what: object) -> None:
        """Order those tasks to train together."""
        self.number += 1
        values = {"blocks": tasks or None, **what}
        text = encode(Order(self.number, self.training.term, **values))  # type: ignore[arg-type]
        new = self.training.files.directory / "new"
        new.write_bytes(text)
        new.rename(self.training.files.directory / ORDERS)

    def open(self, **shapes: tuple[int, int]) -> None:
        """Give waiting tasks (`t1=(nodes, gpus)`) a shape and let them start."""
        for name, shape in shapes.items():
            task = Task(self.job_id, int(name[1:]))
            self.world.client.reshape(task, Shape(*shape))
            self.world.client.release(task)

    def grown(self, *tasks: int) -> None:
        """The job trains as these blocks of one GPU each."""
        self.order(*tasks)
        self.open(**{f"t{task}": (1, 1) for task in tasks if task not in self.training.members})
        self.wait(30)
        assert set(self.training.members) == set(tasks)

    def states(self) -> list[JobState]:
        return [job.state for job in self.world.client.tasks(self.job_id)]

    def reports(self, term: int) -> list[Report]:
        path = self.training.files.directory / reports_name(term)
        return [decode_report(line)[2] for line in path.read_bytes().splitlines()]

    def of(self, kind: type, term: int | None = None) -> list:  # type: ignore[type-arg]
        return [r for r in self.reports(self.training.term if term is None else term) if isinstance(r, kind)]

    def finish(self) -> None:
        """Let it end, and check that every sample was used once."""
        self.wait(40_000)
        assert self.world.done
        assert self.training.finished
        runs = [self.reports(term) for term in range(self.training.term + 1)]
        assert list(order_of_samples(self.training.curve.dataset, runs, blocks=True)) == []
        assert self.training.lost_samples == 0
        assert not any(
            node.held for node in map(self.world.cluster.nodes.__getitem__, self.world.cluster.nodes.names())
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_task_0_trains_as_a_plain_job_and_the_others_wait(tmp_path: Path) -> None:
    """Without a companion the throttle keeps them from starting; the end cancels them."""
    world = World(WORK, ClusterSpec(4, 4), tmp_path, QUIET, mechanism=HOT)
    world.pass_time(30)
    (training,) = world.trainings.values()
    assert training.hot is not None
    assert [job.state for job in world.client.tasks(1)] == [JobState.RUNNING, *(BLOCKS - 1) * [JobState.PENDING]]
    spec = decode_spec((tmp_path / "ones-1" / SPEC).read_bytes())
    assert (spec.hot, spec.term) == (True, 0)
    reports = [decode_report(line)[2] for line in (tmp_path / "ones-1" / reports_name(0)).read_bytes().splitlines()]
    assert isinstance(reports[0], Hello)
    first = reports[1]
    assert isinstance(first, Membership)
    assert (first.generation, first.blocks, first.restarts, first.world, first.why) == (1, (0,), (0,), 1, "first")
    world.pass_time(40_000)
    assert training.finished
    assert [job.state for job in world.cluster.records.of(1)] == [JobState.COMPLETED, JobState.CANCELLED]
    assert world.done


def test_a_block_joins_while_the_job_trains(bench: Bench) -> None:
    """It launches meanwhile; then training stands still for a moment, and goes on at the new size and batch."""
    bench.order(0, 1, batch=64)
    bench.open(t1=(2, 4))
    before = bench.training.position.step
    bench.wait(LAUNCH_S)
    assert bench.training.members == (0,)
    assert bench.training.position.step > before
    bench.wait(5)
    (_, joined) = bench.of(Membership)
    assert (joined.generation, joined.blocks, joined.restarts, joined.world) == (2, (0, 1), (0, 0), 9)
    assert (joined.nodes, joined.gpus_per_node, joined.batch, joined.order, joined.why) == (3, 0, 64, 1, "order")
    assert joined.pause_s == pytest.approx(GROW_S)
    assert LAUNCH_S <= joined.ready_s < LAUNCH_S + 3
    assert bench.of(Batch)[-1].batch == 64
    assert bench.training.term == 0
    assert bench.training.gpus == 9
    bench.finish()


def test_a_block_that_leaves_completes_and_the_others_train_on(bench: Bench) -> None:
    bench.grown(0, 1, 2)
    bench.order(0, 2)
    bench.wait(1.0)
    left = bench.of(Membership)[-1]
    assert (left.blocks, left.pause_s, left.bytes) == ((0, 2), HOT.shrink_pause_s, 0)
    bench.wait(3)
    assert bench.states()[:3] == [JobState.RUNNING, JobState.COMPLETED, JobState.RUNNING]
    bench.world.client.reuse(Task(bench.job_id, 1))
    bench.grown(0, 1, 2)
    assert bench.of(Membership)[-1].restarts == (0, 0, 1)
    bench.finish()


def test_the_leader_leaves_and_the_next_term_begins(bench: Bench) -> None:
    """A replaced block: nobody leaves before the other is ready, and reports go on in the next file."""
    bench.order(1)
    bench.open(t1=(1, 4))
    bench.wait(LAUNCH_S - 5)
    assert bench.training.members == (0,)
    bench.wait(10)
    assert bench.training.members == (1,)
    bye = bench.of(Bye, 0)[-1]
    assert bye.reason == "moved"
    hello, moved = bench.reports(1)[:2]
    assert isinstance(hello, Hello)
    assert isinstance(moved, Membership)
    assert (hello.step, hello.world, hello.checkpoint) == (bye.step, 4, "")
    assert (moved.generation, moved.blocks, moved.why) == (2, (1,), "order")
    assert decode_spec((bench.training.files.directory / SPEC).read_bytes()).term == 1
    assert bench.states()[0] is JobState.COMPLETED
    bench.finish()


def test_a_block_that_nobody_wants_ends_at_once(bench: Bench) -> None:
    bench.open(t3=(1, 1))
    bench.wait(4)
    assert bench.states()[3] is JobState.COMPLETED
    assert len(bench.of(Membership)) == 1


def test_an_order_that_is_taken_back_leaves_the_job_as_it_was(bench: Bench) -> None:
    bench.order(0, 1)
    bench.open(t1=(1, 1))
    bench.wait(5)
    bench.order(0)
    bench.wait(20)
    assert bench.training.members == (0,)
    assert bench.states()[1] is JobState.COMPLETED
    assert len(bench.of(Membership)) == 1


def test_one_that_never_starts_is_waited_for_and_the_others_join_before_it(bench: Bench) -> None:
    bench.order(0, 1, 2)
    bench.open(t1=(1, 1))
    bench.wait(LAUNCH_S + 10)
    assert bench.training.members == (0, 1)
    bench.open(t2=(1, 1))
    bench.wait(LAUNCH_S + 10)
    assert bench.training.members == (0, 1, 2)


@pytest.mark.parametrize("phase", ["launching", "ready", "switching"])
def test_a_newcomer_that_dies_costs_the_others_nothing_but_time(bench: Bench, phase: str) -> None:
    bench.order(0, 1)
    bench.open(t1=(1, 1))
    if phase == "switching":
        while bench.training.phase.value != "switching":
            bench.wait(0.05)
    else:
        bench.wait(8 if phase == "launching" else LAUNCH_S)
    bench.world.cluster.kill(Task(bench.job_id, 1), 137)
    bench.wait(10)
    assert bench.training.members == (0,)
    assert len(bench.of(Membership)) == 1
    assert bench.training.term == 0
    bench.finish()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_block_that_is_lost_is_done_without_from_memory(bench: Bench, lost: int) -> None:
    """Seconds later the others train on, in a new term, and no sample is used twice."""
    bench.grown(0, 1)
    at = bench.training.position
    bench.world.cluster.kill(Task(bench.job_id, lost), 137)
    bench.wait(1)
    assert bench.training.position.step == at.step
    bench.wait(10)
    (hello,) = bench.of(Hello, 1)
    assert (hello.step, hello.cursor, hello.checkpoint) == (at.step, at.cursor, f"step-{at.step:09d}")
    (left,) = bench.of(Membership, 1)
    assert (left.blocks, left.why, left.generation) == ((1 - lost,), "first", 3)
    assert bench.states()[lost] is JobState.FAILED
    bench.finish()


def test_a_block_that_slurm_stops_leaves_by_itself(bench: Bench) -> None:
    bench.grown(0, 1)
    bench.world.cluster.preempt(Task(bench.job_id, 1))
    bench.wait(2)
    left = bench.of(Membership)[-1]
    assert (left.blocks, left.why, left.order) == ((0,), "leaving", None)
    bench.wait(200)
    again = bench.of(Membership)[-1]
    assert (again.blocks, again.restarts) == ((0, 1), (0, 1))
    bench.finish()


def test_a_leader_that_slurm_stops_hands_over(bench: Bench) -> None:
    bench.grown(0, 1)
    bench.world.cluster.preempt(Task(bench.job_id, 0))
    bench.wait(2)
    assert (bench.training.members, bench.training.term) == ((1,), 1)
    assert bench.of(Bye, 0)[-1].reason == "moved"
    bench.wait(200)
    assert bench.training.members == (1, 0)
    bench.finish()


def test_when_all_blocks_are_lost_the_next_one_begins_at_the_last_checkpoint(bench: Bench) -> None:
    bench.grown(0, 1)
    bench.wait(700)
    assert bench.of(Checkpoint)
    durable = bench.training.durable
    bench.world.cluster.kill(Task(bench.job_id, 0), 137)
    bench.world.cluster.kill(Task(bench.job_id, 1), 137)
    bench.world.client.release(Task(bench.job_id, 2))
    bench.wait(60)
    assert bench.training.members == (2,)
    assert bench.training.term == 1
    (hello,) = bench.of(Hello)
    assert hello.step >= durable.step


def test_a_drain_is_answered_as_by_a_plain_job(bench: Bench) -> None:
    bench.grown(0, 1)
    bench.order(drain=True)
    bench.wait(10)
    assert bench.of(Checkpoint)[-1].order == bench.number
    assert bench.training.drained_for == bench.number
    bench.wait(120)
    bench.finish()


def test_the_store_is_lost_and_the_blocks_find_each_other_again(bench: Bench) -> None:
    bench.grown(0, 1)
    bench.training.lose_store()
    bench.wait(7 + GROW_S)
    assert (bench.training.members, bench.training.term) == ((0, 1), 1)
    assert [report.blocks for report in bench.of(Membership)] == [(0,), (0, 1)]
    bench.finish()


def test_the_whole_job_is_cancelled(bench: Bench) -> None:
    bench.grown(0, 1)
    bench.world.cluster.cancel(bench.job_id)
    bench.wait(10)
    assert set(bench.states()) == {JobState.CANCELLED}
    assert bench.world.done
    assert bench.training.members == ()
