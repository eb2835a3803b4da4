"""POSIX access control lists of Linux: one more user may read a file. An owner may set them without any privilege."""

from __future__ import annotations

import os
import struct

NAME = "system.posix_acl_access"
"""The extended attribute that holds a file's list."""

# As in linux/posix_acl_xattr.h: a version, then tag, permissions and id of each entry, little-endian.
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_NOBODY = 0xFFFFFFFF
"""In place of an id, for entries that have none."""
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE = 4, 2


def readable_by(uid: int) -> bytes:
    """The list of a file that its owner reads and writes, `uid` reads, and nobody else (but root) opens."""
    entries = (
        (_USER_OBJ, _READ | _WRITE, _NOBODY),
        (_USER, _READ, uid),
        (_GROUP_OBJ, 0, _NOBODY),
        (_MASK, _READ, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries)


def let_read(fd: int, uid: int) -> None:
    """Let `uid` read the open file too. Raises OSError, with ENOTSUP where its file system has no such lists."""
    os.setxattr(fd, NAME, readable_by(uid))
