"""The files of a job: where they are, and how to open what somebody else owns, believing nothing.

A job's directory is writable by its user, while the reader may be privileged: links are not followed, nothing that
could block is opened, ownership is checked on the open descriptor, and reads are bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ones_wrapper.protocol import MAX_POINTER, ProtocolError, decode_pointer, directory_name, pointer_name

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class HasFiles(Protocol):
    """A job, by what its files are found by."""

    @property
    def job_id(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def work_dir(self) -> str: ...


class NotBelieved(Exception):
    """A file or directory is not what it should be; the message says what and where."""


def job_directory(job: HasFiles) -> Path:
    """The directory of the job's files: that of its pointer, or else below the job's working directory.

    Whether it is the user's shows when it is opened. Raises `NotBelieved` for a pointer that is not theirs, or no path.
    """
    pointer = Path(job.work_dir) / pointer_name(job.job_id)
    try:
        text, _ = read_from(None, str(pointer), job.uid, 0, MAX_POINTER + 1)
        return Path(decode_pointer(text))
    except FileNotFoundError:
        return Path(job.work_dir) / directory_name(job.job_id)
    except ProtocolError as error:
        raise NotBelieved(f"{pointer}: {error}") from None


def foreign(job: HasFiles) -> bool:
    """This process may not write into the job's directory, and has the spool for its orders alone."""
    return job.uid != os.geteuid() and os.geteuid() != 0


@contextmanager
def directory_of(path: Path, uid: int, whose: str = "the job's user") -> Iterator[int]:
    """A descriptor of the directory at `path`, which must belong to `uid` (in words: `whose`) and be no link.

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
    """At most `limit` bytes of a regular file of `uid` from `offset`, and the file's size. Without a `directory`,
    `name` is its whole path.

    Raises FileNotFoundError if there is none, `NotBelieved` if it is a link, a device, or another's file.
    """
    try:
        # Looked at before it is opened, since opening alone may do something to a device or a FIFO; and after, since
        # it may have been replaced in between.
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
