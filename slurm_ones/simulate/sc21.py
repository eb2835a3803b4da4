"""The twenty kinds of jobs of ONES' evaluation (SC21, §4.1): models on subsets of public data sets, on V100s.

Model, data set and its size, patience, local batch, range of the learning rate, target accuracy and GPUs asked for are
the paper's. Speeds, noise scales and numbers of epochs are ours, such that a job runs for some 100 to 400 s at the size
it asks for. The largest batch follows from the largest learning rate, since the rate grows with the batch (§3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.simulate.catalogue import Kind, ParametricSpeed, speed

MARGIN = 1.05
"""What a job reaches at its base batch, over its target."""


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
                gpus=self.gpus,
            )
            for i, samples in enumerate(self.samples)
        ]


_BERT = speed(30, 100, (7, 0.5), (90, 1))
"""110 million parameters in single precision, sequences of 128 tokens."""
_ROWS = (
    _Row("bert", "cola", (5000, 8000), 5, 16, 4, 0.80, 2, 8, (40, 120),
         _BERT, 12),
    _Row("bert", "mrpc", (3600, 3600), 5, 16, 4, 0.80, 2, 9, (40, 120),
         _BERT, 12),
    _Row("bert", "sst2-", (10_000, 20_000), 5, 32, 8, 0.90, 8, 7, (80, 300),
         _BERT, 12),
    _Row("resnet18", "cifar", (20_000, 40_000), 10, 256, 16, 0.70, 4, 24, (400, 2200),
         speed(12, 1500, (1, 0.2), (9, 0.3))),
    _Row("googlenet", "cifar", (20_000, 40_000), 10, 256, 16, 0.70, 4, 22, (400, 2200),
         speed(30, 800, (1, 0.2), (8, 0.3))),
    _Row("vgg16", "cifar", (20_000, 40_000), 10, 128, 16, 0.70, 4, 26, (200, 1200),
         speed(8, 1600, (1.5, 0.2), (12, 0.3))),
    _Row("alexnet", "imagenet", (10_000, 20_000), 20, 64, 16, 0.25, 16, 42, (120, 1000),
         speed(12, 600, (4, 0.3), (50, 0.6))),
    _Row("resnet50", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 26, (80, 700),
         speed(20, 320, (2, 0.2), (22, 0.4))),
    _Row("vgg16", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 24, (80, 700),
         speed(15, 210, (8, 0.5), (110, 1))),
    _Row("inception3", "imagenet", (10_000, 20_000), 10, 32, 16, 0.55, 16, 26, (80, 700),
         speed(30, 230, (2, 0.2), (22, 0.4))),
)  # fmt: skip

SC21_KINDS: tuple[Kind, ...] = tuple(kind for row in _ROWS for kind in row.kinds())
"""All twenty, each as frequent."""
