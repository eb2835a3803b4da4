"""Page and JSON of a study of shares: verdict, distance from the recorded waits, and what is assumed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_ones.simulate.study.curves import RESIZE_S, RULE, Curves
from slurm_ones.simulate.study.plan import StudyPlan
from slurm_ones.simulate.study.present import as_json, finite, page, rows, value_and_unit
from slurm_ones.simulate.study.runs import ContenderSummary, StudyRun
from slurm_ones.simulate.study.stretch import PATIENCE, SLACK_S, Stretch, picked, recorded
from slurm_ones.simulate.traces.trace import Trace
from slurm_ones.text import seconds

FAR = 2.0
"""Factor between recorded and simulated mean waits beyond which they are called far apart …"""
FAR_S = 60.0
"""… if they differ by more than this many seconds."""
MOST_LISTED = 1000
"""Jobs whose curves the page lists."""
RIGID = "stays rigid"


@dataclass(frozen=True)
class ElasticityStudy:
    """A study of a trace's stretch with more and more of its jobs elastic, and its results."""

    trace: Trace
    stretch: Stretch
    curves: Curves
    plan: StudyPlan
    summaries: Sequence[ContenderSummary]
    runs: Sequence[StudyRun]

    def verdict(self) -> list[str]:
        """Sentences that an admin reads first: the gain and the costs of each share, and their certainty."""
        none, *others = self.summaries
        found = []
        for one in others:
            jct, hours = _changes(one, none, "mean_jct_s"), _changes(one, none, "gpu_hours")
            if not jct:
                continue
            undecided = "; the seeds do not agree on whether it is shorter" if min(jct) < 0 < max(jct) else ""
            missing = max(each["unfinished"] for summary in (none, one) for each in summary.each.values())
            if missing:
                undecided += f"; up to {missing:.0f} jobs had not ended when the simulation gave up, and do not count"
            found.append(
                f"With {one.label} of the jobs elastic the mean JCT changes by {_between(jct)}, and the GPU hours that "
                f"jobs hold by {_between(hours)}{undecided}{'; one seed alone' if len(jct) == 1 else ''}."
            )
        return found

    def fidelity(self) -> str:
        """Distance of the simulation without any elastic job from what was recorded."""
        each = list(self.summaries[0].each.values())
        if not each:
            return ""
        was = recorded(self.stretch).get("mean_wait_s")
        if was is None:
            return (
                "The trace records no starts, so that the simulated waits at 0 % cannot be compared with real ones: "
                "take the differences between the shares as a hint, and no figure for itself."
            )
        now = each[0]["mean_wait_s"]
        text = (
            f"Recorded, jobs waited for {seconds(was)} on average; simulated with no elastic job, for {seconds(now)}."
        )
        if max(was, now) > FAR * min(was, now) and abs(was - now) > FAR_S:
            return text + (
                " That is far from this cluster: priorities, reservations, other partitions, nodes that were down or "
                "jobs that are missing in the trace are not simulated. Do not take the figures below for those of your "
                "cluster."
            )
        return text + " The simulation is near this cluster in that."

    def assumptions(self) -> list[str]:
        """Assumptions, in words."""
        s = self.stretch
        cluster = f"{s.nodes} nodes of {s.gpus_per_node} GPUs"
        cluster += ", as named; jobs" if s.given else ", since jobs"
        cluster += f" held {s.most_held} at once at most, by the trace"
        kind = (
            "measured profiles"
            if self.curves.measured
            else "the package's own catalogue, by round figures that nobody measured"
        )
        sampled = "" if s.sample >= 1 else f" that a sample of {100 * s.sample:g} % left"
        jobs = f"{len(s.jobs)} of the {s.of_all} jobs with GPUs{sampled}"
        if len(s.jobs) + s.left_out < s.of_all:
            jobs += (
                ", those that follow each other in the stretch whose load is the median of all stretches of that many"
            )
        return [
            f"Cluster: one partition of {cluster}. Limits of users, accounts and reservations are not there.",
            f"Jobs: {jobs}. They are submitted within {seconds(s.hours * 3600)}.",
            *([f"{s.left_out} jobs asked for more GPUs than the cluster has, and are left out."] if s.left_out else []),
            f"{len(s.before)} earlier jobs that still ran or waited are there when the first one comes, uncounted, "
            f"and for at most {PATIENCE:g} times as long as the counted ones take.",
            "A job that is not elastic comes when it came, asks for what it asked for, and holds it for as long as it "
            "did, whether it then ended well, failed or was cancelled.",
            "Slurm starts jobs in the order of their submission, with backfill by time limits; if none was recorded, "
            f"the limit is the time that the job ran. {SLACK_S:g} s are added to each.",
            f"Curves of speed and efficiency are those of {kind}; {len(self.curves.applications)} applications.",
            *RULE,
            "An elastic job may run on one GPU up to what its application can use, and has no time limit.",
            f"A resize is a checkpoint and a requeue that stop the job for {RESIZE_S:g} s; a start costs half of that "
            "besides what was recorded.",
            f"The companion itself decides by the policy ones every {seconds(self.plan.interval_s)}, with its default "
            "settings; Slurm below it, the jobs and their reports are simulated.",
            *self.trace.notes,
        ]

    def picks(self) -> list[list[str]]:
        """The application of each job with each seed if all are elastic."""
        each = [picked(self.stretch, self.curves, 1.0, seed) for seed in self.plan.seeds]
        return [[pick or RIGID for pick in picks] for picks in zip(*each, strict=True)]

    def listed(self) -> list[tuple[str, int, str, list[str]]]:
        """Each job's number, GPUs, run time, and application with each seed."""
        jobs = self.stretch.jobs[:MOST_LISTED]
        return [(job.name, job.gpus, seconds(job.run_s), picks) for job, picks in zip(jobs, self.picks(), strict=False)]

    def as_json(self) -> dict[str, Any]:
        """All figures, and what they rest on."""
        s = self.stretch
        left_out = dict(self.trace.left_out)
        curves = [
            {"job": name, "gpus": gpus, "run": run, "curves": dict(zip(map(str, self.plan.seeds), picks, strict=True))}
            for name, gpus, run, picks in self.listed()
        ]
        return {
            **as_json(self.plan, self.summaries, self.runs),
            "trace": {"name": self.trace.name, "format": self.trace.format, "jobs": s.of_all, "left_out": left_out},
            "stretch": {"sample": s.sample, "jobs": len(s.jobs), "before": len(s.before), "hours": s.hours},
            "assumed": self.assumptions(),
            "recorded": finite(recorded(s)),
            "curves": curves,
        }

    def page(self) -> dict[str, Any]:
        """Values of the template `study.html`, pictures apart."""
        by_seed = [
            [seed, *(value_and_unit(one.each.get(seed, {}).get("mean_jct_s", math.nan), "s") for one in self.summaries)]
            for seed in self.plan.seeds
        ]
        counts = [Counter(picks) for picks in zip(*self.picks(), strict=True)]
        names = sorted(set().union(*counts), key=lambda name: (name == RIGID, name))
        return {
            **page(self.plan, self.summaries),
            "title": f"What would elasticity bring? {self.trace.name}",
            "run": {},
            "rows": rows(self.plan, self.summaries, recorded(self.stretch)),
            "elasticity": {
                "said": [*self.verdict(), self.fidelity()],
                "seeds": [f"seed {seed}" for seed in self.plan.seeds],
                "by_seed": by_seed,
                "assigned": [[name, *(count[name] for count in counts)] for name in names],
                "listed": [[name, gpus, ran, *picks] for name, gpus, ran, picks in self.listed()],
                "more": max(len(self.stretch.jobs) - MOST_LISTED, 0),
                "assumptions": self.assumptions(),
                "left_out": self.trace.left_out,
                "doubts": self.trace.doubts,
            },
        }


def _changes(summary: ContenderSummary, none: ContenderSummary, key: str) -> list[float]:
    """Relative difference of a figure from that with no elastic job, for each seed."""
    pairs = [(each[key], none.each[seed][key]) for seed, each in summary.each.items() if seed in none.each]
    return [now / was - 1.0 for now, was in pairs if was > 0 and math.isfinite(now)]


def _between(changes: Sequence[float]) -> str:
    """`-11 % (-16 % to -3 %)`."""
    mean, low, high = (f"{100 * one:+.0f} %" for one in (sum(changes) / len(changes), min(changes), max(changes)))
    return mean if low == high else f"{mean} ({low} to {high})"
