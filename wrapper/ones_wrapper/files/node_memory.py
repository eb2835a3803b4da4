"""A node launcher's folder in its node's memory, by which a planned term gets its state without the job's file system.

The launcher outlives its ranks, and keeps the folder. A lock shows that the launcher or one of its ranks lives. At its
start a launcher removes folders of killed launchers. A file in the job's directory describes the checkpoint in memory,
with the folder of each of its files. The file is removed once the disk has a newer checkpoint. Needs only the standard
library.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ones_wrapper.files.job_directory import STEP_NAME
from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.protocol import CHECKPOINTS

COPY_STEPS = "ONES_COPY_STEPS"
"""Environment variable: steps between two copies of a sharded training in the nodes' memory; no copies for 0 or if
missing."""
FOLDER = "ONES_MEMORY_FOLDER"
"""Environment variable with the folder in memory of the launcher of these ranks (`MemoryFolder.text`)."""
HELD = ".in-memory"
"""File among the job's checkpoints that describes the checkpoint in the nodes' memory (`HeldCheckpoint`)."""
PIECE = re.compile(r"tensors-\d{5,}\.safetensors|rest\.pt", re.ASCII)
"""Name of a file of a checkpoint in memory."""
_PREFIX = ".ones-blocks-"
_MOST_BYTES = 16 << 20
_NAMES_2 = "memory.max", "memory.current", "inactive_file"
_NAMES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""A cgroup's limit, its use, and the file pages within its use, which the kernel drops if memory is short."""


@dataclass(frozen=True)
class MemoryFolder:
    """A launcher's folder in memory, as other processes of the job know it."""

    node: str
    """Name of the file system in memory; equal for all processes that see it."""
    host: str
    port: int
    """Port of the server of the folder's files (`network.pieces`), on `host`."""
    room: int
    """Bytes that fitted into the folder when the launcher began."""
    path: Path

    @property
    def text(self) -> str:
        """This folder as a text, which `parse` reads."""
        return f"{self.node} {self.host} {self.port} {self.room} {self.path}"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints within this folder."""
        return self.path / CHECKPOINTS

    @classmethod
    def parse(cls, text: str) -> MemoryFolder:
        """Return the folder of this text. Raises ValueError."""
        node, host, port, room, path = text.split(" ", 4)
        if not (text.isprintable() and path.startswith("/") and Path(path).name.startswith(_PREFIX)):
            raise ValueError("not a launcher's folder")
        return cls(node, host, int(port), int(room), Path(path))


@dataclass(frozen=True)
class HeldCheckpoint:
    """The one checkpoint in the nodes' memory."""

    name: str
    manifest: dict[str, Any]
    folders: tuple[str, ...]
    """`MemoryFolder.text` of the folders that have its files."""
    places: dict[str, list[int]]
    """Indices in `folders` of the folders that have a file, by the file's name."""

    @property
    def text(self) -> str:
        """This checkpoint as JSON, which `parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> HeldCheckpoint:
        """Return the checkpoint from parsed JSON. Raises ValueError."""
        try:
            found = cls(data["name"], data["manifest"], tuple(data["folders"]), data["places"])
            sound = STEP_NAME.fullmatch(found.name) and found.places.keys() == found.manifest["files"].keys()
            if not sound or not all(map(PIECE.fullmatch, found.places)):
                raise ValueError("not a checkpoint's files")
            for file in found.places:
                if not found.folders_of(file):
                    raise ValueError(f"{file} lies nowhere")
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"not a checkpoint in memory: {error}") from None
        return found

    def folders_of(self, file: str) -> list[MemoryFolder]:
        """Return the folders that have this file."""
        return [MemoryFolder.parse(self.folders[number]) for number in self.places[file]]

    def second_at(self, folder: str) -> HeldCheckpoint:
        """Return a description of the files whose second copy belongs in `folder`, with the places of their first
        copies only."""
        there = {file: at[:1] for file, at in self.places.items() if folder in map(self.folders.__getitem__, at[1:])}
        return replace(self, places=there)

    def at(self, folders: Sequence[str]) -> HeldCheckpoint:
        """Return this checkpoint with other `folders` that each have all its files."""
        once = tuple(dict.fromkeys(folders))
        return replace(self, folders=once, places={file: [i % len(once)] for i, file in enumerate(sorted(self.places))})


class NodeMemory:
    """A node launcher's folder in memory, which the launcher locks until its end."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """The variable `ONES_MEMORY` names the file system in memory (default `/dev/shm`); if it is empty, there is no
        folder."""
        self.folder: MemoryFolder | None = None
        """The folder, not served yet, or None."""
        root = Path(env.get("ONES_MEMORY", "/dev/shm"))
        if not root.is_absolute():
            return
        with suppress(OSError):
            _remove_abandoned(root)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # mode 0700
            if _locked(path) is not None and path.exists():
                boot, place = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), root.stat()
                self.folder = MemoryFolder(f"{boot}-{place.st_dev}-{place.st_ino}", "", 0, room(path), path)

    def remove(self) -> None:
        """Remove the folder, because the block ends on this node."""
        if self.folder is not None:
            shutil.rmtree(self.folder.path, ignore_errors=True)


def _locked(path: Path) -> int | None:
    """Lock a directory of this user; return its open handle, which keeps the lock. None if a living process holds
    it."""
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


def own_folder() -> MemoryFolder | None:
    """Return the folder of this rank's launcher; None if there is none."""
    text = os.environ.get(FOLDER, "")
    return MemoryFolder.parse(text) if text else None


def least_room(texts: Sequence[str]) -> str:
    """Return the one of `texts` (each launcher's `MemoryFolder.text`) whose folder has the least `room`; empty if a
    launcher has no folder."""
    return min(texts, key=lambda text: MemoryFolder.parse(text).room) if all(texts) else ""


def folder_for(coming: Sequence[str], present: Sequence[str]) -> tuple[MemoryFolder, int] | None:
    """Return the folder into which this rank writes its part, and the largest size of the whole checkpoint in bytes.
    `coming` and `present` are the `MemoryFolder.text` of all launchers after and before the change. None if a launcher
    has no folder.

    The folder is that of the first coming launcher on this rank's node, or else of this rank's own launcher. Every node
    gets the whole checkpoint, so the node with the fewest free bytes limits its size.
    """
    own = own_folder()
    if own is None or not all((*coming, *present)):
        return None
    folders = [MemoryFolder.parse(text) for text in coming]
    found = next((one for one in folders if one.node == own.node), own)
    return found, min(room(found.path), *(one.room for one in folders))


def copy_steps(env: Mapping[str, str]) -> int:
    """Return the steps between two copies in memory; 0 for none. Raises ValueError."""
    text = env.get(COPY_STEPS) or "0"
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{COPY_STEPS}={text} must be a number of steps, or 0")
    return int(text)


def neighbour(launchers: Sequence[tuple[int, str]], rank: int) -> str:
    """Return the folder for the second copy of this rank's file: that of the next block on another node, or else of the
    next block. `launchers` has (block's task, folder) of each rank. Raises ValueError if there is only one block."""
    block, text = launchers[rank]
    others = [one for one in (*launchers[rank:], *launchers[:rank]) if one[0] != block]
    if not others:
        raise ValueError("no other block trains")
    node = MemoryFolder.parse(text).node
    return next((its for _, its in others if MemoryFolder.parse(its).node != node), others[0][1])


def ours(folder: Path) -> bool:
    """Return True for a launcher's folder that belongs to this user, and is closed to all other users."""
    with suppress(OSError):
        state = folder.lstat()
        private = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
        return folder.name.startswith(_PREFIX) and private and state.st_uid == os.geteuid()
    return False


def clear(folder: Path, but: str = "") -> None:
    """Remove all checkpoints in a launcher's folder, except the one with the path `but`. Raises OSError."""
    if not ours(folder):
        raise PermissionError(f"{folder} is gone, or not this user's")
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir(mode=0o700, exist_ok=True)
    for one in checkpoints.iterdir():
        if str(one) != but:
            shutil.rmtree(one)


def hold(checkpoints: Path, held: HeldCheckpoint) -> None:
    """Write the description of the checkpoint in memory. It is not synced, since a power failure loses the memory,
    too."""
    replace_small(checkpoints / HELD, held.text.encode(), 0o600, sync=False)


def held(checkpoints: Path) -> HeldCheckpoint | None:
    """Return the checkpoint in memory that the file in `checkpoints` describes; None if there is none."""
    try:
        return HeldCheckpoint.parse(read_json(checkpoints / HELD, _MOST_BYTES))
    except (OSError, ValueError):
        return None


def drop(checkpoints: Path) -> None:
    """Remove the description of the checkpoint in memory. Raises OSError."""
    (checkpoints / HELD).unlink(missing_ok=True)


def room(folder: Path) -> int:
    """Return the bytes that may be written into the folder; 0 if unknown. Half of the free memory is left, for the copy
    that is written to the disk."""
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
