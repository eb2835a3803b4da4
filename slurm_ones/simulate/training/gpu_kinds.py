"""What simulated GPUs of several kinds do to an application: its compute is faster, its gradient exchange is not.

By how much differs between applications (Gavel, OSDI 2020; Sia, SOSP 2023): large matrices use all that a newer GPU
has, small recurrent or embedding models little of it. The figures are round ones of our own between 1.0 and 3.5, not
measured. A GPU of kind k makes an application's compute `POWER[k] ** use` times as fast as the reference, on which
profiles and catalogue were made.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, replace

import numpy as np

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.training.application import Application, PlacedSpeed, Speed

POWER = {"t4": 1.0, "rtx": 1.6, "v100": 2.0, "a100": 3.5}
"""Speed of each kind where an application can use all of it, over that of the reference."""
USE = {
    "recommender": 0.1,
    "lstm-wikitext2": 0.3,
    "speech-rnn": 0.4,
    "unet-cells": 0.6,
    "detector-voc": 0.6,
    "resnet18-cifar10": 0.5,
    "wideresnet-cifar100": 0.8,
    "resnet50-tiny": 0.8,
    "detector-coco": 0.8,
    "resnet50-imagenet": 0.9,
    "transformer-iwslt": 0.9,
    "bert-glue": 1.0,
    "bert-squad": 1.0,
    "vit-imagenet": 1.0,
    "gpt2-finetune": 1.0,
}
"""How much of it each kind of job uses: the exponent."""
LEAST_USE = 0.2
"""Of an application that is none of these at least; how much follows from its name."""


def use_of(application: str) -> float:
    """How much of a faster GPU the application uses, by its name: one of `USE`, maybe with a variant's letter."""
    for name, use in USE.items():
        if application == name or application.startswith(f"{name}-"):
            return use
    return LEAST_USE + (1.0 - LEAST_USE) * (zlib.crc32(application.encode()) % 1000) / 999.0


def factor(application: str, kind: str) -> float:
    """How many times as fast its compute is on that kind of GPU; 1 where the kind has no name."""
    return 1.0 if not kind else float(POWER[kind] ** use_of(application))


@dataclass(frozen=True)
class FasterCompute:
    """A speed whose compute is `factor` times as fast, its exchange as it was."""

    of: Speed
    factor: float

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """See `application.Speed`."""
        return _faster(*self.of.step(nodes, gpus, local), self.factor)


@dataclass(frozen=True)
class FasterPlaced(FasterCompute):
    """The same of a speed that knows placements."""

    def placed(self, placement: tuple[int, ...], local: Floats) -> tuple[Floats, Floats]:
        """See `application.PlacedSpeed`."""
        assert isinstance(self.of, PlacedSpeed)
        return _faster(*self.of.placed(placement, local), self.factor)


def _faster(step: Floats, sync: Floats, factor: float) -> tuple[Floats, Floats]:
    return np.maximum(step - sync, 0.0) / factor + sync, sync


def on_kind(app: Application, kind: str) -> Application:
    """The application as it is on that kind of GPU; itself on the reference."""
    times = factor(app.name, kind)
    if times == 1.0:
        return app
    wrapped = FasterPlaced if isinstance(app.speed, PlacedSpeed) else FasterCompute
    known = {field.name: getattr(app, field.name) for field in fields(app) if not field.name.startswith("_")}
    later = None if app.later is None else on_kind(replace(app.later, name=app.name), kind)
    return Application(**{**known, "speed": wrapped(app.speed, times), "later": later})
