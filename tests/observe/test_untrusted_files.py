"""Files that somebody else owns: links, devices, other owners."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from slurm_ones.untrusted_files import NotBelieved, directory_of, read_from

ME = os.geteuid()
SOMEBODY = 12345
root_only = pytest.mark.skipif(ME != 0, reason="giving files to somebody else takes root")


def read(directory: Path, name: str, *, uid: int = ME, offset: int = 0, limit: int = 100) -> tuple[bytes, int]:
    with directory_of(directory, ME) as opened:
        return read_from(opened, name, uid, offset, limit)


def test_a_piece_of_a_file(tmp_path: Path) -> None:
    """No more than asked for is read, from where it was asked, and the size is told."""
    (tmp_path / "f").write_bytes(b"0123456789")
    assert read(tmp_path, "f", offset=2, limit=3) == (b"234", 10)
    assert read(tmp_path, "f", offset=20) == (b"", 10)


def test_what_is_not_there(tmp_path: Path) -> None:
    """A job that has not written yet is no suspect."""
    with pytest.raises(FileNotFoundError):
        read(tmp_path, "f")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", "f")


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Else a job could show a privileged reader's files to itself, or another's as its own."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "f").symlink_to(secret)
    with pytest.raises(NotBelieved, match="f: "):
        read(tmp_path, "f")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    with pytest.raises(NotBelieved, match="link"), directory_of(tmp_path / "link", ME):
        pass


def test_nothing_that_could_block_is_read(tmp_path: Path) -> None:
    """A FIFO without a writer, a socket, a directory: refused, at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("fifo", "socket", "directory"):
            with pytest.raises(NotBelieved, match=name):
                read(tmp_path, name)


def test_a_device_is_no_file(tmp_path: Path) -> None:
    """Nor is the device that it would be a link to."""
    with (
        pytest.raises(NotBelieved, match="not a regular file"),
        directory_of(Path("/dev"), Path("/dev").stat().st_uid) as dev,
    ):
        read_from(dev, "null", ME, 0, 1)


@root_only
def test_another_owner_is_not_believed(tmp_path: Path) -> None:
    """Reports count only where the job's user wrote them."""
    (tmp_path / "f").write_text("x")
    os.chown(tmp_path / "f", SOMEBODY, SOMEBODY)
    with pytest.raises(NotBelieved, match=f"f: belongs to uid {SOMEBODY}"):
        read(tmp_path, "f")
    with pytest.raises(NotBelieved, match="not to the job's user"), directory_of(tmp_path, SOMEBODY):
        pass


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    """It is said what is wrong."""
    (tmp_path / "f").write_text("x")
    with pytest.raises(NotBelieved, match="Not a directory"), directory_of(tmp_path / "f", ME):
        pass


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """A daemon that leaks one a tick dies of it."""
    (tmp_path / "f").write_text("x")
    (tmp_path / "link").symlink_to("f")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        read(tmp_path, "f")
        with pytest.raises(NotBelieved):
            read(tmp_path, "link")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
