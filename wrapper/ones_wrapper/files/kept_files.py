"""Text files that a script writes on rank 0. A loaded checkpoint cuts them back to their size at that checkpoint.

The next run repeats the steps after the checkpoint, and writes their lines again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ones_wrapper.process.log import log


class KeptFiles:
    """The text files of one job that are continued after a resize; checkpoints hold only their sizes."""

    def __init__(self, writes: Callable[[], bool]) -> None:
        """`writes` returns True if this process writes the files, as only rank 0 does."""
        self._writes = writes
        self._sizes: dict[str, int] = {}
        self._fresh = True
        """True if training begins from scratch."""
        self._open: dict[str, KeptFile] = {}

    def open(self, path: str | os.PathLike[str]) -> KeptFile:
        """Return the file, cut back if a checkpoint was loaded, and opened at its end. Raises OSError if rank 0 cannot
        write it, and ValueError if it is already open."""
        name = os.fspath(path)
        before = self._open.get(name)
        if before is not None and not before.closed:
            raise ValueError(f"open: {name} is open already")
        if before is None and self._writes():
            self._cut(name)
        self._open[name] = file = KeptFile(name, self._writes)
        if self._writes():
            file.write("")  # an error now, rather than after the first hours
        return file

    def _cut(self, name: str) -> None:
        wanted, path = 0 if self._fresh else self._sizes.get(name), Path(name)
        if wanted is None or not path.exists():
            return
        size = path.stat().st_size
        if size < wanted:
            log(f"{name} holds {size} bytes and held {wanted} at the checkpoint: lines are missing")
        elif size > wanted:
            os.truncate(path, wanted)

    def state_dict(self) -> dict[str, Any]:
        """Sync the open files to the disk; return all files' sizes in bytes."""
        sizes = dict(self._sizes)
        for name, file in self._open.items():
            file.sync()
            with suppress(OSError):  # other nodes can lack the file
                sizes[name] = Path(name).stat().st_size
        return sizes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the files' sizes from a checkpoint."""
        self._sizes, self._fresh = dict(state), False


class KeptFile(io.TextIOBase):
    """Text file for `print(..., file=f)`, `csv.writer(f)` and `f.write(...)`. Each line is written at once on rank 0;
    other ranks write nothing."""

    def __init__(self, name: str, writes: Callable[[], bool]) -> None:
        self.name, self._writes = name, writes
        self._file: io.TextIOWrapper | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed:
            raise ValueError(f"{self.name} is closed")
        if self._writes():
            if self._file is None:
                self._file = Path(self.name).open("a", buffering=1, newline="")  # noqa: SIM115  # closed by `close`
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        """Flush and fsync the file."""
        if self._file is not None and self._writes():
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        super().close()
        if self._file is not None:
            with self._file:
                self.sync()  # a checkpoint must count only bytes that are on the disk
            self._file = None
