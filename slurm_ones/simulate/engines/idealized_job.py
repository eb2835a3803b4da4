"""One job as it trains under the assumptions of the published studies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.schedule.policy import ClusterView, Floats, Ints, JobView, Limits, Progress, SizeRule
from slurm_ones.schedule.shapes import nodes_of, strategy_counts, takes, valid_counts
from slurm_ones.simulate.engines.idealized_placement import Plan
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.training.gpu_kinds import on_kind
from slurm_ones.simulate.training.mechanism import Hot, Mechanism
from slurm_ones.simulate.training.network import NONE, Slowdown
from slurm_ones.simulate.training.strategies import TrainedBy
from slurm_ones.simulate.training.training_progress import EarlyStopping

EPSILON = 1e-9
SETTLED_S = 120.0
"""A hot job moves to fewer nodes so long after it was last given any."""


@dataclass(frozen=True)
class TrueModel:
    """What a job truly does from here on, as both of a policy's models."""

    application: Application
    done: float
    """Progress in samples of the base batch."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """See `schedule.policy.ThroughputModel`."""
        return self.application.throughput(nodes, gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """None."""
        return np.zeros(np.shape(gpus))

    def efficiency(self, batches: Ints) -> Floats:
        """See `schedule.policy.EfficiencyModel`."""
        return self.application.efficiency(self.done, batches)


class Variants:
    """Applications as they are on each kind of GPU, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Application] = {}

    def of(self, app: Application, kind: str) -> Application:
        """The application on that kind."""
        key = app.name, kind
        if key not in self._known:
            self._known[key] = on_kind(app, kind)
        return self._known[key]


@dataclass
class Change:
    """GPUs that a job is to get, or to move to."""

    shape: Shape
    nodes: dict[str, int]
    """GPUs of the job on each node once they have joined."""
    batch: int
    begins_s: float = 0.0
    """Until others have left the last of them."""
    left_s: float = 0.0
    """From then on until they are ready."""


@dataclass(frozen=True)
class Stretch:
    """Seconds in which a job held the same GPUs."""

    start: float
    end: float
    nodes: Mapping[str, int]
    batch: int


@dataclass
class IdealizedJob:
    """One job as it trains."""

    job_id: int
    submission: Submission
    application: Application
    cluster: ClusterView
    mechanism: Mechanism
    done: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    shape: Shape | None = None
    batch: int = 0
    change: Change | None = None
    """Of a hot job that is to start or to grow."""
    starting: bool = False
    """It has not trained since it started."""
    paused: float = 0.0
    """Seconds that it still stands still."""
    started: float | None = None
    ended: float | None = None
    running_s: float = 0.0
    gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    resizes: int = 0
    changed_epoch: int = 0
    placed: float = 0.0
    """When it was last given nodes."""
    slowdown: Slowdown = NONE
    """What its place costs it, from the last decision on."""
    promised: bool | None = None
    """Whether its deadline was promised; None until a schedule says so."""
    variants: Variants = field(default_factory=lambda: Variants())
    """The applications on each kind of GPU, shared by the jobs of a run."""

    def __post_init__(self) -> None:
        app, asked = self.application, self.submission
        self._early_stopping = EarlyStopping(app)
        self._kind_of = {node.name: node.kind for node in self.cluster.nodes}
        self._on = {kind: self.variants.of(app, kind) for kind in self.cluster.kinds}
        self.requested_batch = min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch)
        self.requested_nodes = nodes_of(self.cluster, asked.gpus)
        most = min(app.max_gpus, self.cluster.gpus)
        counts = valid_counts(self.cluster, 1, most) if asked.elastic else ()
        batch = self.requested_batch
        # Nobody may change the batch of a job that did not opt in.
        low, high = (app.min_batch or app.base_batch, app.max_batch) if asked.elastic else (batch, batch)
        self.limits = Limits(tuple(sorted({*counts, min(asked.gpus, self.cluster.gpus)})), low, high, app.max_batch)
        if app.by is not None:
            self.limits = self._by_strategy(app.by, most)

    def _by_strategy(self, by: TrainedBy, most: int) -> Limits:
        """The limits of a job with a strategy, of which its batches are not told."""
        batch = self.application.max_batch
        rows = by.limits(most, self.application.max_local_batch).sizes
        rules = tuple(SizeRule(row.gpus, row.replicas, batch, row.quantum, row.together) for row in rows)
        limits = replace(self.limits, rules=rules, strategy=by.name)
        possible = [n for n in strategy_counts(self.cluster, rules, 1, most) if takes(limits, n)]
        return replace(limits, gpus=tuple(n for n in possible if self.submission.elastic or n == self.submission.gpus))

    @property
    def total(self) -> float:
        """Progress at which it is done."""
        return self.application.total * self.submission.epochs

    @property
    def deadline(self) -> float | None:
        """When its user wants it to have ended."""
        asked = self.submission
        return None if asked.deadline_s is None else asked.time + asked.deadline_s

    @property
    def goodput(self) -> float:
        """Progress/s at its size, placement and batch."""
        return self._speed * float(self.application.efficiencies(self.batch)[self.application.epoch(self.done)])

    @property
    def _speed(self) -> float:
        placement, batch = tuple(self.nodes.values()), float(self.batch)
        kinds = {self._kind_of[name] for name in self.nodes}
        # Of several kinds the slowest sets the pace.
        return min(self._on[kind].at(self.done).placed_speed(placement, batch, self.slowdown) for kind in kinds)

    @property
    def kind(self) -> str:
        """Of the GPUs that it has the kind which sets its pace; where it has none, the most frequent one here."""
        kinds = {self._kind_of[name] for name in self.nodes}
        if len(kinds) == 1:
            return kinds.pop()
        if not kinds:
            gpus = {kind: self.cluster.of_kind(kind).gpus for kind in self.cluster.kinds}
            return max(gpus, key=gpus.__getitem__)
        placement, batch = tuple(self.nodes.values()), float(self.batch)
        return min(kinds, key=lambda kind: self._on[kind].at(self.done).placed_speed(placement, batch))

    def start(self, now: float, shape: Shape, nodes: dict[str, int], batch: int) -> None:
        """Hold these GPUs from now on."""
        if self.started is None:
            self.started = now
        else:
            self.resizes += 1
        self.starting = True
        self._hold(shape, nodes, batch, self.mechanism.start_s(self.application))

    def scattered(self, now: float) -> bool:
        """Whether it has for a while been on more nodes than it needs; one that did not opt in stays there."""
        if not self.submission.elastic:
            return False
        needed = nodes_of(self.cluster, sum(self.nodes.values()))
        return len(self.nodes) > needed and now - self.placed >= SETTLED_S

    def go(self, now: float, shape: Shape, plan: Plan, batch: int) -> None:
        """Come to the shape as planned: at once where that takes no GPU that it has not."""
        app, self.placed = self.application, now
        if self.shape is None and not plan.wait_s:
            self.start(now, shape, plan.nodes, batch)
            return
        if self.shape is not None and plan.keeps != self.nodes:
            self._hold(Shape(1, sum(plan.keeps.values())), plan.keeps, self.batch, self.mechanism.shrink_s(app))
            if plan.nodes == plan.keeps:
                self.resizes += 1
                return
        if plan.wait_s or any(gpus > self.nodes.get(name, 0) for name, gpus in plan.nodes.items()):
            self.change = Change(shape, plan.nodes, batch, plan.wait_s, self.mechanism.prepare_s(app))
        else:
            self.resizes += 1
            self._hold(shape, plan.nodes, batch, self.mechanism.shrink_s(app))

    def _hold(self, shape: Shape, nodes: dict[str, int], batch: int, pause_s: float) -> None:
        self.shape, self.nodes, self.batch, self.paused = shape, nodes, batch, pause_s
        self.changed_epoch = int(self.done / self.application.dataset)

    @property
    def held(self) -> dict[str, int]:
        """GPUs that it holds on each node, those that prepare included."""
        if self.change is None or self.change.begins_s > EPSILON:
            return dict(self.nodes)
        return united(self.nodes, self.change.nodes)

    def stop(self) -> None:
        """Hold no GPUs any more."""
        self.shape, self.nodes, self.change = None, {}, None

    def run(self, now: float, seconds: float) -> list[Stretch]:
        """Train for `seconds` from `now` on, or to the end; what it held meanwhile."""
        found, end = [], now + seconds
        change = self.change
        if change is not None:
            waits = min(change.begins_s, end - now)
            found.append(self._train(now, waits))
            now, change.begins_s = now + waits, change.begins_s - waits
            if change.begins_s <= EPSILON and self.ended is None:
                if self.shape is None:
                    self.change = None
                    self.start(now, change.shape, change.nodes, change.batch)
                else:
                    prepares = min(change.left_s, end - now)
                    found.append(self._train(now, prepares))
                    now, change.left_s = now + prepares, change.left_s - prepares
                    if change.left_s <= EPSILON and self.ended is None:
                        self.change = None
                        self.resizes += 1
                        pause = self.mechanism.grow_s(self.application)
                        self._hold(change.shape, change.nodes, change.batch, pause)
        if self.ended is None:
            found.append(self._train(now, end - now))
        return [stretch for stretch in found if stretch is not None]

    def _train(self, now: float, seconds: float) -> Stretch | None:
        """Train with the GPUs that are in, while it holds what it holds; None where it holds none, or for no time."""
        if not self.nodes or seconds <= EPSILON:
            return None
        held = self.held
        count, joined = sum(held.values()), sum(self.nodes.values())
        wait = min(self.paused, seconds)
        self.paused -= wait
        left = seconds - wait
        self.starting &= left <= EPSILON
        speed, worth, ends = self._speed, self.application.efficiencies(self.batch), self.application.ends
        while left > EPSILON and self.ended is None:
            row = self.application.epoch(self.done)
            end = min(float(ends[row]), self.total)
            rate = speed * float(worth[row])
            needed = max(end - self.done, 0.0) / rate
            step = min(needed, self._early_stopping.room / speed, left)
            left -= step
            self.done = end * (1 + 1e-12) if step == needed else self.done + rate * step
            gives_up = self._early_stopping.use(step * speed, self.done)
            if gives_up or (step == needed and end >= self.total * (1 - 1e-12)):
                self.ended = now + seconds - left
        self.running_s += seconds - left
        self.gpu_s += (seconds - left) * count
        self.lost_gpu_s += wait * count + (seconds - left - wait) * (count - joined)
        return Stretch(now, self.ended or now + seconds, held, self.batch)

    def view(self) -> JobView:
        """What a policy is shown of it."""
        app, asked = self.application, self.submission
        epochs = self.done / app.dataset
        left = max(self.total - self.done, 1.0) / app.dataset
        several = len(self.cluster.kinds) > 1
        models = {kind: TrueModel(self._on[kind], self.done) for kind in self.cluster.kinds}
        true_model = models[self.kind] if several else next(iter(models.values()))
        hot = isinstance(self.mechanism, Hot)
        # Whatever is under way is shown as done.
        at = self.change or self
        fixed = None
        if hot and (self.change is not None or self.starting):
            fixed = reason("resize_under_way" if self.change is not None else "nothing_reported")
        return JobView(
            job_id=self.job_id,
            submitted=asked.time,
            requested=asked.gpus,
            requested_batch=self.requested_batch,
            shape=at.shape,
            nodes=dict(at.nodes),
            batch=at.batch or self.requested_batch,
            base_batch=app.base_batch,
            limits=self.limits,
            model=true_model,
            efficiency=true_model,
            progress=Progress(max(epochs, 0.5), left, most=left),
            samples=self.done,
            dataset=app.dataset,
            epochs=int(epochs),
            epochs_since_change=int(epochs) - self.changed_epoch,
            running_s=self.running_s,
            resizes=self.resizes,
            resize_s=self.mechanism.grow_s(app),
            shrink_s=self.mechanism.shrink_s(app) if hot else None,
            prepare_s=self.mechanism.prepare_s(app),
            fixed=fixed,
            deadline=self.deadline,
            promised=self.promised,
            on=models if several else {},
            true_remaining_s=app.seconds(
                self.requested_nodes, min(asked.gpus, app.max_gpus), float(self.requested_batch), self.done, self.total
            ),
        )


def united(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The most GPUs of each node in either."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in [*one, *(n for n in other if n not in one)]}
