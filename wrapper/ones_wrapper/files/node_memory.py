"""A block's folder in its node's memory, by which a planned term gets its state without the job's file system.

The folder belongs to the node's launcher, which outlives its ranks. A lock shows that the launcher, or a rank of it,
lives; a launcher that starts removes the folders of those that were killed. A file in the job's directory names the one
checkpoint that lies in memory and not on the disk yet. Needs only the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ones_wrapper.files.job_directory import STEP_NAME
from ones_wrapper.files.small_files import read_small, replace_small
from ones_wrapper.protocol import CHECKPOINTS

FOLDER = "ONES_MEMORY_FOLDER"
"""Environment variable of the ranks: the node's memory, a colon, and the path of their launcher's folder."""
HELD = ".in-memory"
"""File among the job's checkpoints with the path of the checkpoint that lies in a node's memory."""
_PREFIX = ".ones-blocks-"
_MOST_BYTES = 4096
_NAMES_2 = "memory.max", "memory.current", "inactive_file"
_NAMES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""A cgroup's limit, its use, and the pages of files within its use, which the kernel drops when memory is short."""


class NodeMemory:
    """The folder of one node launcher, which keeps the lock until its end."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """`ONES_MEMORY` names the file system in memory; if it is empty or missing, there is no folder."""
        self.name = ""
        """Text for `FOLDER`; empty without a folder. Its first part is equal for all processes that see the folder."""
        self._path: Path | None = None
        root = Path(env.get("ONES_MEMORY", "/dev/shm"))
        if not root.is_absolute():
            return
        with suppress(OSError):
            _remove_abandoned(root)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # mode 0700
            if _locked(path) is not None and path.exists():
                boot, place = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), root.stat()
                self._path, self.name = path, f"{boot}-{place.st_dev}-{place.st_ino}:{path}"

    def remove(self) -> None:
        """Remove the folder: the block ends on this node."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)


def _locked(path: Path) -> int | None:
    """Lock a directory of this user; return its open handle, which keeps the lock. None if a living process has it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with suppress(OSError):
        if os.fstat(handle).st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
    os.close(handle)
    return None


def _remove_abandoned(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if (handle := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(handle)


def common(names: Sequence[str]) -> Path | None:
    """Return the folder of the first of these launchers, each given by its text for `FOLDER`; None unless all of them
    see it."""
    places = {name.partition(":")[0] for name in names}
    return Path(names[0].partition(":")[2]) if len(places) == 1 and "" not in places else None


def ours(folder: Path) -> bool:
    """Return whether this is a launcher's folder of this user, which no other user can write or read."""
    with suppress(OSError):
        state = folder.lstat()
        private = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
        return folder.name.startswith(_PREFIX) and private and state.st_uid == os.geteuid()
    return False


def clear(folder: Path, but: str = "") -> None:
    """Remove the checkpoints in a launcher's folder, complete or not, except the one with the path `but`. Raises
    OSError."""
    if not ours(folder):
        raise PermissionError(f"{folder} is gone, or not this user's")
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir(mode=0o700, exist_ok=True)
    for one in checkpoints.iterdir():
        if str(one) != but:
            shutil.rmtree(one)


def hold(checkpoints: Path, held: Path) -> None:
    """Name the checkpoint in memory among the job's checkpoints. Not synced: no node that lost power has it either."""
    replace_small(checkpoints / HELD, str(held).encode(), 0o600, sync=False)


def held(checkpoints: Path) -> Path | None:
    """Return the checkpoint that is named among the job's checkpoints; None for none."""
    try:
        text = read_small(checkpoints / HELD, _MOST_BYTES).decode()
    except (OSError, ValueError):
        return None
    sound = text.isprintable() and text.startswith("/") and len(Path(text).parents) > 2
    return Path(text) if sound and STEP_NAME.fullmatch(Path(text).name) else None


def drop(checkpoints: Path) -> None:
    """Remove the checkpoint in memory, if this node has it, and its name."""
    path = held(checkpoints)
    with suppress(OSError):
        (checkpoints / HELD).unlink()
    if path is not None and ours(path.parents[1]):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def private_files() -> Iterator[None]:
    """Context in which new files of this process have mode 0600, and new directories 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def room(folder: Path) -> int:
    """Return the bytes that may be written into the folder; 0 if they are unknown. Half of the free memory is left: the
    copy that is written to the disk needs as much."""
    with suppress(OSError, ValueError):
        of = os.statvfs(folder)
        return min(of.f_bavail * of.f_frsize, min(_free()) // 2)
    return 0


def _free(system: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes that are free on the node, and below the limit of each cgroup above this process."""
    for line in (system / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for line in (system / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):  # version 2, or 1
            limit, used, cached = _NAMES_1 if kinds else _NAMES_2
            top = system / "sys/fs/cgroup" / kinds
            group = top / path.lstrip("/")
            for one in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                # Without a limit the file has no number, and a container may not show the cgroups above its own.
                with suppress(OSError, ValueError):
                    counts = dict(line.split() for line in (one / "memory.stat").read_text().splitlines())
                    taken = int((one / used).read_text()) - int(counts[cached])
                    yield int((one / limit).read_text()) - taken
