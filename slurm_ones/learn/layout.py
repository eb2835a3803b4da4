"""What a job tells of its step: how samples are split, and what a rank sends, by number of GPUs.

Bytes are the strategy's own formula (`ones_wrapper.limits.SizeLimits`), or follow from the gradients of a job that is
plainly data parallel. So only the links' speed is left to be learned: of one job at one size, and then for all jobs
whose bytes are known. Of a job that tells none, what its exchange takes is learned from its measurements alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from ones_wrapper.limits import Limits
from ones_wrapper.protocol import Spec
from slurm_ones.schedule.policy import Bools, Floats, Ints

GIGABYTE = 1e9
NOTHING = 1e-12
"""Gigabytes that stand for none, in logarithms."""
NONE = float(np.log(NOTHING))
"""Its logarithm."""
LATENCY_GB = 0.005
"""As long as these take, an exchange takes at least, however few its bytes are: half a millisecond at 10 GB/s."""
ANY_LOCAL = 2.0**31
"""Samples of a pass, of a job that has not said."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows by number of GPUs, ascending; none of a job that is plainly data parallel."""

    max_local: float = ANY_LOCAL
    """Samples of a pass of each replica, where no row says less."""
    gpus: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    replicas: Floats = field(default_factory=lambda: np.zeros(0))
    local: Floats = field(default_factory=lambda: np.zeros(0))
    """Most samples of a replica's pass."""
    replica_gb: Floats = field(default_factory=lambda: np.zeros(0))
    """Sent by a rank within its replica, for each sample of the replica."""
    data_gb: Floats = field(default_factory=lambda: np.zeros(0))
    """Sent by a rank between replicas in a step."""
    gradient_gb: float = 0.0
    """Of the gradients of a job without rows; 0 where it has not said."""

    @cached_property
    def wired(self) -> bool:
        """Whether it tells what is sent at every size at which anything is."""
        if not len(self.gpus):
            return self.gradient_gb > 0
        several = self.gpus > 1
        return bool(several.any()) and bool((self.replica_gb + self.data_gb)[several].all())

    def split(self, gpus: Floats) -> tuple[Floats, Floats]:
        """Replicas, and the most samples of a pass of each, at numbers of GPUs that may not be among the rows."""
        if not len(self.gpus):
            return gpus, np.full(np.shape(gpus), self.max_local)
        row, there = self._rows(gpus)
        return np.where(there, self.replicas[row], gpus), np.where(there, self.local[row], self.max_local)

    def sent(self, nodes: Floats, gpus: Floats, batches: Floats) -> tuple[Floats, Floats]:
        """Logs of the gigabytes that a rank sends in a step inside its node, and to others. What a replica sends stays
        inside where nodes hold whole replicas. Around a ring of n ranks each sends 2 (n - 1) / n of the gradients."""
        if not len(self.gpus):
            ring = np.log(self.gradient_gb * 2.0 * (gpus - 1.0) / gpus + LATENCY_GB)
            return np.where(nodes > 1, NONE, ring), np.where(nodes > 1, ring, NONE)
        row, _ = self._rows(gpus)
        replicas = np.maximum(self.replicas[row], 1.0)
        within = self.replica_gb[row] * batches / replicas
        between = self.data_gb[row]
        several, each = nodes > 1, gpus / np.maximum(nodes, 1.0)
        parted = several & (np.mod(each, gpus / replicas) > 1e-9)
        outside = np.where(several, between, 0.0) + np.where(parted, within, 0.0)
        return np.log(np.maximum(within + between - outside, NOTHING)), np.log(np.maximum(outside, NOTHING))

    def _rows(self, gpus: Floats) -> tuple[Ints, Bools]:
        """The row of each number of GPUs, the next one where there is none, and whether it is that of the number."""
        row = np.minimum(np.searchsorted(self.gpus, gpus), len(self.gpus) - 1)
        there: Bools = self.gpus[row] == gpus
        return row, there


PLAIN = Layout()


@lru_cache(maxsize=1024)
def layout_of(spec: Spec | None) -> Layout:
    """The layout of a job by what it told."""
    if spec is None:
        return PLAIN
    most = max(float(spec.max_local_batch), 1.0)
    limits: Limits | None = spec.limits
    if limits is None or not limits.sizes:
        return Layout(most, gradient_gb=spec.gradient_bytes / GIGABYTE if limits is None else 0.0)
    rows = limits.sizes
    fits = [row.most_local(limits.memory_bytes) for row in rows]
    return Layout(
        most,
        np.array([row.gpus for row in rows], dtype=np.int64),
        np.array([float(row.replicas) for row in rows]),
        np.array([most if fit is None else max(min(most, float(fit)), 1.0) for fit in fits]),
        np.array([row.replica_bytes / GIGABYTE for row in rows]),
        np.array([row.data_bytes / GIGABYTE for row in rows]),
    )
