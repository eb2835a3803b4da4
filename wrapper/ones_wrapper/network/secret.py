"""The job's secret: 32 random bytes in the folder `hot/`, which only its owner may read. Standard library only."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from pathlib import Path

from ones_wrapper.files.small_files import create_small, read_small, replace_small
from ones_wrapper.process.placement import LaunchError

SECRET = "secret"
SIZE = 32


class JobSecret:
    """The job's secret. It is never sent; keys for each purpose are derived from it."""

    def __init__(self, value: bytes) -> None:
        assert len(value) == SIZE
        self._value = value

    def key(self, *purpose: str) -> bytes:
        """Return the key for one purpose."""
        return hmac.digest(self._value, "\0".join(purpose).encode(), hashlib.sha256)

    @classmethod
    def fresh(cls) -> JobSecret:
        """Return a new random secret, for processes that inherit it."""
        return cls(os.urandom(SIZE))

    @classmethod
    def make(cls, folder: Path) -> JobSecret:
        """Return the job's secret; create it if it is missing. Concurrent calls return the same secret. Raises
        `LaunchError`."""
        try:
            if not os.path.lexists(folder / SECRET):
                create_small(folder / SECRET, os.urandom(SIZE), 0o600)
        except OSError as error:
            raise LaunchError(f"job directory {folder / SECRET} cannot be made ({error.strerror})") from None
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path, patience_s: float = 0.0) -> JobSecret:
        """Return the job's secret. Waits up to `patience_s` seconds for the file, which a file system may show late.
        Raises `LaunchError`."""
        until, path = time.monotonic() + patience_s, f"job directory {folder / SECRET}"
        while True:
            try:
                value = read_small(folder / SECRET, SIZE, private=True)
                if len(value) != SIZE:
                    raise ValueError(f"has {len(value)} bytes, not {SIZE}")
                return cls(value)
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise LaunchError(f"{path} is missing: ones-run makes it") from None
                time.sleep(0.1)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise LaunchError(f"{path} {why}; remove it while the job does not run") from None

    @classmethod
    def renew(cls, folder: Path) -> None:
        """Replace the job's secret by a new random secret. Raises OSError."""
        replace_small(folder / SECRET, os.urandom(SIZE), 0o600)
