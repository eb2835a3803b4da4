"""A checkpoint in the nodes' memory: its files are written into folders of launchers, and read from a copy on each
node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ones_wrapper.checkpoint.folder import Folder
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files.checksums import Sum
from ones_wrapper.files.node_memory import HeldCheckpoint, clear, own_folder
from ones_wrapper.network.pieces import take
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.placement import LaunchError
from ones_wrapper.protocol import CHECKPOINTS, HOT


class HeldFolder(Folder):
    """One rank's view of a launcher's folder, which has all or some of the checkpoint's files."""

    mode = 0o600

    def __init__(self, disk: Folder, path: Path, of: Mapping[str, Sequence[str]] | None = None) -> None:
        """`path` is the launcher's folder. `of` maps each file's name to the texts of the folders that get a copy
        (`MemoryFolder.text`). The first of them is where the file is written."""
        super().__init__(disk.job_dir, disk.job_id, disk.restart, keep=1)
        self._disk, self._of, self._launcher = disk, of or {}, path
        self._path = path / CHECKPOINTS

    def temporary(self, name: str) -> Path:
        """Return the final path, since a description rather than a rename publishes a checkpoint in memory."""
        return self.path(name)

    def make(self, name: str, but: str) -> None:
        """Make a folder for a checkpoint's files, and remove all other checkpoints except `but`. One rank of each
        launcher calls this, before any rank writes."""
        clear(self._launcher, but=str(self.path(but)))
        self.path(name).mkdir(mode=0o700)

    def complete(self, name: str, progress: TrainingProgress, files: dict[str, Sum]) -> int:
        """Publish the checkpoint by a description in the job's folder; return its size in bytes."""
        self._disk.hold(self.described(name, progress, files))
        return sum(s.size for s in files.values())

    def described(self, name: str, progress: TrainingProgress, files: dict[str, Sum]) -> HeldCheckpoint:
        """Return the description of a checkpoint with these files."""
        folders = tuple(dict.fromkeys(text for file in files for text in self._of[file]))
        places = {file: [folders.index(text) for text in self._of[file]] for file in files}
        return HeldCheckpoint(name, self.manifest_of(progress, files), folders, places)


def bring(job_dir: Path, held: HeldCheckpoint, part: int, parts: int, present: Sequence[str] = ()) -> str:
    """Copy part `part` of `parts` of the files of a checkpoint in memory to this node, and check them. Return the
    damage in words; empty if there is no damage. The launchers with the folders `present` are known to live."""
    try:
        return take(held, JobSecret.read(job_dir / HOT), part, parts, present)
    except LaunchError as error:
        return str(error)


def free_memory(but: str = "") -> None:
    """Remove the checkpoints in the folder of this rank's launcher, except the newest one with the path `but`. Raises
    OSError."""
    if (own := own_folder()) is not None:
        clear(own.path, but)
