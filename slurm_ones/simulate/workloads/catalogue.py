"""Kinds of training jobs from which workloads are generated. Their speeds were not measured.

The figures are round numbers for GPUs like V100 and T4, with four GPUs per node. Each kind is named after its model. A
workload varies the figures at random, from its seed, so that no policy can be tuned to them. Jobs with a training
strategy assume GPUs of 16 GB and about 40 TFLOP/s. Their memory and bytes follow the formulas of `training.strategies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.training.strategies import StrategySpeed, TrainedBy, fused, leader, mesh, onebit, ring

Size = Literal["small", "medium", "large", "extra-large"]
"""Size of a job by the GPU-hours that it takes on one GPU: "small" up to 1.5, "medium" up to 12, "large" up to 60."""

DROP = 3.0
"""Factor by which the gradient noise scale jumps up when the learning rate drops."""


@dataclass(frozen=True)
class ParametricSpeed:
    """Step time from compute and gradient exchange, which overlap in part (Pollux, OSDI 2021, §3.2).

    compute = a + b × local batch, and exchange = c + d × (GPUs − 2), with different c and d inside a node and between
    nodes. The step takes (compute^γ + exchange^γ)^(1/γ). At γ = 1 they do not overlap, at a large γ they overlap fully.
    """

    fixed: float
    """a, in seconds: the part of a step that does not depend on the number of samples."""
    sample: float
    """b, in seconds per sample, data loading included."""
    inside: tuple[float, float]
    """c and d in seconds if all GPUs are on one node."""
    across: tuple[float, float]
    """c and d in seconds if the GPUs are on several nodes."""
    overlap: float = 1.6
    """γ, the exponent of the overlap."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        compute: Floats = self.fixed + self.sample * np.asarray(local, dtype=np.float64)
        if gpus < 2:
            return compute, np.zeros_like(compute)
        base, growth = self.inside if nodes == 1 else self.across
        exchange = base + growth * (gpus - 2)
        step = (compute**self.overlap + exchange**self.overlap) ** (1.0 / self.overlap)
        return step, step - compute

    def perturbed(self, compute: float, exchange: float) -> ParametricSpeed:
        """Return this speed with compute times multiplied by `compute`, and exchange times by `exchange`."""
        return ParametricSpeed(
            self.fixed * compute,
            self.sample * compute,
            (self.inside[0] * exchange, self.inside[1] * exchange),
            (self.across[0] * exchange, self.across[1] * exchange),
            self.overlap,
        )


@dataclass(frozen=True)
class Kind:
    """A kind of training job, from which `build` makes an application."""

    name: str
    size: Size
    dataset: int
    """Samples per epoch."""
    epochs: int
    """Number of epochs of a job at the base batch. With early stopping, the last `patience` epochs bring no
    improvement."""
    base_batch: int
    max_batch: int
    max_local_batch: int
    speed: ParametricSpeed | StrategySpeed
    noise: tuple[float, float]
    """Gradient noise scale in samples, at the start and at the end of the training."""
    top: float
    """Final validation metric of training at the base batch."""
    drops: tuple[float, ...] = ()
    """Moments at which the learning rate drops, as shares of the training. The noise scale then jumps up."""
    tolerance: float = 0.005
    """Share of `top` by which the final metric may be lower and still satisfy the user."""
    target: float = math.nan
    """Metric that satisfies the user; NaN to derive it from `top` and `tolerance`."""
    patience: int = 0
    """Number of epochs without improvement after which the training stops; 0 for no early stopping."""
    pace: float = 0.2
    """Time constant of the metric's exponential rise, as a share of the training. With early stopping it is derived
    from `patience`."""
    too_large: float = 2.0
    """Multiple of the noise scale above which a batch lowers the final metric."""
    gap: float = 0.02
    """Share of the metric that is lost for each doubling of the batch above this multiple."""
    resize_s: float = 30.0
    parameters: float = 25e6
    """Number of the model's parameters, as published."""
    gpus: int = 0
    """Number of GPUs that users request; 0 to derive it from how well the job scales."""
    max_gpus: int = 64
    by: TrainedBy | None = None
    """Training strategy; None for plain data parallelism."""


def build(
    kind: Kind, *, name: str = "", compute: float = 1.0, exchange: float = 1.0, noise: float = 1.0, length: float = 1.0
) -> Application:
    """Return an application of this kind. `compute`, `exchange`, `noise` and `length` are factors on its compute time,
    exchange time, noise scale and number of samples."""
    dataset = max(round(kind.dataset * length), kind.base_batch)
    doublings = max(math.ceil(math.log2(kind.max_batch / kind.base_batch)), 0)
    batches = np.unique(np.minimum(kind.base_batch * 2 ** np.arange(doublings + 1), kind.max_batch)).astype(np.int64)
    at = np.arange(1, kind.epochs + 1) / kind.epochs
    scale = noise * _noise(kind, at)
    # What patience waits out at the end adds nothing worth the name.
    pace = (kind.epochs - kind.patience) / kind.epochs / 4.0 if kind.patience else kind.pace
    curve = (1.0 - np.exp(-at / pace)) / (1.0 - math.exp(-1.0 / pace))
    beyond = np.log2(np.maximum(batches[None, :] / (kind.too_large * scale[:, None]), 1.0))
    metric = kind.top * curve[:, None] * np.maximum(1.0 - kind.gap * beyond, 0.1)
    gain = metric[-1, 0] - metric[-1 - kind.patience, 0] if kind.patience else 0.0
    wide = np.ones((1, len(batches)))
    truth = kind.speed.perturbed(compute, exchange)
    made = Application(
        name=name or kind.name,
        speed=truth,
        base_batch=kind.base_batch,
        max_batch=kind.max_batch,
        max_local_batch=kind.max_local_batch,
        max_gpus=min(kind.max_gpus, kind.max_batch),
        ends=dataset * np.arange(1.0, kind.epochs + 1),
        batches=batches,
        sqr=np.ones((kind.epochs, 1)) * wide,
        var=scale[:, None] / kind.base_batch * wide,
        metric=metric,
        resize_s=kind.resize_s,
        parameters=kind.parameters,
        target=kind.top * (1.0 - kind.tolerance) if math.isnan(kind.target) else kind.target,
        patience=kind.patience,
        least_gain=float(gain),
        by=kind.by,
    )
    return replace(made, later=made.altered(speed=truth.later())) if isinstance(truth, StrategySpeed) else made


def _noise(kind: Kind, at: Floats) -> Floats:
    begin, end = kind.noise
    jumps = sum((np.where(at > drop, math.log(DROP), 0.0) for drop in kind.drops), np.zeros_like(at))
    smooth = math.log(end / begin) - math.log(DROP) * len(kind.drops)
    return begin * np.exp(smooth * at**0.7 + jumps)


def speed(
    fixed_ms: float, per_s: float, inside_ms: tuple[float, float], across_ms: tuple[float, float]
) -> ParametricSpeed:
    """Return a speed from times in milliseconds. `per_s` is the samples/s of one GPU at large batches."""
    inside, across = (inside_ms[0] / 1e3, inside_ms[1] / 1e3), (across_ms[0] / 1e3, across_ms[1] / 1e3)
    return ParametricSpeed(fixed_ms / 1e3, 1.0 / per_s, inside, across)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        # A neural collaborative filter on some 20 million interactions: tiny compute, large batches, minutes.
        Kind(
            "recommender", "small", 20_000_000, 8, 1024, 32768, 32768,
            speed(5, 1.6e6, (4, 0.3), (18, 0.4)), (40e3, 4e6), 0.69, max_gpus=16, resize_s=15, parameters=32e6,
        ),
        # ResNet-18 on CIFAR-10 in half precision.
        Kind(
            "resnet18-cifar10", "small", 50_000, 60, 128, 16384, 1024,
            speed(14, 2400, (4, 0.5), (22, 0.6)), (250, 6000), 0.945, drops=(0.5, 0.75), resize_s=40, parameters=11e6,
        ),
        # A wide residual network on CIFAR-100.
        Kind(
            "wideresnet-cifar100", "small", 50_000, 60, 128, 8192, 256,
            speed(25, 750, (12, 1), (60, 1)), (400, 3000), 0.80, drops=(0.5, 0.75), resize_s=45, parameters=37e6,
        ),
        # A recurrent language model on WikiText-2, sequences of 35 tokens: the exchange of its embeddings dominates.
        Kind(
            "lstm-wikitext2", "small", 60_000, 40, 20, 640, 160,
            speed(18, 900, (16, 2), (85, 2)), (60, 1500), 0.62, drops=(0.7,), resize_s=20, parameters=33e6,
        ),
        # Fine-tuning a BERT base model on a sentence task, sequences of 128 tokens.
        Kind(
            "bert-glue", "small", 60_000, 3, 16, 512, 32,
            speed(35, 105, (9, 0.5), (95, 1)), (60, 200), 0.88, pace=0.3, resize_s=90, parameters=110e6,
        ),
        # Segmentation of microscope images by a U-Net, few images and a small batch.
        Kind(
            "unet-cells", "small", 1_600, 60, 4, 128, 8,
            speed(30, 24, (10, 1), (70, 1)), (10, 50), 0.91, resize_s=25, parameters=31e6,
        ),
        # Fine-tuning BERT on questions and answers, sequences of 384 tokens, three epochs.
        Kind(
            "bert-squad", "medium", 88_000, 3, 12, 384, 12,
            speed(40, 24, (60, 5), (330, 4)), (200, 1500), 0.885, pace=0.3, resize_s=110, parameters=110e6,
        ),
        # Recurrent speech recognition on a hundred hours of speech.
        Kind(
            "speech-rnn", "medium", 28_000, 60, 16, 512, 64,
            speed(50, 52, (50, 10), (280, 6)), (40, 20e3), 0.78, drops=(0.6,), resize_s=30, parameters=38e6,
        ),
        # A translation model on a few hundred thousand pairs of sentences.
        Kind(
            "transformer-iwslt", "medium", 160_000, 40, 64, 2048, 128,
            speed(40, 520, (14, 1), (90, 1.5)), (300, 6000), 0.65, resize_s=35, parameters=37e6,
        ),
        # ResNet-50 on 100,000 images of 64 × 64 pixels.
        Kind(
            "resnet50-tiny", "medium", 100_000, 60, 128, 16384, 256,
            speed(30, 620, (10, 0.6), (55, 0.8)), (500, 6000), 0.66, drops=(0.33, 0.67), resize_s=50, parameters=24e6,
        ),
        # A one-stage detector on Pascal VOC: eight images fill a GPU, and the exchange is large.
        Kind(
            "detector-voc", "large", 16_500, 60, 8, 512, 8,
            speed(70, 18, (40, 10), (420, 5)), (30, 1800), 0.80, drops=(0.7,), resize_s=80, parameters=62e6,
        ),
        # Fine-tuning GPT-2 small on 100 million tokens, sequences of 1,024.
        Kind(
            "gpt2-finetune", "large", 100_000, 3, 16, 512, 4,
            speed(60, 3.6, (25, 1), (260, 2)), (120, 900), 0.55, pace=0.35, resize_s=120, parameters=124e6,
        ),
        # A detector on COCO.
        Kind(
            "detector-coco", "large", 118_000, 24, 32, 2048, 32,
            speed(60, 31, (18, 1), (130, 2)), (90, 900), 0.52, drops=(0.67, 0.9), resize_s=100, parameters=38e6,
        ),
        # ResNet-50 on ImageNet, 90 epochs.
        Kind(
            "resnet50-imagenet", "extra-large", 1_281_000, 90, 256, 16384, 256,
            speed(25, 235, (15, 1), (70, 0.8)), (1500, 30e3), 0.76, drops=(0.33, 0.67, 0.89), resize_s=240,
            parameters=26e6,
        ),
        # A small vision transformer on ImageNet, 100 epochs.
        Kind(
            "vit-imagenet", "extra-large", 1_281_000, 100, 512, 16384, 128,
            speed(35, 270, (18, 1), (90, 1)), (4000, 40e3), 0.78, resize_s=220, parameters=22e6,
        ),
    )
}  # fmt: skip
"""Kinds of jobs in plain data parallel, by name."""


RING = ring(length=16_384, hidden=1024, layers=24, degree=4)
MESH = mesh(length=1024, hidden=4096, layers=12, side=2)
ONEBIT = onebit(parameters=340e6, warm_up=0.2)
PLAIN = TrainedBy("data parallel", 340e6, fixed_bytes=4 * 4 * 340e6, element=2.0)
"""Plain data-parallel training of the model that 1-bit LAMB trains, for comparison."""
LEADER = leader(parameters=26e6, period=16)
FUSED = fused(parameters=1.5e6, members=8)

STRATEGY_KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        # A language model of 0.3 billion parameters on sequences that no one GPU's memory holds.
        Kind(
            "ring-longtext", "medium", 2_500, 3, 16, 256, 2,
            StrategySpeed(RING, 0.05, 2.7), (60, 500), 0.6, pace=0.35, resize_s=60, parameters=302e6, by=RING,
        ),
        # A wide model of 2.4 billion parameters, which no one GPU's memory holds.
        Kind(
            "optimus-wide", "medium", 16_000, 3, 32, 512, 8,
            StrategySpeed(MESH, 0.05, 0.37), (120, 900), 0.6, pace=0.35, resize_s=120, parameters=2.4e9, by=MESH,
        ),
        # BERT large, pre-trained further with 1-bit LAMB.
        Kind(
            "onebit-bert", "medium", 200_000, 3, 128, 2048, 32,
            StrategySpeed(ONEBIT, 0.03, 0.026), (600, 6000), 0.7, pace=0.35, resize_s=90, parameters=340e6, by=ONEBIT,
        ),
        # A residual network by leaders.
        Kind(
            "lsgd-resnet", "medium", 100_000, 30, 256, 8192, 128,
            StrategySpeed(LEADER, 0.02, 1 / 400), (500, 6000), 0.7, resize_s=40, parameters=26e6, by=LEADER,
        ),
        # Eight small models of a sweep as one job; a sample is one of each.
        Kind(
            "fused-sweep", "small", 50_000, 20, 64, 2048, 512,
            StrategySpeed(FUSED, 0.03, 1 / 900), (150, 2500), 0.9, resize_s=20, parameters=12e6, by=FUSED,
        ),
    )
}  # fmt: skip
"""Kinds of jobs with a training strategy, by name."""

_PLAIN_KINDS = ("resnet18-cifar10", "bert-glue", "unet-cells", "transformer-iwslt", "resnet50-tiny")
MIXED: dict[Kind, float] = {
    **dict.fromkeys((KINDS[name] for name in _PLAIN_KINDS), 0.1),
    **dict.fromkeys(STRATEGY_KINDS.values(), 0.1),
}
"""Share of each kind of job in the mix `strategies`. Half of the jobs have a training strategy."""


MARGIN = 1.05
"""Final metric of a job at the base batch, divided by the target of ONES' evaluation."""


def _sc21(
    model: str,
    data: str,
    sizes: tuple[int, int],
    patience: int,
    local_batch: int,
    growth: int,
    target: float,
    gpus: int,
    epochs: int,
    noise: tuple[float, float],
    speed: ParametricSpeed,
    parameters: float,
    resize_s: float = 8.0,
) -> list[Kind]:
    """Return the kinds of one line in ONES' evaluation table (SC21, §4.1): a model on subsets of a public data set.

    From the paper are model, data set and its sizes, patience, local batch, range of the learning rate, target accuracy
    and requested GPUs. Speeds (V100s in mixed precision), noise scales and numbers of epochs are our own, such that a
    job runs for about 150 to 500 s on its requested GPUs. The largest batch is `growth` × the local batch, the factor
    by which the paper lets the learning rate grow (§3.3).
    """
    return [
        Kind(
            f"{model}-{data}{samples / 1000:g}k{'-bis' if samples in sizes[:i] else ''}", "small", samples, epochs,
            local_batch, local_batch * growth, local_batch * 2, speed, noise, target * MARGIN, target=target,
            patience=patience, gap=0.04, resize_s=resize_s, parameters=parameters, gpus=gpus,
        )
        for i, samples in enumerate(sizes)
    ]  # fmt: skip


_BERT = speed(22, 220, (5, 0.4), (65, 0.8))
"""Speed of a model with 110 million parameters, in mixed precision, on sequences of 128 tokens."""
SC21_KINDS: tuple[Kind, ...] = (
    *_sc21("bert", "cola", (5000, 8000), 5, 16, 4, 0.80, 2, 18, (100, 500),
           _BERT, 110e6, 12),
    *_sc21("bert", "mrpc", (3600, 3600), 5, 16, 4, 0.80, 2, 22, (100, 500),
           _BERT, 110e6, 12),
    *_sc21("bert", "sst2-", (10_000, 20_000), 5, 32, 8, 0.90, 8, 17, (150, 800),
           _BERT, 110e6, 12),
    *_sc21("resnet18", "cifar", (20_000, 40_000), 10, 256, 16, 0.70, 4, 60, (400, 4000),
           speed(9, 3200, (1, 0.2), (7, 0.2)), 11e6),
    *_sc21("googlenet", "cifar", (20_000, 40_000), 10, 256, 16, 0.70, 4, 50, (400, 4000),
           speed(22, 1600, (1, 0.2), (6, 0.2)), 7e6),
    *_sc21("vgg16", "cifar", (20_000, 40_000), 10, 128, 16, 0.70, 4, 62, (250, 2500),
           speed(6, 3200, (1.2, 0.2), (9, 0.2)), 15e6),
    *_sc21("alexnet", "imagenet", (10_000, 20_000), 20, 64, 16, 0.25, 16, 115, (250, 2500),
           speed(9, 1200, (3, 0.2), (35, 0.4)), 61e6),
    *_sc21("resnet50", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 75, (250, 2500),
           speed(15, 680, (1.5, 0.2), (16, 0.3)), 26e6),
    *_sc21("vgg16", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 60, (250, 2500),
           speed(11, 430, (6, 0.4), (75, 0.7)), 138e6),
    *_sc21("inception3", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 75, (250, 2500),
           speed(22, 480, (1.5, 0.2), (16, 0.3)), 24e6),
)  # fmt: skip
"""All twenty kinds of jobs in ONES' evaluation. A workload has equally many jobs of each."""
