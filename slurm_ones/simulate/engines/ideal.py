"""A job as the published studies simulate it: its models are the truth, and a resize stops it for a fixed time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slurm_ones.schedule.policy import ClusterView, Floats, Ints, JobView, Limits, Progress
from slurm_ones.schedule.shapes import nodes_of, valid_counts
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.training.early_stopping import Patience
from slurm_ones.simulate.workloads.workload import Submission
from slurm_ones.slurm.model import Shape

EPSILON = 1e-9


@dataclass(frozen=True)
class Truth:
    """What a job truly does from here on, as both of a policy's models."""

    application: Application
    done: float
    """Progress in samples of the base batch."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """See `decide.policy.ThroughputModel`."""
        return self.application.throughput(nodes, gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """None."""
        return np.zeros(np.shape(gpus))

    def efficiency(self, batches: Ints) -> Floats:
        """See `decide.policy.EfficiencyModel`."""
        return self.application.efficiency(self.done, batches)


@dataclass
class IdealJob:
    """One job as it trains."""

    job_id: int
    submission: Submission
    application: Application
    cluster: ClusterView
    resize_s: float
    """Seconds that each start of it takes."""
    done: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    shape: Shape | None = None
    batch: int = 0
    paused: float = 0.0
    """Seconds that it still stands still."""
    started: float | None = None
    ended: float | None = None
    running_s: float = 0.0
    gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    resizes: int = 0
    changed_epoch: int = 0

    def __post_init__(self) -> None:
        app, asked = self.application, self.submission
        self._patience = Patience(app)
        self.requested_batch = min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch)
        self.requested_nodes = nodes_of(self.cluster, asked.gpus)
        most = min(app.max_gpus, self.cluster.gpus)
        counts = valid_counts(self.cluster, 1, most) if asked.elastic else ()
        self.limits = Limits(
            tuple(sorted({*counts, min(asked.gpus, self.cluster.gpus)})),
            app.min_batch or app.base_batch,
            app.max_batch,
            app.max_batch,
        )

    @property
    def total(self) -> float:
        """Progress at which it is done."""
        return self.application.total * self.submission.epochs

    @property
    def goodput(self) -> float:
        """Progress/s at its size, placement and batch."""
        return self._speed * float(self.application.efficiencies(self.batch)[self.application.epoch(self.done)])

    @property
    def _speed(self) -> float:
        return self.application.placed_speed(tuple(self.nodes.values()), float(self.batch))

    def start(self, now: float, shape: Shape, nodes: dict[str, int], batch: int) -> None:
        """Hold these GPUs from now on."""
        if self.started is None:
            self.started = now
        else:
            self.resizes += 1
        self.shape, self.nodes, self.batch = shape, nodes, batch
        self.paused = self.resize_s
        self.changed_epoch = int(self.done / self.application.dataset)

    def stop(self) -> None:
        """Hold no GPUs any more."""
        self.shape, self.nodes = None, {}

    def run(self, now: float, seconds: float) -> None:
        """Train for `seconds` from `now` on, or to the end."""
        if self.shape is None:
            return
        wait = min(self.paused, seconds)
        self.paused -= wait
        left = seconds - wait
        self.lost_gpu_s += wait * self.shape.gpus
        speed, worth, ends = self._speed, self.application.efficiencies(self.batch), self.application.ends
        while left > EPSILON and self.ended is None:
            row = self.application.epoch(self.done)
            end = min(float(ends[row]), self.total)
            rate = speed * float(worth[row])
            needed = max(end - self.done, 0.0) / rate
            step = min(needed, self._patience.room / speed, left)
            left -= step
            self.done = end * (1 + 1e-12) if step == needed else self.done + rate * step
            gives_up = self._patience.use(step * speed, self.done)
            if gives_up or (step == needed and end >= self.total * (1 - 1e-12)):
                self.ended = now + seconds - left
        self.running_s += seconds - left
        self.gpu_s += (seconds - left) * self.shape.gpus

    def view(self) -> JobView:
        """What a policy is shown of it."""
        app, asked = self.application, self.submission
        epochs = self.done / app.dataset
        truth = Truth(app, self.done)
        return JobView(
            job_id=self.job_id,
            submitted=asked.time,
            requested=asked.gpus,
            requested_batch=self.requested_batch,
            shape=self.shape,
            nodes=dict(self.nodes),
            batch=self.batch or self.requested_batch,
            base_batch=app.base_batch,
            limits=self.limits,
            model=truth,
            efficiency=truth,
            progress=Progress(max(epochs, 0.5), max(self.total - self.done, 1.0) / app.dataset),
            samples=self.done,
            dataset=app.dataset,
            epochs=int(epochs),
            epochs_since_change=int(epochs) - self.changed_epoch,
            running_s=self.running_s,
            resizes=self.resizes,
            resize_s=self.resize_s,
            true_remaining_s=app.seconds(
                self.requested_nodes, min(asked.gpus, app.max_gpus), float(self.requested_batch), self.done, self.total
            ),
        )
