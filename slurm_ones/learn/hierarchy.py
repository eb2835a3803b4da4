"""Prior of a job before its own measurements, learned from similar jobs by a hierarchical model.

The groups form a tree: the site, families (jobs with equal batches and strategy), specs (jobs of one script), owners,
jobs. Each parameter of the step time (`step_time`) has a value at every node of the tree. It is normally distributed
around its value at the parent node, with one standard deviation for each level:

    job ~ N(owner, S3), owner ~ N(spec, S2), spec ~ N(family, S1), family ~ N(site, S0),

A job's measurements give a normal likelihood of its parameters, by linearisation of its fit. Belief propagation
combines these likelihoods, once up the tree and once down. The posterior of a node is the product of its prior and its
children's messages. The four deviations maximise the likelihood of the measurements (empirical Bayes, by
expectation-maximisation). With few jobs each deviation stays near a typical one. This is partial pooling (Gelman and
others, Bayesian Data Analysis, 2013, ch. 5); written from general knowledge of that book.

A user who runs many jobs with false reports must not decide what is expected of other users' jobs:

- Within a spec each owner counts once. At other nodes a user's weight is at most half of the weight of all others
  together.
- A child further than `FAR` deviations from its parent moves the parent no more than a child at that distance (Huber
  loss).
- The jobs of a family or spec move the prior by at most `MOVES` deviations of the wider group. A job's own measurements
  move its parameters without limit. Jobs also move the site's prior without limit.

**Widths** calibrate the predicted intervals. Each size that a finished job measured is predicted from its other sizes
and from the other half of the jobs. The errors are divided by their predicted deviations. A quantile of these ratios is
the factor on predicted deviations, one factor inside a node and one across nodes. An interval of nominal coverage
`HOLDS` then covers that share of the measurements. This is split conformal prediction (Vovk, Gammerman and Shafer,
Algorithmic Learning in a Random World, 2005). With few predictions a factor stays near 1. No user's predictions count
for more than those of all others together.

**Kinds of GPU.** A job's curve is fitted for the kind of GPU on which it has measured most. On another kind, compute is
faster by a factor, and the exchange of gradients takes as long. The logarithm of the factor has a normal distribution
at three levels, and measurements narrow each of them:

- For all jobs of the site: Normal(0, `SITE`²) before any measurement. If the site has guessed how fast its kinds are
  (`gpu_speeds`), Normal(guess, `SCRIPT`²).
- For the jobs of one spec, that is one script: Normal(site, `SCRIPT`²).
- For the job itself: Normal(script, `OWN`²).

A job that ran on two kinds measures the factor. So do jobs of one owner and spec that ran on different kinds. An
owner's jobs of one script count once, by their median; for the site, all of an owner's jobs count once. Running many
jobs gives a user no more influence on other users' jobs.
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

from slurm_ones.learn.step_time import (
    HIGHEST,
    INSIDE,
    LOWEST,
    NOISE,
    PARAMETERS,
    SPEED,
    Fit,
    Points,
    Prior,
    Sizes,
    StepLayout,
    fit_all,
)
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.policy.contract import Bools, Floats, Ints, ThroughputModel

LEVELS = 4
"""Number of levels of nodes with children: site, family, spec and owner."""
FAR = 2.0
MOVES = 2.5
MAJORITY = 0.5
"""Largest weight of one user's jobs, relative to the weight of all other users' jobs together."""
SPREADS: Floats = np.array(
    [
        [1.5, 1.0, 0.9, 0.8, 0.6, 0.8, 0.5],
        [0.5, 0.3, 0.3, 0.3, 0.25, 0.3, 0.2],
        [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    ]
)
"""Typical standard deviation of each child around its parent (levels, parameters): families, specs, owners, jobs."""
CERTAIN = 4.0
"""Weight of `SPREADS` in the estimate of a level's deviations, counted in children."""
WIDEST = 2.0
"""Largest deviation, as a multiple of that in `SPREADS`; false reports could otherwise widen it without bound."""
ROUNDS = 5
"""Number of rounds of expectation-maximisation."""


@dataclass(frozen=True)
class GroupPath:
    """Position of a job in the tree of groups: its family, its spec and its owner."""

    family: Hashable
    spec: Hashable
    user: str

    def nodes(self) -> tuple[Hashable, ...]:
        """Return the keys of the nodes above the job: site, family, spec and owner."""
        return ((), (self.family,), (self.family, self.spec), (self.family, self.spec, self.user))


@dataclass(frozen=True)
class JobEvidence:
    """Likelihood of a job's parameters, as its measurements give it without any prior."""

    weighed: Floats
    """Precision matrix × parameters (parameters,)."""
    precision: Floats
    """Precision matrix of the parameters (parameters, parameters)."""

    @classmethod
    def of(cls, fit: Fit) -> JobEvidence:
        """Return the likelihood that a fit's measurements give, without the fit's prior."""
        precision = fit.slopes.T @ fit.weights @ fit.slopes
        return cls(precision @ fit.parameters + fit.slopes.T @ fit.misfit, precision)


@dataclass
class _Level:
    """All nodes of one level, as children of the level above. Each array has a row for each child."""

    parents: Ints
    """Index of each child's parent in the level above."""
    shares: Floats
    """Weight of each child among its parent's children."""
    near: Floats
    """Huber weight of each child: 1 near its parent, less if it is further than `FAR` deviations away."""
    weighed: Floats
    precision: Floats
    """Precision matrix of each child's parameters, from the measurements below it; `weighed` is this matrix ×
    parameters."""


class Tree:
    """Tree of groups with their priors, learned from measured jobs. `around` is the prior without any measured job."""

    def __init__(self, jobs: Sequence[tuple[GroupPath, JobEvidence]], around: Prior) -> None:
        self._around = around
        self.spreads = SPREADS.copy()
        """Standard deviation of the children of each level around their parents (levels, parameters)."""
        self._levels: list[_Level] = []
        self._places: list[dict[Hashable, int]] = [{} for _ in range(LEVELS)]
        if not jobs:
            return
        paths = [path.nodes() for path, _ in jobs]
        for nodes in paths:
            for level, node in enumerate(nodes):
                self._places[level].setdefault(node, len(self._places[level]))
        parents: list[Ints] = []
        for level in range(LEVELS):
            last = level + 1 == LEVELS
            below = list(range(len(paths))) if last else [nodes[level + 1] for nodes in paths]
            of = dict(zip(below, (self._places[level][nodes[level]] for nodes in paths), strict=True))
            order = range(len(paths)) if last else self._places[level + 1]
            parents.append(np.array([of[child] for child in order], dtype=np.int64))
        shares = _shares(parents, [path.user for path, _ in jobs])
        for above, share in zip(parents, shares, strict=True):
            count = len(above)
            self._levels.append(
                _Level(
                    above,
                    share,
                    np.ones(count),
                    np.zeros((count, PARAMETERS)),
                    np.zeros((count, PARAMETERS, PARAMETERS)),
                )
            )
        self._levels[-1].weighed = np.stack([one.weighed for _, one in jobs])
        self._levels[-1].precision = np.stack([one.precision for _, one in jobs])
        for _ in range(ROUNDS):
            self._up()
            self._settle()
        self._up()

    def expect(self, path: GroupPath, *, others: bool = False) -> Prior:
        """Return the prior of a job at this place in the tree. With `others`, its owner's jobs of this spec do not
        count."""
        if not self._levels:
            return self._around
        mean: Floats = self._around.mean
        precision: Floats = np.diag(_vague(self._around) ** -2.0)
        nodes = path.nodes()
        for level in range(LEVELS):
            if level:
                precision = np.linalg.inv(np.linalg.inv(precision) + np.diag(self.spreads[level - 1] ** 2))
            place = self._places[level].get(nodes[level])
            if place is None or (others and level + 1 == LEVELS):
                continue
            found, weighed = self._from_below[level][0][place], self._from_below[level][1][place]
            below = self._places[level + 1].get(nodes[level + 1]) if level + 1 < LEVELS else None
            if below is not None:
                # The message of this child is added further down.
                own, own_weighed = self._messages[level]
                found, weighed = found - own[below], weighed - own_weighed[below]
            before, room = mean, MOVES * np.sqrt(np.diagonal(np.linalg.inv(precision)))
            mean = np.linalg.solve(precision + found, precision @ mean + weighed)
            precision = precision + found
            if 0 < level < LEVELS - 1:
                mean = np.clip(mean, before - room, before + room)
        covariance = np.linalg.inv(precision) + np.diag(self.spreads[-1] ** 2)
        deviation = np.sqrt(np.diagonal(covariance))
        return Prior(np.clip(mean, LOWEST, HIGHEST), deviation, covariance / deviation / deviation[:, None])

    def _up(self) -> None:
        """Compute the message of each child to its parent, and the sum of the messages to each parent."""
        self._from_below: list[tuple[Floats, Floats]] = []
        self._messages: list[tuple[Floats, Floats]] = []
        for level in range(LEVELS - 1, -1, -1):
            at = self._levels[level]
            counts = (at.shares * at.near)[:, None]
            inner = np.linalg.inv(at.precision + np.diag(self.spreads[level] ** -2.0))
            message = at.precision - at.precision @ inner @ at.precision
            weighed = at.weighed - np.einsum("cab,cbd,cd->ca", at.precision, inner, at.weighed)
            message, weighed = counts[:, :, None] * message, counts * weighed
            total = np.zeros((len(self._places[level]), PARAMETERS, PARAMETERS))
            sums = np.zeros((len(self._places[level]), PARAMETERS))
            np.add.at(total, at.parents, message)
            np.add.at(sums, at.parents, weighed)
            self._messages.insert(0, (message, weighed))
            self._from_below.insert(0, (total, sums))
            if level:
                self._levels[level - 1].precision, self._levels[level - 1].weighed = total, sums

    def _settle(self) -> None:
        """Update the deviations of each level and the Huber weights of the children: one step of
        expectation-maximisation."""
        mean: Floats = self._around.mean[None]
        covariance: Floats = np.diag(_vague(self._around) ** 2)[None]
        for level in range(LEVELS):
            at = self._levels[level]
            found, weighed = self._from_below[level]
            inverse = np.linalg.inv(covariance)
            covariance = np.asarray(np.linalg.inv(inverse + found), dtype=np.float64)
            mean = np.einsum("nab,nb->na", covariance, np.einsum("nab,nb->na", inverse, mean) + weighed)
            # Children, given the node above: `apart` is their distance from it, `left` the covariance of that distance.
            tight = self.spreads[level] ** -2.0
            own = np.linalg.inv(at.precision + np.diag(tight))
            pull = own * tight[None, None, :] - np.eye(PARAMETERS)
            above, above_covariance = mean[at.parents], covariance[at.parents]
            apart = np.einsum("cab,cb->ca", own, at.weighed) + np.einsum("cab,cb->ca", pull, above)
            left = own + pull @ above_covariance @ pull.transpose(0, 2, 1)
            off = np.abs(apart) / self.spreads[level]
            at.near = np.minimum(1.0, FAR / np.maximum(off.max(axis=1), 1e-9))
            square = apart**2 + np.diagonal(left, axis1=1, axis2=2)
            counts = (at.shares * at.near)[:, None]
            total = CERTAIN * SPREADS[level] ** 2 + (counts * square).sum(axis=0)
            self.spreads[level] = np.minimum(np.sqrt(total / (CERTAIN + counts.sum())), WIDEST * SPREADS[level])
            if level + 1 < LEVELS:
                # The belief about the node above without a child's own message is what is expected of this child.
                message, own_weighed = self._messages[level]
                above_precision = np.linalg.inv(above_covariance)
                rest = above_precision - message
                weighed = np.einsum("cab,cb->ca", above_precision, above) - own_weighed
                mean = np.linalg.solve(rest, weighed[:, :, None])[:, :, 0]
                spread = np.diag(self.spreads[level] ** 2)
                covariance = np.asarray(np.linalg.inv(rest) + spread, dtype=np.float64)


def _vague(around: Prior) -> Floats:
    return np.minimum(around.deviation, np.where(np.arange(PARAMETERS) == 0, 4.0, 0.7))


def _shares(parents: Sequence[Ints], users: Sequence[str]) -> list[Floats]:
    """Return, for each level, the weight of each child among its parent's children. One user's children weigh at most
    `MAJORITY` of all others' together.

    `parents` holds for each level the index of each child's parent; the children at the last level are jobs. `users`
    are the jobs' owners. A node belongs to each user by the share of its jobs that are the user's.
    """
    masses: list[dict[str, float]] = [{user: 1.0} for user in users]
    found: list[Floats] = []
    for above in reversed(parents):
        totals: list[dict[str, float]] = [{} for _ in range(int(above.max()) + 1)]
        for parent, mass in zip(above.tolist(), masses, strict=True):
            for user, share in mass.items():
                totals[parent][user] = totals[parent].get(user, 0.0) + share
        every = [sum(total.values()) for total in totals]
        weights = [
            sum(share * _most(totals[parent][user], every[parent]) for user, share in mass.items())
            for parent, mass in zip(above.tolist(), masses, strict=True)
        ]
        found.insert(0, np.array(weights))
        masses = [
            {user: share / all_ for user, share in total.items()} for total, all_ in zip(totals, every, strict=True)
        ]
    return found


def _most(mine: float, every: float) -> float:
    return min(1.0, MAJORITY * (every - mine) / mine) if every - mine > 1e-9 else 1.0


HOLDS, BEYOND = 0.8, 1.2816
"""Nominal coverage of the calibrated intervals, and the half width of that interval of a standard normal
distribution."""
UNSURE = 10.0
"""Weight of the value 1 in the estimate of a calibration factor, counted in predictions."""
LEAST, MOST = 0.4, 2.5
TESTED = 60
"""Largest number of finished jobs used for calibration; the newest are used."""


def found_widths(jobs: Sequence[tuple[GroupPath, Fit]], around: Prior) -> tuple[float, float]:
    """Return the factors on predicted standard deviations, inside a node and across nodes. `jobs` are finished jobs,
    newest first."""
    jobs = [(path, fit) for path, fit in jobs if len(fit.misfit)]
    held = [
        (half, path, fit, out)
        for half, some in enumerate((jobs[0::2], jobs[1::2]))
        for path, fit in some[: TESTED // 2]
        for out in _sizes(fit.points)
    ]
    if not held:
        return 1.0, 1.0
    trees = [Tree([(path, JobEvidence.of(fit)) for path, fit in some], around) for some in (jobs[1::2], jobs[0::2])]
    priors = {(half, path): trees[half].expect(path) for half, path in {(half, path) for half, path, _, _ in held}}
    fits = fit_all([(_some(fit.points, ~out), fit.reference, priors[half, path]) for half, path, fit, out in held])
    models = MeasuredThroughput.together([MeasuredThroughput(fit) for fit in fits])
    tests = [_some(fit.points, np.arange(len(out)) == np.argmax(out)) for _, _, fit, out in held]
    at = Sizes.together([test.at for test in tests], np.stack)
    measured = np.array([test.log_step[0] for test in tests])
    count = np.array([test.count[0] for test in tests])
    deviation = np.sqrt(models.variance(at)[:, 0] + NOISE**2 / count)
    off = np.abs(measured - models.log_step(at)[:, 0]) / deviation
    across = at.across[:, 0] > 0
    users = [path.user for _, path, _, _ in held]
    inside, outside = (_factor(off[rows], [users[i] for i in np.flatnonzero(rows)]) for rows in (~across, across))
    return inside, outside


def _factor(off: np.ndarray, users: Sequence[str]) -> float:
    if not len(off):
        return 1.0
    counts = Counter(users)
    others = {user: len(users) - count for user, count in counts.items()}
    weight = np.array([min(1.0, others[user] / counts[user]) if others[user] else 1.0 for user in users])
    order = np.argsort(off)
    # One further prediction, not known yet, must be covered as well.
    reached = np.cumsum(weight[order]) >= HOLDS * (weight.sum() + 1.0)
    quantile = off[order[np.argmax(reached)]] if reached.any() else off.max()
    sure = weight.sum() / (weight.sum() + UNSURE)
    return float(np.clip(np.exp(sure * np.log(max(quantile, 1e-3) / BEYOND)), LEAST, MOST))


def _sizes(points: Points) -> list[Bools]:
    kinds = np.stack([points.at.gpus, points.at.across], axis=1)
    each = np.unique(kinds, axis=0)
    return [(kinds == kind).all(axis=1) for kind in each] if len(each) > 1 else []


def _some(points: Points, rows: Bools) -> Points:
    return Points(points.at.each(lambda values: values[rows]), points.log_step[rows], points.count[rows])


# -- kinds of GPU ------------------------------------------------------------------------------------------------------

SITE, SCRIPT, OWN = 0.7, 0.35, 0.1
"""Standard deviations of the log of a speed factor between two kinds of GPU: of the site's around 0 before any
measurement, of a script's around the site's, of a job's around its script's."""
COMPARED = 0.1
"""Standard deviation that different sizes, nodes and hours add to the log ratio of two compared speeds."""


class Ratio(NamedTuple):
    """Log of a job's speed ratio: compute speed on the kind of GPU `there`, divided by that on the kind `here`."""

    here: str
    there: str
    log: float
    variance: float


@dataclass(frozen=True)
class Factor:
    """Normal distribution of the log of a speed factor between two kinds of GPU."""

    mean: float = 0.0
    variance: float = SITE**2

    def after(self, observed: Iterable[tuple[float, float]]) -> Factor:
        """Return the posterior after observations of the log, each a pair (log, variance)."""
        weight, total = 1.0 / self.variance, self.mean / self.variance
        for log, variance in observed:
            weight += 1.0 / variance
            total += log / variance
        return Factor(total / weight, 1.0 / weight)


SAME = Factor(0.0, 0.0)
"""Factor from a kind of GPU to itself."""


@dataclass(frozen=True)
class KindEvidence:
    """Fit of one job on the kind of GPU `here`, and ratios of its speeds on other kinds to its speed on `here`."""

    spec: Hashable
    user: str
    here: str
    fit: Fit
    ratios: Sequence[Ratio]


def faster(layout: StepLayout) -> Floats:
    """Return the change of a job's parameters (parameters,) on GPUs that compute faster by a factor of e = 2.718."""
    along = np.zeros(PARAMETERS)
    along[SPEED] = 1.0
    if not layout.wired:  # the exchange is then relative to the reference step
        along[INSIDE] = 1.0
    return along


class KindFactors:
    """Speed factors between kinds of GPU, learned from jobs. Before any job they are the site's guesses (`guessed`)."""

    def __init__(self, guessed: Mapping[str, float] | None = None) -> None:
        self._guessed = guessed or {}
        self._site: dict[tuple[str, str], Factor] = {}
        self._scripts: dict[tuple[Hashable, str, str], Factor] = {}
        self.reference = next(iter(self._guessed), "")
        """Kind of GPU on which most jobs ran; all jobs' parameters are converted to it."""

    def learn(self, jobs: Sequence[KindEvidence]) -> None:
        """Learn the speed factors from these jobs, and forget earlier ones."""
        ran = Counter(job.here for job in jobs if job.here)
        self.reference = max(sorted(ran), key=lambda kind: ran[kind], default=next(iter(self._guessed), ""))
        scripts: dict[tuple[Hashable, str, str], list[tuple[float, float]]] = defaultdict(list)
        users: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for (_, here, there), each in _by_owner(jobs).items():
            for spec, (log, variance) in each.items():
                scripts[spec, here, there].append((log, variance + OWN**2))
            logs, variances = zip(*each.values(), strict=True)
            users[here, there].append((statistics.median(logs), statistics.median(variances) + SCRIPT**2))
        self._site = {pair: self._first(*pair).after(found) for pair, found in users.items()}
        self._scripts = {key: self._other(*key[1:]).after(found) for key, found in scripts.items()}

    def factor(self, spec: Hashable, here: str, there: str, own: Iterable[Ratio] = ()) -> Factor:
        """Return the speed factor from kind `here` to kind `there` for a job of this spec with its `own` ratios."""
        if here == there or not (here and there):
            return SAME
        known = self._scripts.get((spec, here, there)) if spec is not None else None
        known = known or self._other(here, there)
        prior = Factor(known.mean, known.variance + OWN**2)
        return prior.after([(one.log, one.variance) for one in own if (one.here, one.there) == (here, there)])

    def _other(self, here: str, there: str) -> Factor:
        site = self._site.get((here, there))
        if site is None:
            return self._first(here, there)
        return Factor(site.mean, site.variance + SCRIPT**2)

    def _first(self, here: str, there: str) -> Factor:
        if here in self._guessed and there in self._guessed:
            return Factor(math.log(self._guessed[there] / self._guessed[here]), SCRIPT**2)
        return Factor()


def _by_owner(jobs: Sequence[KindEvidence]) -> dict[tuple[str, str, str], dict[Hashable, tuple[float, float]]]:
    """Return each speed factor's (log, variance), by (owner, here, there) and then by spec."""
    every: dict[tuple[str, str, str], dict[Hashable, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    speeds: dict[tuple[Hashable, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for job in jobs:
        for ratio in job.ratios:
            every[job.user, ratio.here, ratio.there][job.spec].append((ratio.log, ratio.variance))
            every[job.user, ratio.there, ratio.here][job.spec].append((-ratio.log, ratio.variance))
        if job.here and job.spec is not None:
            own = float(job.fit.parameters[SPEED]), float(job.fit.covariance[SPEED, SPEED])
            speeds[job.spec, job.user][job.here].append(own)
    for (spec, user), by_kind in speeds.items():
        for here, there in permutations(sorted(by_kind), 2):
            (before, doubt), (after, more) = middle(by_kind[here]), middle(by_kind[there])
            every[user, here, there][spec].append((after - before, doubt + more + 2 * OWN**2 + COMPARED**2))
    return {key: {spec: middle(found) for spec, found in each.items()} for key, each in every.items()}


def middle(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of the logs in the pairs (log, variance), and the median's variance."""
    logs, variances = zip(*found, strict=True)
    return statistics.median(logs), statistics.median(variances) / len(found)


def prior_on(prior: Prior, factor: Factor, layout: StepLayout) -> Prior:
    """Return the prior on another kind of GPU. `factor` is the speed factor to it from the kind of `prior`."""
    if factor == SAME:
        return prior
    along = faster(layout)
    covariance = prior.covariance + factor.variance * np.outer(along, along)
    deviation = np.sqrt(np.diagonal(covariance))
    return Prior(prior.mean + factor.mean * along, deviation, covariance / deviation / deviation[:, None])


def on_kinds(
    model: MeasuredThroughput,
    here: str,
    kinds: Iterable[str],
    factors: KindFactors,
    spec: Hashable,
    own: Sequence[Ratio],
) -> Mapping[str, ThroughputModel]:
    """Return the job's model on each of these kinds of GPU. `model` is for the kind `here` ("" if unknown)."""
    along = faster(model.layout)
    by_kind = {kind: factors.factor(spec, here, kind, own) for kind in kinds}
    return {
        kind: model if factor == SAME else model.moved(factor.mean * along, math.sqrt(factor.variance) * along)
        for kind, factor in by_kind.items()
    }
