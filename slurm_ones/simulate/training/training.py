"""A simulated training job: launches, trains, reports, checkpoints, and obeys orders, as the wrapper does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Event, Timeline
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.training.job_reports import JobFiles, Reporter
from slurm_ones.simulate.training.network import NONE, Slowdown
from slurm_ones.simulate.training.training_progress import Position, TrainingCurve

ORDER_POLL_S = 0.1
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
    SWITCHING = "switching"
    """Of a job of blocks: some join or leave."""
    RECOVERING = "recovering"
    """Of a job of blocks: one is lost, and the others find each other again."""


@dataclass
class Interval:
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
    """One job over all its runs. `exited` is called with the exit code when a run ends by itself.

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
        self.curve = TrainingCurve(application, submission.epochs)
        self.finished = False
        self.trained_s = 0.0
        """GPU-seconds in which it trained."""
        self.misplaced: list[str] = []
        """Sizes at which it started though its strategy cannot use them."""
        self.lost_samples = 0
        """Samples used whose work no checkpoint holds."""
        self.phase = Phase.GONE
        self.batch = 0
        """Global batch in force."""
        self.exited: Callable[[int], None] = lambda code: None
        self.speeds: Mapping[str, float] = {}
        """Of the nodes that are slower than others."""
        self.kinds: Mapping[str, str] = {}
        """Kind of GPU of each node, if they differ."""
        self.on: Mapping[str, Application] = {"": application}
        """The application on each kind of GPU."""
        self.nodes: Mapping[str, int] = {}
        """GPUs of each node that train, or did."""
        self.changes: int | None = None
        """Changes of its GPUs; None if Slurm's records have them."""
        self._timeline = timeline
        self._settings = settings
        self._resize_s = resize_s
        self._reporter = Reporter(self.curve, files, timeline, settings, rng, submission.declares)
        least = application.min_batch or application.base_batch
        self.requested_batch = min(max(submission.batch, least), application.max_batch)
        self.durable = Position(wanted=self.requested_batch)
        """What the newest checkpoint holds."""
        self._position = self.durable
        self._restart = 0
        self._placement: tuple[int, ...] = ()
        self._slowdown = NONE
        self._event: Event | None = None
        self._interval = Interval(0.0, self.durable, 1, 1.0)
        self._obeyed = 0
        self._checkpoint_at = math.inf
        self._order_due = False

    # -- what Slurm does with it ---------------------------------------------------------------------------------

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        """Its run begins on so many GPUs of each node."""
        self._restart = restart
        self._hold(gpus)
        self._position = self.durable
        self._obeyed = 0
        self._check_size()
        self.phase = Phase.LAUNCHING
        self._then(self._timeline.now + self._launch_s + self._load_s, self._loaded)

    def stop(self, *, killed: bool = False) -> float:
        """Its processes are killed; returns the seconds until the last is gone."""
        self._count_until_now()
        if self.phase is Phase.DRAINED:
            self._reporter.bye(self._position, "drained", TERMINATED)
        self.lost_samples += self.curve.used(self._position) - self.curve.used(self.durable)
        self._ended()
        return self._settings.stop * self._resize_s

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where it is now, whole steps counted."""
        if self.phase is not Phase.TRAINING:
            return self._position if self.phase is not Phase.GONE else self.durable
        return self._after(self._interval.samples(self._timeline.now, self._left))

    @property
    def drained_for(self) -> int | None:
        """Number of the drain order that it has answered by a checkpoint and now waits for, None while it does not."""
        return self._obeyed if self.phase is Phase.DRAINED else None

    @property
    def goodput(self) -> float:
        """Progress/s now; 0 unless it trains."""
        if self.phase is not Phase.TRAINING:
            return 0.0
        app = self.application
        return self._interval.rate * float(app.efficiencies(self.batch)[app.epoch(self._position.progress)])

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
        """Samples from the interval's beginning to the end of the pass."""
        return self.curve.dataset - self._interval.at.cursor

    def _hold(self, gpus: Mapping[str, int]) -> None:
        """Train on so many GPUs of each node, as fast as the slowest of them."""
        self.nodes, self._placement = dict(gpus), tuple(gpus.values())
        slowest = min((self.speeds.get(name, 1.0) for name in gpus), default=1.0)
        self._slowdown = Slowdown(1.0 / slowest, self._slowdown.exchange)

    def _then(self, time: float, action: Callable[[], None]) -> None:
        if self._event is not None:
            self._event.cancel()
        self._event = self._timeline.at(time, action)

    def _ended(self) -> None:
        if self._event is not None:
            self._event.cancel()
        self.phase = Phase.GONE

    def _in_force(self, wanted: int) -> int:
        """As the wrapper does: what its ranks take, in multiples; a batch that its strategy keeps stays."""
        limits = self.application.limits(self._position.progress)
        if limits is not None and limits.batch_fixed and self.batch:
            return self.batch
        row = limits.at(self.gpus) if limits is not None else None
        batch = max(1, min(wanted, self.application.max_batch))
        return max(batch // row.quantum, 1) * row.quantum if row is not None else batch

    def _check_size(self) -> None:
        """Note a size that its strategy cannot use: a real job would end there."""
        limits = self.application.limits(self.durable.progress)
        if limits is None:
            return
        row = limits.at(self.gpus)
        parted = row is not None and len(self._placement) > 1 and any(gpus % row.together for gpus in self._placement)
        if row is None or parted:
            self.misplaced.append(f"{limits.strategy} on {'+'.join(map(str, self._placement))} GPUs")

    def _loaded(self) -> None:
        """Everything is loaded: say so, and train. An order that waits sets the batch; a drain waits for a boundary."""
        self._order_due = False
        if self.files is not None:
            self.files.reread_order()
            order = self.files.order
            if order is not None and order.restart <= self._restart:
                if order.batch is not None:
                    self._position = replace(self._position, wanted=order.batch)
                self._order_due = order.drain and order.restart == self._restart
                self._obeyed = order.number - self._order_due
        self.batch = self._in_force(self._position.wanted)
        self._reporter.hello(self._position, self.batch, self._placement, self._launch_s, self._load_s, self._restart)
        self._timeline.changed = True
        self._checkpoint_at = self._timeline.now + self._settings.checkpoint_s if self.files is not None else math.inf
        self._train()

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train on from here."""
        self.phase = Phase.TRAINING
        self._reporter.tell(self._position)
        # Of several kinds of GPU the slowest sets the pace.
        rate = min(self.speed_on(kind) for kind in {self.kinds.get(name, "") for name in self.nodes})
        self._interval = Interval(self._timeline.now, self._position, self.batch, rate)
        self._schedule_boundary()

    def _schedule_boundary(self) -> None:
        """Let the next thing happen that is due, at its step boundary."""
        interval, left = self._interval, self._left
        due = [self._reporter.due, self._checkpoint_at]
        if self._order_due:
            due.append(self._timeline.now)
        samples = interval.boundary(min(due), left)
        to_end = self.curve.samples_left(interval.at, self.batch)
        samples = min(samples, max(math.ceil(to_end / self.batch - 1e-9), 1) * self.batch, left)
        self._then(interval.begun + samples / interval.rate, lambda: self._boundary(samples))

    def _after(self, samples: int) -> Position:
        return self.curve.use(self._interval.at, samples, self.batch, math.ceil(samples / self.batch))

    def _count_training(self, samples: int) -> None:
        """Count what was trained since the interval began, and begin another at this boundary."""
        now = self._timeline.now
        self._position = self._after(samples)
        self.trained_s += (now - self._interval.begun) * self.gpus
        self._reporter.ran(now - self._interval.begun)
        self._interval = Interval(now, self._position, self.batch, self._interval.rate)

    def _boundary(self, samples: int) -> None:
        """A step ended at which something is due."""
        now = self._timeline.now
        self._count_training(samples)
        gives_up = False
        if self._position.cursor >= self.curve.dataset:
            gives_up = self._end_epoch()
        if gives_up or self.curve.finished(self._position):
            self._finish()
            return
        if self._order_due:
            self._order_due = False
            if self._obey():
                return
        if now >= self._checkpoint_at - 1e-6:
            self._save(self._settings.stall_s, None)
            return
        if now >= self._reporter.due - 1e-6:
            self._reporter.throughput(self._position, self.batch)
        self._train()

    def _end_epoch(self) -> bool:
        """Report the pass and go on to the next; whether patience is at its end."""
        ended = self._position
        self._position, gives_up = self.curve.next_pass(ended)
        self._reporter.epoch(ended, self.batch)
        return gives_up

    def _finish(self) -> None:
        self._reporter.throughput(self._position, self.batch)
        self._reporter.bye(self._position, "finished")
        self.durable = self._position
        self.finished = True
        self._ended()
        self.exited(0)

    # -- what an oracle does with it -----------------------------------------------------------------------------

    def speed_on(self, kind: str) -> float:
        """Samples/s if all its GPUs were of that kind."""
        app = self.on[kind].at(self._position.progress)
        return app.placed_speed(self._placement, float(self.batch or self._position.wanted), self._slowdown)

    def save_at_once(self, wanted: int) -> None:
        """Leave a checkpoint that costs nothing; its next run begins there, with that batch."""
        self._count_until_now()
        self.durable = self._position = replace(self._position, wanted=wanted)

    def go_on(self, gpus: Mapping[str, int], batch: int, pause_s: float) -> None:
        """Stand still for a while, then train on with these GPUs and that batch."""
        self._count_until_now()
        self._hold(gpus)
        self.phase = Phase.SWITCHING
        self._position = replace(self._position, wanted=batch)
        self.batch = self._in_force(batch)
        self._then(self._timeline.now + pause_s, self._train)

    def adjust(self, batch: int, exchange: float) -> None:
        """Train on with that batch, and gradient exchange that takes so many times longer."""
        if (batch, exchange) == (self._position.wanted, self._slowdown.exchange):
            return
        self._count_until_now()
        self._slowdown = self._slowdown._replace(exchange=exchange)
        self._position = replace(self._position, wanted=batch)
        if self.phase is Phase.TRAINING:
            self.batch = self._in_force(batch)
            self._train()

    def _count_until_now(self) -> None:
        if self.phase is Phase.TRAINING:
            self._count_training(self._interval.samples(self._timeline.now, self._left))

    # -- orders and checkpoints ----------------------------------------------------------------------------------

    def check_orders(self) -> None:
        """Look for an order that came while nothing happened here; called before time goes on."""
        if self.files is None or self.phase in (Phase.GONE, Phase.LAUNCHING) or not self.files.newer_order():
            return
        if self.phase is Phase.TRAINING:
            self._order_due = True
            self._schedule_boundary()
        elif self.phase is Phase.DRAINED and self._new_order() is not None:
            self._then(self._timeline.now + ORDER_POLL_S, self._resume)

    def _new_order(self) -> Order | None:
        """The order in force, if it has not been obeyed."""
        order = self.files.order if self.files is not None else None
        is_new = order is not None and order.restart <= self._restart and order.number > self._obeyed
        return order if is_new else None

    def _resume(self) -> None:
        """A newer order came, or no requeue: train on, and obey at the next boundary."""
        self._order_due = self._new_order() is not None
        self._train()

    def _obey(self) -> bool:
        """Do what the order in force says; True where training stops for it."""
        order = self._new_order()
        if order is None:
            return False
        self._obeyed = order.number
        if order.batch is not None:
            self._change_batch(order.batch, order.number)
        if order.drain and order.restart == self._restart:
            self._save(self._settings.save * self._resize_s, order.number)
            return True
        return False

    def _change_batch(self, wanted: int, number: int) -> None:
        self._reporter.throughput(self._position, self.batch)
        self._position = replace(self._position, wanted=wanted)
        self.batch = self._in_force(wanted)
        self._reporter.batch(self._position, self.batch, number)

    def _save(self, seconds: float, order: int | None) -> None:
        self._reporter.throughput(self._position, self.batch)
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
            self._resume()
            return
        self.durable = at
        self._reporter.checkpoint(at, name, seconds, order)
        self._checkpoint_at = now + self._settings.checkpoint_s
        if order is None:
            self._resume()
            return
        self._timeline.changed = True
        self.phase = Phase.DRAINED
        self._then(now + (DRAIN_WAIT_S if self._new_order() is None else ORDER_POLL_S), self._resume)
