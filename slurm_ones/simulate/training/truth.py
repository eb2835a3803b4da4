"""What an oracle is shown of a simulated job: its true curves, and what is truly left of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slurm_ones.policy.contract import ClusterView, Floats, Ints, Limits, SizeRule
from slurm_ones.policy.shapes import nodes_of, strategy_counts, takes, valid_counts
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.training.training import Training


@dataclass(frozen=True)
class TrueModel:
    """What a job truly does from here on, as both of a policy's models."""

    application: Application
    done: float
    """Progress in samples of the base batch."""

    def throughput(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """See `policy.contract.ThroughputModel`."""
        return self.application.throughput(nodes, gpus, batches)

    def uncertainty(self, nodes: Ints, gpus: Ints, batches: Ints) -> Floats:
        """None."""
        return np.zeros(np.shape(gpus))

    def efficiency(self, batches: Ints) -> Floats:
        """See `policy.contract.EfficiencyModel`."""
        return self.application.efficiency(self.done, batches)


def remaining_s(training: Training, cluster: ClusterView) -> float:
    """Seconds that a job still needs at the size and batch that its user asked for."""
    app, asked = training.application, training.submission
    gpus = min(asked.gpus, cluster.gpus)
    nodes, batch = nodes_of(cluster, gpus), float(training.requested_batch)
    return app.seconds(nodes, min(gpus, app.max_gpus), batch, training.position.progress, app.total * asked.epochs)


def limits_of(training: Training, cluster: ClusterView) -> Limits:
    """Sizes and batches that a job can have; of one that did not opt in what it asked for alone."""
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
