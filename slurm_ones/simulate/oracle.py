"""Oracle that replaces the companion: its policy is given each job's true curves, and schedules take effect at once.

Published studies make the same assumptions. Cluster and jobs are as in other simulations, but nothing waits for Slurm,
nothing is learned, and writing a checkpoint takes no time. Only starts and resizes of jobs take time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.policy.contract import (
    Allocation,
    ClusterView,
    Floats,
    Ints,
    JobView,
    Limits,
    NodeView,
    Policy,
    Progress,
    Schedule,
    SizeRule,
)
from slurm_ones.policy.shapes import nodes_of, strategy_counts, takes, valid_counts
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import Nodes, slowdowns
from slurm_ones.simulate.training.application import Application, Hot, Mechanism, on_kind
from slurm_ones.simulate.training.training import Phase, Training
from slurm_ones.simulate.world import World

Placement = Literal["pack", "spread"]
"""Placement rule. "pack" places the largest job first, on the nodes with the fewest free GPUs that suffice. "spread"
places jobs in the schedule's order, on the emptiest nodes, as Pollux's study does for rival policies."""
IMMEDIATE = ClusterSettings(requeue_delay_s=0.0, ending_s=0.0, save=0.0, stop=0.0, launch=1.0, load=0.0)
"""Cluster settings in which only the start of a job takes time."""
SETTLED_S = 120.0
"""Seconds after a resize from memory (`Hot`) before the job may move to fewer nodes."""


@dataclass
class _OracleJob:
    """State of a job under the oracle."""

    record: SimulatedJob
    training: Training
    cluster: ClusterView
    mechanism: Mechanism
    batch: int = 0
    shape: Shape | None = None
    """Shape of the job; during a change, the new shape. None without GPUs."""
    target: dict[str, int] | None = None
    """GPUs on each node after the change that is under way; None if no change is."""
    changed_epoch: int = 0
    placed: float = 0.0
    """Time at which the job last got nodes."""
    promised: bool | None = None

    def __post_init__(self) -> None:
        self.limits = limits_of(self.training, self.cluster)
        self.batch = self.training.requested_batch

    @property
    def job_id(self) -> int:
        return self.record.job_id

    @property
    def own(self) -> dict[str, int]:
        """GPUs on each node with which the job trains now."""
        return {} if self.shape is None else dict(self.training.nodes)

    @property
    def kind(self) -> str:
        """Slowest kind of the job's GPUs. Without GPUs, the kind that is most frequent in the cluster."""
        kinds = {self.training.kinds[name] for name in self.own}
        if len(kinds) == 1:
            return kinds.pop()
        if not kinds:
            gpus = {kind: self.cluster.of_kind(kind).gpus for kind in self.cluster.kinds}
            return max(gpus, key=gpus.__getitem__)
        return min(kinds, key=self.training.speed_on)

    def differs(self, got: Allocation) -> bool:
        """Return True if the allocation has another number or another kind of GPUs than the job."""
        return self.shape is None or got.shape.gpus != self.shape.gpus or got.kind not in ("", self.kind)

    def scattered(self, now: float) -> bool:
        """Return True if the elastic job is on more nodes than it needs, and got them at least `SETTLED_S` seconds
        ago."""
        least = -(-sum(self.training.nodes.values()) // self.cluster.gpus_per_node)
        return self.training.submission.elastic and len(self.training.nodes) > least and now - self.placed >= SETTLED_S

    def view(self, world: World) -> JobView:
        """Return the job as the policy sees it. During a change, this is the job after the change."""
        training, mechanism = self.training, self.mechanism
        app, asked, done = training.application, training.submission, training.position.progress
        epochs, left = done / app.dataset, max(app.total * asked.epochs - done, 1.0) / app.dataset
        models = {kind: TrueModel(on, done) for kind, on in training.on.items()}
        model = models[self.kind] if len(models) > 1 else next(iter(models.values()))
        fixed = None
        if isinstance(mechanism, Hot) and self.busy:
            fixed = reason("resize_under_way" if self.target is not None else "nothing_reported")
        return JobView(
            job_id=self.record.job_id,
            submitted=asked.time,
            requested=asked.gpus,
            requested_batch=training.requested_batch,
            shape=self.shape,
            nodes=self.target or self.own,
            batch=self.batch,
            base_batch=app.base_batch,
            limits=self.limits,
            model=model,
            efficiency=model,
            progress=Progress(max(epochs, 0.5), left, most=left),
            samples=done,
            dataset=app.dataset,
            epochs=int(epochs),
            epochs_since_change=int(epochs) - self.changed_epoch,
            running_s=sum(one.end - one.start for one in self.record.held(world.timeline.now)),
            resizes=training.changes or 0,
            resize_s=mechanism.grow_s(app),
            shrink_s=mechanism.shrink_s(app) if isinstance(mechanism, Hot) else None,
            prepare_s=mechanism.prepare_s(app),
            fixed=fixed,
            deadline=None if asked.deadline_s is None else asked.time + asked.deadline_s,
            promised=self.promised,
            on=models if len(models) > 1 else {},
            true_remaining_s=remaining_s(training, self.cluster),
        )

    @property
    def busy(self) -> bool:
        """True while the job starts, or while it prepares new GPUs."""
        return self.target is not None or self.training.phase is Phase.LAUNCHING


class Oracle:
    """Stand-in for the companion: it gives a policy the true curves, and carries schedules out at once.

    A job changes nodes only if its number or kind of GPUs changes, or to get onto fewer nodes. A job that is resized
    from memory (`Hot`) holds its new GPUs at once, and trains on the old ones until the new ones are ready.
    """

    def __init__(self, world: World, policy: Policy, placement: Placement, seed: int) -> None:
        self._world = world
        self._policy = policy
        self._cluster = world.spec.view
        self._spread = placement == "spread"
        self._rng = np.random.default_rng(seed)
        self._on: dict[str, dict[str, Application]] = {}
        self._jobs: dict[int, _OracleJob] = {}

    @property
    def promises(self) -> dict[int, bool]:
        """Answers to users' deadlines so far, by job id: True for a promise, False for a refusal."""
        return {i: job.promised for i, job in self._jobs.items() if job.promised is not None}

    def tick(self) -> list[float]:
        """Let the policy decide, and carry its schedule out. Return a list with the real seconds of the decision; empty
        if there are no jobs."""
        live = self._live()
        if not live:
            return []
        views, began = [job.view(self._world) for job in live], time.perf_counter()
        schedule = self._policy.decide(self._cluster, views, self._world.seconds, self._rng)
        seconds = time.perf_counter() - began
        self._apply(schedule, live)
        return [seconds]

    def _live(self) -> list[_OracleJob]:
        ids = [*self._world.cluster.records.live_ids()]
        self._jobs.update({job_id: self._known(job_id) for job_id in ids if job_id not in self._jobs})
        return [self._jobs[job_id] for job_id in ids]

    def _known(self, job_id: int) -> _OracleJob:
        training = self._world.trainings[job_id]
        app = training.application
        if app.name not in self._on:
            self._on[app.name] = {kind: on_kind(app, kind) for kind in self._cluster.kinds}
        training.kinds = {node.name: node.kind for node in self._cluster.nodes}
        training.on = self._on[app.name]
        return _OracleJob(self._world.cluster.jobs[job_id], training, self._cluster, self._world.mechanism)

    def _apply(self, schedule: Schedule, live: Sequence[_OracleJob]) -> None:
        """Carry the schedule out, except for jobs whose last change is still under way."""
        hot = isinstance(self._world.mechanism, Hot)
        changing, settled = set[int](), list[_OracleJob]()
        for job in live:
            got = schedule.allocations.get(job.job_id)
            if hot and job.busy:
                continue
            if got is not None and not job.differs(got):
                job.batch = got.batch
                settled.append(job)
                continue
            if job.shape is not None and (got is None or not hot):
                self._stop(job)
            if got is not None:
                changing.add(job.job_id)
        changes = {i: got for i, got in schedule.allocations.items() if i in changing}
        if hot and changes and not self._spread:
            now = self._world.timeline.now
            changes |= {
                job.job_id: Allocation(job.shape, job.batch, job.kind)
                for job in settled
                if job.shape is not None and job.scattered(now)
            }
        self._change(changes, {job.job_id for job in settled})
        for job in live:
            if job.job_id in schedule.promises:
                job.promised = schedule.promises[job.job_id].given
        places = [job.training.nodes if job.shape is not None else {} for job in live]
        for job, slowdown in zip(live, slowdowns(self._cluster, places), strict=True):
            job.training.adjust(job.training.position.wanted if job.busy else job.batch, slowdown.exchange)

    def _change(self, changes: Mapping[int, Allocation], optional: Collection[int]) -> None:
        """Start and resize jobs. A job in `optional` is moved only if it then uses fewer nodes."""
        world = self._world
        world.timeline.run(world.timeline.now)
        asked = [
            GpuChange(i, got.shape, self._jobs[i].own, got.kind, optional=i in optional) for i, got in changes.items()
        ]
        free = {
            name: gpus
            for spec in world.cluster.nodes.partitions
            for name, gpus in world.cluster.nodes.free(spec).items()
        }
        plans = plan_changes(self._cluster, free, asked, spread=self._spread)
        if not isinstance(world.mechanism, Hot) and len(plans) < len(changes):
            raise ValueError(f"the schedule cannot be placed: {changes.keys() - plans.keys()} find no room")
        for job_id, plan in plans.items():
            self._leave(self._jobs[job_id], plan, changes[job_id])
        world.timeline.run(world.timeline.now)
        for job_id, plan in plans.items():
            self._take(self._jobs[job_id], plan, changes[job_id])

    def _stop(self, job: _OracleJob) -> None:
        job.training.save_at_once(job.batch)
        self._world.cluster.requeue(job.job_id, hold=True)
        job.shape, job.target = None, None

    def _leave(self, job: _OracleJob, plan: GpuPlan, got: Allocation) -> None:
        """Free the GPUs that the job gives up under its plan."""
        if not job.own or plan.keeps == job.own:
            return
        if not plan.keeps:
            self._stop(job)
            return
        self._world.cluster.place(job.job_id, plan.keeps)
        batch = got.batch if plan.keeps == plan.nodes else job.training.position.wanted
        job.training.go_on(plan.keeps, batch, self._world.mechanism.shrink_s(job.training.application))

    def _take(self, job: _OracleJob, plan: GpuPlan, got: Allocation) -> None:
        """Give the job its new GPUs. A waiting job starts on them; a running job trains with them once they are
        ready."""
        world, training = self._world, job.training
        app, fresh = training.application, job.shape is None
        job.shape, job.batch, job.placed = got.shape, got.batch, world.timeline.now
        job.changed_epoch = int(training.position.progress / app.dataset)
        training.changes = 0 if training.changes is None else training.changes + 1
        if fresh:
            training.save_at_once(got.batch)
            world.cluster.place(job.job_id, plan.nodes)
        elif plan.nodes != plan.keeps:
            job.target = plan.nodes
            world.cluster.place(job.job_id, dict(Counter(plan.keeps) | Counter(plan.nodes)))
            world.timeline.after(world.mechanism.prepare_s(app), lambda: self._join(job, plan.nodes))

    def _join(self, job: _OracleJob, nodes: dict[str, int]) -> None:
        if job.target is nodes and job.record.running:
            job.target = None
            self._world.cluster.place(job.job_id, nodes)
            job.training.go_on(nodes, job.batch, self._world.mechanism.grow_s(job.training.application))


@dataclass(frozen=True)
class TrueModel:
    """True throughput and efficiency of a job, in place of the learned models."""

    application: Application
    done: float
    """Progress of the job in samples of the base batch."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return self.application.throughput(nodes, gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return np.zeros(np.shape(gpus))

    def efficiency(self, batches: Ints) -> Floats:
        return self.application.efficiency(self.done, batches)


def remaining_s(training: Training, cluster: ClusterView) -> float:
    """Return the remaining seconds of a job at its requested size and batch."""
    app, asked = training.application, training.submission
    gpus = min(asked.gpus, cluster.gpus)
    nodes, batch = nodes_of(cluster, gpus), float(training.requested_batch)
    return app.seconds(nodes, min(gpus, app.max_gpus), batch, training.position.progress, app.total * asked.epochs)


def limits_of(training: Training, cluster: ClusterView) -> Limits:
    """Return the sizes and batches that a job may have: for a rigid job, only those that its user requested."""
    app, asked = training.application, training.submission
    most = min(app.max_gpus, cluster.gpus)
    counts = valid_counts(cluster, 1, most) if asked.elastic else ()
    low = (app.min_batch or app.base_batch) if asked.elastic else training.requested_batch
    high = app.max_batch if asked.elastic else low
    limits = Limits(tuple(sorted({*counts, min(asked.gpus, cluster.gpus)})), low, high, app.max_batch)
    if app.by is None:
        return limits
    rows = app.by.limits(most, app.max_local_batch).sizes
    rules = tuple(SizeRule(row.gpus, row.replicas, app.max_batch, row.quantum, row.together) for row in rows)
    limits = replace(limits, rules=rules, strategy=app.by.name)
    possible = [n for n in strategy_counts(cluster, rules, 1, most) if takes(limits, n)]
    return replace(limits, gpus=tuple(n for n in possible if asked.elastic or n == asked.gpus))


def place(shape: Shape, free: Nodes, cluster: ClusterView, *, spread: bool = False, kind: str = "") -> dict[str, int]:
    """Return GPUs on each node for a job of this shape, all of one `kind`; empty if there are too few.

    By default, the kind with the fewest free GPUs that suffice is chosen. Kinds are mixed only if no kind has enough.
    Slow nodes are used only if the other nodes do not suffice.
    """
    kinds: dict[str, list[NodeView]] = {}
    for node in cluster.nodes:
        kinds.setdefault(node.kind, []).append(node)
    rising = sorted(kinds.values(), key=lambda nodes: sum(free.get(node.name, 0) for node in nodes))
    tries = [kinds.get(kind, [])] if kind else rising
    if not kind and len(kinds) > 1:
        tries.append(list(cluster.nodes))
    for nodes in tries:
        for some in ([node for node in nodes if node.speed >= 1], nodes):
            if found := _below_few(shape, free, some, cluster.uniform, spread):
                return found
    return {}


def place_near(
    shape: Shape, free: Nodes, cluster: ClusterView, own: Nodes, *, spread: bool = False, kind: str = ""
) -> dict[str, int]:
    """Place a job as `place` does, but prefer the job's `own` nodes.

    Of both placements, the one on fewer nodes is chosen; if equal, the one that leaves fewer GPUs free on its nodes.
    """
    found = place(shape, free, cluster, spread=spread, kind=kind)
    if not (found and own) or spread or cluster.uniform or len(cluster.kinds) > 1:
        return found
    near = {name: gpus for name, gpus in free.items() if name in own and gpus > 0}
    left = shape.gpus - sum(near.values())
    if left > 0:
        near |= place(Shape(1, left), {name: gpus for name, gpus in free.items() if name not in own}, cluster)
    else:
        near = place(shape, near, cluster)

    def cost(nodes: Nodes) -> tuple[int, int]:
        return len(nodes), sum(free[name] - gpus for name, gpus in nodes.items())

    return near if cost(near) <= cost(found) else found


def _below_few(shape: Shape, free: Nodes, nodes: Sequence[NodeView], uniform: bool, spread: bool) -> dict[str, int]:
    """Return GPUs on each node, chosen as Slurm's topology/tree chooses them.

    Of the leaf switches with enough free GPUs, the one with the fewest is used. If none has enough, the one with the
    most is combined with others.
    """
    leaves: dict[str, dict[str, int]] = {}
    for node in nodes:
        if node.name in free:
            leaves.setdefault(node.leaf, {})[node.name] = free[node.name]
    rising, chosen = sorted(leaves.values(), key=lambda room: sum(room.values())), dict[str, int]()
    while rising:
        for room in rising:
            if found := _filled(shape, chosen | room, uniform, spread):
                return found
        chosen |= rising.pop()
    return {}


def _filled(shape: Shape, free: Nodes, uniform: bool, spread: bool) -> dict[str, int]:
    """Return GPUs on each node, from the nodes with the fewest free GPUs that suffice; with `spread`, from the emptiest
    nodes."""
    if uniform:
        fitting = sorted((gpus, name) for name, gpus in free.items() if gpus >= shape.gpus_per_node)
        return {name: shape.gpus_per_node for _, name in fitting[: shape.nodes]} if len(fitting) >= shape.nodes else {}
    found: dict[str, int] = {}
    left = shape.gpus
    while left > 0 and (room := {name: gpus for name, gpus in free.items() if gpus > 0 and name not in found}):
        enough = {name: gpus for name, gpus in room.items() if gpus >= left and not spread}
        name = min(enough, key=enough.__getitem__) if enough else max(room, key=room.__getitem__)
        found[name] = min(left, free[name])
        left -= found[name]
    return {} if left else found


class GpuChange(NamedTuple):
    """Requested change of a job's GPUs."""

    job_id: int
    shape: Shape
    own: Nodes
    kind: str = ""
    optional: bool = False
    """True if the job keeps its number of GPUs, and moves only onto fewer nodes."""


class GpuPlan(NamedTuple):
    """Plan for one job: the GPUs on each node after the change, and those that it keeps until then."""

    nodes: dict[str, int]
    keeps: dict[str, int]
    """GPUs on each node with which the job trains until its new GPUs are ready."""


def plan_changes(
    cluster: ClusterView, free: Nodes, changes: Sequence[GpuChange], *, spread: bool
) -> dict[int, GpuPlan]:
    """Plan the GPUs of jobs that change, by job id. A job that does not fit gets no plan, and keeps its GPUs.

    The GPUs of all these jobs are pooled and given out again, to the largest job first (with `spread`, in the given
    order). A job trains on its old GPUs until the new ones are ready. It gives up at once the old GPUs that another job
    gets.
    """
    changes = list(changes) if spread else sorted(changes, key=lambda one: -one.shape.gpus)
    while True:
        room, targets, stays = Counter(free), dict[int, dict[str, int]](), set[int]()
        for one in changes:
            room.update(one.own)
        for one in changes:
            own = {} if spread else one.own
            target = place_near(one.shape, room, cluster, own, spread=spread, kind=one.kind)
            if not target or (one.optional and len(target) >= len(one.own)):
                stays.add(one.job_id)
            targets[one.job_id] = target
            room.subtract(target)
        if not stays:
            break
        changes = [one for one in changes if one.job_id not in stays]
    plans = {}
    for one in changes:
        target = targets[one.job_id]
        leaves = Counter(one.own) - Counter(target)
        kept = all(room[name] >= gpus for name, gpus in leaves.items()) and bool(Counter(target) - Counter(one.own))
        if kept:
            room.subtract(leaves)
        plans[one.job_id] = GpuPlan(target, dict(one.own if kept else Counter(one.own) & Counter(target)))
    return plans
