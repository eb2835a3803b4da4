"""Folder `checkpoints/` of a job: which checkpoints are complete and undamaged, and how a checkpoint becomes complete.

One job at a time locks the directory, since two jobs would remove and replace each other's checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from threading import Thread
from typing import Any

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files import node_memory
from ones_wrapper.files.checksums import RESUMED_FROM, Sum, damage, sync
from ones_wrapper.files.job_directory import checkpoint_names
from ones_wrapper.files.job_lock import lock_directory
from ones_wrapper.files.node_memory import HeldCheckpoint
from ones_wrapper.files.small_files import replace_small
from ones_wrapper.protocol import CHECKPOINTS, MANIFEST, directory_name
from ones_wrapper.script.line import script

FORMAT = 3
REST = "rest.pt"
LATER = {"padding": 0, "run_id": "", "noise_low": 0.0, "lr_peaks": [], "momentum_power": 1.0, "admitted": 0.0}
"""Fields of `TrainingProgress` that the first checkpoints of this format do not have, with their default values."""
OTHERS = (
    "checkpoint {name} is of {theirs} (job {job}, start {start}), whose training {mine} would continue: give each "
    "script a directory (export ONES_JOB_DIR=...). If {mine} is to go on from there, add ones-run --resume-from {here}"
)


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint at this step. Names in alphabetical order are ordered by step."""
    return f"step-{step:09d}"


class Folder:
    """Checkpoints of one job on the disk. Methods are not collective: `Checkpoints` decides which rank calls them."""

    mode = 0o644
    """Mode of the files."""

    def __init__(self, job_dir: Path, job_id: int, restart: int, keep: int) -> None:
        self.job_dir, self.restart = job_dir, restart
        self._path = job_dir / CHECKPOINTS
        self.job_id, self.keep = job_id, keep
        self._sweeper: Thread | None = None
        self._held: int | None = None
        self.mark = ""
        """Part of the names of temporary directories, so that two ranks can write a checkpoint of the same step at
        once."""
        self._aside: list[Path] = []
        """Damaged checkpoints that this process has hidden."""
        self.refuse: Callable[[], str] = str
        """Function that is called before a checkpoint is published. It returns a reason to discard it, or ''."""

    def path(self, name: str) -> Path:
        """Return the path of a complete checkpoint."""
        return self._path / name

    def temporary(self, name: str) -> Path:
        """Return the path of a checkpoint while it is written."""
        return self._path / f".tmp-{self.mark}{name}"

    def prepare(self) -> None:
        """Lock the job's directory, create the folder, and clean up after an interrupted save. Raises `InUseError` if
        another job runs in the directory."""
        self._held = lock_directory(self.job_dir, self.job_id)
        self._path.mkdir(exist_ok=True)
        sync(self.job_dir)
        for old in self._path.glob(".old-*"):
            target = self._path / old.name.removeprefix(".old-")
            if not target.exists():  # killed between the two renames of `_publish`
                old.rename(target)
        _sweep([left for kind in (".tmp-*", ".old-*", ".gone-*") for left in self._path.glob(kind)])

    def take_over(self) -> None:
        """Lock the directory after another process of the same job has released it."""
        if self._held is None:
            self._held = lock_directory(self.job_dir, self.job_id, wait_s=0.0)

    def release(self) -> None:
        """Wait until old checkpoints are deleted, then unlock the directory for other jobs."""
        self.wait_for_removal()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def begin(self, name: str) -> None:
        """Create an empty temporary directory for a checkpoint's files."""
        self.wait_for_removal()
        self.discard(name)
        self.temporary(name).mkdir()

    def discard(self, name: str) -> None:
        """Remove a checkpoint that is not complete."""
        shutil.rmtree(self.temporary(name), ignore_errors=True)

    def complete(self, name: str, progress: TrainingProgress, files: dict[str, Sum]) -> int:
        """Write the manifest, publish the checkpoint, and remove the oldest checkpoints. Return the new checkpoint's
        size in bytes. Rank 0 calls this when the files of all ranks are durable."""
        temporary = self.temporary(name)
        replace_small(temporary / MANIFEST, json.dumps(self.manifest_of(progress, files), indent=1).encode())
        sync(temporary)
        if why := self.refuse():
            raise ValueError(why)
        replaced = self._publish(name)
        with suppress(OSError):
            self.hold(None)
        self._remove(checkpoint_names(self._path)[self.keep :], replaced)
        return sum(s.size for s in files.values())

    def manifest_of(self, progress: TrainingProgress, files: dict[str, Sum]) -> dict[str, Any]:
        """Return the values of a new checkpoint's manifest."""
        return {
            "format": FORMAT,
            "job_id": self.job_id,
            "restart": self.restart,
            "script": script(),
            "progress": asdict(progress),
            "files": {file: [s.size, s.crc] for file, s in files.items()},
        }

    def _publish(self, name: str) -> list[Path]:
        """Rename a checkpoint to its final name. Return the paths of checkpoints that it replaces: one or none."""
        target, old = self.path(name), self._path / f".old-{name}"
        again = target.exists()  # the same step again, such as before and after the end of an epoch
        if again:
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        self.temporary(name).rename(target)
        sync(self._path)
        return [old] if again else []

    def _remove(self, names: list[str], replaced: list[Path]) -> None:
        """Delete checkpoints in a thread. Each is first renamed, since a name without a dot must be a complete
        checkpoint at any time."""
        leaving = [self._path / f".gone-{name}" for name in names]
        for name, gone in zip(names, leaving, strict=True):
            shutil.rmtree(gone, ignore_errors=True)
            self.path(name).rename(gone)
        if leaving or replaced:
            self._sweeper = Thread(target=_sweep, args=(replaced + leaving,), name="ones-sweep", daemon=True)
            self._sweeper.start()

    def wait_for_removal(self) -> None:
        """Wait for the thread that deletes old checkpoints."""
        if self._sweeper is not None:
            self._sweeper.join()
            self._sweeper = None

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first."""
        return checkpoint_names(self._path)

    def held(self) -> HeldCheckpoint | None:
        """Return the checkpoint in the nodes' memory; None if there is none, or if the disk has a newer one."""
        newest = next(iter(self.names()), "step-0")  # first: on NFS, listing the folder shows its new files
        held = node_memory.held(self._path)
        return held if held is not None and int(held.name[5:]) >= int(newest[5:]) else None

    def hold(self, held: HeldCheckpoint | None) -> None:
        """Write the description of the checkpoint in the nodes' memory; with None, remove it. Raises OSError."""
        if held is None:
            node_memory.drop(self._path)
        else:
            node_memory.hold(self._path, held)

    def damage(self, name: str, part: int, parts: int) -> str:
        """Check one of `parts` parts of a checkpoint's files. Return the damage; empty if there is none
        (`checksums.damage`)."""
        return damage(self.path(name), part, parts)

    def set_aside(self, name: str) -> None:
        """Rename a damaged checkpoint to a hidden name, for people to examine. Delete those that earlier starts hid."""
        hidden = self._path / f".damaged-{name}"
        _sweep([older for older in self._path.glob(".damaged-*") if older == hidden or older not in self._aside])
        self._aside.append(hidden)
        self.path(name).rename(hidden)

    def manifest(self, name: str) -> tuple[int, TrainingProgress]:
        """Return (job id, progress) of a checkpoint. The job is the one that wrote the checkpoint first, even if
        another has taken it over by `--resume-from`. Raises ValueError for another format, and for a malformed
        manifest. Raises ValueError also for another job's or script's checkpoint, unless `--resume-from` was given."""
        try:
            return self._manifest(name, json.loads((self.path(name) / MANIFEST).read_text()))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"checkpoint {name}: its {MANIFEST} is invalid: {type(error).__name__}: {error!s:.100}"
            ) from None

    def _manifest(self, name: str, manifest: Any) -> tuple[int, TrainingProgress]:
        if manifest["format"] != FORMAT:
            raise ValueError(
                f"checkpoint {name} has format {manifest['format']}, and this ones_wrapper reads {FORMAT}; use the "
                "version that wrote it, or another job directory (ONES_JOB_DIR)"
            )
        job_id, here = int(manifest["job_id"]), self.job_dir.resolve().name
        if job_id != self.job_id and here == directory_name(self.job_id):
            raise ValueError(
                f"checkpoint {name} is of job {job_id}, but {here} is the directory of job {self.job_id}. Move "
                f"{CHECKPOINTS}/{name} away to start from scratch, or, to go on from it, give the directory a name of "
                "its own and name it in ONES_JOB_DIR"
            )
        theirs, mine = str(manifest.get("script", "")), script()
        if theirs and mine and theirs != mine and RESUMED_FROM not in manifest:
            start = int(manifest.get("restart", 0))
            raise ValueError(
                OTHERS.format(name=name, theirs=theirs[:100], job=job_id, start=start, mine=mine, here=self.job_dir)
            )
        progress = LATER | manifest["progress"]
        kinds: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
        kinds["list[float]"] = lambda values: [float(value) for value in values]
        known = {f.name: kinds[str(f.type)](progress[f.name]) for f in fields(TrainingProgress)}
        return int(manifest.get(RESUMED_FROM, job_id)), TrainingProgress(**known)


def _sweep(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
