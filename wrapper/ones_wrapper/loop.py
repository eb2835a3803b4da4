"""The script's loop over an epoch: where its steps begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from ones_wrapper.data.feed import AccumulationStep
from ones_wrapper.data.randomness import seed_step
from ones_wrapper.run import Run


class Loader:
    """The batches of the present epoch; made by `Job.loader`. Asking it for the next batch is the step
    boundary.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        """This rank's local batches from the cursor to the end of the present epoch; all ranks take as many."""
        run = self._run
        run.begin()
        loop, progress, group = run.loop, run.progress, run.group
        feed, rate = loop.feed, loop.rate
        assert feed is not None and rate is not None
        loop.exchanges.check()
        epoch, changed = progress.epoch, True
        while changed:
            batch, generation, changed = run.batch, run.generation, False
            run.meter.start()
            cut = (batch, group.world, group.rank, run.spec.max_local_batch)
            for part, local in feed.batches(epoch, progress.cursor, *cut):
                self._enter(part)
                try:
                    with (
                        loop.exchanges.during(part),
                        loop.accumulation.during(part.index, part.count) if loop.accumulation else nullcontext(),
                    ):
                        yield local
                except GeneratorExit:  # the script left the loop: the step counts if the optimizer made it
                    if part.last and rate.stepped:
                        run.commit(part.share.total)
                    self._leave(early=True)
                    raise
                if part.last:
                    run.commit(part.share.total)
                    run.act()
                    run.meter.start()
                    if run.batch != batch or run.generation != generation:
                        changed = True
                        break
        self._leave(early=False)

    def _enter(self, part: AccumulationStep) -> None:
        run, loop = self._run, self._run.loop
        loop.part, loop.within = part, True
        if part.index == 0:
            loop.used = []
            if loop.rate:
                loop.rate.expect()
            seed_step(loop.seed, run.progress.step, run.group.rank)
        if run.trace and loop.feed:
            loop.used += loop.feed.indices(run.progress.epoch, part)
            run.uses(part.last)

    def _leave(self, early: bool) -> None:
        """The epoch's samples are used, or the script left the loop `early`: perhaps by an error."""
        loop = self._run.loop
        loop.within = early
        if loop.accumulation is not None:
            loop.accumulation.drop()
