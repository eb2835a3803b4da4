"""How blocks find their leader: one of several claims a term, and nothing else in the folder is believed."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.membership.board import Board
from ones_wrapper.membership.files import KEPT, HotFolder, Leader, living
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.block import Block, own_block
from ones_wrapper.process.placement import LaunchError

ARRAY = 7
LEADER = Leader(0, "n1", 12345, "secret", 0, 0)
IN_ARRAY = {"ONES_BLOCKS": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def folder(tmp_path: Path) -> HotFolder:
    hot = HotFolder(tmp_path, ARRAY)
    hot.prepare()
    return hot


def put(folder: HotFolder, number: int, **changes: Any) -> Path:
    """A leader file with fields as they should not be."""
    path = folder.path / f"leader-{number}.json"
    path.write_text(json.dumps(asdict(LEADER) | {"term": number, "array": ARRAY} | changes))
    return path


@pytest.mark.parametrize(
    ("change", "block"),
    [
        ({}, Block(7, 3, 0)),
        ({"SLURM_RESTART_COUNT": "2"}, Block(7, 3, 2)),
        ({"ONES_BLOCKS": ""}, None),
        ({"ONES_BLOCKS": "0"}, None),
        ({"SLURM_ARRAY_TASK_ID": ""}, None),
        ({"SLURM_ARRAY_JOB_ID": "seven"}, None),
        ({"SLURM_ARRAY_JOB_ID": "٧"}, None),
    ],
)
def test_which_block_this_is(change: dict[str, str], block: Block | None) -> None:
    """Protects plain jobs, and sweeps, whose tasks are jobs of their own."""
    assert own_block(IN_ARRAY | change) == block


def test_a_leader_is_found(folder: HotFolder) -> None:
    """Protects every start of a block: what was claimed last is read back, by other processes of the job too."""
    assert (folder.newest(), folder.next_term(None)) == (None, 0)
    assert folder.claim(LEADER)
    assert HotFolder(folder.path.parent, ARRAY).newest() == LEADER
    later = replace(LEADER, term=folder.next_term(LEADER), task=3)
    assert folder.claim(later)
    assert (later.term, folder.newest(), folder.next_term(later)) == (1, later, 2)
    assert folder.next_term(LEADER) == 1, "whoever saw the one before only would replace a leader that lives"
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


def test_a_term_is_claimed_once(folder: HotFolder) -> None:
    """Protects from two memberships: neither the same term again, nor an earlier one."""
    assert folder.claim(replace(LEADER, term=4))
    for term in (4, 3, 0):
        assert not folder.claim(replace(LEADER, term=term, task=5))
    assert folder.newest() == replace(LEADER, term=4)
    assert [path.name for path in folder.path.iterdir()] == ["leader-4.json"]


def test_only_its_owner_may_look(tmp_path: Path) -> None:
    """Protects the secret: whoever has it is taken for a peer."""
    old = os.umask(0)
    try:
        hot = HotFolder(tmp_path, ARRAY)
        hot.prepare()
        assert hot.claim(LEADER)
    finally:
        os.umask(old)
    assert hot.path.stat().st_mode & 0o777 == 0o700
    assert (hot.path / "leader-0.json").stat().st_mode & 0o777 == 0o600
    hot.path.chmod(0o755)
    hot.prepare()
    assert hot.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "nowhere"])
def test_a_folder_that_is_none(tmp_path: Path, kind: str) -> None:
    """Protects what a link names from being written to, or its mode from being changed."""
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    if kind == "link":
        (tmp_path / "hot").symlink_to(target)
    elif kind == "file":
        (tmp_path / "hot").write_text("")
    with pytest.raises(LaunchError, match="hot"):
        HotFolder(tmp_path / "no" if kind == "nowhere" else tmp_path, ARRAY).prepare()
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from a folder that a stranger made first."""
    (tmp_path / "hot").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(LaunchError, match="belongs to user"):
        HotFolder(tmp_path, ARRAY).prepare()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"array": 8}, "array"),
        ({"array": None}, "array"),
        ({"array": True}, "array"),
        ({"term": 8}, "term"),
        ({"term": "9"}, "term"),
        ({"port": 0}, "port"),
        ({"port": 70_000}, "port"),
        ({"port": 1.5}, "port"),
        ({"host": ""}, "host"),
        ({"host": "n1\nn2"}, "host"),
        ({"host": "n1 ; rm"}, "host"),
        ({"host": ["n1"]}, "host"),
        ({"host": "n" * 300}, "host"),
        ({"place": ""}, "place"),
        ({"place": 5}, "place"),
        ({"task": -1}, "task"),
        ({"task": True}, "task"),
        ({"restart": None}, "restart"),
        ({"x": "y" * 5000}, "larger than"),
    ],
)
def test_fields_that_are_not_believed(
    folder: HotFolder, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
) -> None:
    """Each costs this file alone: the one below it counts, it is said once, and the next term is free."""
    assert folder.claim(LEADER)
    put(folder, 9, **change)
    assert folder.newest() == folder.newest() == LEADER
    words = capsys.readouterr().err
    assert words.count("is ignored") == 1 and says in words
    assert len(words) < 500


def _link(path: Path) -> None:
    other = path.parent.parent / "other.json"
    other.write_text(json.dumps(asdict(LEADER) | {"term": 9, "array": ARRAY}))
    path.symlink_to(other)


def _deep(path: Path) -> None:
    path.write_text("[" * 4000)


@pytest.mark.parametrize(
    "make",
    [
        _link,
        os.mkfifo,
        Path.mkdir,
        _deep,
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"array":7,"term":' + "9" * 4000 + "}"),
        lambda path: path.write_bytes(b" " * 10_000_000),
    ],
    ids=["link", "pipe", "directory", "deep", "bytes", "empty", "list", "digits", "huge"],
)
def test_things_that_are_no_leader_files(
    folder: HotFolder, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object]
) -> None:
    """Neither followed, waited for, nor believed; and no term is lost to them for ever."""
    assert folder.claim(LEADER)
    make(folder.path / "leader-1.json")
    assert folder.newest() == LEADER
    assert "is ignored" in capsys.readouterr().err
    assert folder.next_term(LEADER) == 2
    assert not folder.claim(replace(LEADER, term=1))
    assert folder.claim(replace(LEADER, term=2))


@pytest.mark.parametrize(
    "name", ["leader-.json", "leader--1.json", "leader-01.json", "leader-1.json~", "leader-٣.json"]
)
def test_names_that_are_none(folder: HotFolder, name: str) -> None:
    """Protects from a copy that an editor left."""
    (folder.path / name).write_text(json.dumps(asdict(LEADER) | {"term": 1, "array": ARRAY}))
    assert (folder.newest(), folder.next_term(None)) == (None, 0)


def test_a_stranger_s_leader(folder: HotFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects training from sending its state to another user."""
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    os.chown(put(folder, 5), 4321, 4321)
    assert folder.newest() is None
    assert "belongs to user 4321" in capsys.readouterr().err


def test_old_files_go(folder: HotFolder) -> None:
    """Protects a job that moves its leader every minute from a folder without end; the newest terms stay."""
    for term in range(3 * KEPT):
        assert folder.claim(replace(LEADER, term=term))
    left = sorted(int(path.stem.partition("-")[2]) for path in folder.path.iterdir())
    assert left == [*range(2 * KEPT, 3 * KEPT)]


def test_the_end(folder: HotFolder) -> None:
    """Protects the queue from blocks that have nothing to do: said once, and for good; a link says nothing."""
    assert not folder.over()
    target = folder.path.parent / "target"
    target.write_text("7\n")
    (folder.path / "over").symlink_to(target)
    assert not folder.over()
    HotFolder(folder.path.parent, 77).end()
    assert not folder.over()  # of the job that had the directory before
    folder.end()
    folder.end()
    assert folder.over()
    assert target.read_text() == "7\n"
    assert [path.name for path in folder.path.iterdir()] == ["over"]


def test_a_leader_nobody_could_read(folder: HotFolder) -> None:
    """Protects from a term that is taken by nobody."""
    with pytest.raises(ValueError, match="host"):
        folder.claim(replace(LEADER, host="two words"))
    assert not list(folder.path.iterdir())


def test_whether_a_leader_lives() -> None:
    """Protects the decision to lead: a term's board that is there lives. What listens at its port and is none of the
    job's does not, nor what is of the job and has another board."""
    network = JobNetwork.here()
    board = Board.hosted(network, 0)
    leader = replace(LEADER, host=board.address[0], port=board.address[1], place=board.place)
    assert living(leader, network.secret)
    assert not living(replace(leader, place="term-1-aa"), network.secret)
    assert not living(leader, JobSecret.fresh())
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = replace(leader, port=server.getsockname()[1])
        assert not living(stranger, network.secret, 0.2)
    assert not living(stranger, network.secret)
    assert not living(replace(leader, host="there-is-no-such-host.invalid"), network.secret)


def claim_at_once(folder: HotFolder, leaders: list[Leader]) -> list[Leader]:
    """Those that won."""
    start, won = threading.Barrier(len(leaders)), []

    def claim(leader: Leader) -> None:
        hot = HotFolder(folder.path.parent, ARRAY)
        start.wait()
        if hot.claim(leader):
            won.append(leader)

    threads = [threading.Thread(target=claim, args=(leader,)) for leader in leaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


@given(terms=st.lists(st.integers(0, 3), min_size=2, max_size=6), before=st.integers(-1, 2))
def test_several_claim_at_once(tmp_path_factory: pytest.TempPathFactory, terms: list[int], before: int) -> None:
    """Protects from two memberships: whatever terms they try, a term is one's at most, none that is earlier than what
    was there, and the newest file is a winner's."""
    folder = HotFolder(tmp_path_factory.mktemp("job"), ARRAY)
    folder.prepare()
    if before >= 0:
        put(folder, before)
    won = claim_at_once(folder, [replace(LEADER, term=term, task=task) for task, term in enumerate(terms)])
    assert len({leader.term for leader in won}) == len(won)
    assert all(leader.term > before for leader in won)
    newest = folder.newest()
    assert newest is not None
    if max(terms) > before:
        assert newest == max(won, key=lambda leader: leader.term)
    else:
        assert not won and newest.term == before


def test_one_of_two_gets_the_term(folder: HotFolder) -> None:
    """Protects from two memberships, often tried: exactly one wins, and the file names it."""
    for term in range(200):
        won = claim_at_once(folder, [replace(LEADER, term=term, task=task) for task in (1, 2)])
        assert won == [folder.newest()]
