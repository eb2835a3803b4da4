"""Opening files that somebody else owns, believing nothing.

A job's directory is writable by its user, while the reader may be privileged: links are not followed, nothing that
could block is opened, ownership is checked on the open descriptor, and reads are bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class NotBelieved(Exception):
    """A file or directory is not what it should be; the message says what and where."""


@contextmanager
def directory_of(path: Path, uid: int) -> Iterator[int]:
    """A descriptor of the directory at `path`, which must belong to `uid` and be no link.

    Raises FileNotFoundError where there is none, `NotBelieved` where it is something else.
    """
    try:
        fd = os.open(path, _READ | os.O_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotBelieved(f"{path}: {error.strerror}") from None
    try:
        owner = os.fstat(fd).st_uid
        if owner != uid:
            raise NotBelieved(f"{path}: belongs to uid {owner}, not to the job's user (uid {uid})")
        yield fd
    finally:
        os.close(fd)


def read_from(directory: int, name: str, uid: int, offset: int, limit: int) -> tuple[bytes, int]:
    """At most `limit` bytes of a regular file of `uid` from `offset`, and the file's size.

    Raises FileNotFoundError where there is none, `NotBelieved` where it is a link, a device, or another's file.
    """
    try:
        fd = os.open(name, _READ, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotBelieved(f"{name}: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise NotBelieved(f"{name}: not a regular file")
        if info.st_uid != uid:
            raise NotBelieved(f"{name}: belongs to uid {info.st_uid}, not to the job's user (uid {uid})")
        return os.pread(fd, limit, offset), info.st_size
    finally:
        os.close(fd)
