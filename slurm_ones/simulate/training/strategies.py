"""Simulated jobs with a training strategy: the limits that each job reports, and its true speed.

Memory and sent bytes follow formulas of published systems, per transformer layer and optimizer step:

- ring attention (Li et al., 2021, arXiv 2105.13120)
- 2D tensor parallelism (Xu et al., 2021, arXiv 2104.05343)
- compressed exchange (Li et al., 2021, arXiv 2104.06069)
- leader SGD (Teng et al., 2019, arXiv 1905.10395)
- fused jobs (Wang et al., 2021, arXiv 2102.02344)

Links have one bandwidth inside a node, one between nodes, and a time per message. A job reports the bytes that it
sends, but not the bandwidths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from slurm_ones.policy.contract import Floats

FP32, FP16 = 4.0, 2.0
MEMORY = 16e9
"""Bytes of memory of a simulated GPU."""
MOST_ROWS = 256


@dataclass(frozen=True)
class Links:
    """Bandwidths between ranks, and the time per message."""

    inside: float = 10e9
    """Bytes/s to a GPU of the same node."""
    across: float = 1.5e9
    """Bytes/s to another node."""
    message_s: float = 15e-6
    """Additional seconds for each message."""

    def slower(self, factor: float) -> Links:
        """Return links on which everything takes `factor` times as long."""
        return Links(self.inside / factor, self.across / factor, self.message_s * factor)


@dataclass(frozen=True)
class TrainedBy:
    """Training strategy of a simulated job. A job in plain data parallel has none."""

    name: str
    parameters: float
    """Number of the model's parameters; for fused jobs, of all models together."""
    degree: int = 1
    """Number of GPUs of a replica; all are on one node."""
    fixed_bytes: float = 0.0
    """Bytes of memory on each GPU, besides those that grow with the batch."""
    sample_bytes: float = 0.0
    """Bytes of memory on each GPU, for each sample of its replica's local batch."""
    replica_bytes: float = 0.0
    """Bytes that a rank sends inside its replica, for each sample."""
    weight_bytes: float = 0.0
    """Bytes that a rank sends inside its replica in each pass, besides those for each sample."""
    shared: float = 1.0
    """Share of the parameters that a rank exchanges with other replicas."""
    element: float = FP32
    """Bytes per parameter in the exchange with other replicas."""
    period: int = 1
    """Number of steps from one exchange with other replicas to the next."""
    messages: int = 0
    """Number of messages that a rank sends inside its replica in each pass, one after the other."""
    quantum: int = 1
    """Number by which each replica's batch must be divisible."""
    packed: float = 1.0
    """Factor by which the exchange shrinks after `from_share` of the training. From then on the batch is fixed."""
    from_share: float = 2.0
    exact: bool = True
    reshards: bool = False
    carries: tuple[str, ...] = ()
    resets: tuple[str, ...] = ()
    min_steps: int = 0

    def frozen(self, share: float) -> bool:
        """Return True if the batch is fixed after this share of the training."""
        return share >= self.from_share

    def between(self, replicas: Floats | float, share: float) -> Floats | float:
        """Return the mean bytes that a rank sends to other replicas in a step."""
        ring = 2.0 * (replicas - 1.0) / np.maximum(replicas, 1.0) * self.shared * self.parameters * self.element
        return ring / self.period / (self.packed if self.frozen(share) else 1.0)

    def limits(self, most_gpus: int, local: int, share: float = 0.0) -> StrategyLimits:
        """Return the limits that the job reports after this `share` of its training, up to `most_gpus` GPUs. Bytes per
        sample are for passes of `local` samples."""
        sizes = range(self.degree, min(most_gpus, MOST_ROWS * self.degree) + 1, self.degree)
        rows = tuple(self._row(gpus, local, share) for gpus in sizes)
        frozen = self.frozen(share)
        return StrategyLimits(
            self.name, rows, int(MEMORY), self.exact, frozen, self.carries, self.resets, self.reshards, self.min_steps
        )

    def _row(self, gpus: int, local: int, share: float) -> SizeLimits:
        replicas = gpus // self.degree
        return SizeLimits(
            gpus,
            replicas,
            self.quantum * (replicas if self.degree > 1 else 1),
            self.degree,
            int(self.fixed_bytes),
            int(self.sample_bytes),
            int((self.replica_bytes * local + self.weight_bytes) / max(local, 1)),
            int(self.between(float(replicas), share)),
        )


@dataclass(frozen=True)
class StrategySpeed:
    """Step time of a job with a training strategy.

    Each pass computes, then exchanges inside the replica. The exchange with other replicas overlaps with both in part
    (see `catalogue.ParametricSpeed`).
    """

    by: TrainedBy
    fixed: float
    """Seconds of a pass, besides those for each sample."""
    sample: float
    """Seconds per sample on one GPU."""
    links: Links = Links()
    overlap: float = 1.6
    share: float = 0.0
    """Share of the training that is already done."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """See `application.Speed`. `local` is the local batch of a replica."""
        by, samples = self.by, np.asarray(local, dtype=np.float64)
        replicas = gpus / by.degree  # a part of one, where a job is timed on fewer GPUs than it can run on
        compute: Floats = self.fixed + self.sample * samples / by.degree
        if by.degree > 1 and gpus > 1:
            sent = by.replica_bytes * samples + by.weight_bytes
            compute = compute + sent / self.links.inside + by.messages * self.links.message_s
        if replicas <= 1:
            return compute, np.zeros_like(compute)
        link = self.links.inside if nodes == 1 else self.links.across
        exchange = float(by.between(replicas, self.share)) / link + 2.0 * replicas * self.links.message_s / by.period
        step = (compute**self.overlap + exchange**self.overlap) ** (1.0 / self.overlap)
        return step, step - compute

    def perturbed(self, compute: float, exchange: float) -> StrategySpeed:
        """Return this speed with compute times multiplied by `compute`, and exchange times by `exchange`."""
        return replace(
            self, fixed=self.fixed * compute, sample=self.sample * compute, links=self.links.slower(exchange)
        )

    def later(self) -> StrategySpeed:
        """Return the speed after `from_share` of the training, when the exchange is smaller."""
        return replace(self, share=self.by.from_share)


def ring(length: int, hidden: int, layers: int, degree: int) -> TrainedBy:
    """Return ring attention over N = `degree` GPUs.

    Each GPU has all weights, and a part of each sample's sequence. In each layer a GPU sends blocks of keys or values,
    each of length/N × hidden numbers: 2 (N - 1) blocks in the forward pass, 4 N - 2 in the backward pass.
    """
    block = length / degree * hidden * FP16 * layers
    parameters = 12.0 * hidden**2 * layers
    return TrainedBy(
        "ring",
        parameters,
        degree,
        fixed_bytes=4 * FP32 * parameters,
        sample_bytes=16.0 * length * hidden / degree * layers * FP16,
        replica_bytes=(2 * (degree - 1) + 4 * degree - 2) * block if degree > 1 else 0.0,
        messages=(6 * degree - 4) * layers,
        carries=("nothing: each rank has all weights",),
    )


def mesh(length: int, hidden: int, layers: int, side: int) -> TrainedBy:
    """Return 2D tensor parallelism on q × q GPUs (q = `side`), each with a part of the weights and of the activations.

    In each layer's forward pass a GPU sends (q - 1)/q² × (7 BLH + 12 H²) numbers, for batch B, length L and hidden size
    H. In the backward pass it sends twice as many.
    """
    degree, layer = side**2, 12.0 * hidden**2
    sent = 3.0 * (side - 1) / degree * layers * FP16
    return TrainedBy(
        "optimus2d",
        layer * layers,
        degree,
        fixed_bytes=4 * FP32 * layer * layers / degree,
        sample_bytes=16.0 * length * hidden / degree * layers * FP16,
        replica_bytes=sent * 7.0 * length * hidden,
        weight_bytes=sent * layer,
        shared=1.0 / degree,
        messages=12 * side * layers,
        quantum=side,
        reshards=True,
        min_steps=50,
        carries=("weights and moments, cut again",),
    )


def onebit(parameters: float, warm_up: float) -> TrainedBy:
    """Return 1-bit LAMB: ranks exchange 16-bit numbers during a share `warm_up` of the training, then 1-bit numbers.

    After the warm-up the optimizer's variance and the batch are fixed.
    """
    return TrainedBy(
        "onebit-lamb",
        parameters,
        fixed_bytes=5 * FP32 * parameters,
        element=FP16,
        packed=16.0,
        from_share=warm_up,
        exact=False,
        min_steps=5,
        carries=("the mean residual",),
        resets=("each rank's own residual",),
    )


def leader(parameters: float, period: int) -> TrainedBy:
    """Return leader SGD: every `period` steps the best rank sends its weights to all others."""
    return TrainedBy(
        "lsgd", parameters, shared=0.5, period=period, exact=False,
        carries=("the leader's weights and moments",), resets=("the followers' weights",),
    )  # fmt: skip


def fused(parameters: float, members: int) -> TrainedBy:
    """Return a fused job, which trains `members` models of one architecture together."""
    return TrainedBy(
        "fused", members * parameters, fixed_bytes=4 * FP32 * members * parameters,
        carries=("each member's weights, moments and step",),
    )  # fmt: skip
