"""Room for jobs that cannot be resized, taken from elastic ones before a policy decides.

Which jobs give up how much does not depend on the policy: it is shown a cluster without what rigid jobs are to get,
on which the jobs that make room have their smaller shape already, and keeps them so as it keeps every `fixed` job.

What is guaranteed, of rigid jobs that wait for GPUs alone, in Slurm's order of priority:

- Running elastic jobs that may change in this round give up what they have beyond what they asked for, to any of them;
  and to those that come before them in Slurm's order all beyond their minimum.
- They do so only where a rigid job then has room: on the nodes where fewest GPUs are given up, in place; where that is
  not enough, jobs of one node move off it to be smaller elsewhere, for rigid ones that come before them. (Slurm starts
  these first, on what a requeue frees.) Which jobs move is found greedily: not in every case in which there is a way.
- One that would have to wait all the same takes nothing, and those after it only get room that they give back in
  time, by their time limit (EASY backfill, see `simulate.scheduler`).
- No job goes below its owner's minimum or to a size that its limits do not allow.

What is not: a job within its dwell time, in the middle of a resize, near its end or resized too often keeps what it
has, so a rigid job may wait that long. Slurm starts whom it likes in what was given up, mostly the first of its queue.
Jobs are asked to give up GPUs, not CPUs, memory, licences or a node that was asked for by name. A requeue gives a job
its whole time limit anew, so Slurm's plan for a rigid job that waits for an elastic one's end may move with it; that
job's GPUs come free when its training ends all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.policy.build import fixed_jobs
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.policy.shapes import least_and_most, shape_of
from slurm_ones.policy.tables import build_tables
from slurm_ones.rules.rigid import PendingJob, Release, RigidDemand
from slurm_ones.slurm.model import kind_of

TRIES = 32
"""Nodes that are looked at in one decision for whether jobs can be moved off them."""


@dataclass(frozen=True)
class Reclaimed:
    """What the policy is to see, and why the jobs that make room are smaller."""

    cluster: ClusterView
    jobs: Sequence[JobView]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Of each job that shrinks."""
    served: tuple[int, ...] = ()
    """Rigid jobs that have room then, side by side."""


def make_room(cluster: ClusterView, jobs: Sequence[JobView], demand: RigidDemand) -> Reclaimed:
    """The cluster and the jobs once rigid jobs have got what they need; as they are where nobody has to yield."""
    if not demand.pending:
        return Reclaimed(cluster, jobs)
    reclaimer = Reclaimer(cluster, jobs, demand)
    reserved, served = math.inf, []
    for pending in demand.pending:
        if pending.limit_s > reserved:
            continue
        if reclaimer.make_room_for(pending):
            served.append(pending.job_id)
        else:
            reserved = min(reserved, reclaimer.starts_in(pending, demand.releases))
    return replace(_reclaimed(cluster, jobs, reclaimer), served=tuple(served))


def annotate(schedule: Schedule, reclaimed: Reclaimed) -> Schedule:
    """The schedule with the jobs that make room at their smaller shape, with the reason."""
    if not reclaimed.reasons:
        return schedule
    views = {job.job_id: job for job in reclaimed.jobs}
    kinds = {node.name: node.kind for node in reclaimed.cluster.nodes}
    smaller = {}
    for id_ in reclaimed.reasons:
        view = views[id_]
        if view.shape:
            kind = kind_of(view.nodes, kinds)
            smaller[id_] = Allocation(view.shape, view.batch, kind="" if "," in kind else kind)
    return replace(
        schedule,
        allocations={**schedule.allocations, **smaller},
        reasons={**schedule.reasons, **reclaimed.reasons},
        parked=schedule.parked - smaller.keys(),
    )


def _reclaimed(cluster: ClusterView, jobs: Sequence[JobView], reclaimer: Reclaimer) -> Reclaimed:
    """What the policy is to see."""
    if not reclaimer.shrunk_for:
        return Reclaimed(cluster, jobs)
    given: dict[str, int] = {}
    views, reasons = [], {}
    for job in jobs:
        pending = reclaimer.shrunk_for.get(job.job_id)
        if pending is None or job.shape is None:
            views.append(job)
            continue
        kept = reclaimer.held[job.job_id]
        for name in {**job.nodes, **kept}:
            given[name] = given.get(name, 0) + job.nodes.get(name, 0) - kept.get(name, 0)
        # One node with all GPUs stands for nodes that give unequally many.
        uniform = len({*kept.values()}) == 1
        shape = Shape(len(kept), max(kept.values())) if uniform else Shape(1, sum(kept.values()))
        reasons[job.job_id] = _reason(job, shape, pending, reclaimer.comes_first(pending, job.job_id))
        batch = _batch(cluster, job, shape.gpus)
        views.append(replace(job, shape=shape, nodes=kept, batch=batch, fixed=reasons[job.job_id]))
    nodes = tuple(replace(node, gpus=node.gpus - given.get(node.name, 0)) for node in cluster.nodes)
    return Reclaimed(replace(cluster, nodes=nodes, node_gpus=cluster.gpus_per_node), views, reasons)


def _batch(cluster: ClusterView, job: JobView, gpus: int) -> int:
    """The job's batch at that size."""
    tables = build_tables(cluster, [job])
    return int(tables.batch[0, tables.sizes.tolist().index(gpus)])


def _reason(job: JobView, shape: Shape, pending: PendingJob, first: bool) -> Reason:
    assert job.shape is not None
    need = str(Shape(pending.nodes, pending.gpus_per_node))
    before, gpus = job.shape.gpus, shape.gpus
    if first:
        return reason("makes_room_for_priority", before=before, gpus=gpus, job=pending.job_id, shape=need)
    return reason(
        "makes_room", before=before, gpus=gpus, job=pending.job_id, shape=need, requested=max(job.requested, 0)
    )


class Shrink(NamedTuple):
    """A job goes down to a smaller size in place."""

    job_id: int
    given_up: int
    """GPUs in all."""
    freed: int
    """GPUs on the node in question."""
    kept: dict[str, int]


_State = tuple[dict[str, int], dict[int, dict[str, int]], dict[int, PendingJob]]


class Reclaimer:
    """The GPUs of a cluster's nodes, free and held, as room is made for pending jobs one after the other."""

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], demand: RigidDemand) -> None:
        self._cluster = cluster
        self._ranks = demand.ranks
        self._free = dict(demand.free)
        self._kinds = {node.name: node.kind for node in cluster.nodes}
        self._jobs = {job.job_id: job for job in jobs if job.shape is not None}
        self.held = {job.job_id: dict(job.nodes) for job in self._jobs.values()}
        """GPUs of each job by node."""
        self._known: dict[tuple[int, str, bool], list[Shrink]] = {}
        staying = fixed_jobs(cluster, jobs)
        self._on: dict[str, list[int]] = {}
        """Jobs that may change now, by node."""
        for job in self._jobs.values():
            for name in job.nodes if job.job_id not in staying else ():
                self._on.setdefault(name, []).append(job.job_id)
        self.shrunk_for: dict[int, PendingJob] = {}
        """Jobs that gave up something, and the first pending that they did so for."""
        self._tries = TRIES

    def make_room_for(self, pending: PendingJob) -> bool:
        """Let jobs give up what the pending needs; False, with nothing changed, where that is not enough."""
        before = self._state()
        prices = {name: self._price(name, pending) for name in self._free}
        chosen: list[str] = []
        while len(chosen) < pending.nodes:
            # Of nodes that cost nothing the fullest, as Slurm does.
            best = min(
                (name for name, price in prices.items() if price is not None and name not in chosen),
                key=lambda name: (sum(step.given_up for step in prices[name] or ()), self._free[name], name),
                default=None,
            )
            if best is None:
                best = self._vacate(pending, chosen)
                if best is None:
                    self._restore(before)
                    return False
                self._free[best] -= pending.gpus_per_node
                chosen.append(best)
                prices = {name: self._price(name, pending) for name in self._free}
                continue
            touched = {best}
            for step in prices[best] or ():
                touched |= self._apply(step, pending)
            self._free[best] -= pending.gpus_per_node
            chosen.append(best)
            for name in touched | {
                other for node in touched for id_ in self._on.get(node, ()) for other in self.held[id_]
            }:
                if name in prices and name not in chosen:
                    prices[name] = self._price(name, pending)
        return True

    def _state(self) -> _State:
        return dict(self._free), dict(self.held), dict(self.shrunk_for)

    def _restore(self, state: _State) -> None:
        self._free, self.held, self.shrunk_for = state
        self._known.clear()

    def _vacate(self, pending: PendingJob, chosen: Sequence[str]) -> str | None:
        """A node on which the pending job has room once others have moved off it, at smaller sizes; None, with nothing
        changed, where none is found among those that fewest GPUs must leave."""
        left = {
            name: sum(self.held[id_].get(name, 0) for id_ in jobs)
            for name, jobs in self._on.items()
            if name in self._free and name not in chosen and self._gives(name, pending.kind)
        }
        possible = [name for name, gpus in left.items() if self._free[name] + gpus >= pending.gpus_per_node]
        for name in sorted(possible, key=lambda name: (left[name], name)):
            if not self._tries:
                return None
            self._tries -= 1
            before = self._state()
            for job_id in sorted(self._on[name], key=lambda id_: (-self.held[id_].get(name, 0), id_)):
                if self._price(name, pending) is not None:
                    break
                if self.held[job_id].keys() == {name} and self.comes_first(pending, job_id):
                    self._move(job_id, name, pending)
            steps = self._price(name, pending)
            if steps is not None:
                for step in steps:
                    self._apply(step, pending)
                return name
            self._restore(before)
        return None

    def _move(self, job_id: int, name: str, pending: PendingJob) -> None:
        """Let the job go down to a smaller size on another node, where that costs fewest GPUs; where it can."""
        job, now = self._jobs[job_id], self.held[job_id][name]
        best: tuple[int, int, str, tuple[Shrink, ...], int] | None = None
        for gpus in job.limits.gpus:
            shape = shape_of(self._cluster, gpus)
            least, most = least_and_most(job.limits, gpus)
            if gpus >= now or shape is None or least > most:
                continue
            need = replace(pending, nodes=1, gpus_per_node=gpus, kind=self._kinds.get(name, ""))
            for other in self._free:
                steps = self._price(other, need) if other != name else None
                if steps is not None:
                    cost = now - gpus + sum(step.given_up for step in steps)
                    found = (cost, self._free[other], other, steps, gpus)
                    best = found if best is None or found[:3] < best[:3] else best
        if best is not None:
            _, _, other, steps, gpus = best
            for step in steps:
                self._apply(step, pending)
            self._apply(Shrink(job_id, now - gpus, now, {other: gpus}), pending)

    def starts_in(self, pending: PendingJob, releases: Sequence[Release]) -> float:
        """Seconds until the pending job has room at the latest, infinite where nobody knows; all that elastic jobs may
        be asked for counts as there already, also of those that may not change now."""
        room = dict(self._free)
        for job_id, held in self.held.items():
            steps = [step for name in held for step in self._steps(job_id, name, pending)]
            least = min(steps, key=lambda step: -step.given_up, default=None)
            for name, gpus in held.items():
                if least is not None and name in room:
                    room[name] += gpus - least.kept.get(name, 0)
        for release in [Release(0.0, {}), *sorted(releases, key=lambda one: one.after_s)]:
            for name, gpus in release.gpus.items():
                if name in room:
                    room[name] += gpus
            enough = (gpus >= pending.gpus_per_node and self._gives(name, pending.kind) for name, gpus in room.items())
            if sum(enough) >= pending.nodes:
                return release.after_s
        return math.inf

    def comes_first(self, pending: PendingJob, job_id: int) -> bool:
        """Tell whether Slurm would start the pending job before that one."""
        return job_id in self._ranks and pending.rank < self._ranks[job_id]

    def _gives(self, name: str, kind: str) -> bool:
        """Tell whether the node's GPUs are of that kind, where one is asked for and the nodes' kinds are known."""
        return not kind or self._kinds.get(name, "") in ("", kind)

    def _price(self, name: str, pending: PendingJob) -> tuple[Shrink, ...] | None:
        """The steps of fewest GPUs in all that give the pending job its GPUs on that node; None where none do."""
        if not self._gives(name, pending.kind):
            return None
        short = pending.gpus_per_node - self._free[name]
        if short <= 0:
            return ()
        best: dict[int, tuple[int, tuple[Shrink, ...]]] = {0: (0, ())}
        for job_id in self._on.get(name, ()):
            if name not in self.held[job_id]:
                continue
            steps = self._steps(job_id, name, pending)
            for freed, (cost, chosen) in list(best.items()):
                for step in steps:
                    total, now = cost + step.given_up, min(short, freed + step.freed)
                    if now not in best or total < best[now][0]:
                        best[now] = total, (*chosen, step)
        return best[short][1] if short in best else None

    def _steps(self, job_id: int, name: str, pending: PendingJob) -> list[Shrink]:
        """What the job could go down to so that it has less on that node."""
        first = self.comes_first(pending, job_id)
        if (known := self._known.get((job_id, name, first))) is not None:
            return known
        job, held = self._jobs[job_id], self.held[job_id]
        now = sum(held.values())
        lowest = 1 if first else max(job.requested, 1)
        found = self._known[job_id, name, first] = []
        if job.smaller is not None:
            found += [
                Shrink(job_id, now - gpus, held[name] - kept.get(name, 0), dict(kept))
                for gpus, kept in job.smaller.items()
                if lowest <= gpus < now
                and gpus in job.limits.gpus
                and all(held.get(node, 0) >= count for node, count in kept.items())
            ]
            return found
        for gpus in job.limits.gpus:
            shape = shape_of(self._cluster, gpus)
            if not lowest <= gpus < now or shape is None or shape.nodes > len(held):
                continue
            least, most = least_and_most(job.limits, gpus)
            if least > most:
                continue
            # It keeps what is nearest to full, and the node in question only where it needs all.
            places = sorted(held, key=lambda node: (node == name, self._free.get(node, 0), node))[: shape.nodes]
            if all(held[node] >= shape.gpus_per_node for node in places):
                kept = dict.fromkeys(places, shape.gpus_per_node)
                found.append(Shrink(job_id, now - gpus, held[name] - kept.get(name, 0), kept))
        return found

    def _apply(self, step: Shrink, pending: PendingJob) -> set[str]:
        """The job has its smaller size; returns the nodes on which it has less."""
        held = self.held[step.job_id]
        touched = set()
        for name in {**held, **step.kept}:
            less = held.get(name, 0) - step.kept.get(name, 0)
            if less:
                touched.add(name)
                if name in self._free:
                    self._free[name] += less
            if step.job_id not in self._on.setdefault(name, []):
                self._on[name].append(step.job_id)
        for name in {**held, **step.kept}:
            for first in (False, True):
                self._known.pop((step.job_id, name, first), None)
        self.held[step.job_id] = step.kept
        # Of several pending jobs the first is named.
        self.shrunk_for.setdefault(step.job_id, pending)
        return touched
