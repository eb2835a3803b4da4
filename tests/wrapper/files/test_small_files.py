"""Small files: who is believed, and what stays of a write that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ones_wrapper.files.small_files import create_small, read_small, replace_small


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    replace_small(path, b"first", 0o600)
    replace_small(path, b"second", 0o600)
    assert read_small(path, 6) == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert not create_small(path, b"third")
    assert read_small(path, 6, private=True) == b"second"
    assert list(tmp_path.iterdir()) == [path]


def readable(path: Path) -> None:
    path.write_text("1234")
    path.chmod(0o644)  # whatever the umask


def linked(path: Path) -> None:
    (path.parent / "other").write_text("x")
    path.symlink_to("other")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (linked, "symbolic link"),
        (os.mkfifo, "is not a regular file"),
        (Path.mkdir, "is not a regular file"),
        (lambda path: replace_small(path, b"12345", 0o600), "is larger than 4 bytes"),
        (readable, "may be read by others"),
        (lambda path: None, "No such file"),
    ],
)
def test_what_is_not_believed(tmp_path: Path, make: Callable[[Path], object], error: str) -> None:
    """Protects a reader from files that others put there: it neither waits, nor follows, nor reads on."""
    path = tmp_path / "one"
    make(path)
    with pytest.raises((OSError, ValueError), match=error):
        read_small(path, 4, private=True)


def test_whose_files_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, owner = tmp_path / "one", os.geteuid()
    path.write_text("1234")
    assert read_small(path, 4, {owner, 4711}) == b"1234"
    with pytest.raises(ValueError, match=f"belongs to user {owner}, not to a user whose files are read"):
        read_small(path, 4, {4711})
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ValueError, match=f"belongs to user {owner}, not to you"):
        read_small(path, 4)


def test_one_of_many_makes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda number: create_small(path, bytes([number])), range(8))
    assert sorted(made) == [False] * 7 + [True] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "one"
    replace_small(path, b"before")

    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), fails)
    with pytest.raises(OSError, match="No space"):
        replace_small(path, b"after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_server_that_answers_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a block that took a term: its link is there although the call failed."""
    link = os.link

    def late(old: Path, new: Path) -> None:
        link(old, new)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", late)
    assert create_small(tmp_path / "one", b"x")

    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(PermissionError):
        create_small(tmp_path / "two", b"x")
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]
