"""Checkpoints of one run, in front of the training or behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import SavePlan

from ones_wrapper.checkpoint.content import Content, collect, differences, restore
from ones_wrapper.checkpoint.files import Sum, tensor_file, write_tensors
from ones_wrapper.checkpoint.folder import REST, Folder, checkpoint_name
from ones_wrapper.checkpoint.plan import Plan, Planner
from ones_wrapper.checkpoint.reader import Reader
from ones_wrapper.checkpoint.state import Failed, Loaded, Progress, Saved, State
from ones_wrapper.group import Group, RankError, ThreadsError
from ones_wrapper.mailbox import say


@dataclass(frozen=True)
class _Work:
    """A checkpoint that is ready to be written."""

    name: str
    progress: Progress
    plan: Plan
    tensors: list[torch.Tensor]
    rest: dict[str, Any]
    started: float


class Checkpoints:
    """The `checkpoints/` of one job. Methods are collective unless they say otherwise: all ranks call them at the
    same step boundary.
    """

    def __init__(self, job_dir: Path, group: Group, job_id: int, restart: int, keep: int = 2) -> None:
        """`keep` is how many complete checkpoints stay. Raises `RankError` where another job runs in `job_dir`."""
        self._group = group
        self._folder = Folder(job_dir, job_id, restart, max(1, keep))
        self._job_id = job_id
        self._planner = Planner(group)
        self._behind: Group | None = None
        self._alone = False
        self._thread: Thread | None = None
        self._end: Saved | Failed | None = None
        group.on_first(self._folder.prepare)

    def save(self, state: State, progress: Progress) -> Saved:
        """Write a checkpoint; when this returns it survives a crash of every node. One under way is waited for.

        Raises `RankError` on all ranks where it could not be written (a full disk, state of a type that cannot be
        saved); older checkpoints then stay.
        """
        started = time.monotonic()
        self._wait()
        work = self._work(state, progress, started, copy=False)
        size = self._write(self._group, work)
        seconds = time.monotonic() - started
        return Saved(work.name, size, seconds, seconds, work.progress)

    def begin(self, state: State, progress: Progress) -> None:
        """Copy all that is to be saved, and write it behind the training; `ended` tells how that went.

        One under way is waited for. Raises nothing for a checkpoint that could not be written. Where the ranks
        cannot speak to one another from a second thread (some MPI), it is written before this returns.
        """
        started = time.monotonic()
        self._wait()
        if self._behind is None and not self._alone:
            try:
                self._behind = self._group.beside()
            except ThreadsError:
                self._alone = True
        try:
            work = self._work(state, progress, started, copy=not self._alone)
        except RankError as error:
            self._end = Failed(checkpoint_name(progress.step), str(error))
            return
        if self._behind is None:
            self._run(self._group, work, None)
            return
        stall = time.monotonic() - started
        # A daemon, so that a rank that fails is not held up; what it leaves has a dot in its name.
        self._thread = Thread(target=self._run, args=(self._behind, work, stall), name="ones-checkpoint", daemon=True)
        self._thread.start()

    def ended(self) -> Saved | Failed | None:
        """How the last `begin` ended, told once; None while it is under way. Not collective, never waits."""
        if self._thread is not None and self._thread.is_alive():
            return None
        end, self._end = self._end, None
        return end

    def close(self) -> None:
        """Wait for one under way, leave the background's group, and let others have the directory."""
        self._wait()
        if self._behind is not None:
            self._behind.close()
            self._behind = None
        self._folder.rest()
        self._folder.release()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, state: State, progress: Progress, started: float, copy: bool) -> _Work:
        """Agree on who writes what; with `copy`, training may change everything once this returns."""
        group, planner, name = self._group, self._planner, checkpoint_name(progress.step)

        def look() -> tuple[Content, SavePlan]:
            content = collect(state)
            return content, planner.local(content)

        content, local = _here(group, look)
        plan = planner.agree(local)
        rest = content.rest if group.rank == 0 else {}

        def take() -> tuple[list[torch.Tensor], dict[str, Any]]:
            if group.rank == 0:
                self._folder.begin(name)
            return (planner.staged(content), _copied(rest)) if copy else (planner.live(content), rest)

        try:
            tensors, kept = _here(group, take)
        except RankError:
            if group.rank == 0:
                self._folder.discard(name)
            raise
        return _Work(name, replace(progress), plan, tensors, kept, started)

    def _run(self, group: Group, work: _Work, stall: float | None) -> None:
        """Write, and keep how it ended; `stall` is None where training waits for it."""
        try:
            size = self._write(group, work)
        except Exception as error:
            self._end = Failed(
                work.name, f"{error}" if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
            )
            return
        seconds = time.monotonic() - work.started
        self._end = Saved(work.name, size, seconds, seconds if stall is None else stall, work.progress)

    def _write(self, group: Group, work: _Work) -> int:
        """The files, the manifest, the rename; the checkpoint's bytes."""
        folder, mine = self._folder, tensor_file(group.rank)

        def part() -> dict[str, Sum]:
            if not work.tensors:
                return {}
            return {mine: write_tensors(folder.temporary(work.name) / mine, work.plan.header, work.tensors)}

        try:
            files = {name: s for one in group.everywhere(part) for name, s in one.items()}
            return group.on_first(lambda: folder.complete(work.name, work.progress, work.rest, files))
        except Exception:
            if group.rank == 0:
                folder.discard(work.name)
            raise

    def load(self, state: State) -> Loaded:
        """Load the newest checkpoint that is undamaged, into the objects of `state`.

        A damaged one is set aside under a name with a dot, and said. Raises `RankError` where the files are
        sound but do not fit (model, optimizer, extras, job), and where `state` is of types that cannot be saved:
        better now than after the first hours.
        """
        group, folder = self._group, self._folder
        _here(group, lambda: collect(state))
        notes: list[str] = []
        for name in group.on_first(folder.names):
            problems = [
                problem
                for problem in group.everywhere(partial(folder.damage, name, group.rank, group.world))
                if problem
            ]
            if problems:
                notes.append(f"checkpoint {name} is damaged ({problems[0]}) and was passed over")
                group.on_first(partial(folder.set_aside, name))
                continue
            progress, note = group.everywhere(partial(self._read, name, state))[0]
            return Loaded(name, progress, self._said([*notes, *note]))
        return Loaded("", Progress(), self._said(notes))

    def _said(self, notes: list[str]) -> str:
        note = "; ".join(notes)
        if note and self._group.rank == 0:
            say(note)
        return note

    def _read(self, name: str, state: State) -> tuple[Progress, list[str]]:
        manifest, path = self._folder.manifest(name), self._folder.path(name)
        rest = torch.load(path / REST, map_location=self._place, weights_only=True)
        reader, now = Reader(path), collect(state, template=True)
        metadata = reader.read_metadata()
        if problems := differences(now, rest, metadata):
            raise ValueError(
                f"checkpoint {name} does not fit this model and optimizer: {'; '.join(problems)}. Use the script that "
                "wrote it, or another job directory (ONES_JOB_DIR)"
            )
        tensors = {key: now.tensors[key] for key in metadata.state_dict_metadata}
        # Each rank reads what it needs of what lies on the shared file system; there is nothing to agree upon.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner)
        restore(state, rest, tensors)
        if manifest.job_id == self._job_id:
            return manifest.progress, []
        return manifest.progress, [f"going on from checkpoint {name} of job {manifest.job_id}"]

    def _place(self, storage: Any, location: str) -> Any:
        """Plain tensors that were on rank 0's GPU go to this rank's."""
        device = self._group.device
        return storage.to(device=device) if location.startswith("cuda") and device.type == "cuda" else storage


def _here(group: Group, function: Callable[[], Any]) -> Any:
    """This rank's result of a function that all ranks run; it need not travel. Raises `RankError` on all where it
    failed on any.
    """
    results: list[Any] = []
    group.everywhere(lambda: results.append(function()))
    return results[0]


def _copied(value: Any) -> Any:
    """Plain data with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
