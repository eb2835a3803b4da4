"""Clusters and queues as hypothesis draws them: some jobs run where they fit, some wait, some are fixed."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from slurm_ones.decide.ones_sc21.ones_sc21 import OnesSc21, Options
from slurm_ones.decide.ones_sc21.space import Space, build
from slurm_ones.schedule.policy import ClusterView, JobView, Limits, Progress
from slurm_ones.schedule.shapes import shape_of, valid_counts
from tests.decide.contract import HELD, Power, cluster, job

Round = tuple[ClusterView, list[JobView]]

figures = st.sampled_from([0.0, 1e-9, 1.0, 90.0, 100.0, 1e300, math.nan, math.inf, -math.inf, -5.0])


across = st.sampled_from([1.0, 0.6])


@st.composite
def rounds(draw: st.DrawFn, max_jobs: int = 9, uniform: bool | None = None) -> Round:
    """A cluster of up to 4 nodes, whole-node or not, rigid jobs on part of it, and jobs in any state.

    Shapes are `uniform` or not as drawn, unless it is given. Measurements, losses and forecasts may be absurd.
    """
    if uniform is None:
        uniform = draw(st.booleans())
    whole = uniform and draw(st.booleans())
    per_node = draw(st.sampled_from([1, 2, 3, 4, 8]))
    nodes = draw(st.integers(1, 4))
    free = [per_node if whole else draw(st.integers(0, per_node)) for _ in range(nodes)]
    view = cluster(nodes, per_node, whole=whole, free=free, uniform=uniform)
    left = {node.name: node.gpus for node in view.nodes}
    jobs = []
    for job_id in range(draw(st.integers(0, max_jobs))):
        low = draw(st.sampled_from([1, 1, 2, 4]))
        counts = valid_counts(view, low, draw(st.sampled_from([low, 4, 8, 64])))
        runs = bool(counts) and draw(st.booleans())
        shape = shape_of(view, draw(st.sampled_from(counts))) if runs else None
        roomy = [] if shape is None else [name for name in left if left[name] >= shape.gpus_per_node]
        held: dict[str, int] = {}
        if shape is not None and shape.gpus_per_node > per_node:
            held = _spread(left, shape.gpus)
        elif shape is not None and len(roomy) >= shape.nodes:
            held = dict.fromkeys(draw(st.permutations(roomy))[: shape.nodes], shape.gpus_per_node)
        for name, gpus in held.items():
            left[name] -= gpus
        epochs = draw(st.integers(0, 9)) if held else draw(st.sampled_from([0, 0, 3]))
        least = draw(st.sampled_from([1, 64, 100]))
        limits = Limits(counts, least, draw(st.sampled_from([least, 512, 4096])), 256, draw(st.sampled_from([1, 8])))
        model = Power(table={n: draw(figures) for n in counts}) if draw(st.booleans()) else Power(across=draw(across))
        jobs.append(
            job(
                job_id,
                held,
                shape=shape if held else None,
                epochs=epochs,
                limits=limits,
                model=model,
                requested=draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 64])),
                requested_batch=draw(st.sampled_from([0, 1, 64, 100, 512, 10**9])),
                true_remaining_s=draw(figures),
                running_s=draw(st.one_of(figures, st.just(10.0 * epochs))),
                losses=tuple((float(k), draw(figures)) for k in range(draw(st.sampled_from([0, 0, 3, 9])))),
                submitted=float(draw(st.integers(0, 3))),
                epochs_since_change=draw(st.integers(0, epochs)),
                progress=Progress(max(epochs, 0.5), draw(st.sampled_from([1.0, 20.0, math.nan, math.inf, 0.0]))),
                resize_s=draw(st.sampled_from([30.0, 0.0, math.nan])),
                fixed=draw(st.sampled_from([None, None, None, None, None, HELD])),
            )
        )
    return view, jobs


def _spread(left: dict[str, int], gpus: int) -> dict[str, int]:
    """GPUs taken wherever they are left; nothing where there are too few."""
    held: dict[str, int] = {}
    for name, room in left.items():
        if taken := min(room, gpus - sum(held.values())):
            held[name] = taken
    return held if sum(held.values()) == gpus else {}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """What a decision would search over in such a round."""
    view, jobs = draw(rounds(uniform=True))
    return build(view, jobs, {j.job_id: j.fixed for j in jobs if j.fixed})


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def quick(**options: object) -> OnesSc21:
    """ONES with few generations."""
    return OnesSc21(Options(**{"generations": 4, "population": 6, **options}))  # type: ignore[arg-type]
