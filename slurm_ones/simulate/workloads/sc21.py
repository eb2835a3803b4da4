"""The twenty kinds of jobs of ONES' evaluation (SC21, §4.1): models on subsets of public data sets.

Model, data set and its size, patience, local batch, range of the learning rate, target accuracy and GPUs asked for are
the paper's. The speeds (of V100s in mixed precision), the noise scales and the numbers of epochs are ours, such that a
job runs for some 150 to 500 s at the size it asks for. The largest batch follows from the largest learning rate, since
the rate grows with the batch (§3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.simulate.workloads.catalogue import Kind, ParametricSpeed, speed

MARGIN = 1.05
"""A job's metric at its base batch, over its target."""


@dataclass(frozen=True)
class _Row:
    """One line of the paper's table, and what we add to it."""

    model: str
    data: str
    samples: tuple[int, ...]
    patience: int
    local_batch: int
    growth: int
    """Largest over smallest learning rate."""
    target: float
    gpus: int
    epochs: int
    noise: tuple[float, float]
    speed: ParametricSpeed
    parameters: float
    resize_s: float = 8.0

    def kinds(self) -> list[Kind]:
        """One for each size of the data set."""
        return [
            Kind(
                name=f"{self.model}-{self.data}{samples / 1000:g}k{'-bis' if samples in self.samples[:i] else ''}",
                size="small",
                dataset=samples,
                epochs=self.epochs,
                base_batch=self.local_batch,
                max_batch=self.local_batch * self.growth,
                max_local_batch=self.local_batch * 2,
                speed=self.speed,
                noise=self.noise,
                top=self.target * MARGIN,
                target=self.target,
                patience=self.patience,
                gap=0.04,
                resize_s=self.resize_s,
                parameters=self.parameters,
                gpus=self.gpus,
            )
            for i, samples in enumerate(self.samples)
        ]


_BERT = speed(22, 220, (5, 0.4), (65, 0.8))
"""110 million parameters in mixed precision, sequences of 128 tokens."""
_ROWS = (
    _Row("bert", "cola", (5000, 8000), 5, 16, 4, 0.80, 2, 18, (100, 500),
         _BERT, 110e6, 12),
    _Row("bert", "mrpc", (3600, 3600), 5, 16, 4, 0.80, 2, 22, (100, 500),
         _BERT, 110e6, 12),
    _Row("bert", "sst2-", (10_000, 20_000), 5, 32, 8, 0.90, 8, 17, (150, 800),
         _BERT, 110e6, 12),
    _Row("resnet18", "cifar", (20_000, 40_000), 10, 256, 16, 0.70, 4, 60, (400, 4000),
         speed(9, 3200, (1, 0.2), (7, 0.2)), 11e6),
    _Row("googlenet", "cifar", (20_000, 40_000), 10, 256, 16, 0.70, 4, 50, (400, 4000),
         speed(22, 1600, (1, 0.2), (6, 0.2)), 7e6),
    _Row("vgg16", "cifar", (20_000, 40_000), 10, 128, 16, 0.70, 4, 62, (250, 2500),
         speed(6, 3200, (1.2, 0.2), (9, 0.2)), 15e6),
    _Row("alexnet", "imagenet", (10_000, 20_000), 20, 64, 16, 0.25, 16, 115, (250, 2500),
         speed(9, 1200, (3, 0.2), (35, 0.4)), 61e6),
    _Row("resnet50", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 75, (250, 2500),
         speed(15, 680, (1.5, 0.2), (16, 0.3)), 26e6),
    _Row("vgg16", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 60, (250, 2500),
         speed(11, 430, (6, 0.4), (75, 0.7)), 138e6),
    _Row("inception3", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 75, (250, 2500),
         speed(22, 480, (1.5, 0.2), (16, 0.3)), 24e6),
)  # fmt: skip

SC21_KINDS: tuple[Kind, ...] = tuple(kind for row in _ROWS for kind in row.kinds())
"""All twenty, each as frequent."""
