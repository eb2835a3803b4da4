"""Small files, read only if their owner is trusted, and written completely or not at all. Needs only the standard
library."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ones_wrapper.protocol.fields import object_of


def read_small(path: Path, most: int, owners: Collection[int] = (), private: bool = False) -> bytes:
    """Return the bytes of a regular file of this user, or of one of `owners`. Follows no link, and does not wait for a
    FIFO.

    Raises OSError, and ValueError with a reason such as "is larger than 10 bytes". With `private`, the file must not be
    readable by others. Do not check a file's time instead of reading it: on NFS only an open asks the server.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("is not a regular file")
        if state.st_uid not in (owners or (os.geteuid(),)):
            raise ValueError(
                f"belongs to user {state.st_uid}, not to {'a user whose files are read' if owners else 'you'}"
            )
        if private and state.st_mode & 0o077:
            raise ValueError("may be read by others")
        if state.st_size > most:
            raise ValueError(f"is larger than {most} bytes")
        return os.read(file, most + 1)
    finally:
        os.close(file)


def read_json(path: Path, most: int) -> dict[str, Any]:
    """Return the JSON object in a file of this user. Raises OSError, and ValueError as `read_small` does."""
    return object_of(read_small(path, most))


def replace_small(path: Path, text: bytes, mode: int | None = None, sync: bool = True) -> None:
    """Replace the file at `path` atomically by one with this text. Raises OSError; the old file then stays. The new
    file has `mode`, whatever the umask. Without `sync` it may be empty after its host has lost power."""
    new = _temporary(path)
    try:
        _write(new, text, mode, sync)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def create_small(path: Path, text: bytes, mode: int | None = None) -> bool:
    """Create a file with this text and return True; False if the path exists. Of several processes that call this at
    once, exactly one creates the file. Raises OSError."""
    new = _temporary(path)
    try:
        _write(new, text, mode, sync=True)
        try:
            os.link(new, path)
        except OSError:
            if new.lstat().st_nlink > 1:
                return True  # a server that answers late made the link all the same
            if not os.path.lexists(path):
                raise
            return False
        return True
    finally:
        with suppress(OSError):
            new.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".new-{path.name.lstrip('.')}-{os.urandom(8).hex()}")


def _write(path: Path, text: bytes, mode: int | None, sync: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644 if mode is None else mode), "wb") as out:
        if mode is not None:
            os.fchmod(out.fileno(), mode)
        out.write(text)
        out.flush()
        if sync:
            os.fsync(out.fileno())
