"""Where a job's files are: pointers that the companion finds, and the spool that the site published."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ones_wrapper.files.places import find_job_directory, find_spool
from ones_wrapper.files.resume import prepare_job_directory
from ones_wrapper.launch import LaunchError
from ones_wrapper.protocol import MAX_POINTER, ProtocolError, decode_pointer

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="giving files to somebody else takes root")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the job was submitted."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def prepare(home: Path, cwd: Path | None = None, **given: str) -> Path:
    env = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(home), **given}
    path = find_job_directory(env, cwd or home)
    prepare_job_directory(path, env, cwd or home)
    return path


def test_a_directory_elsewhere_leaves_a_pointer(home: Path, tmp_path: Path) -> None:
    """Readable to others whatever the umask, and whole at every moment."""
    pointer = home / "ones-7.where"
    assert prepare(home) == home / "ones-7" and not pointer.exists()
    old = os.umask(0o077)
    try:
        path = prepare(home, ONES_JOB_ROOT=str(tmp_path / "scratch/üb er"))
    finally:
        os.umask(old)
    assert path == tmp_path / "scratch/üb er/ones-7" and path.is_dir()
    assert pointer.stat().st_mode & 0o777 == 0o644
    assert decode_pointer(pointer.read_bytes()) == str(path)
    path = prepare(home, ONES_JOB_DIR=str(tmp_path / "mine"))
    assert decode_pointer(pointer.read_bytes()) == str(path)
    assert [entry.name for entry in home.iterdir() if "where" in entry.name] == [pointer.name]
    # Slurm gives ids anew: an old pointer must not lead a later job of that id astray.
    prepare(home)
    assert not pointer.exists()


def test_a_script_that_changes_directory(home: Path, tmp_path: Path) -> None:
    """It is found from where it was submitted, and with --chdir from there."""
    (tmp_path / "run").mkdir()
    path = prepare(home, cwd=tmp_path / "run")
    assert path == tmp_path / "run/ones-7"
    assert decode_pointer((home / "ones-7.where").read_bytes()) == str(path)
    path = prepare(home, cwd=tmp_path / "run", ONES_JOB_DIR="../mine", ONES_JOB_ROOT="/not/asked")
    assert path == tmp_path / "mine"
    assert decode_pointer((tmp_path / "run/ones-7.where").read_bytes()) == str(path)


def test_of_blocks_by_the_array(home: Path, tmp_path: Path) -> None:
    """The companion knows the array alone."""
    block = {"ONES_BLOCKS": "1", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    path = prepare(home, ONES_JOB_ROOT=str(tmp_path), **block)
    assert path == tmp_path / "ones-5"
    assert decode_pointer((home / "ones-5.where").read_bytes()) == str(path)


def test_where_no_pointer_can_be_left(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reason, not silence; and the job trains."""
    gone = tmp_path / "gone"
    prepare(home, SLURM_SUBMIT_DIR=str(gone), ONES_JOB_DIR=str(tmp_path / "mine"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{gone}/ones-7.where cannot be written" in said and "Submit from" in said
    prepare(home, ONES_JOB_DIR=str(tmp_path / "two\nlines"))
    assert "not an absolute path without control characters" in capsys.readouterr().err


def test_outside_slurm_there_is_nothing_to_point_to(home: Path, tmp_path: Path) -> None:
    for env in ({}, {"SLURM_JOB_ID": "7"}):
        prepare_job_directory(tmp_path / "mine", env, home)
    assert not list(home.iterdir())


def test_a_root_that_cannot_be_made(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"ONES_JOB_ROOT=.*file/ones: cannot be made"):
        prepare(home, ONES_JOB_ROOT=str(tmp_path / "file/ones"))


@pytest.mark.parametrize(
    "text", [b"", b"relative", b"/a/../b", b"/a\nb", b"/a\0b", b"/\xff", b"/" + b"a" * MAX_POINTER, b"/a\x1b[0m"]
)
def test_what_is_no_pointer(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_pointer(text)


@root_only
def test_the_spool_that_the_site_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who names the spool says whose orders jobs obey: so only root may, and a user for their own jobs."""
    folder = tmp_path / "slurm-ones"
    file = folder / "spool"
    assert find_spool({}, file) is None
    folder.mkdir(mode=0o755)
    assert find_spool({}, file) is None
    file.write_text("/shared/spool\n")
    assert find_spool({}, file) == Path("/shared/spool")
    assert find_spool({"ONES_SPOOL": "/mine"}, file) == Path("/mine")
    assert not capsys.readouterr().err

    def doubted() -> bool:
        return find_spool({}, file) is None and "is not used (" in capsys.readouterr().err

    file.chmod(0o664)
    assert doubted()
    assert find_spool({"ONES_LAUNCHED": "5.0"}, file) is None
    assert not capsys.readouterr().err  # a rank says nothing again
    file.chmod(0o644)
    folder.chmod(0o777)
    assert doubted()
    folder.chmod(0o755)
    os.chown(file, 12345, 0)
    assert doubted()
    os.chown(file, 0, 0)
    file.write_text("shared/spool\n")
    assert doubted()
    file.write_bytes(b"\xff\xfe")
    assert doubted()
    file.unlink()
    file.symlink_to("/etc/hostname")
    assert doubted()
