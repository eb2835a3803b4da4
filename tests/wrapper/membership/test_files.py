"""How blocks find their leader: one of several claims a term, and nothing else in the folder is believed."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    path = folder.path / f"leader-{number}.json"
    path.write_text(json.dumps(asdict(LEADER) | {"term": number, "array": ARRAY} | changes))
    return path


@pytest.mark.parametrize(
    ("change", "block"),
    [
        ({}, Block(7, 3, 0)), ({"SLURM_RESTART_COUNT": "2"}, Block(7, 3, 2)), ({"ONES_BLOCKS": ""}, None),
        ({"ONES_BLOCKS": "0"}, None), ({"SLURM_ARRAY_TASK_ID": ""}, None), ({"SLURM_ARRAY_JOB_ID": "seven"}, None),
        ({"SLURM_ARRAY_JOB_ID": "٧"}, None),
    ],
)  # fmt: skip
def test_which_block_this_is(change: dict[str, str], block: Block | None) -> None:
    """Plain jobs are none, nor tasks of sweeps."""
    assert own_block(IN_ARRAY | change) == block


def test_a_leader_is_found(folder: HotFolder) -> None:
    """What was claimed last is read back, by other processes of the job too; not one that nobody could read."""
    assert (folder.newest(), folder.next_term(None)) == (None, 0)
    assert folder.claim(LEADER)
    assert HotFolder(folder.path.parent, ARRAY).newest() == LEADER
    later = replace(LEADER, term=folder.next_term(LEADER), task=3)
    assert folder.claim(later)
    assert (later.term, folder.newest(), folder.next_term(later)) == (1, later, 2)
    assert folder.next_term(LEADER) == 1, "whoever saw the one before only would replace a leader that lives"
    with pytest.raises(ValueError, match="host"):
        folder.claim(replace(LEADER, term=2, host="two words"))
    assert folder.newest() == later
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


def test_a_term_is_claimed_once(folder: HotFolder) -> None:
    """Neither the same term again, nor an earlier one."""
    assert folder.claim(replace(LEADER, term=4))
    for term in (4, 3, 0):
        assert not folder.claim(replace(LEADER, term=term, task=5))
    assert folder.newest() == replace(LEADER, term=4)
    assert [path.name for path in folder.path.iterdir()] == ["leader-4.json"]


def test_only_its_owner_may_look(tmp_path: Path) -> None:
    """Whoever has the secret is taken for a peer."""
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


@pytest.mark.parametrize("kind", ["link", "file", "nowhere", "a stranger's"])
def test_a_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What a link names is not written to, nor its mode changed."""
    (target := tmp_path / "target").mkdir()
    target.chmod(0o755)  # whatever the umask
    if kind == "link":
        (tmp_path / "hot").symlink_to(target)
    elif kind == "file":
        (tmp_path / "hot").write_text("")
    elif kind == "a stranger's":
        (tmp_path / "hot").mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(LaunchError, match="belongs to user" if kind == "a stranger's" else "hot"):
        HotFolder(tmp_path / "no" if kind == "nowhere" else tmp_path, ARRAY).prepare()
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *[({"array": odd}, "array") for odd in (8, None, True)],
        *[({"term": odd}, "term") for odd in (8, "9")],
        *[({"port": odd}, "port") for odd in (0, 70_000, 1.5)],
        *[({"host": odd}, "host") for odd in ("", "n1\nn2", "n1 ; rm", ["n1"], "n" * 300)],
        *[({"place": odd}, "place") for odd in ("", 5)],
        *[({"task": odd}, "task") for odd in (-1, True)],
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


def link(path: Path) -> None:
    other = path.parent.parent / "other.json"
    other.write_text(json.dumps(asdict(LEADER) | {"term": 9, "array": ARRAY}))
    path.symlink_to(other)


THINGS: dict[str, Callable[[Path], object]] = {"link": link, "pipe": os.mkfifo, "directory": Path.mkdir} | {
    name: lambda path, content=content: path.write_bytes(content)  # type: ignore[misc]
    for name, content in {
        "deep": b"[" * 4000, "bytes": b"\xff\xfe", "empty": b"", "list": b"[]", "huge": b" " * 10_000_000,
        "digits": b'{"array":7,"term":' + b"9" * 4000 + b"}",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
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
    """An editor leaves copies."""
    (folder.path / name).write_text(json.dumps(asdict(LEADER) | {"term": 1, "array": ARRAY}))
    assert (folder.newest(), folder.next_term(None)) == (None, 0)


def test_a_stranger_s_leader(folder: HotFolder, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    os.chown(put(folder, 5), 4321, 4321)
    assert folder.newest() is None
    assert "belongs to user 4321" in capsys.readouterr().err


def test_old_files_go(folder: HotFolder) -> None:
    """The newest terms stay."""
    for term in range(3 * KEPT):
        assert folder.claim(replace(LEADER, term=term))
    left = sorted(int(path.stem.partition("-")[2]) for path in folder.path.iterdir())
    assert left == [*range(2 * KEPT, 3 * KEPT)]


def test_the_end(folder: HotFolder) -> None:
    """Said once, and for good; a link says nothing."""
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


def test_whether_a_leader_lives() -> None:
    """A term's board that is there lives. What listens at its port and is none of the job's does not, nor another
    board."""
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
    start = threading.Barrier(len(leaders))

    def claim(leader: Leader) -> bool:
        hot = HotFolder(folder.path.parent, ARRAY)
        start.wait()
        return hot.claim(leader)

    with ThreadPoolExecutor(len(leaders)) as pool:
        return [leader for leader, won in zip(leaders, pool.map(claim, leaders), strict=True) if won]


@given(terms=st.lists(st.integers(0, 3), min_size=2, max_size=6), before=st.integers(-1, 2))
def test_several_claim_at_once(tmp_path_factory: pytest.TempPathFactory, terms: list[int], before: int) -> None:
    """Whatever terms they try, a term is one's at most, none is earlier than what was there, and the newest file is a
    winner's."""
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
