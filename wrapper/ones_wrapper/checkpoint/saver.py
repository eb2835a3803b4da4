"""Choice of the times of checkpoints, by their cost and the job's failure rate, and reports of each checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from ones_wrapper.checkpoint import Checkpoints, Failed, Loaded, Saved, SavedState
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import Group, RankError
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.protocol import Checkpoint, Report

FIRST_S = 600.0
"""Seconds until the first checkpoint, and between checkpoints until the cost of one is known."""


class Saver:
    """Checkpoints of one run: when to write them, and their reports. Methods are collective unless their docstring says
    otherwise."""

    def __init__(
        self,
        group: Group,
        checkpoints: Checkpoints,
        every_s: float | None,
        behind: bool,
        send: Callable[[Report], None],
    ) -> None:
        """`every_s` is the time between checkpoints in seconds, None for the time that their cost suggests. `behind`
        writes checkpoints that nobody waits for in the background. `send` sends a report."""
        self._group = group
        self._checkpoints = checkpoints
        self._every_s = every_s
        self._behind = behind
        self._send = send
        self._saved: TrainingProgress | None = None
        self._saved_at = time.monotonic()
        self._stall_s: float | None = None
        self._writing = False
        self.load_s = 0.0
        """Seconds that the last `load` took."""

    def load(self, state: SavedState) -> Loaded:
        """Load the newest sound checkpoint into the objects of `state`."""
        started = time.monotonic()
        loaded = self._checkpoints.load(state)
        self._saved = replace(loaded.progress) if loaded.name else None
        self._saved_at = time.monotonic()
        self.load_s = self._saved_at - started
        return loaded

    def due(self, progress: TrainingProgress) -> bool:
        """Tell whether the next checkpoint is due. Not collective: rank 0 decides."""
        every_s = self._every_s
        if every_s is None:
            rate = failure_rate(progress.failures, progress.trained_s, self._group.nodes)
            every_s = FIRST_S if self._stall_s is None else interval_s(self._stall_s, 1.0 / rate)
        return not self._writing and time.monotonic() - self._saved_at >= every_s

    def save(self, state: SavedState | None, progress: TrainingProgress, why: str, order: int | None = None) -> bool:
        """Write a checkpoint that is durable on return; return False if the write failed, which is logged.

        Without an order, nothing is written if the progress equals that of the last checkpoint.
        """
        if state is None:
            return False
        if order is None and self._saved == progress:
            return True
        try:
            saved = self._checkpoints.save(state, progress)
        except RankError as error:
            self._failed(why, str(error))
            return False
        finally:
            self._saved_at = time.monotonic()
            FLAGS.checkpoint_taken()
            self.report_finished()  # one that was under way was waited for
        self._done(saved, order)
        return True

    def begin(self, state: SavedState, progress: TrainingProgress) -> None:
        """Begin a checkpoint that is written in the background, or write it at once if `behind` is off."""
        if not self._behind:
            self.save(state, progress, "in passing")
            return
        if self._saved == progress:
            return
        self._checkpoints.begin(state, progress)
        self._writing = True
        self._saved_at = time.monotonic()

    def report_finished(self) -> None:
        """Report the result of the background checkpoint once it has ended. Not collective, never waits."""
        ended = self._checkpoints.ended()
        if ended is None:
            return
        self._writing = False
        if isinstance(ended, Failed):
            self._failed("behind the training", ended.why)
        else:
            self._done(ended, None)

    @property
    def writing(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._writing

    def ranks_changed(self, restart: int) -> Group | None:
        """Continue with the group's new ranks; see `Checkpoints.ranks_changed`. Not collective."""
        self._saved = None  # what new ranks know of no checkpoint must hold for all
        self._saved_at = time.monotonic()
        return self._checkpoints.ranks_changed(restart)

    def let_go(self) -> None:
        """Finish the checkpoint under way, since these ranks leave and others train on. Not collective."""
        self._checkpoints.let_go()
        self.report_finished()

    def rescue(self, state: SavedState, progress: TrainingProgress, refuse: Callable[[], str]) -> bool:
        """Write a checkpoint from this rank only, as `Checkpoints.rescue` does; return whether it was written."""
        if self._saved == progress:
            return True
        try:
            name = self._checkpoints.rescue(state, replace(progress), refuse)
        except Exception as error:  # the last one has to do
            log(f"no checkpoint could be written of step {progress.step} ({error}); the last one stays")
            return False
        log(f"{name} was written by one rank, since others are lost")
        return True

    def close(self) -> None:
        """Wait for a checkpoint under way, report it, and release the directory."""
        self._checkpoints.close()
        self.report_finished()

    def _done(self, saved: Saved, order: int | None) -> None:
        at = saved.progress
        self._saved = at
        self._stall_s = saved.stall_s
        position = (at.epoch, at.cursor, at.step)
        self._send(Checkpoint(saved.name, *position, saved.bytes, saved.seconds, saved.stall_s, order))

    def _failed(self, why: str, error: str) -> None:
        if self._group.rank == 0:
            log(f"the checkpoint {why} could not be written ({error}); the last one stays")


PRIOR_FAILURES = 0.2
PRIOR_NODE_S = 20 * 86_400.0
"""Prior of the failure rate, a gamma distribution: one failure in 100 node-days. Kokolis et al. ("Revisiting
Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025) report 6.5 and 2.3 infrastructure failures in
1,000 node-days on two clusters. People and scripts cause failures as well, so our rate is a round number above theirs.
The prior is so weak that the job's own first failures outweigh it."""

LEAST_S = 30.0
MOST_S = 3_600.0
"""Bounds of the interval in seconds: stalls too short to measure, or a rate known only from the prior, would lead to
extremes."""


def failure_rate(failures: int, trained_s: float, nodes: int) -> float:
    """Return the failures per second of a job on `nodes` nodes, after `failures` in `trained_s` seconds at this size.

    The result is the mean of a gamma posterior: nodes fail independently, each at the same rate.
    """
    nodes = max(1, nodes)
    return nodes * (PRIOR_FAILURES + failures) / (PRIOR_NODE_S + max(0.0, trained_s) * nodes)


def interval_s(stall_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds of training between two checkpoints that lose least to stalls and to repeated work.

    Daly's higher-order estimate in closed form ("A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22, 2006). Its first term is Young's sqrt(2 × stall × time between
    failures). The result is limited to `LEAST_S` to `MOST_S`. `stall_s` is the pause of training for one checkpoint,
    not the time of its write.
    """
    stall, between = max(0.0, stall_s), max(1e-9, mean_time_between_failures_s)
    best = between
    if stall < 2 * between:
        root = math.sqrt(stall / (2 * between))
        best = math.sqrt(2 * stall * between) * (1 + root / 3 + root * root / 9) - stall
    return min(MOST_S, max(LEAST_S, best))
