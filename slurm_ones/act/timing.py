"""When the action of a resize's state is due, and when it is too late for it."""

from __future__ import annotations

from collections.abc import Callable

from ones_db import ResizeRecord
from ones_wrapper.protocol import DRAIN_WAIT_S
from slurm_ones.act.transitions import State
from slurm_ones.config import ResizeSettings
from slurm_ones.slurm.model import Job

ASK_AGAIN_S = 10.0
"""An action whose effect is not seen is repeated after this long."""


class ActionTimes:
    """What a machine remembers of the resizes under way. None of it is lost with a crash that matters: actions may be
    repeated, and deadlines are in the database."""

    def __init__(self, settings: ResizeSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._asked: dict[tuple[int, State], float] = {}
        """When the action of each resize's state was last taken."""
        self._requeued: dict[int, float] = {}
        """When the requeued job of each resize was first seen ready to be released."""

    @property
    def queue_deadline(self) -> float:
        """Of a job that is released now."""
        return self._clock() + self._settings.max_wait_s

    @property
    def start_deadline(self) -> float:
        """Of a job that starts now."""
        return self._clock() + self._settings.start_timeout_s

    def due(self, resize: ResizeRecord, *, once: bool = False) -> bool:
        """Whether the state's action is to be taken now: at first, after a restart of ours, and again if in vain."""
        key = (resize.id, State(resize.state))
        asked = self._asked.get(key)
        # A clock that was set back must not put it off.
        if asked is not None and (once or 0.0 <= self._clock() - asked < ASK_AGAIN_S):
            return False
        self._asked[key] = self._clock()
        return True

    def late(self, resize: ResizeRecord) -> bool:
        """Its state's deadline is past; or further ahead than any is set, because the clock was set back since."""
        if resize.deadline is None:
            return False
        times = self._settings
        limits = (times.drain_timeout_s, times.max_wait_s, times.start_timeout_s, times.blocks_wait_s, DRAIN_WAIT_S)
        longest = max(limits)
        return not 0.0 <= resize.deadline - self._clock() <= longest

    def just_requeued(self, resize: ResizeRecord, job: Job) -> bool:
        """Whether its last run was killed a moment ago.

        Slurm ends a job's processes on a node by the job's id. Where a node did not answer when that run was to end,
        its daemon being started again say, Slurm tells it once more a second later, and a run that began meanwhile
        dies of it, and the job with it. Slurm's own delay after a requeue is there for that.
        """
        if not (self._settings.start_now and job.pending and resize.restart >= 0):
            return False
        now = self._clock()
        return 0.0 <= now - self._requeued.setdefault(resize.id, now) < self._settings.settle_s

    def entered(self, resize: ResizeRecord, state: State) -> None:
        """The state is written down: its action is due."""
        self._asked.pop((resize.id, state), None)

    def forget(self, resize: ResizeRecord) -> None:
        """The resize is over."""
        self._asked = {key: at for key, at in self._asked.items() if key[0] != resize.id}
        self._requeued.pop(resize.id, None)
