"""A simulated training job: launches, trains, reports, checkpoints, and obeys orders, as the wrapper does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Event, Timeline
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.training.job_reports import JobFiles, Reporter
from slurm_ones.simulate.training.training_progress import Course, Position
from slurm_ones.simulate.workloads.workload import Submission

HEARD_S = 0.1
"""A drained job looks this often for a newer order."""
TERMINATED = 128 + 15
"""Exit code of a run that ended on SIGTERM."""


class Phase(str, Enum):
    """What a run is doing."""

    GONE = "gone"
    LAUNCHING = "launching"
    TRAINING = "training"
    SAVING = "saving"
    DRAINED = "drained"


@dataclass
class Stretch:
    """Steps at one size and batch, from a position on."""

    begun: float
    at: Position
    batch: int
    rate: float
    """Samples/s."""

    def samples(self, now: float, most: int) -> int:
        """Samples of the whole steps until now, `most` to the end of the pass."""
        steps = math.floor((now - self.begun) * self.rate / self.batch + 1e-6)
        return min(steps * self.batch, most)

    def boundary(self, time: float, most: int) -> int:
        """Samples used at the first step boundary from `time` on."""
        if (time - self.begun) * self.rate >= most:
            return most
        steps = max(math.ceil((time - self.begun) * self.rate / self.batch - 1e-6), 1)
        return min(steps * self.batch, most)


class Training:
    """One job over all its runs. `exited` hears the exit code when a run ends by itself.

    Without `files` it is a job whose owner knows nothing of us: it neither reports, nor checkpoints, nor obeys.
    """

    def __init__(
        self,
        submission: Submission,
        application: Application,
        files: JobFiles | None,
        timeline: Timeline,
        settings: ClusterSettings,
        resize_s: float,
        rng: np.random.Generator,
    ) -> None:
        self.submission = submission
        self.application = application
        self.files = files
        self.course = Course(application, submission.epochs)
        self.finished = False
        self.trained_s = 0.0
        """GPU-seconds in which it trained."""
        self.lost_samples = 0
        """Samples used whose work no checkpoint holds."""
        self.phase = Phase.GONE
        self.batch = 0
        """Global batch in force."""
        self.exited: Callable[[int], None] = lambda code: None
        self._timeline = timeline
        self._settings = settings
        self._resize_s = resize_s
        self._say = Reporter(self.course, files, timeline, settings, rng)
        wanted = min(max(submission.batch, application.min_batch or application.base_batch), application.max_batch)
        self.durable = Position(wanted=wanted)
        """What the newest checkpoint holds."""
        self._position = self.durable
        self._restart = 0
        self._placement: tuple[int, ...] = ()
        self._event: Event | None = None
        self._stretch = Stretch(0.0, self.durable, 1, 1.0)
        self._heard = 0
        self._checkpoint_at = math.inf
        self._order_due = False

    # -- what Slurm does with it ---------------------------------------------------------------------------------

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        """Its run begins on so many GPUs of each node."""
        self._restart, self._placement = restart, tuple(gpus.values())
        self._position = self.durable
        self._heard = 0
        self.phase = Phase.LAUNCHING
        self._then(self._timeline.now + self._launch_s + self._load_s, self._hello)

    def stop(self) -> float:
        """Its processes are killed; returns the seconds until the last is gone."""
        if self.phase is Phase.TRAINING:
            self._reckon(self._stretch.samples(self._timeline.now, self._left))
        if self.phase is Phase.DRAINED:
            self._say.bye(self._position, "drained", TERMINATED)
        self.lost_samples += self.course.used(self._position) - self.course.used(self.durable)
        self._gone()
        return self._settings.stop * self._resize_s

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where it is now, whole steps counted."""
        if self.phase is not Phase.TRAINING:
            return self._position if self.phase is not Phase.GONE else self.durable
        return self._after(self._stretch.samples(self._timeline.now, self._left))

    @property
    def drained_for(self) -> int | None:
        """Number of the drain order that it has answered by a checkpoint and now waits for, None while it does not."""
        return self._heard if self.phase is Phase.DRAINED else None

    @property
    def goodput(self) -> float:
        """Progress/s now; 0 unless it trains."""
        if self.phase is not Phase.TRAINING:
            return 0.0
        app = self.application
        return self._stretch.rate * float(app.efficiencies(self.batch)[app.epoch(self._position.progress)])

    @property
    def gpus(self) -> int:
        """World size."""
        return sum(self._placement)

    @property
    def _launch_s(self) -> float:
        return self._settings.launch * self._resize_s

    @property
    def _load_s(self) -> float:
        """Seconds to load the checkpoint, where there is one."""
        return self._settings.load * self._resize_s if self.durable.step else 0.0

    @property
    def _left(self) -> int:
        """Samples from the stretch's beginning to the end of the pass."""
        return self.course.dataset - self._stretch.at.cursor

    def _then(self, time: float, action: Callable[[], None]) -> None:
        if self._event is not None:
            self._event.cancel()
        self._event = self._timeline.at(time, action)

    def _gone(self) -> None:
        if self._event is not None:
            self._event.cancel()
        self.phase = Phase.GONE

    def _in_force(self, wanted: int) -> int:
        return max(1, min(wanted, self.application.max_batch))

    def _hello(self) -> None:
        """Everything is loaded: say so, and train. An order that waits sets the batch; a drain waits for a boundary."""
        self._order_due = False
        if self.files is not None:
            self.files.look_anew()
            order = self.files.order
            if order is not None and order.restart <= self._restart:
                if order.batch is not None:
                    self._position = replace(self._position, wanted=order.batch)
                self._order_due = order.drain and order.restart == self._restart
                self._heard = order.number - self._order_due
        self.batch = self._in_force(self._position.wanted)
        self._say.hello(self._position, self.batch, self._placement, self._launch_s, self._load_s, self._restart)
        self._timeline.stirred = True
        self._checkpoint_at = self._timeline.now + self._settings.checkpoint_s if self.files is not None else math.inf
        self._train()

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train on from here."""
        self.phase = Phase.TRAINING
        rate = self.application.placed_speed(self._placement, float(self.batch))
        self._stretch = Stretch(self._timeline.now, self._position, self.batch, rate)
        self._aim()

    def _aim(self) -> None:
        """Let the next thing happen that is due, at its step boundary."""
        stretch, left = self._stretch, self._left
        due = [self._say.due, self._checkpoint_at]
        if self._order_due:
            due.append(self._timeline.now)
        samples = stretch.boundary(min(due), left)
        to_end = self.course.samples_left(stretch.at, self.batch)
        samples = min(samples, max(math.ceil(to_end / self.batch - 1e-9), 1) * self.batch, left)
        self._then(stretch.begun + samples / stretch.rate, lambda: self._boundary(samples))

    def _after(self, samples: int) -> Position:
        return self.course.use(self._stretch.at, samples, self.batch, math.ceil(samples / self.batch))

    def _reckon(self, samples: int) -> None:
        """Count what was trained since the stretch began, and begin another at this boundary."""
        now = self._timeline.now
        self._position = self._after(samples)
        self.trained_s += (now - self._stretch.begun) * self.gpus
        self._say.ran(now - self._stretch.begun)
        self._stretch = Stretch(now, self._position, self.batch, self._stretch.rate)

    def _boundary(self, samples: int) -> None:
        """A step ended at which something is due."""
        now = self._timeline.now
        self._reckon(samples)
        gives_up = False
        if self._position.cursor >= self.course.dataset:
            gives_up = self._end_epoch()
        if gives_up or self.course.over(self._position):
            self._finish()
            return
        if self._order_due:
            self._order_due = False
            if self._obey():
                return
        if now >= self._checkpoint_at - 1e-6:
            self._save(self._settings.stall_s, None)
            return
        if now >= self._say.due - 1e-6:
            self._say.throughput(self._position, self.batch)
        self._train()

    def _end_epoch(self) -> bool:
        """Report the pass and go on to the next; whether patience is at its end."""
        ended = self._position
        self._position, gives_up = self.course.next_pass(ended)
        self._say.epoch(ended, self.batch)
        return gives_up

    def _finish(self) -> None:
        self._say.throughput(self._position, self.batch)
        self._say.bye(self._position, "finished")
        self.durable = self._position
        self.finished = True
        self._gone()
        self.exited(0)

    # -- orders and checkpoints ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Look for an order that came while nothing happened here; called before time goes on."""
        if self.files is None or self.phase in (Phase.GONE, Phase.LAUNCHING) or not self.files.newer_order():
            return
        if self.phase is Phase.TRAINING:
            self._order_due = True
            self._aim()
        elif self.phase is Phase.DRAINED and self._unheard() is not None:
            self._then(self._timeline.now + HEARD_S, self._carry_on)

    def _unheard(self) -> Order | None:
        """The order in force, if it has not been obeyed."""
        order = self.files.order if self.files is not None else None
        unheard = order is not None and order.restart <= self._restart and order.number > self._heard
        return order if unheard else None

    def _carry_on(self) -> None:
        """A newer order came, or no requeue: train on, and obey at the next boundary."""
        self._order_due = self._unheard() is not None
        self._train()

    def _obey(self) -> bool:
        """Do what the order in force says; True where training stops for it."""
        order = self._unheard()
        if order is None:
            return False
        self._heard = order.number
        if order.batch is not None:
            self._change_batch(order.batch, order.number)
        if order.drain and order.restart == self._restart:
            self._save(self._settings.save * self._resize_s, order.number)
            return True
        return False

    def _change_batch(self, wanted: int, number: int) -> None:
        self._say.throughput(self._position, self.batch)
        self._position = replace(self._position, wanted=wanted)
        self.batch = self._in_force(wanted)
        self._say.batch(self._position, self.batch, number)

    def _save(self, seconds: float, order: int | None) -> None:
        self._say.throughput(self._position, self.batch)
        self.phase = Phase.SAVING
        self._then(self._timeline.now + seconds, lambda: self._saved(seconds, order))

    def _saved(self, seconds: float, order: int | None) -> None:
        assert self.files is not None
        now, at = self._timeline.now, self._position
        try:
            name = self.files.checkpoint(at.step)
        except OSError:
            # As the wrapper does where its disk is full: it says nothing and trains on.
            self._checkpoint_at = now + self._settings.checkpoint_s
            self._carry_on()
            return
        self.durable = at
        self._say.checkpoint(at, name, seconds, order)
        self._checkpoint_at = now + self._settings.checkpoint_s
        if order is None:
            self._carry_on()
            return
        self._timeline.stirred = True
        self.phase = Phase.DRAINED
        self._then(now + (DRAIN_WAIT_S if self._unheard() is None else HEARD_S), self._carry_on)
