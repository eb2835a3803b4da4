"""The script's loop over an epoch's passes: where its steps begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ones_wrapper.batch import Gate
from ones_wrapper.data import Feed, Pass, Share
from ones_wrapper.exchange import Exchange
from ones_wrapper.randomness import seed_step
from ones_wrapper.rate import Rate
from ones_wrapper.streams import StreamFeed

if TYPE_CHECKING:
    from ones_wrapper.run import Run


class Loop:
    """What the loop takes part in on this rank: data, exchange, optimizer. Not collective, but for `steps`."""

    def __init__(self) -> None:
        self.feed: Feed | StreamFeed | None = None
        self.seed = 0
        self.exchange: Exchange | None = None
        self.gate: Gate | None = None
        self.rate: Rate | None = None
        self.passed = Pass(Share(0, 1, 1), 0, 1, 0, 1, 1)
        """The pass that the script is in, or was in last."""
        self.within = False
        """Whether an error of the script may be one of a pass: not after an epoch's last."""
        self.used: list[int] = []
        """Dataset indices that this rank used in the step, where there is a trace."""

    @property
    def half_way(self) -> bool:
        """Whether the model is ahead of the cursor: the optimizer stepped, and the step is not yet committed."""
        return self.within and self.rate is not None and self.rate.stepped

    def steps(self, run: Run) -> Iterator[Any]:
        """This rank's local batches from the cursor to the end of the present epoch; all ranks take as many."""
        run.begin()
        progress, group, feed = run.progress, run.group, self.feed
        assert feed is not None and self.rate is not None
        epoch, changed = progress.epoch, True
        while changed:
            batch, changed = run.batch, False
            run.meter.start()
            cut = (batch, group.world, group.rank, run.spec.max_local_batch)
            for passed, local in feed.batches(epoch, progress.cursor, *cut):
                self._enter(passed, run)
                try:
                    with self.exchange.during(passed) if self.exchange else nullcontext():
                        yield local
                except GeneratorExit:  # the script left the loop: the step counts if the optimizer made it
                    if passed.last and self.rate.stepped:
                        run.commit(passed.share.total)
                    self._leave(early=True)
                    raise
                if passed.last:
                    run.commit(passed.share.total)
                    run.act()
                    run.meter.start()
                    if run.batch != batch:
                        changed = True
                        break
        self._leave(early=False)

    def _enter(self, passed: Pass, run: Run) -> None:
        self.passed, self.within = passed, True
        if passed.index == 0:
            self.used = []
            if self.rate:
                self.rate.expect()
            seed_step(self.seed, run.progress.step, run.group.rank)
        if self.gate is not None:
            self.gate.begin(passed.index, passed.count)
        if run.trace and self.feed:
            self.used += self.feed.indices(run.progress.epoch, passed)

    def _leave(self, early: bool) -> None:
        """The epoch's samples are used, or the script left the loop `early`: perhaps by an error."""
        self.within = early
        if self.gate is not None:
            self.gate.begin(0, 1)


class Loader:
    """The batches of the present epoch; made by `Job.loader`. Asking it for the next batch is the step
    boundary.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return self._run.loop.steps(self._run)
