"""The network, in numpy: a perceptron with two hidden layers that scores a step, a linear score of the void action."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from slurm_ones.decide.drl.steps import CONTEXT, FEATURES
from slurm_ones.schedule.policy import Floats

HIDDEN = (32, 16)
SHAPES = ((FEATURES, HIDDEN[0]), (HIDDEN[0],), HIDDEN, (HIDDEN[1],), (HIDDEN[1], 1), (CONTEXT,))
"""Of the parameters, one after another: weights and bias of each layer, the last without bias; then the void's."""
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


@dataclass(frozen=True)
class Network:
    """Scores from features; the parameters are one flat vector, as an optimizer wants them."""

    flat: Floats
    """(SIZE,)"""

    def parameters(self) -> list[Floats]:
        """The vector in its shapes."""
        cuts = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(self.flat, cuts), SHAPES, strict=True)]

    def scores(self, features: Floats) -> Floats:
        """(…) from (…, F)."""
        found: Floats = self.layers(features)[-1]
        return found

    def void(self, context: Floats) -> float:
        """Score of the void action from (C,)."""
        return float(self.flat[-CONTEXT:] @ context)

    def layers(self, features: Floats) -> tuple[Floats, Floats, Floats]:
        """Both hidden layers (…, H) and the scores (…), from (…, F)."""
        first, bias, second, bias2, last, _ = self.parameters()
        one = np.tanh(features @ first + bias)
        two = np.tanh(one @ second + bias2)
        return one, two, (two @ last)[..., 0]


@dataclass(frozen=True)
class Trained:
    """A network and where it comes from."""

    network: Network
    command: str
    """What trained it."""
    seed: int
    curve: Floats
    """(E, 3) of the training: processor seconds, updates, mean JCT over that of equal shares on the workloads of the
    validation."""


@cache
def load() -> Trained:
    """The weights that come with the package."""
    with resources.as_file(resources.files("slurm_ones.decide.drl") / "weights.npz") as path, np.load(path) as file:
        network = Network(np.asarray(file["flat"], dtype=np.float64))
        return Trained(network, str(file["command"]), int(file["seed"]), np.asarray(file["curve"], dtype=np.float64))
