"""The table of a block's states: what it allows, its picture in the documents, and that blocks go so."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_wrapper.membership.machine import BLOCK_EDGES, LAST, BlockMachine, BlockState, Carrier, block_picture
from ones_wrapper.membership.plan import Member, Plan
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.protocol import Bye, Membership, decode_spec
from ones_wrapper.run.changing import ChangingRanks
from slurm_ones.act.transitions import State
from tests.cluster.paths import REPOSITORY
from tests.wrapper.membership.blocks import SAMPLES, Job

PLAN = Plan(1, 0, (Member(0, 0, "0.0", 1, 1, 1),))
OUTSIDE, ADMITTED, LEADING, MEMBER, CHANGING, PARTING, OVER, LOST = BlockState


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FLAGS, "leaving", False)


def test_every_state_is_reached_and_none_is_left_without_a_way_on() -> None:
    """And a reader of two tables finds no name in both."""
    reached = {OUTSIDE, LOST}
    while more := {edge.after for edge in BLOCK_EDGES if edge.before in reached} - reached:
        reached |= more
    assert reached == set(BlockState) and all(edge.why for edge in BLOCK_EDGES)
    assert len({edge[:2] for edge in BLOCK_EDGES}) == len(BLOCK_EDGES)
    assert {edge.before for edge in BLOCK_EDGES} == set(BlockState) - {OVER}
    assert not {state.value for state in BlockState} & {state.value for state in State}


@pytest.mark.parametrize("first", [ADMITTED, LEADING, MEMBER])
def test_a_plan_that_comes_to_nothing_leaves_a_block_as_it_was(first: BlockState) -> None:
    machine = BlockMachine(first, Carrier.MEMORY)
    for _ in range(2):
        machine.prepare(PLAN)
        assert (machine.state, machine.settled, machine.plan) == (CHANGING, first, PLAN)
    machine.back()
    assert (machine.state, machine.settled, machine.plan) == (first, first, None)
    machine.back()
    machine.prepare(PLAN)
    machine.go(PARTING)
    assert (machine.state, machine.settled, machine.plan) == (PARTING, first, PLAN) and FLAGS.leaving


@pytest.mark.parametrize("to", [OVER, LEADING, MEMBER, OUTSIDE])
def test_a_step_that_the_table_does_not_have_is_said(to: BlockState, capfd: pytest.CaptureFixture[str]) -> None:
    """A fault of ours in the table ends no training."""
    machine = BlockMachine(ADMITTED, Carrier.MEMORY)
    machine.go(to)
    assert machine.state is to and f"went from admitted to {to.value}" in "".join(capfd.readouterr())
    machine.go(LOST)
    assert "went" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("last", sorted(LAST, key=lambda state: state.value))
def test_nothing_follows_a_last_state(last: BlockState) -> None:
    """The watch's thread finds the others lost while the script's changes over."""
    machine = BlockMachine(LEADING, Carrier.MEMORY)
    machine.prepare(PLAN)
    threads = [threading.Thread(target=machine.go, args=(last,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    machine.back()
    for to in BlockState:
        machine.go(to)
    assert (machine.state, machine.settled) == (last, LEADING)


@pytest.mark.parametrize(
    ("first", "code", "then", "over"),
    [
        (LEADING, 0, None, True), (LEADING, 0, OVER, True), (LEADING, 1, None, False),
        (ADMITTED, 0, None, False), (LEADING, 0, LOST, False), (CHANGING, 0, PARTING, False),
    ],
)  # fmt: skip
def test_whose_end_is_that_of_the_job(first: BlockState, code: int, then: BlockState | None, over: bool) -> None:
    """Not a block's that leaves it: also if it was just found lost by its watch."""
    ended: list[int] = []
    machine = BlockMachine(first, Carrier.MEMORY)
    if then is not None:
        machine.go(then)
    machine.go(PARTING if then is LOST else machine.state)
    ranks: Any = object.__new__(ChangingRanks)
    folder = SimpleNamespace(end=lambda: ended.append(1))
    posted: list[int] = []
    ranks._blocks = SimpleNamespace(
        machine=machine, close=lambda: None, folder=folder, post_failure=lambda: posted.append(1)
    )
    ranks._machine, ranks._group = machine, SimpleNamespace(rank=0)
    assert ranks.ended(code) is (then is not PARTING)
    assert ended == [1] * over
    assert posted == [1] * (code != 0)


def test_the_picture_in_the_documents_is_that_of_the_table() -> None:
    """python -m ones_wrapper.membership.machine prints it."""
    page = (REPOSITORY / "docs" / "how_blocks_work.md").read_text()
    found = page.split("<!-- block states -->\n```mermaid\n")[1].split("\n```\n<!-- end of block states -->")[0]
    assert found == block_picture()


@pytest.mark.slow
def test_blocks_go_by_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's states in a job that grows, changes its leader, and outlives its first block; while its script holds
    the next batch, no sample of which is left out or used twice."""
    go = BlockMachine.go

    def noted(machine: BlockMachine, to: BlockState) -> None:
        before = machine.state
        go(machine, to)
        if machine.state is not before:
            with (tmp_path / f"states-{threading.get_native_id()}").open("a") as file:
                file.write(f"{before.value} {machine.state.value}\n")

    monkeypatch.setattr(BlockMachine, "go", noted)
    job = Job(tmp_path / "job", "--step-ms", "40", "--ahead", epochs=30)
    job.move()
    gone = {tuple(path.read_text().split()) for path in tmp_path.glob("states-*")}
    first = "leading changing changing leading leading changing changing parting"
    second = "admitted changing changing member member changing changing leading leading over"
    assert gone == {tuple(first.split()), tuple(second.split())}
    assert [bye.reason for bye in job.of(Bye)] == ["moved", "finished"]
    assert decode_spec((job.directory / "spec.json").read_bytes()).term == 1
    memberships = job.of(Membership)
    assert memberships[1].bytes > 0
    assert [one.step % -(-SAMPLES // 16) for one in memberships] == [0, 0, 0], (
        "its script has a batch of the epoch ahead"
    )
    job.assert_as_undisturbed()
