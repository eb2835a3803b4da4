"""What is expected of a job before it has run: the figures of its like, each group shrunk towards the wider one.

A tree of groups: the site, in it the families (jobs whose batches are told alike), in them the specs, in those their
owners, and in those the jobs. Each figure of the step time (`step_time`) has a value at every node that is normal
around that of the node above it, with a deviation of the level, so

    job ~ N(owner, S3), owner ~ N(spec, S2), spec ~ N(family, S1), family ~ N(site, S0),

and a job's measurements are a normal message about its own figures, that of its linearised fit. What is known of a node
is then the product of what its children say and what is expected of it: one pass up the tree and one down. The four
deviations are those under which what was measured is most likely (empirical Bayes, by expectation-maximisation), each
held near a typical one as long as few jobs say otherwise (partial pooling, as in Gelman and others, Bayesian Data
Analysis, 2013, ch. 5; written from what is generally known of it).

Who runs many jobs that lie must not decide what is expected of other people's:

- in a spec each owner counts once, and elsewhere no user counts for more than half of all others together;
- a child that is further than `FAR` deviations from the node above it pulls no harder than one that is there (Huber);
- what others of its family, and of its spec, have measured moves a job's figures by at most `MOVES` deviations of the
  group above, its own by any. The site's own figures are not held: where one user's jobs alone are known they decide.

**Widths.** How wide an interval must be to hold as often as it says: measured on what the database's own jobs did next.

Each size that a finished job measured is predicted from its other sizes, and from what the other half of the jobs
teaches about one like it. How far off these predictions are, in their own deviations, gives one factor for sizes inside
a node and one across nodes, such that intervals of `HOLDS` hold that often (split conformal prediction; Vovk, Gammerman
and Shafer, Algorithmic Learning in a Random World, 2005). With few predictions the factor stays near 1.

No user's predictions count for more than those of all others together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from slurm_ones.learn.step_time import FIGURES, HIGHEST, LOWEST, NOISE, Fit, Points, Prior, Sizes, fit_all
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.policy.contract import Bools, Floats, Ints

LEVELS = 4
"""Site, family, spec and owner: nodes that have children."""
FAR = 2.0
MOVES = 2.5
MAJORITY = 0.5
"""Of what all others count for, what one user does at most: with as much as they, a lie would draw the middle along."""
SPREADS: Floats = np.array(
    [
        [1.5, 1.0, 0.9, 0.8, 0.6, 0.8, 0.5],
        [0.5, 0.3, 0.3, 0.3, 0.25, 0.3, 0.2],
        [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    ]
)
"""(LEVELS, 7) typical deviations of families, specs, owners and jobs around the node above them."""
CERTAIN = 4.0
"""How many children those typical deviations count for."""
WIDEST = 2.0
"""No deviation is taken for more than so many typical ones: who lies would widen them, and pull harder."""
ROUNDS = 5
"""Of expectation-maximisation."""


@dataclass(frozen=True)
class GroupPath:
    """Where a job is in the tree."""

    family: Hashable
    spec: Hashable
    user: str

    def nodes(self) -> tuple[Hashable, ...]:
        """Its node at each level, the site's first."""
        return ((), (self.family,), (self.family, self.spec), (self.family, self.spec, self.user))


@dataclass(frozen=True)
class JobEvidence:
    """What one job's measurements say of its figures, whatever was believed before."""

    weighed: Floats
    """(7,) precision × value: of figures that they leave open only what is known of them together."""
    precision: Floats
    """(7, 7)"""

    @classmethod
    def of(cls, fit: Fit) -> JobEvidence:
        """From a fit, its prior taken out again."""
        precision = fit.slopes.T @ fit.weights @ fit.slopes
        return cls(precision @ fit.figures + fit.slopes.T @ fit.misfit, precision)


@dataclass
class _Level:
    """The nodes of one level as children of those above."""

    parents: Ints
    """(C,) the place above of each child."""
    shares: Floats
    """(C,) how much each counts there."""
    near: Floats
    """(C,) and how much of that is left for its distance."""
    weighed: Floats
    precision: Floats
    """(C, 7) and (C, 7, 7): what is known of each from below."""


class Tree:
    """What jobs that were heard teach; `around` is what is believed before any was."""

    def __init__(
        self, heard: Sequence[tuple[GroupPath, JobEvidence]], around: Prior, spreads: Floats = SPREADS
    ) -> None:
        self._around = around
        self.spreads = spreads.copy()
        """(LEVELS, 7) deviations of children around the node above them."""
        self._levels: list[_Level] = []
        self._places: list[dict[Hashable, int]] = [{} for _ in range(LEVELS)]
        if not heard:
            return
        kins = [kin.nodes() for kin, _ in heard]
        for nodes in kins:
            for level, node in enumerate(nodes):
                self._places[level].setdefault(node, len(self._places[level]))
        parents: list[Ints] = []
        for level in range(LEVELS):
            last = level + 1 == LEVELS
            below = list(range(len(kins))) if last else [nodes[level + 1] for nodes in kins]
            of = dict(zip(below, (self._places[level][nodes[level]] for nodes in kins), strict=True))
            order = range(len(kins)) if last else self._places[level + 1]
            parents.append(np.array([of[child] for child in order], dtype=np.int64))
        shares = _shares(parents, [kin.user for kin, _ in heard])
        for above, share in zip(parents, shares, strict=True):
            count = len(above)
            self._levels.append(
                _Level(above, share, np.ones(count), np.zeros((count, FIGURES)), np.zeros((count, FIGURES, FIGURES)))
            )
        jobs = self._levels[-1]
        jobs.weighed = np.stack([one.weighed for _, one in heard])
        jobs.precision = np.stack([one.precision for _, one in heard])
        for _ in range(ROUNDS):
            self._up()
            self._settle()
        self._up()

    def expect(self, kin: GroupPath, *, others: bool = False) -> Prior:
        """What is believed of a job there that has measured nothing; of what `others` measured of its spec, where its
        owner's jobs are not to count there."""
        if not self._levels:
            return self._around
        mean: Floats = self._around.mean
        precision: Floats = np.diag(_vague(self._around) ** -2.0)
        nodes = kin.nodes()
        for level in range(LEVELS):
            if level:
                precision = _through(precision, self.spreads[level - 1])
            place = self._places[level].get(nodes[level])
            if place is None or (others and level + 1 == LEVELS):
                continue
            told, weighed = self._told[level][0][place], self._told[level][1][place]
            below = self._places[level + 1].get(nodes[level + 1]) if level + 1 < LEVELS else None
            if below is not None:
                # What this child says of it comes in further down.
                own, own_weighed = self._messages[level]
                told, weighed = told - own[below], weighed - own_weighed[below]
            before, room = mean, MOVES * np.sqrt(np.diagonal(np.linalg.inv(precision)))
            mean = np.linalg.solve(precision + told, precision @ mean + weighed)
            precision = precision + told
            if 0 < level < LEVELS - 1:
                mean = np.clip(mean, before - room, before + room)
        covariance = np.linalg.inv(precision) + np.diag(self.spreads[-1] ** 2)
        deviation = np.sqrt(np.diagonal(covariance))
        return Prior(np.clip(mean, LOWEST, HIGHEST), deviation, covariance / deviation / deviation[:, None])

    def _up(self) -> None:
        """What is known of each node from below, and what each child says of the node above it."""
        self._told: list[tuple[Floats, Floats]] = []
        self._messages: list[tuple[Floats, Floats]] = []
        for level in range(LEVELS - 1, -1, -1):
            at = self._levels[level]
            counts = (at.shares * at.near)[:, None]
            inner = np.linalg.inv(at.precision + np.diag(self.spreads[level] ** -2.0))
            message = at.precision - at.precision @ inner @ at.precision
            weighed = at.weighed - np.einsum("cab,cbd,cd->ca", at.precision, inner, at.weighed)
            message, weighed = counts[:, :, None] * message, counts * weighed
            total = np.zeros((len(self._places[level]), FIGURES, FIGURES))
            sums = np.zeros((len(self._places[level]), FIGURES))
            np.add.at(total, at.parents, message)
            np.add.at(sums, at.parents, weighed)
            self._messages.insert(0, (message, weighed))
            self._told.insert(0, (total, sums))
            if level:
                self._levels[level - 1].precision, self._levels[level - 1].weighed = total, sums

    def _settle(self) -> None:
        """One step of expectation-maximisation: the deviations that make what was heard likelier, and how much of each
        child counts that is far from the node above it."""
        mean: Floats = self._around.mean[None]
        covariance: Floats = np.diag(_vague(self._around) ** 2)[None]
        for level in range(LEVELS):
            at = self._levels[level]
            told, weighed = self._told[level]
            inverse = np.linalg.inv(covariance)
            covariance = np.asarray(np.linalg.inv(inverse + told), dtype=np.float64)
            mean = np.einsum("nab,nb->na", covariance, np.einsum("nab,nb->na", inverse, mean) + weighed)
            # The children, given the node above: off it by `apart`, with covariance `left`.
            tight = self.spreads[level] ** -2.0
            own = np.linalg.inv(at.precision + np.diag(tight))
            pull = own * tight[None, None, :] - np.eye(FIGURES)
            above, above_covariance = mean[at.parents], covariance[at.parents]
            apart = np.einsum("cab,cb->ca", own, at.weighed) + np.einsum("cab,cb->ca", pull, above)
            left = own + pull @ above_covariance @ pull.transpose(0, 2, 1)
            off = np.abs(apart) / self.spreads[level]
            at.near = np.minimum(1.0, FAR / np.maximum(off.max(axis=1), 1e-9))
            square = apart**2 + np.diagonal(left, axis1=1, axis2=2)
            counts = (at.shares * at.near)[:, None]
            total = CERTAIN * SPREADS[level] ** 2 + (counts * square).sum(axis=0)
            found = np.sqrt(total / (CERTAIN + counts.sum()))
            self.spreads[level] = np.minimum(found, WIDEST * SPREADS[level])
            if level + 1 < LEVELS:
                # What is above each child, less what it said there, is what is expected of it.
                message, said = self._messages[level]
                rest = np.linalg.inv(above_covariance) - message
                rest_mean = np.linalg.solve(
                    rest, (np.einsum("cab,cb->ca", np.linalg.inv(above_covariance), above) - said)[:, :, None]
                )[:, :, 0]
                mean, spread = rest_mean, np.diag(self.spreads[level] ** 2)
                covariance = np.asarray(np.linalg.inv(rest) + spread, dtype=np.float64)


def _through(precision: Floats, spread: Floats) -> Floats:
    """Precision of a child of a node of that precision."""
    result: Floats = np.linalg.inv(np.linalg.inv(precision) + np.diag(spread**2))
    return result


def _vague(around: Prior) -> Floats:
    """Deviation of the site's own figures around what is believed of any site."""
    return np.minimum(around.deviation, np.where(np.arange(FIGURES) == 0, 4.0, 0.7))


def _shares(parents: Sequence[Ints], users: Sequence[str]) -> list[Floats]:
    """(C,) of each level: how much each child counts in its parent, no user's children for more than half of others'.

    `parents` are those of each level's children, the jobs last; `users` own the jobs. A node of several users' jobs is
    each one's in part.
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
    """What each of a user's children counts for, who has so many of every one."""
    return min(1.0, MAJORITY * (every - mine) / mine) if every - mine > 1e-9 else 1.0


HOLDS, BEYOND = 0.8, 1.2816
"""Of a normal distribution, so much lies within so many deviations."""
UNSURE = 10.0
"""Predictions that the factor 1 counts for."""
LEAST, MOST = 0.4, 2.5
TESTED = 60
"""Jobs that are predicted: those that finished last."""


def found_widths(jobs: Sequence[tuple[GroupPath, Fit]], around: Prior) -> tuple[float, float]:
    """The factors inside a node and across nodes, from finished jobs, newest first."""
    jobs = [(kin, fit) for kin, fit in jobs if len(fit.misfit)]
    held = [
        (half, kin, fit, out)
        for half, some in enumerate((jobs[0::2], jobs[1::2]))
        for kin, fit in some[: TESTED // 2]
        for out in _sizes(fit.points)
    ]
    if not held:
        return 1.0, 1.0
    trees = [Tree([(kin, JobEvidence.of(fit)) for kin, fit in some], around) for some in (jobs[1::2], jobs[0::2])]
    priors = {(half, kin): trees[half].expect(kin) for half, kin in {(half, kin) for half, kin, _, _ in held}}
    fits = fit_all([(_some(fit.points, ~out), fit.reference, priors[half, kin]) for half, kin, fit, out in held])
    models = MeasuredThroughput.together([MeasuredThroughput(fit) for fit in fits])
    tests = [_some(fit.points, np.arange(len(out)) == np.argmax(out)) for _, _, fit, out in held]
    at = Sizes(*(np.stack([getattr(test.at, field.name) for test in tests]) for field in fields(Sizes)))
    measured = np.array([test.log_step[0] for test in tests])
    count = np.array([test.count[0] for test in tests])
    deviation = np.sqrt(models.variance(at)[:, 0] + NOISE**2 / count)
    off = np.abs(measured - models.log_step(at)[:, 0]) / deviation
    across = at.across[:, 0] > 0
    users = [kin.user for _, kin, _, _ in held]
    inside, outside = (_factor(off[rows], [users[i] for i in np.flatnonzero(rows)]) for rows in (~across, across))
    return inside, outside


def _factor(off: np.ndarray, users: Sequence[str]) -> float:
    if not len(off):
        return 1.0
    counts = Counter(users)
    others = {user: len(users) - count for user, count in counts.items()}
    weight = np.array([min(1.0, others[user] / counts[user]) if others[user] else 1.0 for user in users])
    order = np.argsort(off)
    # One prediction more, of which nothing is known, is to be held as well.
    reached = np.cumsum(weight[order]) >= HOLDS * (weight.sum() + 1.0)
    quantile = off[order[np.argmax(reached)]] if reached.any() else off.max()
    sure = weight.sum() / (weight.sum() + UNSURE)
    return float(np.clip(np.exp(sure * np.log(max(quantile, 1e-3) / BEYOND)), LEAST, MOST))


def _sizes(points: Points) -> list[Bools]:
    """The points of each size that was measured, where there are several."""
    kinds = np.stack([points.at.gpus, points.at.across], axis=1)
    each = np.unique(kinds, axis=0)
    return [(kinds == kind).all(axis=1) for kind in each] if len(each) > 1 else []


def _some(points: Points, rows: Bools) -> Points:
    at = Sizes(*(getattr(points.at, field.name)[rows] for field in fields(Sizes)))
    return replace(points, at=at, log_step=points.log_step[rows], count=points.count[rows])
