"""How fast a job is on another kind of GPU: its curve on one kind, with another speed of computing and its doubt.

A job's curve is fitted on the kind on which it has measured most. On another kind it computes a factor faster, while
its exchange of gradients takes as long as before. The factor's logarithm is learned in three levels, each with the
doubt that its few measurements leave:

- of all jobs of the site: Normal(0, `SITE`²) before any tells; where the site has guessed how fast its kinds are
  (`gpu_speeds`), Normal(guess, `SCRIPT`²);
- of jobs of one spec (one script): Normal(site, `SCRIPT`²);
- of the job itself: Normal(script, `OWN`²), and what it measured there.

Jobs that ran on both kinds tell the factor, and so do those of one owner and one spec of which some ran on one kind and
some on the other. Of an owner's jobs of a script the median counts, once; for the site so does the median of all that
an owner's jobs tell. So two jobs of a script that ran on both kinds say much of a third one that ran on one, and little
of other scripts; and nobody tells more of other people's jobs by running many.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from ones_db import ThroughputPoint
from slurm_ones.learn.step_time import (
    FIGURES,
    INSIDE,
    SPEED,
    Fit,
    Prior,
    Sizes,
    StepLayout,
    log_step,
    log_step_and_slopes,
)
from slurm_ones.learn.throughput import MeasuredThroughput, MeasuredThroughputs, moved, points_of
from slurm_ones.policy.contract import Floats, ThroughputModel

SITE, SCRIPT, OWN = 0.7, 0.35, 0.1
"""Standard deviations of log factors: of any two kinds, of a script's beside the site's, of a job's beside its
script's."""
NOISE = 0.1
"""Of one job's own comparison: other sizes, other hours."""
FLAT = 0.05
"""Where a step's time follows the speed of computing by less than this, it tells nothing of it."""


class Ratio(NamedTuple):
    """One job's speed of computing on kind `there` over that on kind `here`, in logs."""

    here: str
    there: str
    log: float
    variance: float


@dataclass(frozen=True)
class Factor:
    """Normal distribution of a log factor."""

    mean: float = 0.0
    variance: float = SITE**2

    def heard(self, observed: Iterable[tuple[float, float]]) -> Factor:
        """After these (log, variance)."""
        weight, total = 1.0 / self.variance, self.mean / self.variance
        for log, variance in observed:
            weight += 1.0 / variance
            total += log / variance
        return Factor(total / weight, 1.0 / weight)


CERTAIN = Factor(0.0, 0.0)
"""The same kind."""


@dataclass(frozen=True)
class KindEvidence:
    """What one job tells of kinds: its fit on kind `here`, and how it compares with others that it ran on."""

    spec: Hashable
    user: str
    here: str
    fit: Fit
    ratios: Sequence[Ratio]


def base_kind(points: Sequence[ThroughputPoint]) -> str:
    """The kind on which most sizes and batches were measured, of several the one measured last; empty for none."""
    if len(kinds := {point.kind for point in points}) < 2:
        return kinds.pop() if kinds else ""
    tried = Counter(kind for kind, _ in {(point.kind, point[:3]) for point in points if point.kind})
    last = {point.kind: point.time for point in sorted(points, key=lambda point: point.time)}
    return max(tried, key=lambda kind: (tried[kind], last[kind]), default="")


def of_kind(points: Sequence[ThroughputPoint], kind: str) -> tuple[ThroughputPoint, ...]:
    """Those measured on that kind, and those of which nobody noted it."""
    return tuple(point for point in points if point.kind in (kind, ""))


def faster(layout: StepLayout) -> Floats:
    """(7,) how a job's figures change where it computes e times as fast and exchanges gradients as before."""
    along = np.zeros(FIGURES)
    along[SPEED] = 1.0
    if not layout.wired:  # then the exchange is told relative to the reference step
        along[INSIDE] = 1.0
    return along


def ratios(points: Sequence[ThroughputPoint], fit: Fit, layout: StepLayout, here: str) -> list[Ratio]:
    """What a job with this fit of kind `here` measured on others, each in one figure: the speed of computing there that
    explains its steps best."""
    found, along, model = [], faster(layout), MeasuredThroughputs((MeasuredThroughput(fit, layout),))
    for there in sorted({point.kind for point in points} - {here, ""}) if here else ():
        seen = points_of([point for point in points if point.kind == there], fit.reference, layout)
        if not len(seen.count):
            continue
        reference, row = np.float64(fit.reference), Sizes(*(values[None] for values in vars(seen.at).values()))
        # What the figures leave unexplained at a size is taken to be alike on both kinds.
        misfit = model.log_step(row)[0] - log_step(fit.figures, seen.at, reference)
        log, slope = 0.0, np.zeros(0)
        for _ in range(6):
            steps, slopes = log_step_and_slopes(fit.figures + along * log, seen.at, reference)
            slope = slopes @ along
            if np.abs(slope).max() < FLAT:
                break
            log += float(np.clip(slope @ (seen.log_step - steps - misfit) / (slope @ slope), -1.0, 1.0))
        else:
            doubt = float((slope**2 @ model.variance(row)[0]) / (slope @ slope) ** 2)
            found.append(Ratio(here, there, log, NOISE**2 + doubt))
    return found


class KindFactors:
    """Factors between kinds, from jobs that ran on several, and what the site `guessed` of their speeds."""

    def __init__(self, guessed: Mapping[str, float] | None = None) -> None:
        self._guessed = guessed or {}
        self._site: dict[tuple[str, str], Factor] = {}
        self._scripts: dict[tuple[Hashable, str, str], Factor] = {}
        self.reference = next(iter(self._guessed), "")
        """The kind that figures of all jobs are told for: the one that most of them ran on."""

    def learn(self, jobs: Sequence[KindEvidence]) -> None:
        """From these jobs alone."""
        ran = Counter(job.here for job in jobs if job.here)
        self.reference = max(sorted(ran), key=lambda kind: ran[kind], default=next(iter(self._guessed), ""))
        scripts: dict[tuple[Hashable, str, str], list[tuple[float, float]]] = defaultdict(list)
        users: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for (_, here, there), each in _by_owner(jobs).items():
            for spec, (log, variance) in each.items():
                scripts[spec, here, there].append((log, variance + OWN**2))
            logs, variances = zip(*each.values(), strict=True)
            users[here, there].append((statistics.median(logs), statistics.median(variances) + SCRIPT**2))
        self._site = {pair: self._first(*pair).heard(heard) for pair, heard in users.items()}
        self._scripts = {key: self._other(*key[1:]).heard(heard) for key, heard in scripts.items()}

    def factor(self, spec: Hashable, here: str, there: str, own: Iterable[Ratio] = ()) -> Factor:
        """From kind `here` to kind `there`, of a job of that spec with these ratios of its own."""
        if here == there or not (here and there):
            return CERTAIN
        known = self._scripts.get((spec, here, there)) if spec is not None else None
        known = known or self._other(here, there)
        prior = Factor(known.mean, known.variance + OWN**2)
        return prior.heard([(one.log, one.variance) for one in own if (one.here, one.there) == (here, there)])

    def _other(self, here: str, there: str) -> Factor:
        """Of a script of which nothing is known."""
        site = self._site.get((here, there))
        if site is None:
            return self._first(here, there)
        return Factor(site.mean, site.variance + SCRIPT**2)

    def _first(self, here: str, there: str) -> Factor:
        """Before any job tells: nothing, or the site's guess, which its scripts keep to more or less."""
        if here in self._guessed and there in self._guessed:
            return Factor(math.log(self._guessed[there] / self._guessed[here]), SCRIPT**2)
        return Factor()


def _by_owner(jobs: Sequence[KindEvidence]) -> dict[tuple[str, str, str], dict[Hashable, tuple[float, float]]]:
    """Of each owner, from one kind to another, what the jobs of each spec tell: log and variance."""
    every: dict[tuple[str, str, str], dict[Hashable, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    speeds: dict[tuple[Hashable, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for job in jobs:
        for ratio in job.ratios:
            every[job.user, ratio.here, ratio.there][job.spec].append((ratio.log, ratio.variance))
            every[job.user, ratio.there, ratio.here][job.spec].append((-ratio.log, ratio.variance))
        if job.here and job.spec is not None:
            own = float(job.fit.figures[SPEED]), float(job.fit.covariance[SPEED, SPEED])
            speeds[job.spec, job.user][job.here].append(own)
    for (spec, user), by_kind in speeds.items():
        for here, there in permutations(sorted(by_kind), 2):
            (before, doubt), (after, more) = middle(by_kind[here]), middle(by_kind[there])
            every[user, here, there][spec].append((after - before, doubt + more + 2 * OWN**2 + NOISE**2))
    return {key: {spec: middle(found) for spec, found in each.items()} for key, each in every.items()}


def middle(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Median of the logs, and the variance of that."""
    logs, variances = zip(*found, strict=True)
    return statistics.median(logs), statistics.median(variances) / len(found)


def prior_on(prior: Prior, factor: Factor, layout: StepLayout) -> Prior:
    """What is believed of a job's figures on another kind."""
    if factor == CERTAIN:
        return prior
    along = faster(layout)
    covariance = prior.covariance + factor.variance * np.outer(along, along)
    deviation = np.sqrt(np.diagonal(covariance))
    return Prior(prior.mean + factor.mean * along, deviation, covariance / deviation / deviation[:, None])


def fit_on(fit: Fit, factor: Factor, layout: StepLayout) -> Fit:
    """A fit as it would be on another kind, were the factor certain."""
    return moved(fit, factor.mean * faster(layout)) if factor.mean else fit


def on_kinds(
    model: MeasuredThroughput,
    here: str,
    kinds: Iterable[str],
    factors: KindFactors,
    spec: Hashable,
    own: Sequence[Ratio],
) -> Mapping[str, ThroughputModel]:
    """The model on each of the kinds; `here` is the one that its figures are told for, empty for none."""
    found: dict[str, ThroughputModel] = {}
    for kind in kinds:
        factor = factors.factor(spec, here, kind, own)
        along = faster(model.layout)
        same = factor == CERTAIN
        found[kind] = model if same else model.moved(factor.mean * along, math.sqrt(factor.variance) * along)
    return found
