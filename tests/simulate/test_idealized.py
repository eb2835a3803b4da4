"""An oracle in the companion's place: no time, GPU or sample is lost or made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Policy, Schedule
from slurm_ones.simulate.oracle import GpuChange, Placement, plan_changes
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run as run_any
from slurm_ones.simulate.spec import ClusterSpec, Part
from slurm_ones.simulate.training.application import Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload, read_profile, read_profiles, read_workload
from tests.marks import nightly
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


def run(policy: Policy | str, workload: Workload, *, oracle: Placement = "pack", **options: Any) -> Outcome:
    made = make_policy(policy) if isinstance(policy, str) else policy
    return run_any(made.name, {}, workload, ClusterSpec(2, 4), oracle=oracle, make=lambda: made, **options)


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


def conserved(outcome: Outcome) -> None:
    """What the segments hold is what the jobs held, never more than there is; all jobs end, none before its work."""
    assert all(job.ended is not None and job.started is not None for job in outcome.jobs)
    for job in outcome.jobs:
        mine = [s for s in outcome.segments if s.job == job.name]
        assert sum((s.end - s.start) * s.gpus for s in mine) == pytest.approx(job.gpu_s)
        assert sum(s.end - s.start for s in mine) == pytest.approx(job.running_s)
        assert job.lost_gpu_s <= job.gpu_s
        assert job.jct_s >= job.running_s - 1e-6
    for at in sorted({s.start for s in outcome.segments}):
        assert sum(s.gpus for s in outcome.segments if s.start <= at < s.end) <= outcome.gpus


@pytest.mark.parametrize("policy", ["fifo", "srtf", "srsf", "tiresias", "optimus"])
def test_gpu_seconds_are_conserved(made: Workload, policy: str) -> None:
    conserved(run(policy, made))


def test_a_resize_costs_what_is_said(made: Workload) -> None:
    """Each change of size stops the job for what it costs, counted and lost; a free one only counts."""
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


@dataclass
class Steps:
    """Gives the only job these sizes, one after the other."""

    sizes: Sequence[int]
    name: str = "steps"
    rounds: int = 0
    seen: list[JobView] = field(default_factory=list)

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        self.rounds += 1
        self.seen.append(jobs[0])
        gpus = self.sizes[min(self.rounds, len(self.sizes)) - 1]
        return Schedule({job.job_id: Allocation(Shape(1, gpus), 64) for job in jobs})


HOT = Hot(pause_s=1.0, shrink_pause_s=0.5, launch_s=6.0, bytes_per_s=12 * 25e6)


def test_a_hot_job_trains_while_its_new_gpus_prepare(made: Workload) -> None:
    """They are held from the decision on and lost until they join; the pause counts its state; a policy is told what
    each direction costs."""
    policy = Steps([2, 4, 4, 2])
    outcome = run(policy, only(made, Submission("a", 0.0, "net", 2, 64)), mechanism=HOT, interval_s=15.0)
    (job,) = outcome.jobs
    assert [(s.start, s.end, s.gpus) for s in outcome.segments[:3]] == [(0, 15, 2), (15, 45, 4), (45, job.ended, 2)]
    start, joining, growth, shrink = 6.0 * 2, 6.0 * 2, 2.0 * 4, 0.5 * 2
    assert job.lost_gpu_s == pytest.approx(start + joining + growth + shrink)
    assert job.resizes == 2
    view = policy.seen[1]
    assert (view.resize_s, view.shrink_s, view.prepare_s, view.fixed) == (2.0, 0.5, 6.0, None)


def test_a_job_is_left_alone_while_a_change_is_under_way(made: Workload) -> None:
    """Where preparing takes longer than the time between two decisions, the policy sees the job fixed at what it will
    have, and its GPUs are given to nobody."""
    policy = Steps([2, 4, 2, 2, 2, 2])
    slow = Hot(launch_s=40.0)
    run(policy, only(made, Submission("a", 0.0, "net", 2, 64)), mechanism=slow, interval_s=15.0)
    fixed = [view.fixed.code if view.fixed else "" for view in policy.seen[:8]]
    assert fixed[:4] == ["", *["nothing_reported"] * 2, ""]
    assert all(view.shape is None or view.shape.gpus == sum(view.nodes.values()) for view in policy.seen)


@pytest.mark.slow
@pytest.mark.parametrize("launch_s", [nightly(0.0), 7.0, nightly(40.0)])
@pytest.mark.parametrize("policy", ["ones", nightly("pollux"), "tiresias"])
def test_hot_gpu_seconds_are_conserved(made: Workload, policy: str, launch_s: float) -> None:
    """Also while jobs hold old and new GPUs, no node gives more than it has, all jobs end, and nothing is lost."""
    conserved(run(policy, made, mechanism=Hot(launch_s=launch_s), interval_s=15.0))


def test_spread_and_packed_placement(made: Workload) -> None:
    """Packed, two jobs of two GPUs share a node; spread, as in Pollux's study, each takes the emptiest."""
    jobs = [Submission(name, 0.0, "net", 2, 64) for name in "ab"] + [Submission("c", 0.0, "net", 4, 64)]
    packed, spread = (run("fifo", only(made, *jobs), oracle="pack"), run("fifo", only(made, *jobs), oracle="spread"))
    assert {s.job: s.nodes for s in packed.segments} == {"a": 1, "b": 1, "c": 1}
    assert {s.job: s.nodes for s in spread.segments} == {"a": 1, "b": 1, "c": 2}


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


CLUSTER = ClusterSpec(3, 4).view


def planned(free: Mapping[str, int], *changes: GpuChange) -> dict[int, tuple[dict[str, int], dict[str, int]]]:
    """(GPUs in the end, GPUs kept until then) of each job that finds room."""
    return {i: (plan.nodes, plan.keeps) for i, plan in plan_changes(CLUSTER, free, changes, spread=False).items()}


@pytest.mark.parametrize(
    ("free", "changes", "plans"),
    [
        pytest.param(
            {"n1": 2, "n2": 4, "n3": 4},
            [GpuChange(1, Shape(1, 4), {"n1": 2})],
            {1: ({"n1": 4}, {"n1": 2})},
            id="grows where it is",
        ),
        pytest.param(
            {"n1": 0, "n2": 4, "n3": 0},
            [GpuChange(1, Shape(1, 4), {"n1": 2}), GpuChange(2, Shape(1, 2), {})],
            {1: ({"n2": 4}, {}), 2: ({"n1": 2}, {})},
            id="leaves at once if another needs its GPUs",
        ),
        pytest.param(
            {"n1": 0, "n2": 4, "n3": 0},
            [GpuChange(1, Shape(1, 4), {"n1": 2})],
            {1: ({"n2": 4}, {"n1": 2})},
            id="keeps its GPUs until the new ones are ready if nobody needs them",
        ),
        pytest.param(
            {"n1": 1, "n2": 0, "n3": 0},
            [GpuChange(1, Shape(1, 4), {"n1": 2, "n2": 1}), GpuChange(2, Shape(1, 4), {"n1": 1, "n2": 3})],
            {1: ({"n1": 4}, {"n1": 2}), 2: ({"n2": 4}, {"n2": 3})},
            id="two that want each other's leave them first",
        ),
        pytest.param({"n1": 1, "n2": 0, "n3": 0}, [GpuChange(1, Shape(1, 2), {})], {}, id="no room"),
        pytest.param(
            {"n1": 2, "n2": 0, "n3": 0},
            [GpuChange(1, Shape(1, 4), {"n1": 2, "n2": 2}, optional=True)],
            {1: ({"n1": 4}, {"n1": 2, "n2": 2})},
            id="moves to fewer nodes",
        ),
        pytest.param(
            {"n1": 0, "n2": 1, "n3": 0}, [GpuChange(1, Shape(1, 2), {"n1": 2}, optional=True)], {}, id="no fewer nodes"
        ),
    ],
)
def test_how_running_jobs_come_to_their_gpus(
    free: dict[str, int], changes: list[GpuChange], plans: dict[int, tuple[dict[str, int], dict[str, int]]]
) -> None:
    assert planned(free, *changes) == plans


@st.composite
def moments(draw: st.DrawFn) -> tuple[Counter[str], list[GpuChange]]:
    """Free GPUs, and jobs that are to change; some jobs are not."""
    gpus = [node.name for node in CLUSTER.nodes for _ in range(node.gpus)]
    owners = draw(st.lists(st.integers(0, 6), min_size=len(gpus), max_size=len(gpus)))
    free = Counter(dict.fromkeys(gpus, 0))
    free.update(name for name, owner in zip(gpus, owners, strict=True) if owner == 0)
    changes = []
    for job in range(1, 5):
        own = dict(Counter(name for name, owner in zip(gpus, owners, strict=True) if owner == job))
        optional = bool(own) and draw(st.booleans())
        size = sum(own.values()) + (0 if optional else draw(st.integers(-2, 3)))
        changes.append(GpuChange(job, Shape(1, max(size, 1)), own, optional=optional))
    return free, draw(st.permutations(changes))


@given(moments(), st.booleans())
def test_no_plan_gives_a_gpu_twice(moment: tuple[Counter[str], list[GpuChange]], spread: bool) -> None:
    """Protects every figure of hot jobs: while jobs hold what they keep and what they take, no node gives more than it
    has."""
    free, changes = moment
    plans = plan_changes(CLUSTER, free, changes, spread=spread)
    room = Counter(free)
    for one in changes:
        if one.job_id in plans:
            plan = plans[one.job_id]
            assert sum(plan.nodes.values()) == one.shape.gpus and Counter(plan.keeps) <= Counter(one.own)
            room.update(one.own)
            room.subtract(Counter(plan.keeps) | Counter(plan.nodes))
    assert min(room.values()) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [Requeue(1.0), Hot()])
def test_a_rigid_job_keeps_what_it_asked_for(mechanism: Mechanism) -> None:
    """Nobody may change the size or batch of a job that did not opt in; the bound counts on it."""
    workload = generate("philly", jobs=12, seed=1, gpus=16, gpus_per_node=4, rigid=0.5, load=3.0)
    asked = {one.name: one for one in workload.submissions if not one.elastic}
    found = run_any("ones", {}, workload, ClusterSpec(4, 4), oracle="pack", mechanism=mechanism)
    held = {(one.job, one.gpus, one.batch) for one in found.segments if one.job in asked}
    assert held == {(name, one.gpus, one.batch) for name, one in asked.items()}
    assert len({one.batch for one in found.segments if one.job not in asked}) > len(asked), "others change"


def test_a_cluster_is_what_it_is_said_to_be() -> None:
    spec = replace(ClusterSpec(2, 1), gpus_per_node=4)
    assert (spec.gpus, spec.view.gpus_per_node, [part.gpus_per_node for part in spec.partitions()]) == (8, 4, [4])
    kinds = ClusterSpec(parts=(Part(1, 4, "a100"), Part(2, 2, "t4")))
    assert (kinds.nodes, kinds.gpus, kinds.gpus_per_node, kinds.view.kinds) == (3, 8, 4, ("a100", "t4"))


DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "adaptdl"


@pytest.mark.nightly
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data of Pollux's study in {DATA}")
@pytest.mark.parametrize(("policy", "known"), [("fifo", 5020.7), ("tiresias", 2473.7)])
def test_within_a_tenth_of_the_study(policy: str, known: float) -> None:
    """Mean JCT of workload-1; `benchmarks/validation.py` does all policies and both workloads."""
    work = read_workload(DATA / "workloads" / "workload-1.csv", read_profiles(DATA / "profiles"))
    outcome = run_any(policy, {}, work, ClusterSpec(16, 4), oracle="spread")
    assert np.mean([job.jct_s for job in outcome.jobs]) == pytest.approx(known, rel=0.1)
