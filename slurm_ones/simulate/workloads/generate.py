"""Workloads generated from a seed: jobs of several kinds, their arrivals, and what their users request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from ones_wrapper.protocol.choices import listed
from ones_wrapper.protocol.limits import SizeLimits
from slurm_ones.policy.contract import Floats
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, MIXED, SC21_KINDS, Kind, build
from slurm_ones.simulate.workloads.profiles import Workload

Arrivals = Literal["poisson", "uniform", "diurnal"]
"""Arrival process: "poisson", "uniform" (gaps between 0 and twice their mean), or "diurnal" (more jobs by day)."""


def submission_times(how: Arrivals, jobs: int, window_s: float, rng: np.random.Generator) -> Floats:
    """Return the submission times of `jobs` jobs in seconds, ascending and below `window_s` (with "uniform" gaps, only
    on average)."""
    if how == "uniform":
        gaps = rng.uniform(0.0, 2.0 * window_s / jobs, jobs)
        return np.asarray(np.cumsum(gaps), dtype=np.float64)
    # Given how many come, the times of a Poisson process are independent.
    shares = np.sort(rng.random(jobs))
    if how == "poisson":
        return np.asarray(shares * window_s, dtype=np.float64)
    grid = np.linspace(0.0, window_s, max(24 * 60, math.ceil(window_s / 600.0)) + 1)
    reached = np.append(0.0, np.cumsum(day_rate(grid[1:])))
    return np.asarray(np.interp(shares, reached / reached[-1], grid), dtype=np.float64)


def day_rate(seconds: Floats) -> Floats:
    """Return the submission rate `seconds` after 8 a.m., divided by its mean over the day.

    It is highest in the early afternoon and lowest at night, as in Philly (Jeon et al., ATC 2019).
    """
    return 1.0 + 0.8 * np.cos(2.0 * math.pi * (seconds / 3600.0 + 8.0 - 14.0) / 24.0)


ONE_GPU = 0.65
"""Share of the users of small jobs who request one GPU, even if the job would scale further."""
USEFUL = (0.5, 0.8)
"""Least and largest efficiency of sizes that a well-informed user requests (Pollux, OSDI 2021, §5.1). Efficiency is the
goodput per GPU, divided by the goodput of a single GPU."""

UserRequest = tuple[int, int]
"""Number of GPUs and global batch that a user requests."""


def user_request(app: Application, kind: Kind, gpus: int, per_node: int, rng: np.random.Generator) -> UserRequest:
    """Return the request of a random user on a cluster of `gpus` GPUs."""
    modest, choice = rng.random() < ONE_GPU, rng.random()
    if kind.gpus:
        size = min(kind.gpus, gpus)
        return size, min(kind.base_batch * size, app.max_batch)
    if kind.size == "small" and modest:
        return 1, best_batch(app, 1, per_node)[1]
    options = sensible_requests(app, gpus, per_node)
    return options[int(choice * len(options))]


def mean_gpu_hours(app: Application, kind: Kind, gpus: int, per_node: int) -> float:
    """Return the mean GPU-hours of jobs of this kind, with the sizes and batches that their users request."""

    def hours(size: int, batch: int) -> float:
        return size * app.seconds(-(-size // per_node), size, float(batch), 0.0) / 3600.0

    mean = float(np.mean([hours(*option) for option in sensible_requests(app, gpus, per_node)]))
    if kind.size != "small":
        return mean
    return ONE_GPU * hours(1, best_batch(app, 1, per_node)[1]) + (1.0 - ONE_GPU) * mean


def undisturbed_s(app: Application, asked: Submission, per_node: int) -> float:
    """Return the run time, in seconds, of a job that keeps its requested size and batch."""
    size = min(asked.gpus, app.max_gpus)
    batch = float(min(max(asked.batch, app.min_batch or app.base_batch), app.max_batch))
    return app.seconds(-(-size // per_node), size, batch, 0.0, app.total * asked.epochs)


def sensible_requests(app: Application, gpus: int, per_node: int) -> list[UserRequest]:
    """Return the possible requests of well-informed users: sizes with an efficiency in `USEFUL`, each with its best
    batch."""
    one, batch = best_batch(app, 1, per_node)
    degree = app.by.degree if app.by is not None else 1
    found, last = [], (degree, best_batch(app, degree, per_node)[1] if degree > 1 else batch)
    for size in _possible(app, _sizes(min(app.max_gpus, max(gpus // 2, 1)), per_node), per_node):
        goodput, batch = best_batch(app, size, per_node)
        useful = goodput / one / size
        if USEFUL[0] <= useful <= USEFUL[1]:
            found.append((size, batch))
        elif useful > USEFUL[1]:
            last = (size, batch)
    return found or [last]


def _possible(app: Application, sizes: Sequence[int], per_node: int) -> list[int]:
    """Return the `sizes` that the application's strategy can use on nodes of `per_node` GPUs."""
    limits = app.limits(0.0)
    rows = {size: limits.at(size) if limits is not None else SizeLimits(size, size) for size in sizes}
    return [
        size
        for size, row in rows.items()
        if row is not None and app.max_batch % row.quantum == 0 and (size <= per_node or per_node % row.together == 0)
    ]


def best_batch(app: Application, gpus: int, per_node: int) -> tuple[float, int]:
    """Return the highest goodput on `gpus` GPUs halfway through the training, and the batch that reaches it.

    It tries the base batch and its multiples by powers of two.
    """
    batches = app.base_batch * 2 ** np.arange(math.floor(math.log2(app.max_batch / app.base_batch)) + 1)
    batches = batches[batches >= gpus] if batches[-1] >= gpus else batches[-1:]
    seconds = app.step_seconds(-(-gpus // per_node), gpus, batches.astype(np.float64))
    goodput = batches / seconds * app.efficiency(app.total / 2, batches)
    return float(goodput.max()), int(batches[goodput.argmax()])


def _sizes(most: int, per_node: int) -> list[int]:
    """Return numbers of GPUs, up to `most`, that every Slurm cluster can allocate: powers of two within a node, then
    whole nodes."""
    below = [2**i for i in range(per_node.bit_length()) if 2**i < per_node]
    return [n for n in [*below, *(per_node * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))] if n <= most]


WEIGHTS = {"small": 0.77, "medium": 0.167, "large": 0.045, "extra-large": 0.018}
"""Share of the jobs of each size in a mix like Philly's (ATC 2019). Most jobs are small; a few jobs take most GPU
time."""
OFFERED = 2.3
"""GPU-hours that jobs request, divided by the cluster's GPU-hours up to the last submission, at load 1.

The value is from Pollux's default study, which submits 160 jobs within eight hours on 64 GPUs.
"""
VARIANTS = 4
"""Largest number of applications that a workload makes from one kind, each with other random factors."""
PERTURB = {"compute": 0.2, "exchange": 0.3, "noise": 0.3, "length": 0.35}
"""Standard deviation of the logarithm of each random factor of `catalogue.build`."""
TIGHTNESS = (0.5, 1.5)
"""Least and largest time from a job's submission to its deadline, divided by its undisturbed run time. The ratio is
uniformly distributed, as in ElasticFlow (ASPLOS 2023)."""
STUDIED_GPUS = 64
"""GPUs of the cluster for which the published studies chose their rate of submissions."""


@dataclass(frozen=True)
class Mix:
    """Kinds of jobs in a workload, and the share of each."""

    kinds: tuple[Kind, ...]
    shares: tuple[float, ...]
    jobs: int = 160
    """Default number of jobs, as in the study that the mix is from."""
    gap_s: int = 0
    """Mean seconds between submissions on a cluster of `STUDIED_GPUS`; 0 to derive them from the GPU-hours that jobs
    request."""


def _philly() -> Mix:
    kinds = tuple(KINDS.values())
    of_size = {size: sum(kind.size == size for kind in kinds) for size in WEIGHTS}
    return Mix(kinds, tuple(WEIGHTS[kind.size] / of_size[kind.size] for kind in kinds))


MIXES: dict[str, Mix] = {
    "ones-sc21": Mix(SC21_KINDS, (1 / len(SC21_KINDS),) * len(SC21_KINDS), jobs=50, gap_s=30),
    "philly": _philly(),
    "uniform": Mix(tuple(KINDS.values()), (1 / len(KINDS),) * len(KINDS)),
    "strategies": Mix(tuple(MIXED), tuple(MIXED.values()), jobs=60),
}
"""Mixes of jobs from which workloads are generated. "ones-sc21" is the mix of ONES (SC21). "philly" has as few large
jobs as Philly, "uniform" equally many jobs of each kind, and "strategies" jobs with training strategies."""


def generate(
    kind: str,
    *,
    jobs: int | None = None,
    seed: int = 0,
    load: float = 1.0,
    gpus: int = 64,
    gpus_per_node: int = 4,
    arrivals: Arrivals | None = None,
    hours: float | None = None,
    rigid: float = 0.0,
    deadlines: float = 0.0,
) -> Workload:
    """Return a workload from one of the `MIXES`, with `jobs` jobs (by default as many as the mix's study).

    `load` multiplies the rate of submissions. At load 1 and 64 GPUs, the gaps between submissions of `ones-sc21` are
    whole seconds from 0 to 60. In other mixes the jobs request `OFFERED` times the cluster's GPU-hours. `hours`
    replaces `load`: all jobs are submitted within this time. `arrivals` is the arrival process; mixes other than
    `ones-sc21` have "poisson" by default. `rigid` is the share of jobs that do not opt in. `deadlines` is the share of
    jobs with a deadline (`TIGHTNESS`). The seed also changes the applications' figures by some tens of percent. Raises
    `BadInput`, which names the accepted values.
    """
    mix = _checked(kind, load, gpus, hours, {"rigid": rigid, "deadlines": deadlines}, arrivals)
    jobs = mix.jobs if jobs is None else jobs
    if jobs < 1:
        raise BadInput(f"jobs: {jobs} is not above 0")
    rng = np.random.default_rng(seed)
    kinds = _drawn(mix, jobs, rng)
    applications, chosen = _perturbed(kinds, rng)
    asked = [user_request(applications[name], kinds[i], gpus, gpus_per_node, rng) for i, name in enumerate(chosen)]
    if arrivals is None and mix.gap_s and hours is None:
        pace = load * gpus / STUDIED_GPUS
        times = np.cumsum(rng.integers(0, 2 * mix.gap_s, jobs, endpoint=True)) / pace
    else:
        window_s = _window_s(mix, jobs, load, gpus, gpus_per_node) if hours is None else hours * 3600.0
        times = submission_times(arrivals or "poisson", jobs, window_s, rng)
    rigid_jobs = rng.permutation(jobs) < round(rigid * jobs)
    submissions = tuple(
        Submission(f"{name}-{i + 1}", float(round(at)), name, size, batch, elastic=not rigid_jobs[i])
        for i, (at, name, (size, batch)) in enumerate(zip(times, chosen, asked, strict=True))
    )
    if deadlines:
        submissions = with_deadlines(submissions, applications, deadlines, gpus_per_node, seed)
    return Workload(kind, submissions, applications)


def with_deadlines(
    submissions: Sequence[Submission], applications: Mapping[str, Application], share: float, per_node: int, seed: int
) -> tuple[Submission, ...]:
    """Return the submissions, a random `share` of them with a deadline."""
    rng = np.random.default_rng([seed, 13])
    chosen = rng.permutation(len(submissions)) < round(share * len(submissions))
    factors = rng.uniform(*TIGHTNESS, len(submissions))
    return tuple(
        replace(s, deadline_s=float(factor * undisturbed_s(applications[s.application], s, per_node))) if due else s
        for s, due, factor in zip(submissions, chosen, factors, strict=True)
    )


def offered(workload: Workload, gpus: int, gpus_per_node: int) -> float:
    """Return the offered load: the GPU-seconds that jobs request, divided by the cluster's GPU-seconds up to the last
    submission."""
    wanted = sum(
        s.gpus * undisturbed_s(workload.applications[s.application], s, gpus_per_node) for s in workload.submissions
    )
    return wanted / (gpus * max(s.time for s in workload.submissions))


def _checked(
    kind: str, load: float, gpus: int, hours: float | None, shares: Mapping[str, float], arrivals: Arrivals | None
) -> Mix:
    if kind not in MIXES:
        raise BadInput(f"workload: {kind!r:.60} is neither a file nor one of {listed(MIXES, kind)}")
    if arrivals is not None and arrivals not in get_args(Arrivals):
        raise BadInput(f"arrivals: {arrivals!r:.60} is none of {listed(get_args(Arrivals), arrivals)}")
    for name, value in (("load", load), ("gpus", gpus), ("hours", 1.0 if hours is None else hours)):
        if not (math.isfinite(value) and value > 0):
            raise BadInput(f"{name}: {value} is not above 0")
    if hours is not None and load != 1.0:
        raise BadInput(f"load {load:g} and hours {hours:g}: both set the rate of submissions; give only one")
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise BadInput(f"{name}: {value} is not between 0 and 1")
    return MIXES[kind]


def _drawn(mix: Mix, jobs: int, rng: np.random.Generator) -> list[Kind]:
    """Return the kind of each job, in random order. The number of jobs of each kind is fixed, so that all seeds have
    the same load."""
    edges = np.cumsum(mix.shares) / np.sum(mix.shares) * jobs
    # One offset rounds them all, so that the counts add up.
    rounded = np.floor(edges - 1e-9 + rng.random()).astype(int)
    rounded[-1] = jobs
    counts = np.diff(rounded, prepend=0)
    drawn = [kind for kind, count in zip(mix.kinds, counts, strict=True) for _ in range(count)]
    return [drawn[i] for i in rng.permutation(len(drawn))]


def _perturbed(kinds: Sequence[Kind], rng: np.random.Generator) -> tuple[dict[str, Application], list[str]]:
    applications: dict[str, Application] = {}
    of_kind: dict[str, list[str]] = {}
    for kind in sorted({kind.name: kind for kind in kinds}.values(), key=lambda kind: kind.name):
        for variant in range(min(VARIANTS, sum(other is kind for other in kinds))):
            factors = {name: float(np.exp(rng.normal(0.0, sigma))) for name, sigma in PERTURB.items()}
            name = f"{kind.name}-{'abcdefgh'[variant]}"
            applications[name] = build(kind, name=name, **factors)
            of_kind.setdefault(kind.name, []).append(name)
    return applications, [str(rng.choice(of_kind[kind.name])) for kind in kinds]


def _window_s(mix: Mix, jobs: int, load: float, gpus: int, per_node: int) -> float:
    if mix.gap_s:
        return jobs * mix.gap_s * STUDIED_GPUS / (gpus * load)
    shares: Floats = np.array(mix.shares)
    hours = np.array([mean_gpu_hours(build(kind), kind, gpus, per_node) for kind in mix.kinds])
    return float(jobs * (shares @ hours) / (gpus * OFFERED * load) * 3600.0)
