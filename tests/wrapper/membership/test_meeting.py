"""How ranks come into their run: blocks that look for a leader at the same moment, and those that meet before the
script."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ones_wrapper.frameworks import steps
from ones_wrapper.group import Group, TorchGroup
from ones_wrapper.launch import serve
from ones_wrapper.membership import entered, meeting, rescue
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.coming import LOST, Coming, read_coming
from ones_wrapper.membership.entered import Entered, enter_before_script, enter_block
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.membership.machine import BlockMachine, BlockState, Carrier
from ones_wrapper.membership.plan import Member, Plan
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.job_network import STORE, JobNetwork
from ones_wrapper.process.block import Block
from ones_wrapper.process.exit_codes import PEER_LOST
from ones_wrapper.protocol import Spec
from ones_wrapper.run import changing
from ones_wrapper.run.changing import ChangingRanks
from tests.wrapper.forked import Team


@pytest.fixture(autouse=True)
def nobody_is_asked_any_more() -> Iterator[None]:
    """A thread that still waits for a store as the interpreter ends makes it abort."""
    yield
    for thread in threading.enumerate():
        if thread.name == "ones-ask":
            thread.join(30.0)


def test_a_leader_that_came_while_one_looked_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks find their leader lost; the one that looks later does not replace the other."""
    folder = HotFolder(tmp_path, 7)
    folder.prepare()
    lost = Leader(0, "127.0.0.1", 1, "gone", 0, 0)
    assert folder.claim(lost)
    network = JobNetwork.here()
    board = Board.hosted(network, 1)
    other = Leader(1, *board.address, board.place, 2, 0)

    class Asked(Board):
        def __init__(self, network: JobNetwork, host: str, port: int, place: str, *others: Any, **roles: Any) -> None:
            if place == lost.place:
                assert folder.claim(other)
            super().__init__(network, host, port, place, *others, **roles)

    monkeypatch.setattr(meeting, "Board", Asked)
    found = meeting.find_or_found(folder, Block(7, 1, 0), network)
    assert found == (other, None)
    assert folder.newest() == other


def test_a_leader_that_ends_while_it_is_asked_is_given_up_soon(tmp_path: Path) -> None:
    """The port answered and then closed, as that of a process that ends."""
    folder = HotFolder(tmp_path, 7)
    folder.prepare()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert folder.claim(Leader(0, "127.0.0.1", server.getsockname()[1], "dying", 0, 0))

        def die() -> None:
            server.accept()[0].close()
            server.close()

        dying = threading.Thread(target=die)
        dying.start()
        began = time.monotonic()
        found, board = meeting.find_or_found(folder, Block(7, 1, 0), JobNetwork.here())
        took = time.monotonic() - began
        dying.join()
    assert found is not None and (found.term, found.task) == (1, 1) and board is not None
    assert took < 60.0


def test_announced_blocks_that_waited_for_a_dead_writer_wait_little_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block dies while it writes the rescue checkpoint, for which the other waits as long as it may. It then waited
    twice as long again for the dead one to come."""
    monkeypatch.setattr(rescue, "WAIT_S", 4.0)
    folder, now = HotFolder(tmp_path, 7), time.time()
    folder.prepare()
    assert folder.claim(Leader(0, "127.0.0.1", 1, "gone", 0, 0)) and rescue.claim(folder.path, 0)
    left = Plan(1, 1, (Member(1, 0, "1.0", 1, 1, 1), Member(2, 0, "2.0", 1, 1, 1)), why=LOST)
    assert folder.announce(Coming(left, now, now).fields()) == ""
    _, board = meeting.find_or_found(folder, Block(7, 2, 0), JobNetwork.here())
    took = time.time() - now
    assert board is not None and took > rescue.WAIT_S
    coming = read_coming(board)
    assert coming is not None and coming.patience_s() < took


def meet_and_lose(error: Exception, blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank found a leader, and its run then fails to begin."""

    def lost(*_: Any) -> None:
        raise error

    monkeypatch.setattr(changing, "Run", lost)
    anything: Any = SimpleNamespace()
    changing.start(found(blocks), anything, 0.0, lambda: anything)


TEAM_OF_ONE = TorchGroup(0, 1, 0, 1, 1, torch.device("cpu"), None)


class HeldBlocks(SimpleNamespace):
    has_others = Blocks.has_others
    lost_ranks = Blocks.lost_ranks


def blocks_that(alone: bool, state: BlockState = BlockState.LEADING) -> Any:
    """As a rank of block 1 holds them."""
    leader = Leader(0, "127.0.0.1", 1, "token", 0, 0)
    its = {"leader": leader, "local_rank": 1, "alone": alone, "give_up": lambda why: None, "_group": TEAM_OF_ONE}
    its |= {"machine": BlockMachine(state, Carrier.MEMORY)}
    return HeldBlocks(block=Block(7, 1, 0), **its)


def found(blocks: Any) -> Entered:
    """Ranks of block 1 that have found these blocks."""
    its = Entered(TEAM_OF_ONE, blocks.block)
    its.blocks = blocks
    return its


GLOO = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")


ROLES = [(False, BlockState.LEADING), (True, BlockState.LEADING), (True, BlockState.ADMITTED)]


@pytest.mark.parametrize(("alone", "state"), ROLES)
@pytest.mark.parametrize("error", [GLOO, StoreLostError("gone"), RuntimeError("no such layer")])
def test_blocks_that_are_lost_as_a_term_begins_end_no_others(
    monkeypatch: pytest.MonkeyPatch, alone: bool, state: BlockState, error: Exception
) -> None:
    """The death of a block whose ranks others wait for, before the script's first step or `init`, is no error of the
    script, which would end the job. Neither is that of another rank of a block that is about to join."""
    first = alone and state is BlockState.LEADING
    lost = isinstance(error, StoreLostError) or (error is GLOO and not first)
    with pytest.raises(SystemExit if lost else RuntimeError) as left:
        meet_and_lose(error, blocks_that(alone, state), monkeypatch)
    assert not lost or getattr(left.value, "code", 0) == PEER_LOST
    verdict = found(blocks_that(alone, state)).failed(error)
    assert (verdict[0] if verdict else None) == (PEER_LOST if lost and not first else None)


@pytest.mark.parametrize(("alone", "state"), ROLES)
def test_a_rank_that_is_lost_in_training_or_before_joining(alone: bool, state: BlockState) -> None:
    """Protects a block of two ranks that is about to join: if one rank loses the leader, the other loses that rank, and
    its exit code ended the whole block as the script's error."""
    ranks = ChangingRanks.__new__(ChangingRanks)
    ranks._blocks = blocks_that(alone, state)
    ranks._machine = ranks._blocks.machine
    its: Any = ranks
    its._ending = SimpleNamespace(by_script=lambda end: end())
    verdict = ranks.failed(GLOO)
    first = alone and state is BlockState.LEADING
    assert (verdict[0] if verdict else None) == (None if first else PEER_LOST)
    assert ranks._machine.state is (state if first else BlockState.LOST)


def test_ranks_of_a_block_that_see_another_one_go_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot reach the leader in time and ends: the others notice that as an error of their group."""

    def gone(*_: Any) -> None:
        raise GLOO

    monkeypatch.setattr(entered, "come_in", gone)
    monkeypatch.setenv("ONES_JOB_DIR", str(tmp_path))
    group: Any = SimpleNamespace(rank=1)
    with pytest.raises(SystemExit) as left:
        enter_block(group, Block(7, 1, 0))
    assert left.value.code == PEER_LOST


def test_a_framework_keeps_the_ranks_that_it_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """If others are met after it read who the ranks are, all start again; and a block ends if those who train change
    from memory to memory."""
    blocks = blocks_that(alone=True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(steps, "enter", lambda backend: found(blocks))
    assert steps.meet(None) is TEAM_OF_ONE and blocks.machine.carrier is Carrier.CHECKPOINT
    with pytest.raises(SystemExit) as left:
        found(blocks_that(alone=True, state=BlockState.ADMITTED)).keep_ranks()
    assert left.value.code == 0

    def late(backend: str | None) -> Entered:
        monkeypatch.setenv("WORLD_SIZE", "2")
        return found(blocks)

    monkeypatch.setattr(steps, "enter", late)
    with pytest.raises(SystemExit) as left:
        steps.meet(None)
    assert left.value.code == PEER_LOST


@pytest.mark.parametrize("by_terms", [False, True])
def test_the_spec_says_how_this_term_changes(by_terms: bool) -> None:
    """A strategy could move its state from memory to memory, in a term that several blocks began together, after a loss
    that left too few for it. The first agreement knows the members."""

    class Exchanges(list[Any]):
        hot = True

    control = SimpleNamespace(boundary=SimpleNamespace(members=None))
    sizes, identity = SimpleNamespace(spec=Spec(4, 4, 4, 0, 0)), SimpleNamespace(leads=True)
    settings, loop = SimpleNamespace(strategy=None), SimpleNamespace(exchanges=Exchanges())
    run: Any = SimpleNamespace(settings=settings, loop=loop, sizes=sizes, control=control, identity=identity)
    ranks: Any = object.__new__(ChangingRanks)
    machine = BlockMachine(BlockState.LEADING, Carrier.MEMORY)
    ranks._run, ranks._term, ranks._blocks = run, 1, SimpleNamespace(hot=not by_terms, machine=machine)
    assert ranks.join() is False  # and now comes the first agreement
    assert sizes.spec.hot is not by_terms and sizes.spec.term == 1
    assert control.boundary.members is ranks._blocks


def test_an_order_s_batch_waits_for_all_that_it_names() -> None:
    """A block begins a term alone, since another did not come: the batch was meant for both."""
    blocks: Any = object.__new__(Blocks)
    blocks.present, blocks._me = None, Member(1, 0, "1.0", 1, 1, 1)
    assert [blocks.trains_as(tasks) for tasks in (None, (1,), (0, 1))] == [True, True, False]
    blocks.present = Plan(0, 1, (Member(0, 0, "0.0", 1, 1, 1), blocks._me))
    assert [blocks.trains_as(tasks) for tasks in (None, (1,), (1, 0))] == [True, False, True]


IN_BLOCK = {"ONES_BLOCKS": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


def meets(group: Group, store: str, directory: str, shown: tuple[bool | None, ...]) -> int:
    """How many ranks this one met before the script; 0 for none. `shown` is what each finds of the job's last run:
    whether its state moved from memory to memory, or nothing."""
    mine = shown[group.rank]
    its: Any = None if mine is None else SimpleNamespace(hot=mine, limits=None)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**IN_BLOCK, STORE: store, "ONES_JOB_DIR": directory}.items():
            patch.setenv(name, value)
        patch.setattr(entered, "_MEET_S", 20.0)
        patch.setattr(entered, "read_spec", lambda directory: its)
        patch.setattr(entered, "enter_block", lambda group, block: Entered(group))
        found = enter_before_script()
    return 0 if found is None else found.group.maximum([group.rank])[0] + 1


@pytest.mark.parametrize(
    ("shown", "met"), [((False, None), 2), ((None, False), 0), ((True, True), 0), ((False, False), 2)]
)
def test_ranks_of_a_block_decide_alike(
    teams: dict[int, Team], tmp_path: Path, shown: tuple[bool | None, ...], met: int
) -> None:
    """A shared file system shows one node a spec that another does not see yet, and those who meet before the script
    would wait for those who do so in it."""
    assert teams[2].run(meets, serve(tmp_path, {}), str(tmp_path), shown) == [met, met]
