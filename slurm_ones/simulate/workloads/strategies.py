"""Kinds of jobs with a training strategy, and plain ones, so that policies are compared on mixed work.

Models, data and speeds are round figures of our own, for GPUs of 16 GB that do some 40 TFLOP/s; memory and bytes follow
from the strategies' formulas (`training.strategies`). Nothing in them was measured.
"""

from __future__ import annotations

from slurm_ones.simulate.training.strategies import StrategySpeed, TrainedBy, fused, leader, mesh, onebit, ring
from slurm_ones.simulate.workloads.catalogue import KINDS, Kind

RING = ring(length=16_384, hidden=1024, layers=24, degree=4)
MESH = mesh(length=1024, hidden=4096, layers=12, side=2)
ONEBIT = onebit(parameters=340e6, warm_up=0.2)
PLAIN = TrainedBy("data parallel", 340e6, fixed_bytes=4 * 4 * 340e6, element=2.0)
"""The same model as 1-bit LAMB trains, with all of its gradients exchanged."""
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
"""By name."""

_PLAIN_KINDS = ("resnet18-cifar10", "bert-glue", "unet-cells", "transformer-iwslt", "resnet50-tiny")
MIXED: dict[Kind, float] = {
    **dict.fromkeys((KINDS[name] for name in _PLAIN_KINDS), 0.1),
    **dict.fromkeys(STRATEGY_KINDS.values(), 0.1),
}
"""Kinds and how frequent each is: half of the jobs have a strategy."""
