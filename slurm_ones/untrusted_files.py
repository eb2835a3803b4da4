"""Files of a job: their paths, and safe access to files that another user owns.

A job's directory is writable by its user, while the reader may be privileged: links are not followed, nothing that
could block is opened, ownership is checked on the open descriptor, and reads are bounded.

A file system whose server does not answer blocks whoever touches a path on it. What is opened here is at a path of its
user's choice. So the functions at the end may be run elsewhere (`run_by`). The companion's are run by a child process
(`service.file_child`), and raise `NoAnswer` if it does not answer in time.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ones_wrapper.protocol import MAX_POINTER, ProtocolError, decode_pointer, directory_name, pointer_name

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

WRITTEN_WITHIN_S = 10.0
"""Seconds within which a file must be durable to be put in place: its writer may have been succeeded by then."""


class HasFiles(Protocol):
    """A job, reduced to what its files are found by."""

    @property
    def job_id(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def work_dir(self) -> str: ...


class NotBelieved(Exception):
    """A file or directory cannot be trusted: a link, another's, or not of its kind. The message says what and where."""


class NoAnswer(NotBelieved):
    """The file system of a path did not answer in time."""


Part = tuple[str, int, int]
"""Part of a file: name, first byte, and most bytes."""
Found = tuple[bytes, int] | NotBelieved | FileNotFoundError
"""Bytes that were read and the file's size, or the error."""
Runner = Callable[..., Any]
"""Runs a function of this module, given as (function, path, uid, …): `uid` is the user who chose the path."""


def _run_here(function: Callable[..., Any], path: Path, uid: int, *more: object) -> Any:
    return function(path, uid, *more)


_run: Runner = _run_here


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Context in which users' files are opened by `runner`, everywhere in this process."""
    global _run
    before, _run = _run, runner
    try:
        yield
    finally:
        _run = before


def job_directory(job: HasFiles) -> Path:
    """The directory of the job's files: that of its pointer, or else below the job's working directory.

    Whether the latter is the user's shows when it is opened. Raises `NotBelieved` for a pointer that is not theirs, or
    names no directory that is.
    """
    pointer = Path(job.work_dir) / pointer_name(job.job_id)
    try:
        pointed = Path(decode_pointer(_run(_pointer, pointer, job.uid)))
    except FileNotFoundError:
        return Path(job.work_dir) / directory_name(job.job_id)
    except ProtocolError as error:
        raise NotBelieved(f"{pointer}: {error}") from None
    try:
        check_directory(pointed, job.uid)
    except NoAnswer:
        raise
    except (FileNotFoundError, NotBelieved):
        # One sentence for all: its user must not learn which paths there are.
        raise NotBelieved(f"{pointer}: it names no directory of the job's user that can be opened") from None
    return pointed


def foreign(job: HasFiles) -> bool:
    """Tell whether this process may not write into the job's directory, and has only the spool for its orders."""
    return job.uid != os.geteuid() and os.geteuid() != 0


@contextmanager
def directory_of(path: Path, uid: int, whose: str = "the job's user") -> Iterator[int]:
    """Open the directory at `path`, which must belong to `uid` (in words: `whose`) and be no link; yield its
    descriptor.

    Raises FileNotFoundError if there is none, `NotBelieved` if it is something else. Links among the directories above
    it are followed, as sites have them: they lead to nothing but another directory of that user's.
    """
    if not path.is_absolute():
        raise NotBelieved(f"{str(path)!r:.200}: not an absolute path")
    try:
        fd = os.open(path, _READ | os.O_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotBelieved(f"{path}: {error.strerror}") from None
    except ValueError:  # a NUL in it, or what no file system could have given
        raise NotBelieved(f"{str(path)!r:.200}: not the name of a directory") from None
    try:
        owner = os.fstat(fd).st_uid
        if owner != uid:
            raise NotBelieved(f"{path}: belongs to uid {owner}, not to {whose} (uid {uid})")
        yield fd
    finally:
        os.close(fd)


def read_from(directory: int | None, name: str, uid: int, offset: int, limit: int) -> tuple[bytes, int]:
    """Read at most `limit` bytes of a regular file of `uid` from `offset`; returns also the file's size. Without a
    `directory`, `name` is its whole path.

    Raises FileNotFoundError if there is none, `NotBelieved` if it is a link, a device, or another's file.
    """
    try:
        # Checked before it is opened, since opening by itself may do something to a device or a FIFO. Checked again
        # after, since it may have been replaced in between.
        _check(name, os.stat(name, dir_fd=directory, follow_symlinks=False), uid)
        fd = os.open(name, _READ, dir_fd=directory)
        try:
            info = os.fstat(fd)
            _check(name, info, uid)
            return os.pread(fd, limit, offset), info.st_size
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotBelieved(f"{name}: {error.strerror}") from None
    except ValueError:  # a NUL in it
        raise NotBelieved(f"{name!r:.200}: not the name of a file") from None


def _check(name: str, info: os.stat_result, uid: int) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise NotBelieved(f"{name}: a link, and links are not followed")
    if not stat.S_ISREG(info.st_mode):
        raise NotBelieved(f"{name}: not a regular file")
    if info.st_uid != uid:
        raise NotBelieved(f"{name}: belongs to uid {info.st_uid}, not to the job's user (uid {uid})")


# -- run here, or by a child process -----------------------------------------------------------------------------------


def read_files(path: Path, uid: int, parts: Sequence[Part]) -> list[Found]:
    """Parts of files of `uid` in the directory at `path`, which is theirs. Raises FileNotFoundError if there is no such
    directory, `NotBelieved` if it is something else."""
    found: list[Found] = _run(_parts, path, uid, parts)
    return found


def read_file(path: Path, uid: int, name: str, limit: int, owner: int | None = None) -> tuple[bytes, int]:
    """The first bytes of one file, and its size; `owner` if it is not the directory's. Raises as `read_files` does, and
    the same for the file."""
    (found,) = _run(_parts, path, uid, [(name, 0, limit)], owner)
    if isinstance(found, Exception):
        raise found
    text, size = found
    return text, size


def check_directory(path: Path, uid: int) -> None:
    """Check that the directory exists and belongs to `uid`; raises as `read_files` does."""
    _run(_parts, path, uid, ())


def write_file(path: Path, uid: int, whose: str, name: str, text: bytes, *, safe: bool = False) -> None:
    """Write a file under a temporary name, make it durable, and rename it over `name` in the directory at `path`, which
    must be that of `uid`. If it is to be `safe`, nobody else may rename in it.

    Raises OSError, and `NotBelieved`.
    """
    _run(_write, path, uid, whose, name, text, safe, time.monotonic() + WRITTEN_WITHIN_S)


def names_in(path: Path) -> list[str]:
    """Names in a directory of this process. Raises OSError, and `NoAnswer`."""
    names: list[str] = _run(_names, path, os.geteuid())
    return names


def remove(path: Path) -> None:
    """Remove a file of this process, if it is there. Raises OSError, and `NoAnswer`."""
    _run(_remove, path, os.geteuid())


def status_of(path: Path, uid: int, *, follow: bool = True) -> os.stat_result:
    """Return the status of a path. Raises OSError, and `NoAnswer`."""
    found: os.stat_result = _run(_status, path, uid, follow)
    return found


def _pointer(path: Path, uid: int) -> bytes:
    return read_from(None, str(path), uid, 0, MAX_POINTER + 1)[0]


def _parts(path: Path, uid: int, parts: Sequence[Part], owner: int | None = None) -> list[Found]:
    found: list[Found] = []
    with directory_of(path, uid) as directory:
        for name, offset, limit in parts:
            try:
                found.append(read_from(directory, name, uid if owner is None else owner, offset, limit))
            except (FileNotFoundError, NotBelieved) as error:
                found.append(error)
    return found


def _write(path: Path, uid: int, whose: str, name: str, text: bytes, safe: bool, until: float) -> None:
    with directory_of(path, uid, whose) as directory:
        mode = os.fstat(directory).st_mode
        if safe and mode & 0o022 and not mode & stat.S_ISVTX:
            # Whoever may rename in it could give one job's order to another.
            raise NotBelieved("others may write there; take that from them (chmod 755)")
        _replace(directory, name, text, until)


def _replace(directory: int, name: str, text: bytes, until: float) -> None:
    temporary = f".{name}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o644, dir_fd=directory)
    except FileExistsError:
        os.unlink(temporary, dir_fd=directory)
        fd = os.open(temporary, flags, 0o644, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            file.flush()
            os.fchmod(fd, 0o644)
            os.fsync(fd)
        if time.monotonic() > until:
            raise NoAnswer(f"it took longer than {WRITTEN_WITHIN_S:.0f} s to write {name}")
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except (OSError, NotBelieved):
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def _names(path: Path, uid: int) -> list[str]:
    return [entry.name for entry in path.iterdir()]


def _remove(path: Path, uid: int) -> None:
    path.unlink(missing_ok=True)


def _status(path: Path, uid: int, follow: bool) -> os.stat_result:
    return path.stat(follow_symlinks=follow)
