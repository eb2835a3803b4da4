"""Files that somebody else owns: links, devices, other owners."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.untrusted_files import NotBelieved, directory_of, job_directory, read_from
from tests.slurm.make import job_of

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


def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "link").symlink_to("f")
    for _ in range(20):
        read(tmp_path, "f")
        with pytest.raises(NotBelieved):
            read(tmp_path, "link")
    opened = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
    assert not [name for name in opened if name.startswith(str(tmp_path))]


@pytest.fixture
def job(tmp_path: Path) -> SlurmJob:
    """Submitted from a directory of its own."""
    (tmp_path / "home").mkdir()
    return replace(job_of(Shape(1, 1)), uid=ME, work_dir=str(tmp_path / "home"))


def pointer(job: SlurmJob) -> Path:
    return Path(job.work_dir) / f"ones-{job.job_id}.where"


def test_a_directory_elsewhere_is_found(job: SlurmJob, tmp_path: Path) -> None:
    """Where the job's wrapper says; without that, where it was submitted."""
    assert job_directory(job) == Path(job.work_dir) / f"ones-{job.job_id}"
    (tmp_path / "scratch").mkdir()
    pointer(job).write_text(f"{tmp_path}/scratch\n")
    assert job_directory(job) == tmp_path / "scratch"


def test_a_pointer_finds_out_nothing(job: SlurmJob, tmp_path: Path) -> None:
    """Its user hears the same of a path that is not there, of a file, of a link, and of what is another's."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    said = set()
    for path in ("nothing", "nothing/below", "file", "file/below", "link"):
        pointer(job).write_text(f"{Path(os.path.normpath(tmp_path / path))}\n")
        with pytest.raises(NotBelieved) as refused:
            job_directory(replace(job, uid=ME))
        said.add(str(refused.value))
    assert len(said) == 1


@pytest.mark.parametrize(
    "text", [b"", b"ones-7\n", b"/a\n/b\n", b"/a/../root\n", b"/a\0\n", b"\x7fELF\xff", b"/" * 4097]
)
def test_a_pointer_that_says_nothing(job: SlurmJob, text: bytes) -> None:
    """Hostile, cut short or binary: it leads nowhere, and is named."""
    pointer(job).write_bytes(text)
    with pytest.raises(NotBelieved, match=pointer(job).name):
        job_directory(job)


def test_a_pointer_that_is_no_file(job: SlurmJob, tmp_path: Path) -> None:
    """A link, a FIFO, a directory, and a file without end: nothing is followed, blocks, or is read whole."""
    path = pointer(job)
    (tmp_path / "other").write_text(f"{tmp_path}\n")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(NotBelieved, match="link"):
        job_directory(job)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotBelieved, match="regular"):
        job_directory(job)
    path.unlink()
    path.mkdir()
    with pytest.raises(NotBelieved, match="regular"):
        job_directory(job)
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotBelieved, match="longer"):
        job_directory(job)


@root_only
def test_a_pointer_of_somebody_elses(job: SlurmJob, tmp_path: Path) -> None:
    """Who may write where the job was submitted cannot lay its reports; nor can its user name another's directory."""
    pointer(job).write_text(f"{tmp_path}/scratch\n")
    os.chown(pointer(job), SOMEBODY, SOMEBODY)
    with pytest.raises(NotBelieved, match="belongs to uid"):
        job_directory(job)
    theirs = replace(job, uid=SOMEBODY)
    pointer(job).write_text("/root\n")
    os.chown(pointer(job), SOMEBODY, SOMEBODY)
    with pytest.raises(NotBelieved, match="names no directory of the job's user"):
        job_directory(theirs)
