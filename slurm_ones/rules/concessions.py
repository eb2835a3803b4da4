"""Who holds what on which node while room is made, and what the cheapest way to more of it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from slurm_ones.rules.rigid import Claim, Release, Waiting
from slurm_ones.schedule.placement import fixed_jobs
from slurm_ones.schedule.policy import ClusterView, JobView
from slurm_ones.schedule.shapes import least_and_most, shape_of

TRIES = 32
"""Nodes that are looked at in one decision for whether jobs can be moved off them."""


class Step(NamedTuple):
    """A job goes down to a smaller size in place."""

    job_id: int
    given_up: int
    """GPUs in all."""
    freed: int
    """GPUs on the node in question."""
    kept: dict[str, int]


_State = tuple[dict[str, int], dict[int, dict[str, int]], dict[int, Claim]]


class Floor:
    """The GPUs of a cluster's nodes, free and held, as claims are served one after the other."""

    def __init__(self, cluster: ClusterView, jobs: Sequence[JobView], waiting: Waiting) -> None:
        self._cluster = cluster
        self._ranks = waiting.ranks
        self._free = dict(waiting.free)
        self._jobs = {job.job_id: job for job in jobs if job.shape is not None}
        self.held = {job.job_id: dict(job.nodes) for job in self._jobs.values()}
        """GPUs of each job by node."""
        self._known: dict[tuple[int, str, bool], list[Step]] = {}
        staying = fixed_jobs(cluster, jobs)
        self._on: dict[str, list[int]] = {}
        """Jobs that may change now, by node."""
        for job in self._jobs.values():
            for name in job.nodes if job.job_id not in staying else ():
                self._on.setdefault(name, []).append(job.job_id)
        self.yields: dict[int, Claim] = {}
        """Jobs that gave up something, and the first claim that they did so for."""
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
                other for node in touched for id_ in self._on.get(node, ()) for other in self.held[id_]
            }:
                if name in prices and name not in chosen:
                    prices[name] = self._price(name, claim)
        return True

    def _state(self) -> _State:
        return dict(self._free), dict(self.held), dict(self.yields)

    def _restore(self, state: _State) -> None:
        self._free, self.held, self.yields = state
        self._known.clear()

    def _vacate(self, claim: Claim, chosen: Sequence[str]) -> str | None:
        """A node on which the claim has room once jobs have moved off it, at smaller sizes; None, with nothing changed,
        where none is found among those that fewest GPUs must leave."""
        left = {
            name: sum(self.held[id_].get(name, 0) for id_ in jobs)
            for name, jobs in self._on.items()
            if name in self._free and name not in chosen
        }
        possible = [name for name, gpus in left.items() if self._free[name] + gpus >= claim.gpus_per_node]
        for name in sorted(possible, key=lambda name: (left[name], name)):
            if not self._tries:
                return None
            self._tries -= 1
            before = self._state()
            for job_id in sorted(self._on[name], key=lambda id_: (-self.held[id_].get(name, 0), id_)):
                if self._price(name, claim) is not None:
                    break
                if self.held[job_id].keys() == {name} and self.comes_first(claim, job_id):
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
        job, now = self._jobs[job_id], self.held[job_id][name]
        best: tuple[int, int, str, tuple[Step, ...], int] | None = None
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
            self._apply(Step(job_id, now - gpus, now, {other: gpus}), claim)

    def starts_in(self, claim: Claim, releases: Sequence[Release]) -> float:
        """Seconds until the claim has room at the latest, infinite where nobody knows; all that elastic jobs may be
        asked for counts as there already, also of those that may not change now."""
        room = dict(self._free)
        for job_id, held in self.held.items():
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

    def comes_first(self, claim: Claim, job_id: int) -> bool:
        """Whether Slurm would start the claim's job before that one."""
        return job_id in self._ranks and claim.rank < self._ranks[job_id]

    def _price(self, name: str, claim: Claim) -> tuple[Step, ...] | None:
        """The steps of fewest GPUs in all that give the claim its GPUs on that node; None where none do."""
        short = claim.gpus_per_node - self._free[name]
        if short <= 0:
            return ()
        best: dict[int, tuple[int, tuple[Step, ...]]] = {0: (0, ())}
        for job_id in self._on.get(name, ()):
            if name not in self.held[job_id]:
                continue
            steps = self._steps(job_id, name, claim)
            for freed, (cost, chosen) in list(best.items()):
                for step in steps:
                    total, now = cost + step.given_up, min(short, freed + step.freed)
                    if now not in best or total < best[now][0]:
                        best[now] = total, (*chosen, step)
        return best[short][1] if short in best else None

    def _steps(self, job_id: int, name: str, claim: Claim) -> list[Step]:
        """What the job could go down to so that it has less on that node."""
        first = self.comes_first(claim, job_id)
        if (known := self._known.get((job_id, name, first))) is not None:
            return known
        job, held = self._jobs[job_id], self.held[job_id]
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
                found.append(Step(job_id, now - gpus, held[name] - kept.get(name, 0), kept))
        return found

    def _apply(self, step: Step, claim: Claim) -> set[str]:
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
        # Of several claims it is told the first.
        self.yields.setdefault(step.job_id, claim)
        return touched
