"""Checkpoints that are whole or not there, and load at any world size.

Written to `checkpoints/.tmp-step-N`, every file fsynced, the manifest last, then renamed to `step-N`: a name
without a dot is a complete checkpoint. Tensors go through `torch.distributed.checkpoint`, each rank writing
its part; how far training has come is in the manifest, as JSON. The newest two are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ones_wrapper.group import Group
from ones_wrapper.mailbox import say
from ones_wrapper.protocol import CHECKPOINTS

KEEP = 2
MANIFEST = "manifest.json"
EXTRAS = "extras.pt"
_NAME = re.compile(r"step-\d{9,}")


class Stateful(Protocol):
    """Anything else that training carries: schedulers, gradient scalers, moving averages."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class Progress:
    """How far training has come; all counts are since the job's first run unless said otherwise."""

    epoch: int = 0
    cursor: int = 0
    """Samples of the epoch already used."""
    step: int = 0
    samples: int = 0
    batch: int = 0
    """Global batch last wished for, before it is cut to what the GPUs hold; 0 for the script's own."""
    dataset: int = 0
    """Length of an epoch; 0 before the data is known."""
    useful: float = 0.0
    """Progress in samples of the base batch: each sample counts with its batch's statistical efficiency."""
    noise: float = 0.0
    """Gradient noise scale last measured, in samples; 0 for none."""


@dataclass(frozen=True)
class State:
    """What is saved beside the progress: registered once by the script."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    extras: dict[str, Stateful]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Loaded:
    """Which checkpoint was loaded (empty name: none), and what people should know."""

    name: str
    progress: Progress
    note: str = ""


def checkpoint_name(step: int) -> str:
    """Directory of the checkpoint taken at this step; names sort by step."""
    return f"step-{step:09d}"


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> tuple[int, int]:
    """(size in bytes, crc32) of a regular file of ours."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise OSError(f"{path.name} is not a regular file of this user")
        crc = 0
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return state.st_size, crc


class Checkpoints:
    """The `checkpoints/` of one job. Methods are collective: all ranks call them at the same step
    boundary.
    """

    def __init__(self, job_dir: Path, group: Group, job_id: int, restart: int) -> None:
        self._folder = job_dir / CHECKPOINTS
        self._group = group
        self._origin = {"job_id": job_id, "restart": restart}
        group.on_first(self._prepare)

    def _prepare(self) -> None:
        """Make the folder, and remove what an interrupted save left."""
        self._folder.mkdir(exist_ok=True)
        for left in [*self._folder.glob(".tmp-*"), *self._folder.glob(".old-*")]:
            shutil.rmtree(left, ignore_errors=True)

    def save(self, state: State, progress: Progress) -> Saved:
        """Write a checkpoint; when this returns it survives a crash of every node.

        Raises `RankError` on all ranks where it could not be written (a full disk); older checkpoints then
        stay.
        """
        name = checkpoint_name(progress.step)
        temporary = self._folder / f".tmp-{name}"
        try:
            return self._save(name, temporary, state, progress)
        except Exception:
            if self._group.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _save(self, name: str, temporary: Path, state: State, progress: Progress) -> Saved:
        group = self._group
        group.on_first(lambda: self._make(temporary))
        group.everywhere(lambda: self._write(temporary, state))
        mine = f"__{group.rank}_*.distcp"
        sums = group.everywhere(lambda: {p.name: _checksum(p) for p in temporary.glob(mine)})
        files = {file: checksum for part in sums for file, checksum in part.items()}
        size = group.on_first(lambda: self._complete(name, temporary, state, progress, files))
        return Saved(name, size)

    def _make(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def _write(self, temporary: Path, state: State) -> None:
        try:
            dcp_save(
                tensors(state),
                storage_writer=FileSystemWriter(temporary, sync_files=True),
                process_group=self._group.control,
            )
        except CheckpointException as error:  # no Exception, and pages of trace-back
            raise OSError(_first_failure(error)) from None

    def _complete(
        self, name: str, temporary: Path, state: State, progress: Progress, files: dict[str, tuple[int, int]]
    ) -> int:
        """Rank 0's part: extras, manifest, rename, and the older ones away. Returns the checkpoint's
        bytes.
        """
        torch.save({key: extra.state_dict() for key, extra in state.extras.items()}, temporary / EXTRAS)
        for rest in (EXTRAS, ".metadata"):
            sync(temporary / rest)
            files[rest] = _checksum(temporary / rest)
        manifest = {"format": 1, **self._origin, "progress": asdict(progress), "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        sync(temporary / MANIFEST)
        sync(temporary)
        target, old = self._folder / name, self._folder / f".old-{name}"
        if target.exists():  # the same step again, such as before and after the end of an epoch
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        temporary.rename(target)
        sync(self._folder)
        shutil.rmtree(old, ignore_errors=True)
        for surplus in self.names()[KEEP:]:
            shutil.rmtree(self._folder / surplus, ignore_errors=True)
        return sum(size for size, _ in files.values())

    def names(self) -> list[str]:
        """Complete checkpoints, newest first."""
        found = [entry.name for entry in self._folder.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=lambda name: int(name[5:]), reverse=True)

    def load(self, state: State) -> Loaded:
        """Load the newest checkpoint that is undamaged, into the objects of `state`.

        A damaged one is set aside under a name with a dot, and said. Raises `RankError` where the files are
        sound but do not fit the model or optimizer.
        """
        group = self._group
        notes: list[str] = []
        for name in group.on_first(self.names):
            path = self._folder / name
            problems = [p for p in group.everywhere(lambda path=path: self._damage(path)) if p]  # type: ignore[misc]
            if problems:
                notes.append(f"checkpoint {name} is damaged ({problems[0]}) and was passed over")
                group.on_first(lambda path=path: self._set_aside(path))  # type: ignore[misc]
                continue
            progress = group.everywhere(lambda path=path: self._read(path, state))[0]  # type: ignore[misc]
            return Loaded(name, progress, self._said(notes))
        return Loaded("", Progress(), self._said(notes))

    def _said(self, notes: list[str]) -> str:
        note = "; ".join(notes)
        if note and self._group.rank == 0:
            say(note)
        return note

    def _damage(self, path: Path) -> str:
        """What is wrong with a checkpoint, or empty. The files are shared out among the ranks."""
        try:
            files = json.loads((path / MANIFEST).read_text())["files"]
            for file in sorted(files)[self._group.rank :: self._group.world]:
                if file != Path(file).name:
                    return f"{MANIFEST} names {file!r}"
                if (now := _checksum(path / file)) != tuple(files[file]):
                    return f"{file}: {now[0]} bytes, not the {files[file][0]} that were written, or changed"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"[:200]
        return ""

    def _set_aside(self, path: Path) -> None:
        """Keep one damaged checkpoint for people to look at."""
        for older in self._folder.glob(".damaged-*"):
            shutil.rmtree(older, ignore_errors=True)
        path.rename(path.with_name(f".damaged-{path.name}"))

    def _read(self, path: Path, state: State) -> Progress:
        values = tensors(state)
        try:
            dcp_load(values, storage_reader=FileSystemReader(path), process_group=self._group.control)
        except CheckpointException as error:
            raise ValueError(
                f"checkpoint {path.name} does not fit this model and optimizer ({_first_failure(error)}); "
                "use the script that wrote it, or another job directory (ONES_JOB_DIR)"
            ) from None
        set_model_state_dict(state.model, values["model"])
        set_optimizer_state_dict(state.model, state.optimizer, values["optimizer"])
        # A pickle, as torch.distributed.checkpoint's own metadata is: only files that this user wrote are read.
        extras = torch.load(path / EXTRAS, weights_only=False)
        for key, extra in state.extras.items():
            if key not in extras:
                raise KeyError(f"{path.name} holds no {key!r}; it has {', '.join(sorted(extras)) or 'nothing'}")
            extra.load_state_dict(extras[key])
        progress = json.loads((path / MANIFEST).read_text())["progress"]
        kinds = {"int": int, "float": float}
        return Progress(**{f.name: kinds[str(f.type)](progress[f.name]) for f in fields(Progress)})


def _first_failure(error: CheckpointException) -> str:
    for cause, _ in error.failures.values():
        return f"{type(cause).__name__}: {cause}"[:300]
    return "unknown cause"


def tensors(state: State) -> dict[str, Any]:
    """The part of the state that is written by all ranks."""
    return {
        "model": get_model_state_dict(state.model),
        "optimizer": get_optimizer_state_dict(state.model, state.optimizer),
    }
