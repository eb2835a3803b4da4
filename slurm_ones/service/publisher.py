"""Publication of each user's own jobs, as a file that only the user can read.

At a site with one companion for all, users can read neither the job database nor a server. In `Settings.views_folder`,
each user with jobs has a file named by `view_name`, and SITE_VIEW is for everybody. A thread writes the files of users
whose jobs have changed.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import struct
import threading
import time
from collections.abc import Hashable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from ones_db import StoreError
from ones_db.user_files import ViewSource
from slurm_ones.config import SITE_VIEW, view_name
from slurm_ones.untrusted_files import NotBelieved, directory_of

log = logging.getLogger(__name__)

FOLDER_MODE = 0o711
"""Mode of the folder: everybody may open a file by its name, but only the owner may list the folder."""
ROUND_S = 10.0
"""Seconds after which a round stops writing; the next round writes the remaining files."""
REST = 20
"""Pause after a round, as a multiple of the round's CPU time, so that publishing takes at most a twentieth of a
core."""


class Publisher:
    """Writer of the users' files of one cluster: `publish` does one round. After `start`, a thread does one after each
    call of `ticked`."""

    def __init__(self, url: str, cluster: str, folder: Path) -> None:
        self._source = ViewSource(url, cluster)
        self._folder = folder
        self._written: dict[str, Hashable] = {}
        """State of each user's jobs when their file was last written, in the order of writing."""
        self._rest_until = 0.0
        self._said: set[str] = set()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that publishes."""
        self._thread = threading.Thread(target=self._run, name="views", daemon=True)
        self._thread.start()

    def ticked(self) -> None:
        """Wake the thread for a round after a tick."""
        self._wake.set()

    def close(self) -> None:
        """Do a last round, then end the thread."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * ROUND_S)
        self._source.close()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            # In this order: what is asked for in between has its own round.
            self._wake.clear()
            closing = self._closing
            try:
                self.publish()
            except (StoreError, OSError, NotBelieved) as error:
                self._say_once(f"users cannot see their jobs: {error}")
            except Exception:
                # Its end would be noticed by nobody.
                log.exception("users cannot see their jobs")
            # One that was under way when the end was asked for has not seen what happened since: there is one more.
            if closing:
                return

    def publish(self) -> tuple[int, int]:
        """Write SITE_VIEW, then the files of users whose jobs have changed, the oldest file first. Also remove the
        files of users whose jobs ended long ago.

        Return two numbers of users: with files written, and with files left for the next round. Raises `StoreError`,
        and OSError or `NotBelieved` if the files cannot be written.
        """
        made = not self._folder.exists()
        self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        with directory_of(self._folder, os.geteuid(), "this companion") as folder:
            if made:
                # Whatever the umask took away.
                os.fchmod(folder, FOLDER_MODE)
            if os.fstat(folder).st_mode & 0o022:
                raise NotBelieved(f"{self._folder}: others may write there; take that from them (chmod 711)")
            _write(folder, SITE_VIEW, self._source.site(), None)
            began = time.monotonic()
            if began < self._rest_until and not self._closing:
                return 0, 0
            # What it takes of a processor: on a busy machine it waits, which costs nobody anything.
            used = time.thread_time()
            done = self._publish_users(folder, began)
            self._rest_until = time.monotonic() + REST * (time.thread_time() - used)
        return done

    def _publish_users(self, folder: int, began: float) -> tuple[int, int]:
        now = time.time()
        users = self._source.users(now)
        uids = {user: uid for user in users if (uid := _uid(user)) is not None}
        self._written = {user: seen for user, seen in self._written.items() if user in uids}
        due = [user for user in uids if user not in self._written]
        due += [user for user, seen in self._written.items() if users[user] != seen]
        written = 0
        with closing(self._source.views(due, now)) as views:
            for user, file in views:
                self._write(folder, uids[user], file)
                self._written.pop(user, None)
                self._written[user] = users[user]
                written += 1
                if time.monotonic() - began > ROUND_S:
                    break
        for user in sorted(users.keys() - uids.keys()):
            self._say_once(f"user {user!r} is not known on this machine, and cannot be shown their jobs")
        _tidy(folder, uids)
        return written, len(due) - written

    def _write(self, folder: int, uid: int, file: bytes) -> None:
        try:
            _write(folder, view_name(uid), file, uid)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            raise NotBelieved(
                f"{self._folder}: its file system has no POSIX ACLs, by which users could read files of their "
                "own: set `views` in the settings to a folder on one that has"
            ) from None

    def _say_once(self, text: str) -> None:
        if text not in self._said and len(self._said) < 1000:
            self._said.add(text)
            log.error("%s", text)


def _uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None


def _write(folder: int, name: str, content: bytes, uid: int | None) -> None:
    """Replace a file atomically. The user with id `uid` may read it; if `uid` is None, everybody may."""
    temporary = f".{name}"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if uid is None:
                os.fchmod(fd, 0o644)
            else:
                let_read(fd, uid)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _tidy(folder: int, uids: Mapping[str, int]) -> None:
    """Remove the files of users who have no jobs to show."""
    kept = {*uids.values()}
    for name in os.listdir(folder):
        found = re.fullmatch(r"([0-9]+)\.sqlite", name)
        if found and int(found[1]) not in kept:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


# POSIX access control lists of Linux: one more user may read a file. An owner may set them without any privilege.

ACL = "system.posix_acl_access"
"""Extended attribute that holds a file's access control list."""

# As in linux/posix_acl_xattr.h: a version, then tag, permissions and id of each entry, little-endian.
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_NOBODY = 0xFFFFFFFF
"""Id in entries of an access control list that name no user or group."""
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE = 4, 2


def readable_by(uid: int) -> bytes:
    """Return an access control list: the owner reads and writes, user `uid` reads, and others may not open the file."""
    entries = (
        (_USER_OBJ, _READ | _WRITE, _NOBODY),
        (_USER, _READ, uid),
        (_GROUP_OBJ, 0, _NOBODY),
        (_MASK, _READ, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries)


def let_read(fd: int, uid: int) -> None:
    """Allow user `uid` to read an open file. Raises OSError: ENOTSUP if the file system has no access control lists."""
    os.setxattr(fd, ACL, readable_by(uid))
