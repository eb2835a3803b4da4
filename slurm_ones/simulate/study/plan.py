"""Plan of a study: the contenders, the workload and the cluster. It is plain data, which is checked before anything
runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from ones_db import migrate
from ones_db.engine import backend_of
from ones_wrapper.protocol.choices import listed
from slurm_ones.policies import make_policy
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.outcome import JobOutcome, Outcome
from slurm_ones.simulate.run import companion_settings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.study.figures import figures
from slurm_ones.simulate.training.application import Mechanism, Requeue
from slurm_ones.simulate.workloads.generate import MIXES, Arrivals, generate, with_deadlines
from slurm_ones.simulate.workloads.profiles import Workload, check_fits, read_profiles, read_workload
from slurm_ones.text import seconds

VARIANT = re.compile(r"-[a-h]$")
"""Pattern of the suffix in application names such as `bert-glue-a`, a variant of the kind `bert-glue`."""


@dataclass(frozen=True)
class Contender:
    """One column of a study: a policy with its options, and the label under which tables show it."""

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    elastic: float | None = None
    """Share of a trace's jobs that are elastic; None if the workload is not a trace."""


@dataclass(frozen=True)
class Source:
    """Source of a study's workload: one of the `MIXES`, or a workload file with a folder of profiles."""

    table: ClassVar[str] = "policies"
    """Name of the table that compares the contenders, as in `figures.Metric.tables`."""

    workload: str
    profiles: Path | None = None
    jobs: int | None = None
    """Number of jobs, taken from the beginning of a file. None means all jobs of a file, or a mix's default number."""
    load: float = 1.0
    arrivals: Arrivals | None = None
    hours: float | None = None
    rigid: float = 0.0
    deadlines: float = 0.0
    """Share of the jobs that have a deadline."""

    def load_workload(self, seed: int, gpus: int, per_node: int, elastic: float | None = None) -> Workload:
        """Return the workload for one seed. Raises `BadInput`.

        The workload of a file is the same for all seeds, except for deadlines. `elastic` is used for traces only.
        """
        if self.workload in MIXES:
            if self.profiles is not None:
                raise BadInput(f"--profiles: only for a workload from a file; {self.workload} has its own applications")
            options = {name: value for name, value in vars(self).items() if name not in ("workload", "profiles")}
            return generate(self.workload, seed=seed, gpus=gpus, gpus_per_node=per_node, **options)
        path = Path(self.workload)
        if not path.exists():
            raise BadInput(
                f"workload: {self.workload!r:.200} is neither a file nor one of {listed(MIXES, self.workload)}"
            )
        if self.profiles is None:
            raise BadInput(f"{path}: the profiles of its applications are needed (--profiles DIR)")
        if self.arrivals is not None or self.hours is not None or self.rigid:
            raise BadInput(
                f"{path}: the file states when jobs arrive and which are rigid; --arrivals, --hours and --rigid are "
                "for generated workloads"
            )
        if not 0 < self.load < math.inf or (self.jobs is not None and self.jobs < 1):
            raise BadInput(f"{path}: load {self.load} and jobs {self.jobs} must be above 0")
        found = read_workload(path, read_profiles(self.profiles))
        first = found.submissions[: self.jobs]
        scaled = tuple(replace(s, time=s.time / self.load) for s in first)
        if self.deadlines:
            scaled = with_deadlines(scaled, found.applications, self.deadlines, per_node, seed)
        return replace(found, submissions=scaled)

    def counted(self, outcome: Outcome) -> Outcome:
        """Return the outcome with only those jobs that the study's figures include."""
        return outcome

    def figures(self, outcome: Outcome, work: Mapping[str, float], first: Outcome | None) -> dict[str, float]:
        """Return the metrics by key. `work` is the amount of work of each job, in any unit; `first` is the first
        contender's outcome with the same seed."""
        return figures(outcome, work)

    def kind(self, job: JobOutcome) -> str:
        """Return the kind of a job, which determines its colour in plots."""
        return VARIANT.sub("", job.application) if self.workload in MIXES else job.application

    def described(self) -> dict[str, Any]:
        """Return the options of the workload, for JSON."""
        return {**asdict(self), "profiles": str(self.profiles) if self.profiles else None}


@dataclass(frozen=True)
class StudyPlan:
    """Contenders, seeds, cluster and engine of a study, as plain data that can be pickled for other processes."""

    source: Source
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    cluster: ClusterSpec
    interval_s: float = 60.0
    mechanism: Mechanism = field(default_factory=Requeue)
    """Mechanism by which jobs are resized, and its costs."""
    idealized: bool = False
    """True to simulate with an oracle, under the assumptions of published studies; False to run the companion."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Companion settings that differ from the simulation's defaults. With a `database`, all runs are recorded in it,
    each as a cluster of its own."""

    def with_database(self, url: str) -> StudyPlan:
        """Return the plan with a new job database, in which its runs are recorded. Raises `BadInput` if the database
        already exists."""
        if not url:
            return self
        if self.idealized:
            raise BadInput("--database: only the companion fills it, and --idealized runs without the companion")
        if migrate.current(url) is not None:
            raise BadInput(f"--database: there is a database of jobs in {backend_of(url).place}; name a new one")
        migrate.upgrade(url)
        return replace(self, settings={**self.settings, "database": url})

    def settings_of(self, contender: Contender, seed: int) -> Mapping[str, Any]:
        """Return the companion's settings for one run."""
        own = {"cluster": f"{contender.label}, seed {seed}"} if "database" in self.settings else {}
        return {**self.settings, **own}

    def seeds_of(self, contender: Contender) -> tuple[int, ...]:
        """Return the seeds with which a contender runs. A contender without elastic jobs has only the first, because
        all seeds give the same result."""
        return self.seeds[:1] if contender.elastic == 0 else self.seeds

    def runs(self) -> Iterator[tuple[Contender, int]]:
        """Yield the pairs of contender and seed to run, in order of seeds."""
        for seed in self.seeds:
            for contender in self.contenders:
                if seed in self.seeds_of(contender):
                    yield contender, seed

    def description(self) -> dict[str, str]:
        """Return short texts that describe the plan, by topic."""
        one, jobs = len(self.seeds) == 1, len(self.workload(self.seeds[0]).submissions)
        cluster = self.cluster
        found = {
            "work": self.source.workload,
            "jobs": f"{jobs} jobs",
            "load": f"{self.source.load:g}",
            "cluster": " + ".join(f"{n} nodes × {g} {kind or 'GPUs'}" for n, g, kind in cluster.all_parts),
            "seeds": f"{self.seeds[0]}" if one else f"{self.seeds[0]}–{self.seeds[-1]}",
            "decisions": f"every {seconds(self.interval_s)}",
            "a resize": _cost(self.mechanism),
            "engine": "the published studies' assumptions" if self.idealized else "the companion on a simulated Slurm",
        }
        if cluster.network is not None:
            found["network"] = f"{cluster.network.leaves} leaf switches, tapered {cluster.network.taper:g}:1"
        if cluster.slow_nodes:
            found["slow nodes"] = f"{len(cluster.slow_nodes)} of speed {min(cluster.slow_nodes):g}"
        if self.source.deadlines:
            found["deadlines"] = f"{100 * self.source.deadlines:g} % of the jobs"
        if self.settings:
            found["settings"] = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return found

    def workload(self, seed: int, contender: Contender | None = None) -> Workload:
        """Return the workload of a contender for this seed. Raises `BadInput`, also if a job does not fit on the
        cluster."""
        elastic = contender.elastic if contender is not None else None
        found = self.source.load_workload(seed, self.cluster.gpus, self.cluster.least_node, elastic)
        check_fits(found, self.cluster.gpus)
        return found

    def check(self) -> None:
        """Raise `BadInput` if the plan cannot be run."""
        labels = [contender.label for contender in self.contenders]
        for label in labels:
            if labels.count(label) > 1:
                raise BadInput(f"policy: {label!r:.80} is given twice")
        for contender in self.contenders:
            try:
                make_policy(contender.policy, **contender.options)
            except (TypeError, ValueError) as error:
                raise BadInput(str(error)) from None
        for seed in self.seeds:
            self.workload(seed)
        if any(part.kind for part in self.cluster.all_parts) and not self.idealized:
            raise BadInput("--cluster: GPUs of several kinds are simulated only with --idealized")
        if self.settings:
            try:
                companion_settings(self.cluster, Path.cwd(), self.settings)
            except ValidationError as error:
                wrong = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
                raise BadInput(f"--set: {'; '.join(wrong)}") from None


def _cost(mechanism: Mechanism) -> str:
    if isinstance(mechanism, Requeue):
        return "as measured of each application" if mechanism.seconds is None else seconds(mechanism.seconds)
    hot = mechanism
    return (
        f"{hot.pause_s:g} s and its state at {hot.bytes_per_s / 1e6:g} MB/s if it grows, {hot.shrink_pause_s:g} s "
        f"if it shrinks (hot); a new block prepares for {seconds(hot.launch_s)}"
    )
