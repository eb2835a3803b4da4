"""Saving and loading of one run's checkpoints. All ranks write, while training waits or in a background thread.

`torch.distributed.checkpoint` lists what each rank holds. Each rank writes its own shards. A replicated tensor is
written by one rank, and these tensors are spread evenly over the ranks. So training waits only until each rank has
copied what it writes. This distribution is planned again only if the set of tensors changes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import TensorWriteData
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ones_wrapper.checkpoint.files import tensor_file, write_plain, write_tensors
from ones_wrapper.checkpoint.folder import REST, Folder, checkpoint_name
from ones_wrapper.checkpoint.held import HeldFolder, bring, free_memory
from ones_wrapper.checkpoint.safetensors import PartReader, TensorPart, encode, whole
from ones_wrapper.checkpoint.state import Content, Failed, Loaded, Saved, SavedState, collect, differences, restore
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.devices import streams
from ones_wrapper.devices.host_memory import Arena
from ones_wrapper.files import node_memory
from ones_wrapper.files.checksums import Sum
from ones_wrapper.files.node_memory import FOLDER, HeldCheckpoint, MemoryFolder, neighbour
from ones_wrapper.group import Group, RankError
from ones_wrapper.process.background import run_behind
from ones_wrapper.process.block import own_block


@dataclass(frozen=True)
class _Work:
    name: str
    progress: TrainingProgress
    plan: WritePlan
    tensors: list[torch.Tensor]
    rest: dict[str, Any]
    started: float
    memory: MemoryFolder | None
    """Folder in memory into which this rank writes; None for the disk."""
    twice: bool
    """True if each file of a checkpoint in memory gets a second copy in another block's memory."""


class Checkpoints:
    """The folder `checkpoints/` of one job. Methods are collective unless they say otherwise: all ranks call them at
    the same step boundary."""

    def __init__(
        self, job_dir: Path, group: Group, job_id: int, restart: int, keep: int = 2, *, holds: bool = True
    ) -> None:
        """`keep` is the number of complete checkpoints to keep. With `holds`, these ranks lock the directory, and
        remove what an interrupted save left. Raises `RankError` if another job runs in `job_dir`."""
        self._group = group
        self._folder = Folder(job_dir, job_id, restart, max(1, keep))
        self._planner = Planner(group)
        self._behind: Group | None = None
        self._alone = False
        self._present: list[str] = []
        """Folders in memory of the launchers of all ranks, gathered by `_newest`."""
        self._thread: Thread | None = None
        self._end: Saved | Failed | None = None
        self._ahead: tuple[str, Future[str]] | None = None
        """Checkpoint that is checked before `load`, and the future result of the check (`Folder.damage`)."""
        if holds:
            group.on_first(self._folder.prepare)

    def ranks_changed(self, restart: int) -> Group | None:
        """Drop the plan, because the group has new ranks. A background checkpoint of the old ranks is not interrupted.
        Not collective.

        Returns the group of the old ranks that the background thread uses, or None. The caller must keep this
        reference, because dropping it closes the group.
        """
        behind, self._behind = self._behind, None
        self._planner.forget()
        self._folder.restart = restart
        if self._group.rank == 0:
            self._folder.take_over()
        return behind

    def let_go(self) -> None:
        """Finish the present background checkpoint and release the directory, because this rank leaves. Not
        collective."""
        self._wait()
        self._folder.release()

    def rescue(self, state: SavedState, progress: TrainingProgress, refuse: Callable[[], str]) -> str:
        """Write a checkpoint of this rank's whole model without the other ranks, which may be lost; return its name.
        Not collective. `refuse` is called just before the checkpoint is published: if it returns a reason, the
        checkpoint is discarded. Raises `RankError`."""
        myself = Group(rank=0, world=1, local_rank=0, nodes=1, gpus_per_node=1, device=self._group.device)
        folder = self._folder
        alone = Checkpoints(folder.job_dir, myself, folder.job_id, folder.restart, folder.keep, holds=False)
        alone._folder.refuse, alone._folder.mark = refuse, "rescue-"
        return alone.save(state, progress).name

    def save(self, state: SavedState, progress: TrainingProgress) -> Saved:
        """Write a checkpoint, and return when it is durable. Waits for a background checkpoint first.

        Raises `RankError` on all ranks if the write failed (disk full, or state that cannot be saved). Older
        checkpoints are then kept.
        """
        started = time.monotonic()
        self._wait()
        return self._write(self._group, self._work(state, progress, started, copy=False))

    def hold(self, state: SavedState, progress: TrainingProgress, memory: MemoryFolder, most_bytes: int) -> bool:
        """Write a checkpoint into the nodes' memory, from which the next ranks start. This rank writes its part into
        `memory`. Returns False if the checkpoint would exceed `most_bytes`, or if the newest checkpoint is in memory
        already."""
        started = time.monotonic()
        self._wait()
        group, disk = self._group, self._folder

        def not_durable() -> bool:
            held = disk.held()
            return held is not None and held.manifest.get("restart") != disk.restart

        try:
            if group.on_first(not_durable):
                return False
            self._write(group, self._work(state, progress, started, False, memory, most_bytes))
        except RankError as error:
            group.say(f"the state is written to the disk, not left in the nodes' memory ({error})")
            return False
        return True

    def begin(self, state: SavedState, progress: TrainingProgress, memory: MemoryFolder | None = None) -> None:
        """Copy the state, and start a background thread that writes a checkpoint. `ended` returns the result. With
        `memory`, the folder of this rank's launcher, the checkpoint is written into the nodes' memory, each file twice.

        Waits first for an earlier background checkpoint. A failed write raises no error here. If a second thread cannot
        send messages (some MPI), the checkpoint is written before this returns.
        """
        started = time.monotonic()
        self._wait()
        if self._behind is None and not self._alone:
            self._behind = self._group.duplicate()
            self._alone = self._behind is None
        try:
            most_bytes = node_memory.room(memory.path) if memory is not None else float("inf")
            work = self._work(state, progress, started, not self._alone, memory, most_bytes, twice=True)
        except RankError as error:
            self._end = Failed(checkpoint_name(progress.step), str(error))
            return
        if self._behind is None:
            self._run(self._group, work, None)
            return
        stall = time.monotonic() - started
        # A daemon, so that a rank that fails is not held up; a thread that ends early leaves a name with a dot.
        self._thread = Thread(target=self._run, args=(self._behind, work, stall), name="ones-checkpoint", daemon=True)
        self._thread.start()

    def ended(self) -> Saved | Failed | None:
        """Return the result of the last `begin`, but only once; None while the checkpoint is being written. Not
        collective; does not wait."""
        if self._thread is not None and self._thread.is_alive():
            return None
        end, self._end = self._end, None
        return end

    def close(self) -> None:
        """Wait for a background checkpoint, close the background thread's group, and release the directory."""
        self._wait()
        if self._behind is not None:
            self._behind.close()
            self._behind = None
        self._folder.release()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(
        self,
        state: SavedState,
        progress: TrainingProgress,
        started: float,
        copy: bool,
        memory: MemoryFolder | None = None,
        most_bytes: float = float("inf"),
        twice: bool = False,
    ) -> _Work:
        """Plan what each rank writes. With `copy`, tensors are copied, so that training may continue. Raises
        `RankError` if the checkpoint would have more than `most_bytes`."""
        group, planner, name = self._group, self._planner, checkpoint_name(progress.step)

        def look() -> tuple[Content, list[Held]]:
            content = collect(state)
            return content, planner.local(content)

        content, local = group.here(look)
        plan = planner.agree(local)
        rest = content.rest if group.rank == 0 else {}

        def take() -> tuple[list[torch.Tensor], dict[str, Any]]:
            if group.world * sum(part.bytes for part in plan.parts) > most_bytes:  # parts are about equal
                raise ValueError("there is no room for it")
            if group.rank == 0 and memory is None:
                self._folder.begin(name)
            if not copy:
                return planner.live(content), rest
            # First: `staged` waits for the device, and the thread copies on another stream.
            kept = tree_map_only(torch.Tensor, torch.Tensor.clone, rest)
            return planner.staged(content), kept

        try:
            tensors, kept = group.here(take)
        except RankError:
            if group.rank == 0 and memory is None:
                self._folder.discard(name)
            raise
        return _Work(name, replace(progress), plan, tensors, kept, started, memory, twice)

    def _run(self, group: Group, work: _Work, stall: float | None) -> None:
        """Write a checkpoint and store its result. `stall` is the pause of training in seconds, if not the whole
        write."""
        try:
            self._end = self._write(group, work, stall)
        except RankError as error:
            self._end = Failed(work.name, str(error))
        except Exception as error:
            self._end = Failed(work.name, f"{type(error).__name__}: {error}")

    def _write(self, group: Group, work: _Work, stall: float | None = None) -> Saved:
        """Write the files, then publish the checkpoint: on disk by a manifest and a rename, in memory by a description.
        Then remove older checkpoints in memory."""
        memory, mine = work.memory, tensor_file(group.rank)
        folder = self._folder if memory is None else self._in_memory(group, work, memory)
        at = folder.temporary(work.name)

        def part() -> dict[str, tuple[int, int]]:
            # The rest is written during the tensors: after them all ranks would wait for it. In a rescue the device's
            # default stream waits for lost ranks, so the thread shares this thread's stream.
            with ThreadPoolExecutor(1, "ones-rest", streams.shared(self._group.device)) as beside:
                rest = beside.submit(write_plain, at / REST, work.rest, folder.mode) if group.rank == 0 else None
                files = {}
                if work.tensors:
                    files[mine] = write_tensors(at / mine, work.plan.header, work.tensors, folder.mode)
                files |= {REST: rest.result()} if rest is not None else {}
            return {name: (s.size, s.crc) for name, s in files.items()}

        try:
            files = {name: Sum(*s) for one in group.everywhere(part) for name, s in one.items()}
            if isinstance(folder, HeldFolder) and memory is not None and work.twice:
                second = folder.described(work.name, work.progress, files).second_at(memory.text)
                problems = group.everywhere(self._check(second, work.name))
                if any(problems):
                    raise RankError(next(filter(None, problems)))
            size = group.on_first(lambda: folder.complete(work.name, work.progress, files))
        except Exception as error:
            removes = group.rank == 0
            if memory is not None:  # each launcher has a part; with a description, it may be needed after a loss
                removes = isinstance(error, RankError) and group.on_first(
                    lambda: (held := self._folder.held()) is None or held.name != work.name
                )
            if removes:
                folder.discard(work.name)
            raise
        if self._group.local_rank == 0:
            with suppress(OSError):
                free_memory(but=str(folder.path(work.name)))
        seconds = time.monotonic() - work.started
        return Saved(work.name, size, seconds, seconds if stall is None else stall, work.progress)

    def _in_memory(self, group: Group, work: _Work, memory: MemoryFolder) -> HeldFolder:
        """Return this rank's view of the checkpoint to be written into memory."""
        disk, block = self._folder, own_block(os.environ)

        def counts() -> str:
            held = disk.held()
            if held is not None and held.name == work.name:  # the same step again: an epoch ended
                disk.hold(None)
            return held.name if held is not None and held.name != work.name else ""

        but = group.on_first(counts)
        launchers = group.gather((block.task if block is not None else 0, memory.text))
        texts = [text for _, text in launchers]

        def make() -> list[list[str]]:
            second = {text: neighbour(launchers, texts.index(text)) if work.twice else "" for text in {*texts}}
            of = [[text, second[text]] if work.twice else [text] for text in texts]
            if texts.index(memory.text) == group.rank:
                HeldFolder(disk, memory.path).make(work.name, but)
            return of

        of = group.here(make)
        return HeldFolder(disk, memory.path, {tensor_file(rank): at for rank, at in enumerate(of)} | {REST: of[0]})

    def check_ahead(self) -> None:
        """Start a thread that checks the newest checkpoint for damage, while the script makes its model. A checkpoint
        in memory is first copied to this node."""
        held, name = self._newest()
        if name:
            self._ahead = name, run_behind("ones-check", self._check(held, name))

    def _newest(self) -> tuple[HeldCheckpoint | None, str]:
        """Return (description, name) of the newest checkpoint, with None as description for one on disk. Collective."""

        def look() -> tuple[str, str]:
            held = self._folder.held()
            return (held.text, held.name) if held else ("", next(iter(self._folder.names()), ""))

        text, name = self._group.on_first(look)
        if text:
            self._present = self._group.gather(os.environ.get(FOLDER, ""))
        return HeldCheckpoint.parse(json.loads(text)) if text else None, name

    def _check(self, held: HeldCheckpoint | None, name: str) -> Callable[[], str]:
        """Return a function that checks this rank's part of a checkpoint's files and returns the damage in words, or
        ''."""
        group, folder = self._group, self._folder
        if held is None:
            return partial(folder.damage, name, group.rank, group.world)
        parts = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return partial(bring, folder.job_dir, held, group.local_rank, parts, self._present)

    def _damage(self, held: HeldCheckpoint | None, name: str) -> str:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == name:
            return ahead[1].result()
        return self._check(held, name)()

    def load(self, state: SavedState) -> Loaded:
        """Load the newest checkpoint without damage into the objects of `state`.

        A damaged checkpoint is renamed to a name with a dot, and logged; one in memory is dropped. Raises `RankError`
        if an undamaged checkpoint does not fit (model, optimizer, extras, job), and if `state` has types that cannot be
        saved.
        """
        group, disk = self._group, self._folder
        notes: list[str] = []
        while (newest := self._newest())[1]:
            held, name = newest
            problems = [*filter(None, group.everywhere(partial(self._damage, held, name)))]
            if not problems:
                own = node_memory.own_folder() if held is not None else None
                folder = disk if own is None else HeldFolder(disk, own.path)
                try:
                    progress, note = group.everywhere(partial(self._read, folder, name, state))[0]
                    if own is not None and held is not None:
                        self._lies_in(held, own)
                    path = name if own is None else str(folder.path(name))
                    return Loaded(path, TrainingProgress(**progress), self._log([*notes, *note]))
                except RankError as error:  # its launcher may have ended meanwhile
                    if held is None or all(group.everywhere(folder.path(name).exists)):
                        raise
                    problems = [str(error)]
            what = "is damaged" if held is None else "in memory is not to be had"
            notes.append(f"checkpoint {name} {what} ({problems[0]}) and was passed over")
            group.on_first(partial(disk.set_aside, name) if held is None else partial(disk.hold, None))
        group.here(lambda: collect(state))
        return Loaded("", TrainingProgress(), self._log(notes))

    def _lies_in(self, held: HeldCheckpoint, own: MemoryFolder) -> None:
        """Record that each node has the whole checkpoint in memory."""
        texts = self._group.gather(own.text)
        with suppress(RankError):
            self._group.on_first(lambda: self._folder.hold(held.at(texts)))

    def _log(self, notes: list[str]) -> str:
        note = "; ".join(notes)
        if note:
            self._group.say(note)
        return note

    def _read(self, folder: Folder, name: str, state: SavedState) -> tuple[dict[str, Any], list[str]]:
        (job_id, progress), path = folder.manifest(name), folder.path(name)
        rest = torch.load(path / REST, map_location=self._place, weights_only=True)
        reader, now = PartReader(path), collect(state, template=True)
        metadata = reader.read_metadata()
        if problems := differences(now, rest, metadata):
            raise ValueError(
                f"checkpoint {name} does not fit this model and optimizer: {'; '.join(problems)}. Use the script that "
                "wrote it, or another job directory (ONES_JOB_DIR)"
            )
        tensors = {key: now.tensors[key] for key in metadata.state_dict_metadata}
        # Each rank reads the parts that it needs from the shared file system; there is nothing to agree upon.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner)
        restore(state, rest, tensors)
        note = f"going on from checkpoint {name} of job {job_id}"
        return asdict(progress), [note] if job_id != folder.job_id else []

    def _place(self, storage: Any, location: str) -> Any:
        device = self._group.device
        return storage.to(device=device) if location.startswith("cuda") and device.type == "cuda" else storage


Held: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], str, tuple[int, ...]]
"""Tensor or shard that a rank holds, as plain data: (path, offsets, shape, dtype, shape of the whole tensor)."""


@dataclass(frozen=True)
class WritePlan:
    """Tensors that this rank writes, in the order of its file, and the file's header."""

    parts: list[TensorPart]
    header: bytes


class Planner:
    """Planner of what each rank writes. It also owns the buffers for copies."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._local: list[Held] | None = None
        self._plan = WritePlan([], b"")
        self._arena: Arena | None = None

    def forget(self) -> None:
        """Drop the plan, because the ranks have changed."""
        self._local = None

    def local(self, content: Content) -> list[Held]:
        """Return all tensors and shards that this rank holds. Not collective."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(content.tensors, is_coordinator=self._group.rank == 0)
        others = content.first if self._group.rank else frozenset[str]()
        held: list[Held] = []
        for item in planner.create_local_plan().items:
            path, data = item.index.fqn, item.tensor_data
            assert isinstance(data, TensorWriteData)
            shape, size = tuple(data.chunk.sizes), tuple(data.size)
            # If a tensor has fewer rows than there are ranks, some ranks hold nothing of it.
            if path not in others and (0 not in shape or 0 in size):
                dtype = str(data.properties.dtype).removeprefix("torch.")
                held.append((path, tuple(data.chunk.offsets), shape, dtype, size))
        return held

    def agree(self, local: list[Held]) -> WritePlan:
        """Return what this rank writes, by a plan that all ranks compute together. Collective. Raises `RankError`."""
        group = self._group
        if group.maximum([local != self._local])[0]:
            self._local = None
            every = group.gather(local)

            def choose() -> None:
                # Every rank computes the same, so that no plan has to travel back.
                mine = dealt(every)[group.rank]
                # Wide dtypes first: then all are aligned in the file.
                parts = sorted(mine, key=lambda part: -part.dtype.itemsize)
                self._plan = WritePlan(parts, encode(parts))

            group.everywhere(choose)
            self._local = local
            if self._arena is not None:
                self._arena.free()
                self._arena = None
        return self._plan

    def live(self, content: Content) -> list[torch.Tensor]:
        """Return the tensors that this rank writes, not copied."""
        held = [content.tensors[part.path] for part in self._plan.parts]
        return [(one.to_local() if isinstance(one, DTensor) else one).detach() for one in held]

    def staged(self, content: Content) -> list[torch.Tensor]:
        """Return copies of the tensors that this rank writes, in CPU buffers that the next call reuses."""
        device, live = self._group.device, self.live(content)
        if self._arena is None:
            self._arena = Arena(live, device)
        for buffer, tensor in zip(self._arena.copies, live, strict=True):
            buffer.copy_(tensor, non_blocking=device.type == "cuda")
        streams.wait(device)
        return self._arena.copies


def dealt(every: list[list[Held]]) -> list[list[TensorPart]]:
    """Return what each rank writes, given what each rank holds. A tensor that several ranks hold is written by the rank
    with the fewest bytes so far. Raises ValueError if a part of a tensor is missing or present twice."""
    holders: dict[str, dict[tuple[int, ...], dict[int, TensorPart]]] = {}
    sizes = {}
    for rank, held in enumerate(every):
        for path, offsets, shape, dtype, sizes[path] in held:
            part = TensorPart(path, offsets, shape, getattr(torch, dtype))
            holders.setdefault(path, {}).setdefault(offsets, {})[rank] = part
    found: list[list[TensorPart]] = [[] for _ in every]
    load = [0] * len(every)
    for path, blocks in holders.items():
        if whole(next(iter(parts.values())) for parts in blocks.values()) != sizes[path]:
            raise ValueError(f"{path} is there only in part")
        for parts in blocks.values():
            rank = min(parts, key=load.__getitem__)
            load[rank] += parts[rank].bytes
            found[rank].append(parts[rank])
    return found
