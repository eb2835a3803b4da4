"""Checkpoints of the training's state, and files that the next run continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ones_wrapper.checkpoint import Checkpoints, Failed, Saved, SavedState
from ones_wrapper.checkpoint.interval import failure_rate, interval_s
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files import node_memory
from ones_wrapper.files.kept_files import KeptFiles
from ones_wrapper.files.node_memory import MemoryFolder
from ones_wrapper.group import Group, RankError
from ones_wrapper.process import hang_detector
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.protocol import Checkpoint
from ones_wrapper.run.boundary import CHECKPOINT_DUE, COPY_DUE
from ones_wrapper.run.records import Records
from ones_wrapper.run.settings import Common

FIRST_S = 600.0
"""Seconds before the first checkpoint, and between checkpoints until their cost is known."""


class Keeping:
    """Checkpoints of one run, their reports, and files that the next run continues. Methods are collective unless they
    say otherwise."""

    def __init__(self, common: Common, checkpoints: Checkpoints, records: Records, first: Callable[[], bool]) -> None:
        """`first` returns True if this process writes the script's files."""
        self._group, self._checkpoints, self._settings = common.group, checkpoints, common.settings
        self._progress, self._loop, self._records = common.progress, common.loop, records
        self.state: SavedState | None = None
        self.files = KeptFiles(first)
        self.loaded = self.note = ""
        """Name of the loaded checkpoint, and a message on problems in finding it; either may be empty."""
        self.durable = True
        """False if the state was loaded from the nodes' memory, and the disk has only older checkpoints."""
        self.copy_steps = 0
        """Steps between two copies of the state in the nodes' memory; 0 for no copies."""
        self._copied = 0
        """Step of the newest copy in the nodes' memory, or of a later checkpoint."""
        self._copying = False
        """True if the background thread writes a copy."""
        self._said: set[bool] = set()
        """Results of copies (True for a complete one) that have been logged; each is logged once."""
        self.load_s = 0.0
        self.writing = False
        self._saved: TrainingProgress | None = None
        self._saved_at = time.monotonic()
        self._stall_s: float | None = None

    def load(self, state: SavedState) -> None:
        """Load the newest good checkpoint into the objects of `state`."""
        started = time.monotonic()
        loaded = self._checkpoints.load(state)
        name = Path(loaded.name)
        self.loaded, self.note, self.durable = name.name, loaded.note, not name.is_absolute()
        own = node_memory.own_folder()
        if own is not None and self._group.local_rank == 0:
            with suppress(OSError):  # of a change that failed
                node_memory.clear(own.path, but=loaded.name)
        self._saved = replace(loaded.progress) if loaded.name and self.durable else None
        # One in memory is written to the disk at once, behind the training.
        self._saved_at = time.monotonic() if self.durable else float("-inf")
        self.load_s = time.monotonic() - started
        self._copied = loaded.progress.step
        self._progress.take_over(loaded.progress)

    def load_again(self) -> None:
        """Load the same checkpoint again, because the script has overwritten the loaded state; do nothing if none was
        loaded."""
        if self.loaded and self.state is not None:
            with self._loop.exchanges.thawed():
                self._checkpoints.load(replace(self.state, own={}))

    def due(self) -> int:
        """Return `CHECKPOINT_DUE` or `COPY_DUE`; 0 if nothing is due. No copy is due until the loaded checkpoint is
        durable. Not collective: rank 0 decides."""
        every_s, progress = self._settings.checkpoint_every_s, self._progress
        if every_s is None:
            rate = failure_rate(progress.failures, progress.trained_s, self._group.nodes)
            every_s = FIRST_S if self._stall_s is None else interval_s(self._stall_s, 1.0 / rate)
        if self.writing:
            return 0
        if time.monotonic() - self._saved_at >= every_s:
            return CHECKPOINT_DUE
        copies = 0 < self.copy_steps <= progress.step - self._copied and self.durable
        return COPY_DUE if copies else 0

    def save(self, why: str, order: int | None = None, memory: tuple[MemoryFolder, int] | None = None) -> bool:
        """Write a checkpoint and report it once it is durable. Return False if that fails, which is logged. Without
        `order`, nothing is written if there was no progress since the last checkpoint. With `memory`, from
        `folder_for`, the checkpoint is written into the nodes' memory if there is room. It is then not durable, and not
        reported."""
        self._records.flush()
        hang_detector.beat()
        with self._loop.exchanges.published():
            saved = self._save(why, order, memory)
        hang_detector.beat()
        return saved

    def _save(self, why: str, order: int | None = None, memory: tuple[MemoryFolder, int] | None = None) -> bool:
        if self.state is None:
            return False
        if order is None and self._saved == self._progress:
            return True
        if memory is not None and self._checkpoints.hold(self.state, self._progress, *memory):
            self.report_finished()
            return True
        try:
            saved = self._checkpoints.save(self.state, self._progress)
        except RankError as error:
            self._failed(why, str(error))
            return False
        finally:
            self._saved_at = time.monotonic()
            FLAGS.checkpoint_taken()
            self.report_finished()  # a checkpoint that was under way was waited for
        self._done(saved, order)
        return True

    def save_behind(self) -> None:
        """Begin a checkpoint in the background. With `write_behind=False` in `init`, write it before returning."""
        self._records.flush()
        assert self.state is not None
        with self._loop.exchanges.published():
            if not self._settings.write_behind:
                self._save("in passing")
            elif self._saved != self._progress:
                self._checkpoints.begin(self.state, self._progress)
                self.writing = True
                self._saved_at = time.monotonic()

    def copy(self) -> None:
        """Begin a checkpoint in the nodes' memory in the background, with each file on two nodes. It is not durable,
        and is used only after a loss."""
        assert self.state is not None
        with self._loop.exchanges.published():
            self._checkpoints.begin(self.state, self._progress, node_memory.own_folder())
        self.writing = self._copying = True
        self._copied = self._progress.step

    def report_finished(self) -> None:
        """Report the background checkpoint if it has ended. Not collective; does not wait."""
        ended = self._checkpoints.ended()
        if ended is None:
            return
        copying, self.writing, self._copying = self._copying, False, False
        if copying:
            self._copy_ended(ended)
        elif isinstance(ended, Failed):
            self._failed("behind the training", ended.why)
        else:
            self._done(ended, None)

    def ranks_changed(self, restart: int) -> Group | None:
        """Continue with the group's new ranks (`Checkpoints.ranks_changed`). Not collective."""
        self._saved = None  # what new ranks know of no checkpoint must hold for all
        self._saved_at = time.monotonic()
        return self._checkpoints.ranks_changed(restart)

    def let_go(self) -> None:
        """Wait for the background checkpoint, because these ranks leave a training that continues. Not collective."""
        self._checkpoints.let_go()
        self.report_finished()

    def rescue(self, state: SavedState, refuse: Callable[[], str]) -> None:
        """Write a checkpoint from this rank only, because other ranks are lost (`Checkpoints.rescue`). Not
        collective."""
        progress = self._progress
        if self._saved == progress:
            return
        try:
            name = self._checkpoints.rescue(state, replace(progress), refuse)
        except Exception as error:  # the last checkpoint has to do
            log(f"no checkpoint could be written of step {progress.step} ({error}); the last one stays")
        else:
            log(f"{name} was written by one rank, since others are lost")

    def close(self) -> None:
        """Wait for the present background checkpoint, report it, and release the job's directory."""
        self._checkpoints.close()
        self.report_finished()

    def _copy_ended(self, ended: Saved | Failed) -> None:
        complete = isinstance(ended, Saved)
        if complete in self._said or self._group.rank:
            return
        self._said.add(complete)
        what = f"a second copy of each shard lies on another node's memory, made every {self.copy_steps} steps"
        if isinstance(ended, Failed):
            what = f"the copy of step {int(ended.name[5:])} for another node could not be made ({ended.why[:300]})"
        self._records.note(what)

    def _done(self, saved: Saved, order: int | None) -> None:
        self.durable, self._copied = True, max(self._copied, saved.progress.step)
        self._saved, self._stall_s = saved.progress, saved.stall_s
        position = (saved.progress.epoch, saved.progress.cursor, saved.progress.step)
        self._records.send(Checkpoint(saved.name, *position, saved.bytes, saved.seconds, saved.stall_s, order))

    def _failed(self, why: str, error: str) -> None:
        self._group.say(f"the checkpoint {why} could not be written ({error}); the last one stays")
