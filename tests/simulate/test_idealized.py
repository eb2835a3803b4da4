"""The plain engine: no time, GPU or sample is lost or made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from slurm_ones.decide import make_policy
from slurm_ones.schedule.policy import Allocation, ClusterView, JobView, Policy, Schedule
from slurm_ones.simulate.engines.idealized import idealized_cluster, run_idealized
from slurm_ones.simulate.engines.outcome import Outcome
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.training.mechanism import Requeue
from slurm_ones.simulate.workloads.profiles import read_profile
from slurm_ones.simulate.workloads.workload import Workload
from slurm_ones.slurm.model import Shape
from tests.simulate.profiles import EPOCHS, ITERATIONS, write_profile

SAMPLES = 64 * ITERATIONS * EPOCHS
STEP = 1.0 + 0.01 * 16 / 16
"""Seconds of a step of 16 samples a GPU on up to four GPUs of one node."""


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    """One kind of job, 64 samples a step on four GPUs."""
    app = read_profile(write_profile(tmp_path / "net"))
    jobs = tuple(Submission(f"net-{i}", 100.0 * i, "net", 4, 64) for i in range(6))
    return Workload("made", jobs, {"net": app})


def only(workload: Workload, *jobs: Submission) -> Workload:
    return Workload("one", jobs, workload.applications)


@dataclass
class Flutter:
    """Gives every job another size in every round."""

    name: str = "flutter"
    rounds: int = 0

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        self.rounds += 1
        gpus = 4 if self.rounds % 2 else 2
        return Schedule({job.job_id: Allocation(Shape(1, gpus), 64) for job in jobs})


def run(policy: Policy | str, workload: Workload, **options: object) -> Outcome:
    made = make_policy(policy) if isinstance(policy, str) else policy
    return run_idealized(made, workload, idealized_cluster(2, 4), **options)  # type: ignore[arg-type]


def test_a_job_alone_takes_what_its_profile_says(made: Workload) -> None:
    """Submitted at 30 s it starts at the next decision, stands still for a resize, and then trains to the sample."""
    outcome = run("fifo", only(made, Submission("a", 30.0, "net", 4, 64)))
    (job,) = outcome.jobs
    assert job.started == 60.0
    assert job.ended == pytest.approx(60.0 + 30.0 + SAMPLES / 64 * STEP)
    assert job.lost_gpu_s == pytest.approx(4 * 30.0)
    assert job.metric == pytest.approx(0.4), "of its last epoch"


def test_a_larger_batch_pays_its_efficiency(tmp_path: Path) -> None:
    """At four times the base batch and efficiency 0.4 as many samples more are needed."""
    app = read_profile(write_profile(tmp_path / "net", noise=1.0))
    outcome = run("fifo", Workload("w", (Submission("a", 0.0, "net", 4, 256),), {"net": app}))
    step = 1.0 + 0.01 * 64 / 16
    assert outcome.jobs[0].running_s - 30.0 == pytest.approx(SAMPLES / 0.4 / 256 * step, rel=0.01)


def test_part_of_the_epochs(made: Workload) -> None:
    """A job that trains a quarter of its application's epochs takes a quarter of the time."""
    outcome = run("srtf", only(made, Submission("a", 0.0, "net", 4, 64, epochs=0.25)))
    assert outcome.jobs[0].ended == pytest.approx(30.0 + SAMPLES / 4 / 64 * STEP)


@pytest.mark.parametrize("policy", ["fifo", "srtf", "srsf", "tiresias", "optimus"])
def test_gpu_seconds_are_conserved(made: Workload, policy: str) -> None:
    """What the segments hold is what the jobs held, never more than there is; all jobs end, none before its work."""
    outcome = run(policy, made)
    assert all(job.ended is not None and job.started is not None for job in outcome.jobs)
    for job in outcome.jobs:
        mine = [s for s in outcome.segments if s.job == job.name]
        assert sum((s.end - s.start) * s.gpus for s in mine) == pytest.approx(job.gpu_s)
        assert sum(s.end - s.start for s in mine) == pytest.approx(job.running_s)
        assert job.lost_gpu_s <= job.gpu_s
        assert job.jct_s >= job.running_s - 1e-6
    for at in sorted({s.start for s in outcome.segments}):
        assert sum(s.gpus for s in outcome.segments if s.start <= at < s.end) <= outcome.gpus


def test_a_resize_costs_what_is_said(made: Workload) -> None:
    """Each change of size stops the job for `resize_s`, counted and lost; a free one only counts."""
    one = only(made, Submission("a", 0.0, "net", 4, 64))
    dear, free = run(Flutter(), one), run(Flutter(), one, mechanism=Requeue(0.0))
    assert free.jobs[0].lost_gpu_s == 0.0
    job = dear.jobs[0]
    assert job.resizes > 5
    assert dear.jobs[0].running_s == pytest.approx(free.jobs[0].running_s + 30.0 * (job.resizes + 1), abs=60.0)
    sizes = [s.gpus for s in dear.segments]
    assert job.lost_gpu_s == pytest.approx(sum(30.0 * gpus for gpus in sizes), abs=30.0 * 4)
    own = run(Flutter(), one, mechanism=Requeue(None))
    assert own.jobs[0].lost_gpu_s > 0.0, "an application's own cost"


def test_spread_and_packed_placement(made: Workload) -> None:
    """Packed, two jobs of two GPUs share a node; spread, as in Pollux's study, each takes the emptiest."""
    jobs = [Submission(name, 0.0, "net", 2, 64) for name in "ab"] + [Submission("c", 0.0, "net", 4, 64)]
    packed, spread = (run("fifo", only(made, *jobs), spread=spread) for spread in (False, True))
    assert {s.job: s.nodes for s in packed.segments} == {"a": 1, "b": 1, "c": 1}
    assert {s.job: s.nodes for s in spread.segments} == {"a": 1, "b": 1, "c": 2}


def test_equal_runs_are_equal(made: Workload) -> None:
    """Seeds reproduce a run, times of the real clock aside."""
    first, second = run("tiresias", made), run("tiresias", made)
    assert (first.jobs, first.segments, first.goodput) == (second.jobs, second.segments, second.goodput)


def test_what_never_ends_is_given_up(made: Workload) -> None:
    """A policy that starts nobody ends the run with jobs that have no end, and no hang."""

    @dataclass
    class Idle:
        name: str = "idle"

        def decide(
            self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator
        ) -> Schedule:
            return Schedule({})

    outcome = run(Idle(), made, most_s=3600.0)
    assert all(job.ended is None and job.started is None and np.isnan(job.jct_s) for job in outcome.jobs)
