"""Stretch of a trace: the consecutive jobs that are simulated, their cluster, and the plan of a study with growing
shares of elastic jobs.

A trace does not show how a job's speed depends on its size. So a rule gives each job the curves of an application. The
same seed always gives the same curves, and the study's page states the rule. Results of several seeds show how much
depends on the choice of curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.outcome import JobOutcome, Outcome
from slurm_ones.simulate.spec import ClusterSpec, rounded
from slurm_ones.simulate.study.figures import share_figures, spread
from slurm_ones.simulate.study.plan import Contender, Source, StudyPlan
from slurm_ones.simulate.training.application import Application, Requeue, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, Size, build
from slurm_ones.simulate.workloads.generate import best_batch
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.workloads.trace import Trace, TraceJob

USUAL_NODE = 8
"""GPUs of a node if neither the trace nor its jobs show them."""
SLACK_S = 60.0
"""Seconds that are added to the time limit of each rigid job."""
PATIENCE = 2.0
"""Longest remaining run time of a job from before the stretch, as a multiple of the stretch's expected duration. Longer
run times are cut, because they would prolong the study."""
BEFORE = "before-"
"""Prefix in the names of jobs that were submitted before the stretch. The study's figures exclude them."""
SHARES = (0.0, 0.2, 0.5, 1.0)
"""Shares of jobs that are elastic. Each share is a contender."""
POLICY = "ones"
INTERVAL_S = (60.0, 300.0)
"""Shortest and longest interval between two decisions, in seconds."""
TICKS = 1500
"""Approximate largest number of decisions in a run. In longer runs the interval between decisions is longer, up to its
limit."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive jobs of a trace that are simulated, the jobs that still run or wait when they begin, and the
    cluster."""

    jobs: tuple[TraceJob, ...]
    before: tuple[TraceJob, ...]
    """Jobs that run or wait when the stretch begins, with their remaining run times. They are rigid, and figures
    exclude them."""
    nodes: int
    gpus_per_node: int
    of_all: int
    """Number of jobs in the trace, after sampling."""
    left_out: int = 0
    """Number of jobs that request more GPUs than the cluster has."""
    sample: float = 1.0
    """Share of the trace's jobs that were drawn."""
    most_held: int = 0
    """Largest number of GPUs that the drawn jobs held at one time."""
    given: bool = False
    """True if the user named the cluster. Otherwise it has about `most_held` GPUs."""

    @property
    def begins(self) -> float:
        """Time of the first submission."""
        return self.jobs[0].submitted

    @property
    def hours(self) -> float:
        """Hours from the first submission to the last."""
        return (self.jobs[-1].submitted - self.begins) / 3600.0


def stretch_of(trace: Trace, most: int, cluster: tuple[int, int] | None = None, sample: float = 1.0) -> Stretch:
    """Return the stretch of up to `most` consecutive jobs that has the median load of all such stretches of the trace.

    `cluster` is (nodes, GPUs per node); by default it has as many GPUs as jobs held at one time. `sample` is the share
    of the trace's jobs to use, for a cluster smaller than the recorded one. The sample is pseudo-random, but always the
    same. Raises `BadInput`.
    """
    jobs = [job for job in trace.jobs if _drawn(job) < sample]
    if not jobs:
        raise BadInput(f"--sample: {sample:g} leaves none of the {len(trace.jobs)} jobs of {trace.name}")
    held = most_held(jobs)
    per_node = cluster[1] if cluster else node_gpus(trace)
    nodes = cluster[0] if cluster else max(-(-held // per_node), 1)
    fitting = [job for job in jobs if rounded(job.gpus, per_node) <= nodes * per_node]
    if not fitting:
        raise BadInput(f"--cluster: {nodes}x{per_node} is too small for every job of {trace.name}")
    first = _median_load(fitting, most)
    chosen = tuple(fitting[first : first + most])
    before = tuple(_there(fitting[:first], chosen[0].submitted, PATIENCE * expected_s(chosen, nodes * per_node)))
    left_out = len(jobs) - len(fitting)
    return Stretch(chosen, before, nodes, per_node, len(jobs), left_out, sample, held, cluster is not None)


def _drawn(job: TraceJob) -> float:
    return int.from_bytes(blake2b(f"{job.name} {job.submitted}".encode(), digest_size=6).digest(), "big") / 2**48


def node_gpus(trace: Trace) -> int:
    """Return the GPUs of a node: as the trace states, or else the most GPUs per node of any job."""
    found = [-(-job.gpus // job.nodes) for job in trace.jobs if job.nodes]
    return trace.gpus_per_node or max(found, default=USUAL_NODE)


def most_held(jobs: Sequence[TraceJob]) -> int:
    """Return the largest number of GPUs that these jobs held at one time."""
    starts, ends = np.array([job.began for job in jobs]), np.array([job.began + job.run_s for job in jobs])
    gpus = np.array([job.gpus for job in jobs])
    times, change = np.concatenate([ends, starts]), np.concatenate([-gpus, gpus])
    # Of equal times ends come first.
    order = np.lexsort((change, times))
    return int(change[order].cumsum().max())


def _median_load(jobs: Sequence[TraceJob], most: int) -> int:
    if len(jobs) <= most:
        return 0
    firsts = list(range(0, len(jobs) - most + 1, most))

    def load(first: int) -> float:
        part = jobs[first : first + most]
        return sum(job.gpu_hours for job in part) / max(part[-1].submitted - part[0].submitted, 1.0)

    return sorted(firsts, key=load)[len(firsts) // 2]


def expected_s(jobs: Sequence[TraceJob], gpus: int) -> float:
    """Estimate the seconds from first submission to last end of these jobs on `gpus` GPUs."""
    work_s = sum(job.gpus * job.run_s for job in jobs)
    return max(jobs[-1].submitted - jobs[0].submitted, work_s / gpus) + max(job.run_s for job in jobs)


def _there(earlier: Sequence[TraceJob], at: float, most_s: float) -> list[TraceJob]:
    """Return the jobs that ran at time `at`, then those that waited, with their remaining run times and time limits.

    A remaining run time is at most `most_s`.
    """
    there = sorted((job for job in earlier if job.began + job.run_s > at), key=lambda job: job.began > at)
    return [
        job._replace(
            run_s=min(job.run_s, job.began + job.run_s - at, most_s),
            limit_s=max(job.limit_s - max(at - job.began, 0.0), 0.0),
            submitted=at,
        )
        for job in there
    ]


@dataclass(frozen=True)
class TraceSource(Source):
    """Source of a study that simulates a stretch of a trace, with a share of its jobs elastic."""

    table: ClassVar[str] = "shares"
    stretch: Stretch = field(kw_only=True)
    curves: Curves = field(kw_only=True)

    def load_workload(self, seed: int, gpus: int, per_node: int, elastic: float | None = None) -> Workload:
        """Return the workload for one seed. The seed determines which jobs are elastic, and their curves.

        A job that is elastic at a smaller share is also elastic at a larger share.
        """
        begins = self.stretch.begins
        submissions: list[Submission] = []
        applications: dict[str, Application] = {}
        for i, job in enumerate(self.stretch.before):
            _add(job, f"{BEFORE}{i}", begins, None, submissions, applications, per_node)
        picks = picked(self.stretch, self.curves, elastic or 0.0, seed)
        for i, (job, pick) in enumerate(zip(self.stretch.jobs, picks, strict=True)):
            app = self.curves.applications[pick] if pick else None
            _add(job, f"{i + 1}", begins, app, submissions, applications, per_node)
        return Workload(self.workload, tuple(sorted(submissions, key=lambda s: s.time)), applications)

    def counted(self, outcome: Outcome) -> Outcome:
        """Return the outcome without the jobs from before the stretch."""
        return replace(outcome, jobs=tuple(job for job in outcome.jobs if not job.name.startswith(BEFORE)))

    def figures(self, outcome: Outcome, work: Mapping[str, float], first: Outcome | None) -> dict[str, float]:
        """See `Source.figures`. The first contender must be the one without elastic jobs."""
        hours = {str(i + 1): job.gpu_hours for i, job in enumerate(self.stretch.jobs)}
        rigid = {job.name: job.jct_s for job in first.jobs if job.ended is not None} if first is not None else {}
        return share_figures(self.counted(outcome), hours, rigid)

    def kind(self, job: JobOutcome) -> str:
        return "elastic" if job.elastic else "there before" if job.name.startswith(BEFORE) else "rigid"

    def described(self) -> dict[str, Any]:
        return {"workload": self.workload, "profiles": str(self.profiles) if self.profiles else None}


def plan_of(
    name: str,
    stretch: Stretch,
    curves: Curves,
    seeds: Sequence[int],
    shares: Sequence[float] = SHARES,
    profiles: Path | None = None,
) -> StudyPlan:
    """Return the plan of a study with growing shares of elastic jobs.

    `profiles` is the folder that the curves were read from. Its files are part of the digests of results.
    """
    return StudyPlan(
        source=TraceSource(name, profiles, stretch=stretch, curves=curves),
        contenders=tuple(Contender(f"{100 * share:g} %", POLICY, elastic=share) for share in shares),
        seeds=tuple(seeds),
        cluster=ClusterSpec(stretch.nodes, stretch.gpus_per_node),
        interval_s=interval_of(stretch),
        mechanism=Requeue(None),
    )


def interval_of(stretch: Stretch) -> float:
    """Return the seconds between two decisions: 60, or more for a long stretch."""
    expected = expected_s(stretch.jobs, stretch.nodes * stretch.gpus_per_node)
    least, most = INTERVAL_S
    return min(max(least, least * math.ceil(expected / TICKS / least)), most)


def recorded(stretch: Stretch) -> dict[str, float]:
    """Return the metrics of the stretch's jobs as recorded in the trace; empty if the start of any job is unknown."""
    starts = [job.started for job in stretch.jobs if job.started is not None]
    if len(starts) < len(stretch.jobs):
        return {}
    waits = np.array([start - job.submitted for start, job in zip(starts, stretch.jobs, strict=True)])
    found = spread(waits + np.array([job.run_s for job in stretch.jobs]), waits)
    return found | {"gpu_hours": sum(job.gpu_hours for job in stretch.jobs)}


def picked(stretch: Stretch, curves: Curves, share: float, seed: int) -> list[str | None]:
    """Return the application of each job at this share and seed; None if the job stays rigid."""
    drawn = np.random.default_rng([seed, 62]).permutation(len(stretch.jobs)) < round(share * len(stretch.jobs))
    return [curves.pick(job, seed, stretch.gpus_per_node) if drawn[i] else None for i, job in enumerate(stretch.jobs)]


def _add(
    job: TraceJob,
    name: str,
    begins: float,
    app: Application | None,
    submissions: list[Submission],
    applications: dict[str, Application],
    per_node: int,
) -> None:
    at = float(math.floor(job.submitted - begins))
    if app is not None:
        applications[name], batch = fitted(app, name, job, per_node)
        submissions.append(Submission(name, at, name, job.gpus, batch))
        return
    held = rigid(f"{job.gpus}x{max(round(job.run_s), 1)}", job.gpus, job.run_s)
    applications.setdefault(held.name, held)
    # If no limit was recorded, Slurm plans with the true run time, as in most studies of backfill.
    limit = max(job.limit_s, job.run_s) + SLACK_S
    submissions.append(Submission(name, at, held.name, job.gpus, job.gpus, elastic=False, limit_s=limit))


UP_TO_H: dict[Size, float] = {"small": 1.5, "medium": 12.0, "large": 60.0, "extra-large": float("inf")}
"""Largest number of GPU-hours of a job of each size."""
USEFUL = 0.5
"""Least efficiency with which an application must use the job's GPUs: its goodput per GPU, divided by the goodput of a
single GPU. A job of lower efficiency would have requested too many GPUs.
"""
LEAST_S = 300.0
"""Shortest run time of an elastic job, in seconds. A shorter job would end before a resize pays off."""
RESIZE_S = 30.0
"""Pause of training, in seconds, for a resize by checkpoint and requeue."""
STEPS = 20
"""Least number of steps in an epoch of an elastic job."""

RULE = (
    f"A job's size follows from the GPU-hours that it took: small up to {UP_TO_H['small']:g}, medium up to "
    f"{UP_TO_H['medium']:g}, large up to {UP_TO_H['large']:g}, extra-large beyond.",
    "An application suits a job if its goodput per GPU on the requested GPUs is at least "
    f"{100 * USEFUL:g} % of that on a single GPU. Applications of the job's size are preferred. If none suits, the job "
    "stays rigid.",
    "A hash of the seed and the job's number picks one of the suitable applications.",
    "Its training is made so long that it takes the recorded time on the requested GPUs with the best batch.",
    f"Jobs that ran for less than {LEAST_S:g} s stay rigid.",
)
"""Sentences that state the rule by which jobs get curves."""


@dataclass(frozen=True)
class Curves:
    """Applications whose curves jobs can get, as plain data with a cache."""

    applications: Mapping[str, Application]
    sizes: Mapping[str, Size]
    measured: bool = False
    """True if the applications were measured, False if they come from the catalogue."""

    def pick(self, job: TraceJob, seed: int, per_node: int) -> str | None:
        """Return the name of the application whose curves the job gets; None if the job stays rigid."""
        if job.run_s < LEAST_S:
            return None
        useful = self._useful_at(job.gpus, per_node)
        own = [name for name in useful if self.sizes[name] == size_of(job)] or useful
        if not own:
            return None
        digest = blake2b(f"{seed} {job.name}".encode(), digest_size=8).digest()
        return own[int.from_bytes(digest, "big") % len(own)]

    def _useful_at(self, gpus: int, per_node: int) -> Sequence[str]:
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
    """Return the size of a job by the GPU-hours that it took."""
    return next(size for size in get_args(Size) if job.gpu_hours <= UP_TO_H[size])


def catalogue() -> Curves:
    """Return the catalogue's applications. Their figures are round numbers and were not measured."""
    return Curves({name: build(kind) for name, kind in KINDS.items()}, {n: kind.size for n, kind in KINDS.items()})


def measured(profiles: Mapping[str, Application]) -> Curves:
    """Return measured applications. The size of each follows from the GPU-hours of its training on one GPU."""
    hours = {
        name: app.seconds(1, 1, float(app.min_batch or app.base_batch), 0.0) / 3600.0 for name, app in profiles.items()
    }
    sizes = {name: next(size for size in get_args(Size) if found <= UP_TO_H[size]) for name, found in hours.items()}
    return Curves(profiles, sizes, measured=True)


def fitted(app: Application, name: str, job: TraceJob, per_node: int) -> tuple[Application, int]:
    """Return the application, scaled so that it trains for `job.run_s` seconds on the job's GPUs with the best batch.
    Also return this batch."""
    batch = best_batch(app, job.gpus, per_node)[1]
    nodes = -(-job.gpus // per_node)
    samples = app.total * job.run_s / app.seconds(nodes, job.gpus, float(batch), 0.0)
    epochs = max(1, min(len(app.ends), int(samples // (STEPS * batch))))
    # A short job has fewer epochs: its noise scale goes the same way in longer strides.
    rows = np.linspace(0, len(app.ends) - 1, epochs).round().astype(int)
    short = app.altered(
        name=name,
        ends=samples * np.arange(1.0, epochs + 1) / epochs,
        sqr=app.sqr[rows],
        var=app.var[rows],
        metric=app.metric[rows],
        max_batch=max(batch, min(app.max_batch, int(samples / epochs))),
        resize_s=RESIZE_S,
        target=float("nan"),
        patience=0,
    )
    longer = job.run_s / short.seconds(nodes, job.gpus, float(batch), 0.0)
    return replace(short, ends=short.ends * longer, max_gpus=min(short.max_gpus, short.max_batch)), batch


class EverySecond:
    """Speed of an application whose steps all take one second."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        return np.ones_like(local), np.zeros_like(local)


def rigid(name: str, gpus: int, run_s: float) -> Application:
    """Return an application that runs for `run_s` seconds (rounded), on this number of GPUs only, and starts in no
    time."""
    steps = max(round(run_s), 1)
    one = np.ones((1, 1))
    return Application(
        name=name, speed=EverySecond(), base_batch=gpus, max_batch=gpus, max_local_batch=1, max_gpus=gpus,
        ends=np.array([float(steps * gpus)]), batches=np.array([gpus]), sqr=one, var=0.0 * one, metric=one,
        resize_s=0.0,
    )  # fmt: skip
