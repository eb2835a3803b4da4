"""The script's loop over the batches of an epoch, in which steps begin and end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ones_wrapper.data.coreset import Floats, Ints, select
from ones_wrapper.data.coreset_feed import CoresetFeed
from ones_wrapper.data.feed import AccumulationStep, Feed, Pass, step_size, weigh
from ones_wrapper.data.randomness import keep_generators, seed_step
from ones_wrapper.gradients.schedule import base_steps, counted
from ones_wrapper.process import hang_detector
from ones_wrapper.run.evaluation import Evaluation
from ones_wrapper.run.run import Run
from ones_wrapper.script.ahead import UNCLEAR, AskedAhead

AHEAD = (
    "the loader was asked for a third batch before the first was trained on: requesting the next batch ends a step, "
    "and only one batch can be fetched ahead. To fetch ahead give the loader num_workers=N and pin_memory=True; to "
    "leave batches out on all ranks write `if job.any(bad): continue`"
)
USED_UP = (
    "loader: epoch {epoch} is used up, and the script asks for more batches: use `for epoch in job.epochs():`, or end "
    "the epoch with job.epoch_end() before the next pass. An endless loop is `for epoch in job.epochs(): for batch in "
    "loader:` with ones.init(epochs=0); count its steps by job.base_steps, which continues after a resize. To evaluate "
    "on that data use job.evaluate(dataset)"
)
OUTSIDE = (
    "the loader is used outside job.epochs(){line}, so the script's own count of epochs begins again after a resize: "
    "write `for epoch in job.epochs():`"
)


class Loader:
    """Iterable over the batches of the present epoch, which `Job.loader` returns. Requesting the next batch is the step
    boundary."""

    def __init__(self, run: Run, dataset: Any = None, options: dict[str, Any] | None = None) -> None:
        self._run, self.dataset = run, dataset
        self._options = options or {}
        # In place of a DistributedSampler: each epoch's order follows from the loader's seed and its number.
        self.sampler = SimpleNamespace(set_epoch=lambda epoch: None)
        self._given: deque[AccumulationStep] = deque()
        """Passes whose batch the script has got, and that have not ended: one, or two if the script fetches ahead."""
        self._pass = ExitStack()
        self._asks_ahead = False
        self._doubt: AskedAhead | None = None

    @property
    def batch_size(self) -> int:
        """Base batch, for which the script's learning rate was chosen. `len` counts steps of this batch."""
        return self._run.sizes.spec.base_batch

    def __getattr__(self, name: str) -> Any:
        """Return an option of the given DataLoader, such as `num_workers`."""
        options = self.__dict__.get("_options", {})
        if name in options:
            return options[name]
        raise AttributeError(
            f"job.loader has no {name}: the job decides which samples a step uses. Of a DataLoader it has dataset, "
            "batch_size (init's batch), sampler.set_epoch and the options that it was given"
        )

    def __len__(self) -> int:
        """Return the number of steps of an epoch at the base batch. Raises TypeError for a stream without a length."""
        run = self._run
        assert run.loop.feed is not None
        if not run.loop.feed.samples:
            raise TypeError(
                "len(loader): the dataset has no length, so the number of steps in an epoch is unknown. Give the "
                "dataset a __len__, or choose the schedule's number of steps yourself"
            )
        return base_steps(run.loop.feed.samples, run.sizes.spec.base_batch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's local batches from the cursor to the end of the present epoch, equally many on all ranks.

        A script may fetch one batch ahead, as prefetchers do: it requests the second batch before it has trained on the
        first. A step then ends when the batch after the next is requested, or at the end of the epoch.
        """
        run = self._run
        if run.over and isinstance(run.loop.feed, Feed):  # `update_bn` of an average: nothing is counted
            yield from Evaluation(run, run.loop.feed, run.sizes.spec.max_local_batch)
            return
        run.begin()
        loop, progress = run.loop, run.progress
        feed, first = loop.feed, loop.first_steps
        assert feed is not None
        self._check_pass(progress.epoch)
        loop.exchanges.check()
        if isinstance(feed, CoresetFeed) and feed.due(progress.epoch, progress.cursor):
            self._select(feed)
        run.records.meter.start()
        first.begin()
        self._given.clear()
        coming, number, held = self.coming(self._ahead, seeded=True), 0, None
        while True:
            untrained = not first.touched and not self._stepped
            ahead = number == 1 and untrained and not first.skipped
            if number == 2 and len(self._given) == 2 and untrained:
                raise RuntimeError(AHEAD)
            if self._given and not ahead:
                self._settle()
                self._end_pass()
            found = next(coming, None)
            if found is None:
                break
            self._given.append(found[0])
            if ahead and not self._asks_ahead:
                assert run.keeping.state is not None
                left_out = partial(self._end_pass, boundary=False)  # the script trains on the second batch
                self._doubt = AskedAhead(run.keeping.state.model, held, found[1], lambda: first.touched, left_out)
            held = found[1] if number == 0 else None
            if len(self._given) == 1:
                self._begin_pass()
            number += 1
            try:
                yield found[1]
            except GeneratorExit:  # the script left the loop: the step counts if the optimizer made it
                self._pass.__exit__(*sys.exc_info())
                if self._given[0].last and self._stepped:
                    run.commit(self._given[0].share.total)
                self.leave(early=True)
                raise
        loop.passed = progress.epoch
        self._settle()
        run.records.meter.settle()  # an evaluation may follow
        if self._given:
            loop.end_open = self._end_open
        else:
            self.leave(early=False)

    def _settle(self) -> None:
        if self._doubt is None:
            return
        ahead = len(self._given) == 2
        if ahead and self._doubt.unclear:
            self._run.loop.first_steps.say(UNCLEAR)
        self._asks_ahead = ahead and not self._doubt.unclear
        self._doubt.close()
        self._doubt = None

    @property
    def _stepped(self) -> bool:
        return self._run.loop.rate.stepped

    def _check_pass(self, epoch: int) -> None:
        if self._run.loop.passed == epoch:
            raise RuntimeError(USED_UP.format(epoch=epoch))
        if not self._run.loop.in_epochs:
            self._run.loop.first_steps.say(OUTSIDE)

    def coming(self, ahead: Callable[[], int], seeded: bool) -> Iterator[Pass]:
        """Yield the remaining passes of the epoch, computed again whenever the batch or the ranks change. `ahead`
        returns the number of samples that the script has fetched but not trained on. `seeded` is as in
        `Feed.batches`."""
        run, epoch, feed, changed = self._run, self._run.progress.epoch, self._run.loop.feed, True
        assert feed is not None
        while changed:
            before, changed = run.sizes.cut_by, False
            run.sizes.use_batch()
            passes = feed.batches(epoch, run.progress.cursor + ahead(), run.sizes.cut, seeded=seeded)
            for part, local in self._weighed(passes):
                yield part, local
                if part.last and run.sizes.cut_by != before:
                    changed = True
                    break

    def _weighed(self, passes: Iterator[Pass]) -> Iterator[Pass]:
        """Yield the passes, with their numbers of tokens if the job counts tokens."""
        held = self._run.settings.tokens
        if held is None:
            yield from passes
            return
        step: list[Pass] = []
        for one in passes:
            step.append(one)
            if one[0].last:
                yield from weigh(step, held, self._run.group.total)
                step = []

    def _ahead(self) -> int:
        return sum(part.share.total for part in self._given if part.last)

    def _begin_pass(self) -> None:
        self._pass = ExitStack()
        self._pass.enter_context(self.passing(self._given[0]))

    def _end_pass(self, boundary: bool = True) -> None:
        """End the oldest pass. If it is the last of its step, end the step, and with `boundary` act at the step
        boundary. Then begin the next pass if the script has fetched its batch."""
        run = self._run
        self._pass.close()
        part = self._given.popleft()
        run.loop.ahead = bool(self._given)
        if part.last:
            self.complete(part)
        if part.last and boundary and not self._used_up:
            run.act()
            run.records.meter.start()
        if self._given:
            self._begin_pass()

    @property
    def _used_up(self) -> bool:
        """True if the epoch has no further step; False for a stream of unknown length."""
        run, feed = self._run, self._run.loop.feed
        assert feed is not None
        return feed.samples > 0 and step_size(feed.samples - run.progress.cursor, run.sizes.cut) <= 0

    def _end_open(self) -> None:
        self._run.loop.end_open = lambda: None
        while self._given:
            self._end_pass(boundary=False)
        self.leave(early=False)

    def _select(self, feed: CoresetFeed) -> None:
        """Choose the coreset's samples for the next epochs, with the model in evaluation mode. Collective."""
        run, began = self._run, time.perf_counter()
        loop, epoch, most = run.loop, run.progress.epoch, run.sizes.spec.max_local_batch
        shared = run.sizes.division.replicas < run.group.world
        if (shared or loop.exchanges.gathers) and feed.coreset.features is not None:
            raise ValueError(
                "coreset: the forward passes of a model that several ranks share need all of them at once, and here "
                "each rank has other samples. Leave out features, whose default is the samples' inputs, or use job.ddp "
                "with each rank a replica"
            )

        def features_of(members: Ints) -> Floats:
            hang_detector.beat()
            return feed.features(epoch, members, most)

        assert run.keeping.state is not None
        training = [module for module in run.keeping.state.model.modules() if module.training]
        with keep_generators(), torch.no_grad(), loop.exchanges.evaluating():
            run.keeping.state.model.eval()
            chosen = select(features_of, feed.labels, feed.size, run.group, feed.coreset.shard)
        for module in training:
            module.training = True
        feed.take(epoch, chosen)
        seconds = time.perf_counter() - began
        run.group.say(f"epoch {epoch}: {feed.size} of {len(feed.labels)} samples were chosen in {seconds:.1f} s")

    @contextmanager
    def passing(self, part: AccumulationStep) -> Iterator[None]:
        """Context of the forward and backward pass of one accumulation step."""
        self._enter(part)
        loop = self._run.loop
        with loop.exchanges.during(part), loop.accumulation.during(part.index, part.count):
            yield

    def complete(self, part: AccumulationStep) -> None:
        """Count a step whose last pass is `part`. Not collective."""
        self._run.loop.schedules.check()
        self._run.commit(part.share.total)

    def _enter(self, part: AccumulationStep) -> None:
        run, loop = self._run, self._run.loop
        loop.part, loop.within = part, True
        if part.index == 0:
            loop.used = []
            loop.rate.begin(run.progress, run.sizes.rated(run.sizes.batch), run.sizes.rated(part.share.total))
            loop.first_steps.begin()
            if run.loop.noise is not None:
                run.loop.noise.begin(run.progress.step)
            strategy = run.settings.strategy
            alike = strategy is not None and strategy.same_numbers
            seed_step(loop.seed, run.progress.step, run.sizes.division.replica if alike else run.group.rank)
            sizes, progress = run.sizes, run.progress
            found = counted(progress, part.share.total, sizes.batch, sizes.spec.base_batch, sizes.least_step)
            loop.schedules.enter(found, progress.samples + progress.padding)
        if run.records.trace and loop.feed:
            if run.sizes.division.first:
                loop.used += loop.feed.indices(run.progress.epoch, part)
            run.records.uses(part.last)

    def leave(self, early: bool) -> None:
        """Record the end of the loop over batches. `early` is True if the script left the loop early, perhaps by an
        error."""
        loop = self._run.loop
        loop.within, loop.ahead = early, False
        loop.schedules.leave()
        loop.accumulation.drop()
