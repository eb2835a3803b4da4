"""What the steps of a run consist of: the batch in force, and how it is divided among the ranks.

The part of a run that knows no reports, orders and signals. A strategy's limits and uneven ranks come in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ones_wrapper.checkpoint import State
from ones_wrapper.data.feed import Cut
from ones_wrapper.data.progress import Progress
from ones_wrapper.data.shares import Shares
from ones_wrapper.data.uneven import Uneven
from ones_wrapper.files.job_io import write_spec
from ones_wrapper.group import Group
from ones_wrapper.process.log import log
from ones_wrapper.protocol import Spec
from ones_wrapper.run import replicas, resize_log
from ones_wrapper.run.local_batch import LocalBatch
from ones_wrapper.run.loop_state import Loop
from ones_wrapper.run.settings import Settings


class Sized:
    """Has what `Run` sets. Methods are collective unless said otherwise."""

    group: Group
    spec: Spec
    settings: Settings
    directory: Path
    progress: Progress
    state: State | None
    generation: int
    """Rises when the ranks change."""
    local_batch: LocalBatch
    loop: Loop
    division: replicas.Division
    """Which samples are this rank's."""
    uneven: Uneven | None
    batch: int
    """Global batch in force, in samples."""
    _begun: bool

    @property
    def shares(self) -> Shares | None:
        """How steps are divided over the ranks; None for evenly. Not collective."""
        return self.uneven.shares if self.uneven is not None else None

    @property
    def cut(self) -> Cut:
        """By what the data is cut for this rank. Not collective."""
        return replace(self.division.cut(self.batch, self.shares), least=self.loop.least)

    @property
    def cut_by(self) -> tuple[object, ...]:
        """What the data is cut by: where it changes, the epoch's rest is cut anew. Not collective."""
        return self.batch, self.generation, self.shares

    @property
    def rated_batch(self) -> float:
        """The batch that the learning rate follows. Not collective."""
        return self.batch / self._rated

    @property
    def _rated(self) -> int:
        """How many batches that the learning rate belongs to a global batch is: one, or one a replica."""
        strategy = self.settings.strategy
        return self.division.replicas if strategy is not None and strategy.local_rate else 1

    def use_batch(self) -> str:
        """Steps of the batch in force begin, perhaps anew; what its strategy says of that, which is logged."""
        strategy = self.settings.strategy
        note = strategy.batch_in_force(self.batch) if strategy is not None else ""
        if note and self.group.rank == 0:
            log(note)
        self._batch_fixed()
        return note

    def probe(self, one_pass: Callable[[int], object]) -> int:
        """The most samples of a pass, found by trying where no earlier run has; see `Job.probe`."""
        if self.state is None or self._begun:
            raise RuntimeError("probe: call it after job.register and before the first epoch")
        exchanges, unit = self.loop.exchanges, self.division.unit
        world = self.group.world
        together = self.division.replicas < world or (exchanges.gathers and world > 1)
        with exchanges.trying():
            found = self.local_batch.probe(one_pass, self.state, unit, together)
        self.spec = replicas.as_found(self.spec, self.group.world, found)
        self.division = replicas.divide(self.spec, self.group.world, self.group.rank)
        self.batch = self._in_force(self.progress.batch)
        return found.samples

    def _in_force(self, wanted: int) -> int:
        spec = self.spec
        batch = replicas.in_force(spec, wanted or spec.base_batch * self._rated, self.division)
        if batch % spec.multiple_of and self.group.rank == 0:
            log(f"{self.group.world} ranks take {batch} samples a step, which is no multiple of {spec.multiple_of}")
        return batch

    def _divide(self, uneven: Uneven, measured: tuple[int, ...]) -> None:
        """Shares follow the speeds that the ranks measured. Not collective."""
        passes = self.division.passes(self.batch)
        if uneven.agreed(measured, self.batch, passes) and self.group.rank == 0 and uneven.shares is not None:
            log(resize_log.shares_changed(uneven.shares.samples(self.batch, passes), self.progress.step))

    def _keeps_batch(self, wanted: int, number: int | None) -> bool:
        """Whether the strategy lets no order change the batch now, not to `wanted` either; logged. Not collective."""
        strategy = self.settings.strategy
        kept = strategy is not None and strategy.batch_fixed() and wanted != self.progress.batch
        if kept and self.group.rank == 0:
            log(f"order {number}: the batch stays {self.batch}, which must not change now in this strategy")
        return kept

    def _batch_fixed(self) -> bool:
        """Whether the strategy lets the batch be now. Not collective; what changes is told to the companion."""
        strategy, limits = self.settings.strategy, self.spec.limits
        if strategy is None or limits is None:
            return False
        now = strategy.limits_now(limits)
        if now is not limits:
            self.spec = replace(self.spec, limits=now)
            if self.group.rank == 0:
                write_spec(self.directory, self.spec)
        return now.batch_fixed
