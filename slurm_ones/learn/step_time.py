"""Time of one optimizer step, from seven parameters of a job (Pollux, OSDI 2021, §3.2).

Compute takes a fixed overhead plus a time for each sample. The exchange of gradients (sync) takes no time on one GPU,
c1 + d1 · (n - 2) on n GPUs of one node, and c2 + d2 · (n - 2) across nodes. Compute and sync overlap: T = (compute^γ +
sync^γ)^(1/γ). At γ = 1 one follows the other; at a large γ they overlap fully.

Most parameters are logarithms of ratios: c1 / (time of the job's step on one GPU), c2 / c1, d1 / c1 and d2 / c2. So the
parameters of small and large jobs are comparable, and one job's give a prior for another's. For example, a job with a
long exchange inside a node has a long one across nodes. d / c is small in a ring all-reduce, in which each GPU sends 2
· (n - 1) / n times the gradients' bytes.

If the bytes that each rank sends in a step are known (`StepLayout`), c1 and c2 have another meaning: the seconds to
send a gigabyte inside a node and between nodes. The exchange takes gigabytes times these seconds, so it can be
predicted at an untried size. Link speeds learned from one job hold for all jobs whose bytes are known.

The parameters of many jobs are fitted at once (`fit_all`), with their uncertainty. A job's measurements are noisy step
times at a few sizes, and no formula is exact: log T = model + misfit + noise. Misfits at similar sizes are correlated
(a Gaussian process). So a job that is slower than the formula at one batch is expected to be slower at a similar batch.
The prior of the parameters comes from other jobs (`hierarchy`). Damped Gauss-Newton finds the most likely parameters of
all jobs in a few numpy calls. Their covariance is that of the linearised model.

**Layout.** A job reports, for each number of GPUs, how samples are split and how many bytes a rank sends. The bytes
come from the strategy's formula (`ones_wrapper.protocol.limits.SizeLimits`), or from the gradients of a plain
data-parallel job. Then only the speed of the links must be learned, and one job at one size suffices for all jobs whose
bytes are known. The exchange of a job that reports no bytes is learned without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache

import numpy as np

from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import StrategyLimits
from slurm_ones.policy.contract import Bools, Floats, Ints

GIGABYTE = 1e9
NOTHING = 1e-12
"""Gigabytes in place of 0, which has no logarithm."""
NONE = float(np.log(NOTHING))
"""Log of `NOTHING`."""
LATENCY_GB = 0.005
"""Latency of an exchange, in the gigabytes sent in that time: half a millisecond at 10 GB/s."""
ANY_LOCAL = 2.0**31
"""Largest local batch assumed for a job that reports none."""


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Split of a step's samples and traffic by number of GPUs, ascending; arrays are empty in plain data parallel."""

    max_local: float = ANY_LOCAL
    """Largest number of samples in a replica's forward pass, at any number of GPUs."""
    gpus: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    replicas: Floats = field(default_factory=lambda: np.zeros(0))
    local: Floats = field(default_factory=lambda: np.zeros(0))
    """Most samples in a replica's forward pass, at most `max_local`."""
    replica_gb: Floats = field(default_factory=lambda: np.zeros(0))
    """Gigabytes that a rank sends within its replica, per sample of the replica."""
    data_gb: Floats = field(default_factory=lambda: np.zeros(0))
    """Gigabytes that a rank sends to other replicas in a step."""
    gradient_gb: float = 0.0
    """Gigabytes of all gradients of a plain data-parallel job; 0 if unknown."""

    @cached_property
    def wired(self) -> bool:
        """True if the bytes that a rank sends are known for each number of GPUs above one."""
        if not len(self.gpus):
            return self.gradient_gb > 0
        several = self.gpus > 1
        return bool(several.any()) and bool((self.replica_gb + self.data_gb)[several].all())

    def split(self, gpus: Floats) -> tuple[Floats, Floats]:
        """Return, for each number of GPUs, the number of replicas and the most samples in a replica's forward pass."""
        if not len(self.gpus):
            return gpus, np.full(np.shape(gpus), self.max_local)
        row, there = self._rows(gpus)
        return np.where(there, self.replicas[row], gpus), np.where(there, self.local[row], self.max_local)

    def sent(self, nodes: Floats, gpus: Floats, batches: Floats) -> tuple[Floats, Floats]:
        """Return the logs of the gigabytes that a rank sends in a step, to GPUs of its own node and to other nodes.

        Traffic inside a replica stays inside a node if no replica spans several nodes.
        """
        if not len(self.gpus):
            ring = np.log(self.gradient_gb * 2.0 * (gpus - 1.0) / gpus + LATENCY_GB)
            return np.where(nodes > 1, NONE, ring), np.where(nodes > 1, ring, NONE)
        row, _ = self._rows(gpus)
        replicas = np.maximum(self.replicas[row], 1.0)
        within = self.replica_gb[row] * batches / replicas
        between = self.data_gb[row]
        several, each = nodes > 1, gpus / np.maximum(nodes, 1.0)
        parted = several & (np.mod(each, gpus / replicas) > 1e-9)
        outside = np.where(several, between, 0.0) + np.where(parted, within, 0.0)
        return np.log(np.maximum(within + between - outside, NOTHING)), np.log(np.maximum(outside, NOTHING))

    def _rows(self, gpus: Floats) -> tuple[Ints, Bools]:
        """Return the row of each number of GPUs, or of the next higher one, and whether the number itself has a row."""
        row = np.minimum(np.searchsorted(self.gpus, gpus), len(self.gpus) - 1)
        there: Bools = self.gpus[row] == gpus
        return row, there


PLAIN = StepLayout()


@lru_cache(maxsize=1024)
def layout_of(spec: Spec | None) -> StepLayout:
    """Return the layout that a job's spec describes."""
    if spec is None:
        return PLAIN
    most = max(float(spec.max_local_batch), 1.0)
    limits: StrategyLimits | None = spec.limits
    if limits is None or not limits.sizes:
        return StepLayout(most, gradient_gb=spec.gradient_bytes / GIGABYTE if limits is None else 0.0)
    rows = limits.sizes
    fits = [row.most_local(limits.memory_bytes) for row in rows]
    return StepLayout(
        most,
        np.array([row.gpus for row in rows], dtype=np.int64),
        np.array([float(row.replicas) for row in rows]),
        np.array([most if fit is None else max(min(most, float(fit)), 1.0) for fit in fits]),
        np.array([row.replica_bytes / GIGABYTE for row in rows]),
        np.array([row.data_bytes / GIGABYTE for row in rows]),
    )


SPEED, OVERHEAD, INSIDE, INSIDE_EACH, ACROSS, ACROSS_EACH, OVERLAP = range(7)
"""Indices of the parameters. A reference step is one GPU's step at the reference local batch.

- SPEED: log of the samples/s of a reference step.
- OVERHEAD: logit of the fixed overhead's share of a reference step.
- INSIDE: log of c1, relative to a reference step; INSIDE_EACH: log of d1 / c1.
- ACROSS: log of c2 / c1; ACROSS_EACH: log of d2 / c2.
- OVERLAP: log of γ - 1.
"""
PARAMETERS = 7
LOWEST = np.array([-60.0, -8.0, -16.0, -12.0, -6.0, -12.0, -3.0])
HIGHEST = np.array([60.0, 4.0, 12.0, 3.0, 6.0, 3.0, np.log(9.0)])
"""Largest values of the parameters; `LOWEST` has the smallest."""
NO_SYNC = -60.0


@dataclass(frozen=True)
class Sizes:
    """Sizes and batches at which step times are computed. All arrays have the same shape."""

    local: Floats
    """Log of (samples per GPU and step / reference local batch)."""
    passes: Floats
    """Forward passes per step; more than 1 if a GPU's samples do not fit at once."""
    gpus: Floats
    across: Floats
    """1 if the GPUs are on several nodes, else 0."""
    wired: Floats
    """1 if the bytes that a rank sends are known, else 0."""
    inside: Floats
    outside: Floats
    """Log of (gigabytes that a rank sends to other nodes / reference local batch); `inside` is the same for its own
    node."""

    def each(self, change: Callable[[Floats], Floats]) -> Sizes:
        """Return a copy with `change` applied to each array."""
        return Sizes(*map(change, vars(self).values()))

    @staticmethod
    def together(all_: Sequence[Sizes], join: Callable[[list[Floats]], Floats]) -> Sizes:
        """Join several `Sizes` into one; `join` joins the arrays of one field."""
        return Sizes(*(join([getattr(one, field.name) for one in all_]) for field in fields(Sizes)))


def padded(rows: Sequence[Floats], fill: float = 1.0) -> Floats:
    """Stack rows of different lengths into one array, with `fill` at the end of short rows."""
    found: Floats = np.full((len(rows), max(map(len, rows))), fill)
    for j, row in enumerate(rows):
        found[j, : len(row)] = row
    return found


def sizes(nodes: Floats, gpus: Floats, batches: Floats, reference: float | Floats, layout: StepLayout = PLAIN) -> Sizes:
    """Return the `Sizes` of `gpus` GPUs in total on `nodes` nodes, at each global batch.

    `reference` is the job's reference local batch. For several jobs each array has a row for each job.
    """
    gpus, batches = np.maximum(gpus, 1.0), np.maximum(batches, 1.0)
    local = batches / gpus
    replicas, most = layout.split(gpus)
    passes = np.maximum(np.ceil(batches / replicas / most), 1.0)
    across = ((nodes > 1) & (gpus > 1)).astype(np.float64)
    wired = np.zeros(np.shape(gpus)) + np.asarray(layout.wired, dtype=np.float64)
    inside = outside = np.zeros(np.shape(gpus))
    if wired.any():
        inside, outside = (sent - np.log(reference) for sent in layout.sent(nodes, gpus, batches))
    return Sizes(np.log(local / reference), passes, gpus, across, wired, inside, outside)


def log_step(parameters: Floats, at: Sizes, reference: Floats) -> Floats:
    """Return the log of a step's seconds (…, sizes) at the sizes `at`. `parameters` are (…, parameters), `reference` is
    (…)."""
    compute, sync, gamma, _, _ = _parts(parameters, at)
    total = np.maximum(compute, sync) + np.log1p(np.exp(-gamma * np.abs(compute - sync))) / gamma
    return np.log(reference) - parameters[..., SPEED, None] + total


def log_compute(parameters: Floats, at: Sizes) -> Floats:
    """Return the log of (a step's compute time / the time of a reference step)."""
    return _parts(parameters, at)[0]


def log_step_and_slopes(parameters: Floats, at: Sizes, reference: Floats) -> tuple[Floats, Floats]:
    """Return `log_step` (…, sizes), and its derivatives by the parameters (…, sizes, parameters)."""
    compute, sync, gamma, share, beyond = _parts(parameters, at)
    total = np.maximum(compute, sync) + np.log1p(np.exp(-gamma * np.abs(compute - sync))) / gamma
    of_compute = 1.0 / (1.0 + np.exp(np.minimum(np.maximum(gamma * (sync - compute), -50.0), 50.0)))
    of_sync = np.where(at.gpus > 1, 1.0 - of_compute, 0.0)
    each = beyond / (1.0 + beyond)
    slopes = np.empty((*total.shape, PARAMETERS))
    slopes[..., SPEED] = -1.0 + of_sync * at.wired
    slopes[..., OVERHEAD] = of_compute * share * (1.0 - share) * (at.passes - np.exp(at.local)) / np.exp(compute)
    slopes[..., INSIDE] = of_sync
    slopes[..., INSIDE_EACH] = of_sync * each * (1.0 - at.across)
    slopes[..., ACROSS] = of_sync * _outside(parameters, at)
    slopes[..., ACROSS_EACH] = of_sync * each * at.across
    slopes[..., OVERLAP] = (of_compute * compute + of_sync * sync - total) * (gamma - 1.0) / gamma * (at.gpus > 1)
    return np.log(reference) - parameters[..., SPEED, None] + total, slopes


def _parts(parameters: Floats, at: Sizes) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return five arrays: log compute, log sync, γ, the overhead's share of a reference step, and the growth of sync.

    Compute and sync are times divided by that of a reference step. The growth is the sync time that further GPUs add to
    that of two GPUs, divided by the latter.
    """
    share = 1.0 / (1.0 + np.exp(-parameters[..., OVERHEAD, None]))
    compute = np.log(share * at.passes + (1.0 - share) * np.exp(at.local))
    first = parameters[..., INSIDE, None] + at.across * parameters[..., ACROSS, None]
    if at.wired.any():
        sent = np.logaddexp(at.inside, at.outside + parameters[..., ACROSS, None])
        first = np.where(at.wired > 0, parameters[..., SPEED, None] + parameters[..., INSIDE, None] + sent, first)
    each = np.where(
        at.across > 0, np.exp(parameters[..., ACROSS_EACH, None]), np.exp(parameters[..., INSIDE_EACH, None])
    )
    beyond = each * np.maximum(at.gpus - 2.0, 0.0)
    sync = np.where(at.gpus > 1, first + np.log1p(beyond), NO_SYNC)
    return compute, sync, 1.0 + np.exp(parameters[..., OVERLAP, None]), share, beyond


def _outside(parameters: Floats, at: Sizes) -> Floats:
    if not at.wired.any():
        return at.across
    across = at.outside + parameters[..., ACROSS, None]
    return np.where(at.wired > 0, np.exp(across - np.logaddexp(at.inside, across)), at.across)


MISFIT = 0.15
"""Standard deviation of the misfit: the part of log step time that no parameters explain."""
NOISE = 0.07
"""Standard deviation of the noise in one measurement of log step time."""
ALIKE_GPUS = 1.0
ALIKE_LOCAL = 1.5
"""Correlation length of the misfit in log samples per GPU; `ALIKE_GPUS` is that in log GPUs. One length apart the
correlation is 1/e."""
ITERATIONS = 12


@dataclass(frozen=True)
class Prior:
    """Normal prior of a job's parameters before any measurement; mean and deviation are (parameters,)."""

    mean: Floats
    deviation: Floats
    correlation: Floats | None = None
    """Correlation matrix of the parameters; None if they are independent."""

    @property
    def covariance(self) -> Floats:
        """Covariance matrix of the parameters."""
        correlation = np.eye(PARAMETERS) if self.correlation is None else self.correlation
        return self.deviation[:, None] * correlation * self.deviation


def _cautious() -> Prior:
    mean, deviation = np.zeros(PARAMETERS), np.full(PARAMETERS, 1.0)
    mean[OVERHEAD], deviation[OVERHEAD] = -1.1, 1.2
    # With these values a job's speed grows about as n^0.8 inside a node of eight, and little less across nodes, since
    # fast networks are common. In a ring each GPU sends 2 (n - 1) / n of the gradients, twice as much on 64 GPUs as on
    # 2.
    mean[[INSIDE, INSIDE_EACH, ACROSS, ACROSS_EACH]] = np.log([0.6, 0.02, 1.3, 0.02])
    deviation[ACROSS] = 0.8
    deviation[OVERLAP] = 0.7
    deviation[SPEED] = 4.0
    return Prior(mean, deviation)


CAUTIOUS = _cautious()
"""Prior before any job has measured: one sample per second on one GPU."""


def _wired() -> Prior:
    prior = _cautious()
    # Ten gigabytes a second inside a node, a fourth of that between nodes. The growth of the bytes is known. So each
    # further GPU only adds the latency of its messages.
    prior.mean[[INSIDE, INSIDE_EACH, ACROSS, ACROSS_EACH]] = np.log([0.1, 0.005, 4.0, 0.005])
    prior.deviation[INSIDE] = 1.5
    return prior


WIRED = _wired()
"""Prior before any job has measured, for jobs whose sent bytes are known."""


@dataclass(frozen=True)
class Points:
    """Measurements of one job, combined for each pair of size and batch: a point. Arrays are (points,)."""

    at: Sizes
    log_step: Floats
    """Log of the measured seconds of a step."""
    count: Floats
    """Weight of each point, as a number of measurements. It is below 1 until the job has run for long at this size (see
    `throughput`)."""


@dataclass(frozen=True)
class Fit:
    """Posterior of one job's parameters, given its measurements."""

    points: Points
    reference: float
    parameters: Floats
    """Most likely parameters (parameters,)."""
    covariance: Floats
    """Covariance matrix of the parameters."""
    misfit: Floats
    """`weights` × residuals (points,), from which misfits at other sizes are predicted."""
    slopes: Floats
    """Derivatives of log step time by the parameters (points, parameters)."""
    weights: Floats
    """Inverse of the covariance matrix of misfit plus noise (points, points)."""


def correlated(one: Sizes, other: Sizes) -> Floats:
    """Return the covariance of the misfits at two sets of sizes, with shape (…, sizes of `one`, sizes of `other`)."""
    distance = (
        np.abs(np.log(one.gpus)[..., :, None] - np.log(other.gpus)[..., None, :]) / ALIKE_GPUS
        + np.abs(one.local[..., :, None] - other.local[..., None, :]) / ALIKE_LOCAL
        + np.abs(one.across[..., :, None] - other.across[..., None, :])
    )
    result: Floats = MISFIT**2 * np.exp(-distance)
    return result


def fit_all(jobs: Sequence[tuple[Points, float, Prior]]) -> list[Fit]:
    """Return the fit of each job, given as (points, reference local batch, prior)."""
    if not jobs:
        return []
    every = [points for points, _, _ in jobs]
    most = max(len(points.count) for points in every)
    if most == 0:
        unfitted = np.zeros(0), np.zeros((0, PARAMETERS)), np.zeros((0, 0))
        return [Fit(points, base, prior.mean, prior.covariance, *unfitted) for points, base, prior in jobs]
    # Padding has weight 0.
    at = Sizes.together([points.at for points in every], padded)
    measured = padded([points.log_step for points in every], 0.0)
    count = padded([points.count for points in every], 0.0)
    reference = np.array([[reference] for _, reference, _ in jobs])
    mean = np.stack([prior.mean for _, _, prior in jobs])
    precision = np.linalg.inv(np.stack([prior.covariance for _, _, prior in jobs]))
    there = count > 0
    covariance = correlated(at, at) + np.eye(most) * (NOISE**2 / np.where(there, count, 1.0))[:, None, :]
    weights = np.linalg.inv(np.where(there[:, :, None] & there[:, None, :], covariance, np.eye(most)))
    weights = weights * (there[:, :, None] & there[:, None, :])

    parameters = _search(mean, precision, at, reference, measured, weights)
    found, slopes = log_step_and_slopes(parameters, at, reference)
    hessian = np.einsum("jpa,jpq,jqb->jab", slopes, weights, slopes) + precision
    posterior = np.linalg.inv(hessian)
    misfit = np.einsum("jpq,jq->jp", weights, measured - found)
    return [
        Fit(points, base, parameters[j], posterior[j], misfit[j, :n], slopes[j, :n], weights[j, :n, :n])
        for j, (points, base, _) in enumerate(jobs)
        for n in (len(points.count),)
    ]


def _search(mean: Floats, precision: Floats, at: Sizes, reference: Floats, measured: Floats, weights: Floats) -> Floats:
    """Return the most likely parameters (jobs, parameters), by Gauss-Newton with separate damping for each job."""

    def cost(parameters: Floats) -> Floats:
        off = measured - log_step(parameters, at, reference)
        far = parameters - mean
        result: Floats = np.einsum("jp,jpq,jq->j", off, weights, off) + np.einsum("ja,jab,jb->j", far, precision, far)
        return result

    parameters: Floats = mean.copy()
    # First only the speed is fitted: the other slopes mean little until it is about right.
    gap = measured - log_step(parameters, at, reference)
    share = np.abs(weights).sum(axis=2)
    parameters[:, SPEED] -= (share * gap).sum(axis=1) / np.maximum(share.sum(axis=1), 1e-9)
    parameters = np.clip(parameters, LOWEST, HIGHEST)
    best = cost(parameters)
    damping = np.full(len(mean), 0.1)
    for _ in range(ITERATIONS):
        found, slopes = log_step_and_slopes(parameters, at, reference)
        weighed = np.einsum("jpa,jpq->jaq", slopes, weights)
        downhill = np.einsum("jap,jp->ja", weighed, measured - found)
        downhill -= np.einsum("jab,jb->ja", precision, parameters - mean)
        hessian = np.einsum("jap,jpb->jab", weighed, slopes) + precision
        diagonal = np.einsum("jaa->ja", hessian) * damping[:, None]
        step = np.linalg.solve(hessian + diagonal[:, :, None] * np.eye(PARAMETERS), downhill[:, :, None])[:, :, 0]
        tried = np.clip(parameters + np.clip(step, -2.0, 2.0), LOWEST, HIGHEST)
        now = cost(tried)
        better = now < best
        parameters = np.where(better[:, None], tried, parameters)
        gained = np.max(np.where(better, best - now, 0.0))
        best = np.where(better, now, best)
        damping = np.clip(np.where(better, damping * 0.2, damping * 6.0), 1e-6, 1e6)
        if gained < 1e-4 and (better | (damping > 1e3)).all():
            break
    return parameters
