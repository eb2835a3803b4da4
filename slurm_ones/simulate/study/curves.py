"""Rule that gives a recorded job an application's curves: no trace tells how a job's speed depends on its size.

The rule is deterministic except for a seed, and stands on the study's page. Nobody knows the true curves: another seed
shows how much hangs on the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import get_args

import numpy as np

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.traces.trace import TraceJob
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.workloads.catalogue import KINDS, Size, build
from slurm_ones.simulate.workloads.generate import best_batch

UP_TO_H: dict[Size, float] = {"small": 1.5, "medium": 12.0, "large": 60.0, "extra-large": float("inf")}
"""GPU-hours of the jobs of each size, as the catalogue has them."""
USEFUL = 0.5
"""Least goodput of each GPU that a job asked for, over that of one GPU alone: who asked for more knew no better, and a
study that took such jobs would gain by what a word to their users gains as well."""
LEAST_S = 300.0
"""Jobs that ran for less stay rigid: they are over before a resize has paid."""
RESIZE_S = 30.0
"""Seconds that a resize stops a job for, by a checkpoint and a requeue."""
STEPS = 20
"""Batches in an epoch of a job, at least."""

RULE = (
    f"The GPU-hours that a job took say how large it is: small up to {UP_TO_H['small']:g}, medium up to "
    f"{UP_TO_H['medium']:g}, large up to {UP_TO_H['large']:g}, extra-large beyond.",
    f"Of the applications of that size those count that keep each GPU the job asked for at least {100 * USEFUL:g} % as "
    "useful as one alone; if there is none, those of all sizes; if there is none either, the job stays rigid.",
    "Of these, a hash of the seed and the job's number picks one.",
    "Its training is made so long that at the GPUs that the job asked for, and the batch best there, it takes exactly "
    "the time that was recorded.",
    f"Jobs that ran for less than {LEAST_S:g} s stay rigid.",
)
"""The rule in words."""


@dataclass(frozen=True)
class Curves:
    """Applications to choose from. Plain data, except for a cache."""

    applications: Mapping[str, Application]
    sizes: Mapping[str, Size]
    measured: bool = False
    """They were measured, and are not of our own writing."""

    def pick(self, job: TraceJob, seed: int, per_node: int) -> str | None:
        """The application whose curves the job gets; None if it stays rigid."""
        if job.run_s < LEAST_S:
            return None
        useful = self._useful_at(job.gpus, per_node)
        own = [name for name in useful if self.sizes[name] == size_of(job)] or useful
        if not own:
            return None
        digest = blake2b(f"{seed} {job.name}".encode(), digest_size=8).digest()
        return own[int.from_bytes(digest, "big") % len(own)]

    def _useful_at(self, gpus: int, per_node: int) -> Sequence[str]:
        """Names of those that use this number of GPUs well."""
        if (gpus, per_node) not in self._known:
            self._known[gpus, per_node] = [
                name
                for name, app in sorted(self.applications.items())
                if gpus <= min(app.max_gpus, app.max_batch)
                and best_batch(app, gpus, per_node)[0] >= USEFUL * gpus * best_batch(app, 1, per_node)[0]
            ]
        return self._known[gpus, per_node]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Sequence[str]]:
        return {}


def size_of(job: TraceJob) -> Size:
    """By the GPU-hours that it took."""
    return next(size for size in get_args(Size) if job.gpu_hours <= UP_TO_H[size])


def catalogue() -> Curves:
    """Applications of our own writing, by round figures."""
    return Curves({name: build(kind) for name, kind in KINDS.items()}, {n: kind.size for n, kind in KINDS.items()})


def measured(profiles: Mapping[str, Application]) -> Curves:
    """Applications that were measured, each as large as its training on one GPU."""
    hours = {
        name: app.seconds(1, 1, float(app.min_batch or app.base_batch), 0.0) / 3600.0 for name, app in profiles.items()
    }
    sizes = {name: next(size for size in get_args(Size) if found <= UP_TO_H[size]) for name, found in hours.items()}
    return Curves(profiles, sizes, measured=True)


def fitted(app: Application, name: str, job: TraceJob, per_node: int) -> tuple[Application, int]:
    """The application as that job's, which takes `job.run_s` on its GPUs from first sample to last; and its batch."""
    batch = best_batch(app, job.gpus, per_node)[1]
    nodes = -(-job.gpus // per_node)
    samples = app.total * job.run_s / app.seconds(nodes, job.gpus, float(batch), 0.0)
    epochs = max(1, min(len(app.ends), int(samples // (STEPS * batch))))
    # A short job has fewer epochs: its noise scale goes the same way in longer strides.
    rows = np.linspace(0, len(app.ends) - 1, epochs).round().astype(int)
    short = replace(
        app,
        name=name,
        ends=samples * np.arange(1.0, epochs + 1) / epochs,
        sqr=app.sqr[rows],
        var=app.var[rows],
        metric=app.metric[rows],
        max_batch=max(batch, min(app.max_batch, int(samples / epochs))),
        resize_s=RESIZE_S,
        target=float("nan"),
        patience=0,
        _efficiencies={},
        _single={},
    )
    longer = job.run_s / short.seconds(nodes, job.gpus, float(batch), 0.0)
    return replace(short, ends=short.ends * longer, max_gpus=min(short.max_gpus, short.max_batch)), batch


class EverySecond:
    """A step takes a second."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """See `application.Speed`."""
        return np.ones_like(local), np.zeros_like(local)


def rigid(name: str, gpus: int, run_s: float) -> Application:
    """An application that holds its GPUs for whole seconds at one size, and starts at no cost."""
    steps = max(round(run_s), 1)
    one = np.ones((1, 1))
    return Application(
        name=name, speed=EverySecond(), base_batch=gpus, max_batch=gpus, max_local_batch=1, max_gpus=gpus,
        ends=np.array([float(steps * gpus)]), batches=np.array([gpus]), sqr=one, var=0.0 * one, metric=one,
        resize_s=0.0,
    )  # fmt: skip
