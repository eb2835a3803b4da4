"""Evaluation data: each rank's share of a dataset, without repeats or omissions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ones_wrapper.data.feed import AccumulationStep, Feed
from ones_wrapper.process import hang_detector
from ones_wrapper.run.run import Run
from ones_wrapper.script import calls


class Evaluation:
    """The samples of this rank's replica in an evaluation, as an iterable that `Job.evaluate` returns.

    An evaluation does not change the cursor of the training, its random numbers or its step times. Ranks differ by at
    most one sample. They have equally many batches, unless there are fewer samples than ranks, or batches of one
    sample.
    """

    def __init__(self, run: Run, feed: Feed, batch: int) -> None:
        self._run, self._feed, self._batch = run, feed, batch

    def __len__(self) -> int:
        return len(self._parts())

    def _parts(self) -> list[AccumulationStep]:
        division = self._run.sizes.division
        most = max(division.unit, self._batch - self._batch % division.unit)
        return self._feed.share(division.replicas, division.replica, most, division.unit)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches. All ranks must begin together. Raises ValueError for a sharded model if ranks
        would make different numbers of forward passes."""
        run, began = self._run, time.perf_counter()
        exchanges, replicas = run.loop.exchanges, run.sizes.division.replicas
        if exchanges.gathers and (self._batch == 1 or self._feed.samples < replicas):
            raise ValueError(
                f"evaluate: a sharded model needs all ranks in each forward pass. {self._feed.samples} samples in "
                f"batches of {self._batch} are not as many batches for each of {replicas} ranks: take batch=2 or more, "
                "and a dataset with a sample for each rank"
            )
        parts = self._parts()
        run.loop.first_steps.together("job.evaluate")
        calls.evaluates(sum(part.samples for part in parts))
        try:
            with exchanges.evaluating():
                for local in self._feed.fetch(parts):
                    yield local
                    hang_detector.beat()
        finally:
            run.records.meter.leave_out(time.perf_counter() - began)
