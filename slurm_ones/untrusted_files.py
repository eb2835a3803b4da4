"""Paths of a job's files, and safe access to files of other users.

A job's user can write into the job's directory, while the reader may have more rights. So links are not followed, and
nothing is opened that could block. The owner is checked on the open descriptor, and reads are bounded.

Users choose these paths, and access to a path blocks if the server of its file system does not answer. So all public
functions from `read_files` on run in the runner that `run_by` was given. The companion's runner is a child process
(`service.file_child`), and raises `NoAnswer` after a timeout.
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
"""Longest time, in seconds, for a durable write of a file. After it the file is not renamed into place, since another
companion may lead."""


class HasFiles(Protocol):
    """Fields of a job from which the paths of its files follow."""

    @property
    def job_id(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def work_dir(self) -> str: ...


class NotBelieved(Exception):
    """File or directory that is not trusted: it is a link, another user's, or of a wrong type. The message says
    which."""


class NoAnswer(NotBelieved):
    """The file system of a path did not answer in time."""


Part = tuple[str, int, int]
"""Part of a file to read: name, offset of the first byte, and largest number of bytes."""
Found = tuple[bytes, int] | NotBelieved | FileNotFoundError
"""Result for one part: the bytes and the file's size, or the error."""
Runner = Callable[..., Any]
"""Function that calls a function of this module with (path, uid, …), in this process or another. `uid` is the user who
chose the path."""


def _run_here(function: Callable[..., Any], path: Path, uid: int, *more: object) -> Any:
    return function(path, uid, *more)


_run: Runner = _run_here


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Context manager in which `runner` opens users' files, for all threads of this process."""
    global _run
    before, _run = _run, runner
    try:
        yield
    finally:
        _run = before


def job_directory(job: HasFiles) -> Path:
    """Return the directory of the job's files. The job's pointer file names it; the default is below the job's working
    directory.

    The owner of the default is checked only when it is opened. Raises `NotBelieved` if the pointer file or its target
    is not the user's, or if the target is no directory.
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
        # The message is the same for all causes, so that users do not learn which paths exist.
        raise NotBelieved(f"{pointer}: it names no directory of the job's user that can be opened") from None
    return pointed


def foreign(job: HasFiles) -> bool:
    """Tell whether this process cannot write into the job's directory, so that its orders must go into the spool."""
    return job.uid != os.geteuid() and os.geteuid() != 0


@contextmanager
def directory_of(path: Path, uid: int, whose: str = "the job's user") -> Iterator[int]:
    """Open the directory at `path` and yield its descriptor. It must be no link and belong to `uid`, whom `whose`
    describes in errors.

    Raises FileNotFoundError if it does not exist. Raises `NotBelieved` if `path` is relative, is no directory, is a
    link, belongs to another user or cannot be opened. Links above it in the path are followed; they can only lead to
    another directory of the same user.
    """
    if not path.is_absolute():
        raise NotBelieved(f"{str(path)!r:.200}: not an absolute path")
    try:
        fd = os.open(path, _READ | os.O_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotBelieved(f"{path}: {error.strerror}") from None
    except ValueError:  # the path has a NUL, or is no possible name of a file
        raise NotBelieved(f"{str(path)!r:.200}: not the name of a directory") from None
    try:
        owner = os.fstat(fd).st_uid
        if owner != uid:
            raise NotBelieved(f"{path}: belongs to uid {owner}, not to {whose} (uid {uid})")
        yield fd
    finally:
        os.close(fd)


def read_from(directory: int | None, name: str, uid: int, offset: int, limit: int) -> tuple[bytes, int]:
    """Read at most `limit` bytes from `offset` of a regular file that belongs to `uid`; return them and the file's
    size. Without a `directory`, `name` is the whole path.

    Raises FileNotFoundError if it does not exist, `NotBelieved` if it is a link, a device, or another user's.
    """
    try:
        # The type is checked before opening, since opening a device or a FIFO may have effects. It is checked again
        # after, since the file may have been replaced in between.
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
    except ValueError:  # the name has a NUL
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
    """Read parts of files in the directory at `path`, all owned by `uid`. Raises FileNotFoundError if the directory
    does not exist, `NotBelieved` if it cannot be opened or is not the user's (see `directory_of`)."""
    found: list[Found] = _run(_parts, path, uid, parts)
    return found


def read_file(path: Path, uid: int, name: str, limit: int, owner: int | None = None) -> tuple[bytes, int]:
    """Read the first `limit` bytes of one file; return them and the file's size. The directory must belong to `uid`,
    the file to `owner` (default: `uid`). Raises as `read_files` does, for the file too."""
    (found,) = _run(_parts, path, uid, [(name, 0, limit)], owner)
    if isinstance(found, Exception):
        raise found
    text, size = found
    return text, size


def check_directory(path: Path, uid: int) -> None:
    """Check that the directory exists and belongs to `uid`; raises as `read_files` does."""
    _run(_parts, path, uid, ())


def write_file(path: Path, uid: int, whose: str, name: str, text: bytes, *, safe: bool = False) -> None:
    """Write `text` to a temporary file, make it durable, and rename it to `name` in the directory at `path`. The
    directory must belong to `uid`. With `safe`, the write fails if another user could rename files in it.

    Raises OSError and `NotBelieved`.
    """
    _run(_write, path, uid, whose, name, text, safe, time.monotonic() + WRITTEN_WITHIN_S)


def names_in(path: Path) -> list[str]:
    """List the names in a directory that belongs to this process's user. Raises OSError and `NoAnswer`."""
    names: list[str] = _run(_names, path, os.geteuid())
    return names


def remove(path: Path) -> None:
    """Remove a file, if it exists, from a directory that belongs to this process's user. Raises OSError and
    `NoAnswer`."""
    _run(_remove, path, os.geteuid())


def status_of(path: Path, uid: int, *, follow: bool = True) -> os.stat_result:
    """Return the status of a path; links are followed if `follow`. Raises OSError and `NoAnswer`."""
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
            # A user who can rename files in it could give one job's order to another.
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
