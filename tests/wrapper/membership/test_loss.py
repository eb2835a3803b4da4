"""Blocks are killed, and those that are left train on together: from one place, with no sample lost or used twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_wrapper.membership import coordinator, entrance
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.coming import LOST, MOST_S, Coming, find_coming
from ones_wrapper.membership.coordinator import DEAD_S, Coordinator
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.membership.plan import Member, Plan
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.process.block import Block
from ones_wrapper.protocol import Hello, Membership
from ones_wrapper.run.run import Run
from tests.marks import nightly
from tests.waiting import until
from tests.wrapper.membership.blocks import Job
from tests.wrapper.membership.forked import kill_at_once
from tests.wrapper.membership.test_plan import member
from tests.wrapper.membership.test_standstill import leading


def grown(job: Job, *tasks: int) -> Membership:
    whole = job.begin(*tasks)
    time.sleep(0.3)
    return whole


def assert_together(job: Job, whole: Membership, *left: int) -> None:
    """The next term begins with all that are left, from what they had in memory, and nobody trained by itself."""
    next_ = job.wait(Membership, lambda one: one.generation > whole.generation)
    assert (sorted(next_.blocks), next_.why, job.terms()) == (sorted(left), LOST, 2), job.errors()
    assert next_.pause_s > 0.0
    assert job.of(Hello)[-1].step >= whole.step, f"the rescue was not used: {job.errors()}"


def assert_undisturbed(job: Job, *left: int) -> None:
    """These blocks, in the order of their starts, end as if nothing had happened."""
    job.finish(*left)
    job.assert_as_undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("dead", [nightly((0,)), (0, 2), nightly((1,)), nightly((1, 3)), nightly((3,))], ids=str)
def test_all_that_are_left_go_on_together(job: Job, dead: tuple[int, ...]) -> None:
    """Members, the leader, or both die at once, and nobody waits to join."""
    whole = grown(job, 0, 1, 2, 3)
    kill_at_once(*(job.blocks[task] for task in dead))
    left = [task for task in range(4) if task not in dead]
    assert_together(job, whole, *left)
    batch = job.of(Membership)[-1].batch
    # State still moves from memory to memory: a newcomer joins without another term, at the same batch.
    job.start(5)
    job.order(*left, 5)
    joined = job.wait_for(*left, 5)
    assert (joined.batch, job.terms()) == (batch, 2) and joined.bytes > 0, job.errors()
    assert_undisturbed(job, *left, 4)


def here(task: int) -> bool:
    """Whether this process is a rank of that task, in its first start."""
    return os.environ.get("SLURM_ARRAY_TASK_ID") == str(task) and not os.environ.get("ONES_FORK")


@pytest.mark.slow
@pytest.mark.parametrize("leader", [False, nightly(True)])
@pytest.mark.parametrize("where", ["in its step", nightly("between steps")])
def test_survivors_that_stopped_in_different_places(
    job: Job, monkeypatch: pytest.MonkeyPatch, where: str, leader: bool
) -> None:
    """As one dies, another has the step behind it, and a third has not begun the optimizer's."""
    now, victim = job.directory / "now", 0 if leader else 1
    commit, act = Run.commit, Run.act

    def stepped(run: Run, total: int) -> None:
        if now.exists() and here(2):
            time.sleep(0.3)  # behind the others: its optimizer has stepped, and nothing is counted
        commit(run, total)
        if now.exists() and here(victim) and where == "in its step":
            os.kill(os.getpid(), signal.SIGKILL)

    def at_boundary(run: Run) -> None:
        act(run)
        if now.exists() and here(victim):
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Run, "commit", stepped)  # of forked blocks too
    monkeypatch.setattr(Run, "act", at_boundary)
    whole = grown(job, 0, 1, 2)
    now.touch()
    left = [task for task in range(3) if task != victim]
    next_ = job.wait(Membership, lambda one: one.generation > whole.generation and len(one.blocks) == 2)
    assert sorted(next_.blocks) == left, job.errors()
    now.unlink()
    assert_undisturbed(job, *left)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["answer", nightly("gather"), nightly("begin")])
def test_a_second_dies_while_they_agree(job: Job, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """One that was counted among them, whether it leads or not."""
    struck = job.directory / "struck"
    module: Any = entrance.connections if moment == "begin" else entrance
    agree = getattr(module, moment)

    def die(*arguments: Any) -> Any:
        if os.environ.get("ONES_FORK"):
            try:
                struck.touch(exist_ok=False)
            except FileExistsError:
                return agree(*arguments)
            for pid in (os.getppid(), os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return agree(*arguments)

    monkeypatch.setattr(module, moment, die)  # of forked blocks too
    whole = grown(job, 0, 1, 2, 3)
    killed = time.monotonic()
    job.blocks[3].kill()
    job.wait(Membership, lambda one: one.generation > whole.generation and len(one.blocks) == 2)
    assert time.monotonic() - killed < 20.0, job.errors()
    job.hurry()
    job.end()
    assert sum(block.end() == 0 for block in job.blocks) == 2, job.errors()
    job.assert_as_undisturbed()


# -- the announcement, without processes -------------------------------------------------------------------------------

BLOCKS = (member(0), member(1), member(2))
PRESENT = Plan(4, 3, BLOCKS)


@pytest.fixture
def folder(tmp_path: Path) -> HotFolder:
    folder = HotFolder(tmp_path, 7)
    folder.prepare()
    return folder


@pytest.fixture
def board(folder: HotFolder) -> Board:
    """Of the third term, which block 0 leads."""
    board = Board.hosted(JobNetwork.here(), 3)
    assert folder.claim(Leader(3, *board.address, board.place, 0, 0))
    return board


def rank_of(folder: HotFolder, board: Board, me: Member, coordinator: Coordinator | None = None) -> Blocks:
    blocks: Any = object.__new__(Blocks)
    blocks.folder, blocks.present, blocks.local_rank, blocks._board, blocks._me = folder, PRESENT, 0, board, me
    blocks.leader, blocks._coordinator, blocks.machine = folder.newest(), coordinator, SimpleNamespace(plan=None)
    return blocks  # type: ignore[no-any-return]


def announced(folder: HotFolder) -> tuple[int, ...] | None:
    coming = find_coming(folder, folder.newest())
    return coming.plan.tasks if coming is not None else None


def test_the_leader_names_those_that_are_left(folder: HotFolder, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that ended, though the store says so only after the first look; and an announcement stays as it is."""
    names = board.names

    def ends_after(kind: str) -> set[str]:
        found = names(kind)
        board.put(f"gone-{BLOCKS[1].uid}-0", "1")
        return found

    monkeypatch.setattr(coordinator, "NAMED_S", 60.0)
    monkeypatch.setattr(board, "names", ends_after)
    leader = leading(board, PRESENT, folder.path, 3)
    board.put("gone-7.0-0", "1")  # a newcomer
    rank_of(folder, board, BLOCKS[0], leader).announce_left()
    coming = find_coming(folder, folder.newest())
    assert coming is not None and (coming.plan.tasks, coming.plan.term, coming.plan.generation) == ((0, 2), 4, 5)
    board.put(f"gone-{BLOCKS[2].uid}-0", "1")
    rank_of(folder, board, BLOCKS[0], leader).announce_left()
    assert announced(folder) == (0, 2)


def test_a_silent_block_is_not_left(board: Board, folder: HotFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "NAMED_S", 0.0)
    leader = leading(board, PRESENT, folder.path, 3)
    assert leader.left() == BLOCKS
    monkeypatch.setattr(board, "silent_s", lambda names: [0.1, DEAD_S + 0.1, 0.1])
    assert leader.left() == (BLOCKS[0], BLOCKS[2])


def test_members_speak_for_a_leader_that_is_gone(folder: HotFolder, board: Board) -> None:
    """They say nothing while it answers, or once another leads."""
    mine = board.again()
    rank_of(folder, mine, BLOCKS[1]).announce_left()
    assert announced(folder) is None
    board.close()
    for blocks in (rank_of(folder, mine, BLOCKS[0]), _with(rank_of(folder, mine, BLOCKS[1]), local_rank=1)):
        blocks.announce_left()
        assert announced(folder) is None
    last = rank_of(folder, mine, BLOCKS[1])  # a closed store may still answer for a moment
    until(lambda: last.announce_left() or announced(folder), "an announcement")
    assert announced(folder) == (1, 2)


def _with(blocks: Blocks, **values: Any) -> Blocks:
    vars(blocks).update(values)
    return blocks


def test_nothing_is_announced_once_another_leads_or_to_nobody(folder: HotFolder, board: Board) -> None:
    """The next term's leader may wait for blocks that it announced."""
    blocks = rank_of(folder, board.again(), BLOCKS[1])
    alone = _with(rank_of(folder, board.again(), BLOCKS[1]), present=Plan(4, 3, BLOCKS[:2]))
    board.close()
    alone.announce_left()
    assert folder.claim(Leader(4, "127.0.0.1", 1, "next", 2, 0))
    blocks.announce_left()
    assert folder.announced() is None


@pytest.mark.parametrize(("why", "may_lead"), [(LOST, [False, True, True]), ("order", [False, True, False])])
def test_who_may_lead(why: str, may_lead: list[bool]) -> None:
    """Nobody waits for one that was to lead them, and died too."""
    coming = Coming(Plan(5, 4, BLOCKS[1:], why=why), time.time(), time.time())
    assert [coming.may_lead(Block(7, one.task, one.restart)) for one in BLOCKS] == may_lead
    assert not coming.may_lead(Block(7, 1, 9))


@pytest.mark.parametrize(("ago_s", "least"), [(0.0, 1.0), (3.0, 6.0), (100.0, MOST_S)])
def test_a_loss_is_waited_for_as_long_as_the_start_took(
    monkeypatch: pytest.MonkeyPatch, ago_s: float, least: float
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    coming = Coming(Plan(5, 4, BLOCKS[1:], why=LOST), time.time(), time.time() - ago_s)
    assert coming.patience_s() == least
