"""Data that outlives a run: checkpoints of the training's state, and files that the next run continues."""

from __future__ import annotations

from collections.abc import Callable

from ones_wrapper.checkpoint import SavedState
from ones_wrapper.checkpoint.saver import Saver
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files.kept_files import KeptFiles
from ones_wrapper.process import hang_detector
from ones_wrapper.run.loop_state import Loop
from ones_wrapper.run.records import Records


class Keeping:
    """The checkpoints and files of one run. Methods are collective."""

    def __init__(
        self, saver: Saver, progress: TrainingProgress, loop: Loop, records: Records, first: Callable[[], bool]
    ) -> None:
        """`first` returns whether this process writes the script's files."""
        self.saver = saver
        self._progress, self._loop, self._records = progress, loop, records
        self.state: SavedState | None = None
        """The training's state; None until the script registered it."""
        self.files = KeptFiles(first)
        self.loaded = self.note = ""
        """Name of the checkpoint that was loaded, and a note on its oddities; empty for none."""

    def load(self, state: SavedState) -> None:
        """Load the newest good checkpoint."""
        loaded = self.saver.load(state)
        self.loaded, self.note = loaded.name, loaded.note
        self._progress.take_over(loaded.progress)

    def save(self, why: str, order: int | None = None) -> bool:
        """Write a checkpoint that is durable on return, and report it; False if that failed, which is logged."""
        self._records.flush()
        hang_detector.beat()
        with self._loop.exchanges.published():
            saved = self.saver.save(self.state, self._progress, why, order)
        hang_detector.beat()
        return saved

    def save_behind(self) -> None:
        """Begin a checkpoint that is written while training goes on."""
        self._records.flush()
        assert self.state is not None
        with self._loop.exchanges.published():
            self.saver.begin(self.state, self._progress)
