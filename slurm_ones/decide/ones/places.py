"""What leaf switches cost the search: sizes that need several are slower, and slower still where jobs meet on links.

What of a step is gradient exchange follows from a job's model: its step on several nodes, less that of one GPU with the
same local batch. Where a size needs more than one leaf switch, that takes `taper` times longer, and a larger batch may
be the best, in which it is a smaller share. How
many jobs meet on a link is not known before they are placed; a candidate whose jobs across leaf switches use E ends of
links, of L leaf switches, has about E / L of them on each. Which nodes a job gets is Slurm's choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ones_db.reasons import Reason, reason
from slurm_ones.decide.ones.terms import Penalty, Priced, Term
from slurm_ones.decide.ones.worth import Choices
from slurm_ones.schedule.policy import Bools, ClusterView, Floats, Ints, JobView, ThroughputModel
from slurm_ones.schedule.tables import SLOWEST, Tables, ask_together, speeds_of_one


class Leaves(Term):
    """Leaf switches in the objective."""

    def tapered(self, cluster: ClusterView, jobs: Sequence[JobView]) -> list[JobView]:
        """The jobs as fast as they are across leaf switches, where a size needs several."""
        if not _known(cluster):
            return list(jobs)
        below = max(below_each(cluster).values())
        return [replace(job, model=Tapered(job.model, below, cluster.taper)) for job in jobs]

    def penalty(self, at: Priced, choices: Choices, dear: float) -> Penalty | None:
        cluster, needed = at.cluster, leaves_needed(at.cluster, at.tables.sizes)
        if not _known(cluster) or not (needed > 1).any():
            return None
        ends = np.where(needed > 1, needed / len({node.leaf for node in cluster.nodes}), 0.0)
        lost = np.where(needed > 1, exchange_shares(at.tables), 0.0)
        value = np.where(np.isfinite(choices.worth), np.maximum(choices.worth, 0.0), 0.0)
        rows = np.arange(len(value))

        def meeting(candidates: Ints) -> Floats:
            meets = np.maximum(ends[candidates].sum(axis=1) - 1.0, 0.0)
            if not meets.any():
                return np.zeros(len(candidates))
            each = lost[rows, candidates] * meets[:, None]
            found: Floats = (value[rows, candidates] * each / (1.0 + each)).sum(axis=1)
            return found

        return meeting

    def reasons(self, at: Priced, columns: Ints) -> Mapping[int, Reason]:
        """Of jobs that the next larger size would bring across leaf switches, where that size would be worth its GPUs
        if it did not: more than nothing where they are free, else more than anybody's last GPUs bring at least."""
        if not _known(at.cluster):
            return {}
        sizes, needed, taper = at.tables.sizes, leaves_needed(at.cluster, at.tables.sizes), at.cluster.taper
        across = np.where(needed > 1, 1.0 - exchange_shares(at.tables) * (taper - 1.0) / taper, 1.0)
        rows = np.arange(len(columns))
        held, free = at.speed[rows, columns], at.nodes.gpus - int(sizes[columns].sum())
        last = []
        for j in np.flatnonzero(columns).tolist():
            before = _next(at.tables.allowed[j, : columns[j]][::-1])
            u = columns[j] - 1 - before if before is not None else 0
            less = at.speed[j, u] if u else 0.0
            last.append(at.unit[j] * (held[j] - less) / (sizes[columns[j]] - sizes[u]))
        found = {}
        for j in np.flatnonzero(columns).tolist():
            above = _next(at.tables.allowed[j, columns[j] + 1 :])
            if above is None or needed[v := columns[j] + 1 + above] <= needed[columns[j]]:
                continue
            more = int(sizes[v] - sizes[columns[j]])
            price = 0.0 if more <= free else min(last)
            slower, faster = at.speed[j, v], at.speed[j, v] / across[j, v]
            if at.unit[j] * (slower - held[j]) / more <= price < at.unit[j] * (faster - held[j]) / more:
                found[at.tables.jobs[j].job_id] = reason(
                    "within_switches",
                    gpus=int(sizes[columns[j]]),
                    switches=int(needed[columns[j]]),
                    more=int(sizes[v]),
                    taper=at.cluster.taper,
                )
        return found


class Tapered:
    """A model of throughput where gradients take `taper` times as long on more GPUs than are `below` a leaf switch."""

    def __init__(self, model: ThroughputModel, below: int, taper: float) -> None:
        self._model, self._below, self._taper = model, below, taper

    @classmethod
    def together(cls, models: Sequence[Tapered]) -> Tapered:
        """Models of jobs of one cluster, asked at once."""
        return cls(ask_together([one._model for one in models]), models[0]._below, models[0]._taper)

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        speed = np.asarray(self._model.throughput(nodes, gpus, batches), dtype=np.float64)
        far = (gpus > self._below) & (nodes > 1)
        if not far.any():
            return speed
        local, one = np.maximum(batches // np.maximum(gpus, 1), 1), np.ones_like(gpus)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = batches / speed
            exchange = np.maximum(step - local / self._model.throughput(one, one, local), 0.0)
            return np.where(far, batches / (step + (self._taper - 1.0) * exchange), speed)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        return self._model.uncertainty(nodes, gpus, batches)


def _known(cluster: ClusterView) -> bool:
    """Whether the network is tapered and nodes differ by their places alone: kinds of GPUs are decided one by one."""
    return cluster.taper > 1 and len({node.leaf for node in cluster.nodes}) > 1 and len(cluster.kinds) <= 1


def _next(there: Bools) -> int | None:
    """The first place that is true."""
    found = np.flatnonzero(there)
    return int(found[0]) if len(found) else None


def exchange_shares(tables: Tables) -> Floats:
    """(J, U) part of a step that is gradient exchange, at sizes of several nodes; 0 at others."""
    several = tables.allowed & (tables.nodes > 1)
    columns = np.flatnonzero(several.any(axis=0))
    shares = np.zeros(tables.speed.shape)
    if not len(columns):
        return shares
    batch, gpus = tables.batch[:, columns], tables.sizes[columns]
    local = np.maximum(batch // gpus, 1)
    alone = local / speeds_of_one(tables.jobs, local)
    step = batch / np.maximum(tables.speed[:, columns], SLOWEST)
    shares[:, columns] = np.clip(1.0 - alone / np.maximum(step, 1e-12), 0.0, 1.0)
    return np.where(several, shares, 0.0)


def below_each(cluster: ClusterView) -> Counter[str]:
    """GPUs below each leaf switch."""
    found: Counter[str] = Counter()
    for node in cluster.nodes:
        found[node.leaf] += node.gpus
    return found


def leaves_needed(cluster: ClusterView, sizes: Ints) -> Ints:
    """(U,) fewest leaf switches that so many GPUs are below."""
    most = np.cumsum(sorted(below_each(cluster).values(), reverse=True))
    found: Ints = np.searchsorted(most, sizes) + 1
    return np.minimum(found, len(most))
