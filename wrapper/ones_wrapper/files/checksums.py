"""Check of a checkpoint's files: sizes and checksums. Needs only the standard library."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from ones_wrapper.protocol import MANIFEST

RESUMED_FROM = "resumed_from"
"""Key in a manifest: id of the job that wrote the checkpoint, if another job has taken it over."""


_DAMAGED = (None, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR)
"""Errors that show a damaged file. Other errors (ESTALE, ETIMEDOUT, EACCES, EMFILE) say nothing about its content."""
_TRIES, _AGAIN_S = 5, 2.0
BLOCK = 8 << 20
"""Bytes read at once. A read, or a checksum, waits for the interpreter's lock, which the script may hold."""


@dataclass(frozen=True)
class Sum:
    """A file's size in bytes and CRC-32."""

    size: int
    crc: int


def sync(path: Path) -> None:
    """Call fsync for a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> Sum:
    """Return size and checksum of a regular file of this user. Raises OSError for any other file."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise OSError(f"{path.name} is not a regular file of this user")
        crc, block = 0, memoryview(bytearray(min(max(state.st_size, 1), BLOCK)))
        while read := file.readinto(block):
            crc = zlib.crc32(block[:read], crc)
    return Sum(state.st_size, crc)


def damage(checkpoint: Path, part: int = 0, parts: int = 1) -> str:
    """Return the damage of a checkpoint as a text; empty if there is none. Checks part number `part` of the files,
    divided into `parts` parts. Raises OSError if the files cannot be read for 8 s."""
    for _ in range(_TRIES - 1):
        try:
            return _damage(checkpoint, part, parts)
        except OSError:
            time.sleep(_AGAIN_S)
    return _damage(checkpoint, part, parts)


def _damage(checkpoint: Path, part: int, parts: int) -> str:
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        for file in sorted(files)[part::parts]:
            if file != Path(file).name:
                return f"{MANIFEST} names {file!r}"
            now, then = checksum(checkpoint / file), Sum(*files[file])
            if now != then:
                return f"{file}: {now.size} bytes, not the {then.size} that were written, or changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGED:
            raise
        return f"{type(error).__name__}: {error}"[:200]
    return ""
