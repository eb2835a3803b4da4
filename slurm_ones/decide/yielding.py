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

from slurm_ones.decide.pinned import pinned
from slurm_ones.decide.policy import Allocation, ClusterView, JobView, NodeView, Schedule
from slurm_ones.decide.shapes import least_and_most, shape_of
from slurm_ones.decide.tables import build_tables
from slurm_ones.decide.waiting import Claim, Release, Waiting
from slurm_ones.slurm.model import Shape

TRIES = 32
"""Nodes that are looked at in one decision for whether jobs can be moved off them."""


@dataclass(frozen=True)
class Yielded:
    """What the policy is to see, and what the jobs that make room are told."""

    cluster: ClusterView
    jobs: Sequence[JobView]
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Of each job that shrinks."""
    served: tuple[int, ...] = ()
    """Rigid jobs that have room then, side by side."""


def make_room(cluster: ClusterView, jobs: Sequence[JobView], waiting: Waiting) -> Yielded:
    """The cluster and the jobs once rigid jobs have got what they need; as they are where nobody has to yield."""
    if not waiting.claims:
        return Yielded(cluster, jobs)
    floor = _Floor(cluster, jobs, waiting)
    reserved, served = math.inf, []
    for claim in waiting.claims:
        if claim.limit_s > reserved:
            continue
        if floor.serve(claim):
            served.append(claim.job_id)
        else:
            reserved = min(reserved, floor.starts_in(claim, waiting.releases))
    return replace(floor.result(jobs), served=tuple(served))


def tell(schedule: Schedule, yielded: Yielded) -> Schedule:
    """The schedule with the jobs that make room at their smaller shape, and told why."""
    if not yielded.reasons:
        return schedule
    views = {job.job_id: job for job in yielded.jobs}
    smaller = {id_: Allocation(shape, views[id_].batch) for id_ in yielded.reasons if (shape := views[id_].shape)}
    return replace(
        schedule,
        allocations={**schedule.allocations, **smaller},
        reasons={**schedule.reasons, **yielded.reasons},
        parked=schedule.parked - smaller.keys(),
    )


class _Step(NamedTuple):
    """A job goes down to a smaller size in place."""

    job_id: int
    given_up: int
    """GPUs in all."""
    freed: int
    """GPUs on the node in question."""
    kept: dict[str, int]


_State = tuple[dict[str, int], dict[int, dict[str, int]], dict[int, Claim]]


class _Floor:
    """Who holds what on which node while room is made."""

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], waiting: Waiting) -> None:
        self._cluster = cluster
        self._ranks = waiting.ranks
        self._free = dict(waiting.free)
        self._jobs = {job.job_id: job for job in jobs if job.shape is not None}
        self._held = {job.job_id: dict(job.nodes) for job in self._jobs.values()}
        self._known: dict[tuple[int, str, bool], list[_Step]] = {}
        staying = pinned(cluster, jobs)
        self._on: dict[str, list[int]] = {}
        """Jobs that may change now, by node."""
        for job in self._jobs.values():
            for name in job.nodes if job.job_id not in staying else ():
                self._on.setdefault(name, []).append(job.job_id)
        self._for: dict[int, Claim] = {}
        self._tries = TRIES

    def serve(self, claim: Claim) -> bool:
        """Let jobs give up what the claim needs; False, with nothing changed, where that is not enough."""
        before = self._state()
        prices = {name: self._price(name, claim) for name in self._free}
        chosen: list[str] = []
        while len(chosen) < claim.nodes:
            # Of nodes that cost nothing the fullest, as Slurm does.
            best = min(
                (name for name, price in prices.items() if price is not None and name not in chosen),
                key=lambda name: (sum(step.given_up for step in prices[name] or ()), self._free[name], name),
                default=None,
            )
            if best is None:
                best = self._vacate(claim, chosen)
                if best is None:
                    self._restore(before)
                    return False
                self._free[best] -= claim.gpus_per_node
                chosen.append(best)
                prices = {name: self._price(name, claim) for name in self._free}
                continue
            touched = {best}
            for step in prices[best] or ():
                touched |= self._apply(step, claim)
            self._free[best] -= claim.gpus_per_node
            chosen.append(best)
            for name in touched | {
                other for node in touched for id_ in self._on.get(node, ()) for other in self._held[id_]
            }:
                if name in prices and name not in chosen:
                    prices[name] = self._price(name, claim)
        return True

    def _state(self) -> _State:
        return dict(self._free), dict(self._held), dict(self._for)

    def _restore(self, state: _State) -> None:
        self._free, self._held, self._for = state
        self._known.clear()

    def _vacate(self, claim: Claim, chosen: Sequence[str]) -> str | None:
        """A node on which the claim has room once jobs have moved off it, at smaller sizes; None, with nothing changed,
        where none is found among those that fewest GPUs must leave."""
        left = {
            name: sum(self._held[id_].get(name, 0) for id_ in jobs)
            for name, jobs in self._on.items()
            if name in self._free and name not in chosen
        }
        possible = [name for name, gpus in left.items() if self._free[name] + gpus >= claim.gpus_per_node]
        for name in sorted(possible, key=lambda name: (left[name], name)):
            if not self._tries:
                return None
            self._tries -= 1
            before = self._state()
            for job_id in sorted(self._on[name], key=lambda id_: (-self._held[id_].get(name, 0), id_)):
                if self._price(name, claim) is not None:
                    break
                if self._held[job_id].keys() == {name} and self._comes_first(claim, job_id):
                    self._move(job_id, name, claim)
            steps = self._price(name, claim)
            if steps is not None:
                for step in steps:
                    self._apply(step, claim)
                return name
            self._restore(before)
        return None

    def _move(self, job_id: int, name: str, claim: Claim) -> None:
        """Let the job go down to a smaller size on another node, where that costs fewest GPUs; where it can."""
        job, now = self._jobs[job_id], self._held[job_id][name]
        best: tuple[int, int, str, tuple[_Step, ...], int] | None = None
        for gpus in job.limits.gpus:
            shape = shape_of(self._cluster, gpus)
            least, most = least_and_most(job.limits, gpus)
            if gpus >= now or shape is None or least > most:
                continue
            need = replace(claim, nodes=1, gpus_per_node=gpus)
            for other in self._free:
                steps = self._price(other, need) if other != name else None
                if steps is not None:
                    cost = now - gpus + sum(step.given_up for step in steps)
                    found = (cost, self._free[other], other, steps, gpus)
                    best = found if best is None or found[:3] < best[:3] else best
        if best is not None:
            _, _, other, steps, gpus = best
            for step in steps:
                self._apply(step, claim)
            self._apply(_Step(job_id, now - gpus, now, {other: gpus}), claim)

    def starts_in(self, claim: Claim, releases: Sequence[Release]) -> float:
        """Seconds until the claim has room at the latest, infinite where nobody knows; all that elastic jobs may be
        asked for counts as there already, also of those that may not change now."""
        room = dict(self._free)
        for job_id, held in self._held.items():
            steps = [step for name in held for step in self._steps(job_id, name, claim)]
            least = min(steps, key=lambda step: -step.given_up, default=None)
            for name, gpus in held.items():
                if least is not None and name in room:
                    room[name] += gpus - least.kept.get(name, 0)
        for release in [Release(0.0, {}), *sorted(releases, key=lambda one: one.after_s)]:
            for name, gpus in release.gpus.items():
                if name in room:
                    room[name] += gpus
            if sum(gpus >= claim.gpus_per_node for gpus in room.values()) >= claim.nodes:
                return release.after_s
        return math.inf

    def result(self, jobs: Sequence[JobView]) -> Yielded:
        """What the policy is to see."""
        if not self._for:
            return Yielded(self._cluster, jobs)
        given: dict[str, int] = {}
        views, reasons = [], {}
        for job in jobs:
            claim = self._for.get(job.job_id)
            if claim is None or job.shape is None:
                views.append(job)
                continue
            kept = self._held[job.job_id]
            for name in {**job.nodes, **kept}:
                given[name] = given.get(name, 0) + job.nodes.get(name, 0) - kept.get(name, 0)
            shape = Shape(len(kept), max(kept.values()))
            reasons[job.job_id] = _reason(job, shape, claim, self._comes_first(claim, job.job_id))
            batch = _batch(self._cluster, job, shape.gpus)
            views.append(replace(job, shape=shape, nodes=kept, batch=batch, fixed=reasons[job.job_id]))
        nodes = tuple(NodeView(node.name, node.gpus - given.get(node.name, 0)) for node in self._cluster.nodes)
        return Yielded(replace(self._cluster, nodes=nodes, node_gpus=self._cluster.gpus_per_node), views, reasons)

    def _comes_first(self, claim: Claim, job_id: int) -> bool:
        return job_id in self._ranks and claim.rank < self._ranks[job_id]

    def _price(self, name: str, claim: Claim) -> tuple[_Step, ...] | None:
        """The steps of fewest GPUs in all that give the claim its GPUs on that node; None where none do."""
        short = claim.gpus_per_node - self._free[name]
        if short <= 0:
            return ()
        best: dict[int, tuple[int, tuple[_Step, ...]]] = {0: (0, ())}
        for job_id in self._on.get(name, ()):
            if name not in self._held[job_id]:
                continue
            steps = self._steps(job_id, name, claim)
            for freed, (cost, chosen) in list(best.items()):
                for step in steps:
                    total, now = cost + step.given_up, min(short, freed + step.freed)
                    if now not in best or total < best[now][0]:
                        best[now] = total, (*chosen, step)
        return best[short][1] if short in best else None

    def _steps(self, job_id: int, name: str, claim: Claim) -> list[_Step]:
        """What the job could go down to so that it has less on that node."""
        first = self._comes_first(claim, job_id)
        if (known := self._known.get((job_id, name, first))) is not None:
            return known
        job, held = self._jobs[job_id], self._held[job_id]
        now = sum(held.values())
        lowest = 1 if first else max(job.requested, 1)
        found = self._known[job_id, name, first] = []
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
                found.append(_Step(job_id, now - gpus, held[name] - kept.get(name, 0), kept))
        return found

    def _apply(self, step: _Step, claim: Claim) -> set[str]:
        """The job has its smaller size; returns the nodes on which it has less."""
        held = self._held[step.job_id]
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
        self._held[step.job_id] = step.kept
        # Of several claims it is told the first.
        self._for.setdefault(step.job_id, claim)
        return touched


def _batch(cluster: ClusterView, job: JobView, gpus: int) -> int:
    """The job's batch at that size."""
    tables = build_tables(cluster, [job])
    return int(tables.batch[0, tables.sizes.tolist().index(gpus)])


def _reason(job: JobView, shape: Shape, claim: Claim, first: bool) -> str:
    assert job.shape is not None
    sizes = f"shrinks from {job.shape.gpus} to {shape.gpus} GPU{'s' if shape.gpus > 1 else ''}"
    need = f"job {claim.job_id}, which cannot be resized, waits for {claim.nodes}x{claim.gpus_per_node} GPUs"
    why = "and has the higher priority" if first else f"and this job asked for {job.requested}"
    return f"{sizes}: {need} {why} (limits.yield_to_rigid)"
