"""Steps for frameworks that run the loop themselves: data, beginning and end of each step.

A framework requests data, trains on it, and then logs, evaluates and saves before its next request. So a step ends only
with the next request: a checkpoint then has the framework's state after the step. The last step of an epoch ends with
the epoch, after the evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ones_wrapper.api import Job, enter, init
from ones_wrapper.data.feed import AccumulationStep, Pass
from ones_wrapper.group import Group
from ones_wrapper.process.exit_codes import PEER_LOST
from ones_wrapper.process.log import log
from ones_wrapper.run.loop import Loader

RANKS = "{framework} found {theirs} process(es) and ones-run started {ours}: on CPUs say {on_cpus}"
CONTINUE = (
    "{given}: this job has no checkpoint of its own yet, and {framework}'s does not say which samples were used. Load "
    "its weights{how}, and leave this out, or start the job with `ones-run --resume-from`"
)
STRATEGY = (
    "{framework} trains in plain data parallel, and {strategy} is another strategy: use a training loop of your own, "
    "with ones.init(strategy=...), or leave the strategy out"
)


def join(framework: str, per_device: int, accumulation: int, elastic: dict[str, Any] | None) -> Job:
    """Join the run as `ones.init` does; `elastic` are further keywords of `init`.

    By default the base batch is what the script takes on one GPU: `per_device` samples in each of `accumulation`
    accumulation steps. Raises ValueError if `elastic` has a strategy.
    """
    given = dict(elastic or {})
    if (strategy := given.get("strategy")) is not None:
        raise ValueError(STRATEGY.format(framework=framework, strategy=getattr(strategy, "name", strategy)))
    given.setdefault("batch", per_device * accumulation)
    given.setdefault("max_local_batch", per_device)
    meet(given.get("backend"))
    return init(**given)


def meet(backend: str | None) -> Group:
    """Return the group of ranks, for a framework that stores rank and world size. Afterwards, in a job of blocks, each
    change of ranks begins a term. The first call is collective."""
    known, entered = os.environ.get("WORLD_SIZE"), enter(backend)
    entered.keep_ranks()
    if os.environ.get("WORLD_SIZE") != known:
        # A shared file system did not show the spec before the script; it does by now.
        log("other blocks were met after the framework had asked who the ranks are; it starts again")
        raise SystemExit(PEER_LOST)
    return entered.group


def check_ranks(job: Job, framework: str, theirs: int, on_cpus: str) -> None:
    """Raise RuntimeError if `theirs`, the framework's number of ranks, is not the job's."""
    if theirs != job.world:
        raise RuntimeError(RANKS.format(framework=framework, theirs=theirs, ours=job.world, on_cpus=on_cpus))


def pass_over(job: Job, framework: str, what: str, given: str, how: str, known: bool = False) -> None:
    """Log that a framework's own checkpoint is not loaded, because the job has a newer one. Raises ValueError if the
    job has none, unless this job is `known` to have written the framework's. The message quotes the script's words
    `given`, and says by `how` to load weights."""
    step = job.progress.step
    if not step and not known:
        raise ValueError(CONTINUE.format(framework=framework, given=given, how=how))
    if job.rank == 0:
        log(f"{what} is not read: the job goes on from its own checkpoint, step {step}")


def hidden(scheduler: Any) -> Any:
    """Return an object with the state of a scheduler that steps once an epoch or after evaluations. `Job.register` does
    not wrap it."""
    state = {name: getattr(scheduler, name) for name in ("state_dict", "load_state_dict")}
    return SimpleNamespace(scheduler=scheduler, **state)


class Steps:
    """A job's steps, one after another, for a framework that runs the loop itself. Methods are collective."""

    def __init__(self, job: Job, loader: Loader) -> None:
        self._run = job._run
        self._loader = loader
        self._data: Iterator[Pass] | None = None
        self._within = False
        self._pending: AccumulationStep | None = None
        """Last pass of the present step until the step has ended; None between epochs."""

    def take(self) -> list[Pass]:
        """End the previous step; return the passes of the next step, none at the end of the epoch. An epoch's last step
        is ended by `end_epoch`."""
        coming = self._fetch()
        if not coming:
            return []
        if self._pending is not None:
            before = self._run.sizes.cut_by
            self._commit()
            self._run.act()
            self._run.records.meter.start()
            if self._run.sizes.cut_by != before:
                self._data = None
                coming = self._fetch()
        self._pending = coming[-1][0]
        return coming

    @property
    def base_steps(self) -> int:
        """Number of steps of the base batch so far, including the present step. Not collective."""
        progress, counted = self._run.progress, self._run.loop.schedules.samples if self._pending else 0
        return (progress.samples + progress.padding + counted) // self._run.sizes.spec.base_batch

    @property
    def epochs(self) -> float:
        """Number of epochs so far, with the fraction of the present epoch, including the present step. Not
        collective."""
        progress, total = self._run.progress, self._pending.share.total if self._pending else 0
        return progress.epoch + (progress.cursor + total) / max(1, progress.dataset)

    def begin_epoch(self, accuracy: float | None = None) -> None:
        """Begin an epoch. If another epoch has not ended, end it with this accuracy."""
        if self._within:
            self.end_epoch(accuracy)
        self._within = True

    def end_epoch(self, accuracy: float | None = None) -> None:
        """End the last step of the epoch, and the epoch."""
        self._commit()
        self._data = None
        self._run.end_epoch(None, accuracy)

    def finish(self) -> None:
        """End training, also in the middle of an epoch: end the last step, and write the last checkpoint."""
        if self._pending and not self._fetch():
            self.end_epoch()
        else:
            self._commit()
        self._run.finish()

    def _fetch(self) -> list[Pass]:
        run = self._run
        run.begin()
        if self._data is None:
            run.loop.exchanges.check()
            run.records.meter.start()
            # A framework logs and evaluates before the step that was fetched seeds the generators.
            self._data = self._loader.coming(lambda: self._pending.share.total if self._pending else 0, seeded=False)
        step: list[Pass] = []
        for part, local in self._data:
            step.append((part, local))
            if part.last:
                break
        return step

    def _commit(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._loader.complete(pending)
        self._loader.leave(early=False)
