"""The script's loop over an epoch: where its steps begin and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ones_wrapper.data.coreset import Floats, Ints, select
from ones_wrapper.data.coreset_feed import CoresetFeed
from ones_wrapper.data.feed import AccumulationStep
from ones_wrapper.data.randomness import keep_generators, seed_step
from ones_wrapper.gradients.schedule import base_steps, counted
from ones_wrapper.process import hang_detector
from ones_wrapper.process.log import log
from ones_wrapper.run.run import Run


class Loader:
    """The batches of the present epoch; made by `Job.loader`. Asking it for the next batch is the step
    boundary. Its length is that of an epoch in steps of the base batch, at whatever batch is in force: what a schedule
    is to be written in.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        """Steps of an epoch at the base batch. Raises TypeError for a stream that gives no length."""
        run = self._run
        assert run.loop.feed is not None
        if not run.loop.feed.samples:
            raise TypeError(
                "len(loader): the dataset has no length, so nobody knows how many steps an epoch takes; give the "
                "dataset a __len__, or write the schedule for a number of steps of your own"
            )
        return base_steps(run.loop.feed.samples, run.spec.base_batch)

    def __iter__(self) -> Iterator[Any]:
        """The local batches of this rank's replica from the cursor to the end of the present epoch; all ranks take as
        many.
        """
        run = self._run
        run.begin()
        loop, progress = run.loop, run.progress
        feed, rate = loop.feed, loop.rate
        assert feed is not None and rate is not None
        loop.exchanges.check()
        if isinstance(feed, CoresetFeed) and feed.due(progress.epoch, progress.cursor):
            self._select(feed)
        epoch, changed = progress.epoch, True
        while changed:
            before, changed = run.cut_by, False
            run.use_batch()
            run.meter.start()
            cut = run.division.cut(run.batch, run.shares)
            for part, local in feed.batches(epoch, progress.cursor, cut, seeded=True):
                try:
                    with self.passing(part):
                        yield local
                except GeneratorExit:  # the script left the loop: the step counts if the optimizer made it
                    if part.last and rate.stepped:
                        run.commit(part.share.total)
                    self.leave(early=True)
                    raise
                if part.last:
                    self.complete(part)
                    run.act()
                    run.meter.start()
                    if run.cut_by != before:
                        changed = True
                        break
        run.meter.settle()  # an evaluation may follow
        self.leave(early=False)

    def _select(self, feed: CoresetFeed) -> None:
        """Choose the samples of the epochs to come. Collective; the model is evaluated."""
        run, began = self._run, time.perf_counter()
        loop, epoch, most = run.loop, run.progress.epoch, run.spec.max_local_batch
        shared = run.division.replicas < run.group.world
        if (shared or loop.exchanges.gathers) and feed.coreset.features is not None:
            raise ValueError(
                "coreset: the forward passes of a model that several ranks share need all of them at once, and ranks "
                "look at other samples here; leave out features, whose default is the samples' inputs, or use job.ddp "
                "with each rank a replica"
            )

        def features_of(members: Ints) -> Floats:
            hang_detector.beat()
            return feed.features(epoch, members, most)

        assert run.state is not None
        training = [module for module in run.state.model.modules() if module.training]
        with keep_generators(), torch.no_grad(), loop.exchanges.evaluating():
            run.state.model.eval()
            chosen = select(features_of, feed.labels, feed.size, run.group, feed.coreset.shard)
        for module in training:
            module.training = True
        feed.take(epoch, chosen)
        if run.group.rank == 0:
            seconds = time.perf_counter() - began
            log(f"epoch {epoch}: {feed.size} of {len(feed.labels)} samples were chosen in {seconds:.1f} s")

    def passing(self, part: AccumulationStep) -> AbstractContextManager[None]:
        """Around the forward and backward pass of one accumulation step, which begins with this call."""
        loop = self._run.loop
        self._enter(part)
        exchanging = loop.exchanges.during(part)
        if loop.accumulation is None:
            return exchanging
        return _both(exchanging, loop.accumulation.during(part.index, part.count))

    def complete(self, part: AccumulationStep) -> None:
        """The step that ends with this pass was made. Not collective."""
        self._run.loop.schedules.check()
        self._run.commit(part.share.total)

    def _enter(self, part: AccumulationStep) -> None:
        run, loop = self._run, self._run.loop
        loop.part, loop.within = part, True
        if part.index == 0:
            loop.used = []
            if loop.rate:
                loop.rate.expect()
            if run.noise is not None:
                run.noise.begin(run.progress.step)
            strategy = run.settings.strategy
            alike = strategy is not None and strategy.same_numbers
            seed_step(loop.seed, run.progress.step, run.division.replica if alike else run.group.rank)
            loop.schedules.enter(counted(run.progress, part.share.total, run.batch, run.spec.base_batch))
        if run.trace and loop.feed:
            if run.division.first:
                loop.used += loop.feed.indices(run.progress.epoch, part)
            run.uses(part.last)

    def leave(self, early: bool) -> None:
        """The epoch's samples are used, or the script left the loop `early`: perhaps by an error."""
        loop = self._run.loop
        loop.within = early
        loop.schedules.leave()
        if loop.accumulation is not None:
            loop.accumulation.drop()


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
