"""The job's secret: 32 random bytes in its folder `hot/`, which its owner alone may read. Standard library only."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

SECRET = "secret"
SIZE = 32


class SecretError(Exception):
    """There is no secret that can be used; the message says why, and what to do."""


class JobSecret:
    """The secret itself is never sent: keys that are bound to a purpose are derived from it."""

    def __init__(self, value: bytes) -> None:
        assert len(value) == SIZE
        self._value = value

    def key(self, *purpose: str) -> bytes:
        """The key for one purpose."""
        return hmac.digest(self._value, "\0".join(purpose).encode(), hashlib.sha256)

    @classmethod
    def fresh(cls) -> JobSecret:
        """One that nobody else has, for processes that inherit it."""
        return cls(os.urandom(SIZE))

    @classmethod
    def make(cls, folder: Path) -> JobSecret:
        """The job's secret, made if there is none: of several processes that make it at once, all get the same.

        Raises `SecretError`.
        """
        new = folder / f".{SECRET}-{os.urandom(8).hex()}"
        try:
            if not os.path.lexists(folder / SECRET):
                _write(new)
                try:
                    os.link(new, folder / SECRET)  # whole or not at all, and once
                except FileExistsError:
                    pass
                finally:
                    new.unlink()
        except OSError as error:
            raise SecretError(f"{folder / SECRET} cannot be made ({error.strerror})") from None
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path, patience_s: float = 0.0) -> JobSecret:
        """The job's secret, waited for as long as `patience_s`: a shared file system may show a new file late.

        Raises `SecretError`.
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                return cls(_read(folder / SECRET))
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise SecretError(f"{folder / SECRET} is missing: ones-run makes it") from None
                time.sleep(0.1)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise SecretError(f"{folder / SECRET} {why}; remove it while the job does not run") from None

    @classmethod
    def renew(cls, folder: Path) -> None:
        """Put another secret in place of the one that others saw. Raises OSError."""
        new = folder / f".{SECRET}-{os.urandom(8).hex()}"
        try:
            _write(new)
            new.replace(folder / SECRET)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def _write(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
        os.write(file, os.urandom(SIZE))
        os.fsync(file)
    finally:
        os.close(file)


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("is not a regular file")
        if state.st_uid != os.geteuid():
            raise ValueError(f"belongs to user {state.st_uid}, not to you")
        if state.st_mode & 0o077:
            raise ValueError("may be read by others")
        value = os.read(file, SIZE + 1)
    finally:
        os.close(file)
    if len(value) != SIZE:
        raise ValueError(f"has {len(value)} bytes, not {SIZE}")
    return value
