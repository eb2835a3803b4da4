"""The unchanged companion on the simulated cluster: whole workloads, and what must never happen in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ones_db.shape import Shape
from slurm_ones.policy.contract import ClusterView, JobView, Schedule
from slurm_ones.rivals.ordered import Fifo
from slurm_ones.simulate.outcome import JobOutcome, Outcome
from slurm_ones.simulate.run import AT_ONCE, SimulationFailed, run
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec, asked_shape
from slurm_ones.simulate.training.application import Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.generate import generate, undisturbed_s
from slurm_ones.simulate.workloads.profiles import BadInput, Workload
from tests.marks import NIGHTLY, nightly
from tests.simulate.harness import ChangingPolicy

APPLICATIONS = {
    "cnn": build(replace(KINDS["resnet18-cifar10"], epochs=16), name="cnn"),
    "nlp": build(KINDS["bert-glue"], name="nlp", length=0.3),
}
SMALL = ClusterSpec(2, 4)


def workload(jobs: int = 6, *, rigid: Sequence[int] = (), every_s: float = 40.0) -> Workload:
    """Jobs of two kinds that ask for one to four GPUs, some of them rigid."""
    kinds = ["cnn", "nlp"]
    return Workload(
        "small",
        tuple(
            Submission(
                f"job-{i}",
                i * every_s,
                kinds[i % 2],
                (1, 2, 4)[i % 3],
                APPLICATIONS[kinds[i % 2]].base_batch,
                elastic=i not in rigid,
            )
            for i in range(jobs)
        ),
        APPLICATIONS,
    )


def with_changing_policy(work: Workload, **other: Any) -> Outcome:
    """Every job resized at every tick. Invariants are checked by the engine, which raises where one does not hold."""
    options: dict[str, Any] = {"interval_s": 60.0, "make": ChangingPolicy, "settings": AT_ONCE, **other}
    spec = options.pop("spec", SMALL)
    return run("fifo", {}, work, spec, **options)


@pytest.mark.slow
def test_a_whole_workload_in_the_order_of_its_submission() -> None:
    """Every job ends, starts once, holds what it asked for, and trains for as long as its application takes."""
    work = workload()
    told: list[tuple[float, int]] = []
    outcome = run("fifo", {}, work, SMALL, on_time=lambda now, ended: told.append((now, ended)))
    assert [job.name for job in outcome.jobs] == [s.name for s in work.submissions]
    for job, asked in zip(outcome.jobs, work.submissions, strict=True):
        app = work.applications[asked.application]
        alone = app.seconds(1, asked.gpus, float(asked.batch), 0.0)
        assert job.ended is not None and job.started is not None
        assert job.resizes == 0
        # The launch is half of a resize, an end takes a second.
        assert job.running_s == pytest.approx(alone + 15 + 1, abs=2.0)
        assert job.gpu_s == pytest.approx(job.running_s * asked.gpus)
        assert job.lost_gpu_s == pytest.approx(16 * asked.gpus, abs=1.0)
        assert not job.missed
    assert told[0] == (0.0, 0)
    assert told[-1][1] == len(work.submissions)
    assert outcome.gpus == 8
    assert len(outcome.decision_s) > 5
    assert max(value for _, value in outcome.goodput) <= 1.0
    assert outcome.notes == ()


@pytest.mark.slow
def test_every_job_but_rigid_ones_is_resized_at_every_tick_and_does_its_exact_work() -> None:
    """No job lost or left held, no sample skipped or repeated: the engine raises otherwise. Rigid jobs run at what they
    asked for, once, whatever the policy does to the others; and Slurm backfills."""
    work = workload(6, rigid=(1, 4))
    outcome = with_changing_policy(work)
    assert sum(job.resizes for job in outcome.jobs) > 10
    assert all(job.ended is not None for job in outcome.jobs)
    assert outcome.notes == ()
    for i in (1, 4):
        runs = [segment for segment in outcome.segments if segment.job == f"job-{i}"]
        assert [(run.gpus, run.nodes) for run in runs] == [(work.submissions[i].gpus, 1)]
        assert not outcome.jobs[i].elastic


@pytest.mark.slow
def test_resizes_cost_what_they_are_said_to_cost() -> None:
    """From the last step to the next one; what the companion's looks add comes on top, some seconds."""
    for cost in (20.0, 60.0) if NIGHTLY else (60.0,):
        outcome = with_changing_policy(workload(3), mechanism=Requeue(cost))
        resizes = sum(job.resizes for job in outcome.jobs)
        runs = {s.job: [t for t in outcome.segments if t.job == s.job] for s in outcome.segments}
        first = sum(0.5 * cost * segments[0].gpus for segments in runs.values())
        weight = sum(t.gpus for segments in runs.values() for t in segments[1:])
        lost = sum(job.lost_gpu_s for job in outcome.jobs) - first
        assert resizes > 3
        assert 0.6 * cost < lost / weight < 1.2 * cost


@pytest.mark.slow
def test_equal_seeds_give_equal_outcomes() -> None:
    def gist(seed: int) -> tuple[object, ...]:
        outcome = run("ones", {}, workload(2), SMALL, interval_s=60.0, settings=AT_ONCE, seed=seed)
        return outcome.jobs, outcome.segments, outcome.goodput

    first = gist(1)
    assert gist(1) == first
    assert gist(2) != first


@pytest.mark.slow
def test_whole_nodes() -> None:
    """Where Slurm knows of no GPUs, jobs take nodes, and the companion counts their GPUs from its settings."""
    outcome = with_changing_policy(workload(4), spec=ClusterSpec(3, 4, whole_nodes=True))
    assert {segment.gpus % 4 for segment in outcome.segments} == {0}
    assert len({segment.nodes for segment in outcome.segments}) > 1


def test_a_time_limit_ends_a_job_that_takes_longer() -> None:
    """It is no job that the companion lost; its user's work is not done."""
    work = workload(2)
    outcome = run("fifo", {}, work, SMALL, cluster_settings=ClusterSettings(time_limit_s=120.0))
    assert any(job.ended is None and job.missed for job in outcome.jobs)


class Curious(Fifo):
    """Remembers what it was told."""

    told: list[float]

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        Curious.told += [job.true_remaining_s for job in jobs if job.shape is None]
        return super().decide(cluster, jobs, now, rng)


@pytest.mark.parametrize(("policy", "knows"), [("srtf", True), ("fifo", False)])
def test_only_oracles_are_told_the_truth(policy: str, knows: bool) -> None:
    Curious.told = []
    work = workload(2)
    run(policy, {}, work, SMALL, make=Curious)
    app = work.applications["cnn"]
    if knows:
        assert Curious.told[0] == pytest.approx(app.seconds(1, 1, 128.0, 0.0))
    else:
        assert Curious.told and all(math.isnan(seconds) for seconds in Curious.told)


class Broken:
    """A policy that fails."""

    name = "broken"

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        raise ZeroDivisionError("nobody knows why")


def test_a_policy_that_fails_is_said_to() -> None:
    """The daemon would go on; a simulation of it would only be wrong."""
    with pytest.raises(SimulationFailed, match="ZeroDivisionError: nobody knows why"):
        run("fifo", {}, workload(2), SMALL, make=Broken)


def test_what_cannot_be_run_is_said_before_it_is() -> None:
    work = workload(2, rigid=(1,))
    large = replace(work, submissions=(*work.submissions, Submission("large", 0.0, "cnn", 64, 128, elastic=False)))
    with pytest.raises(BadInput, match="large asks for 64 GPUs, the cluster has 8"):
        run("fifo", {}, large, SMALL)
    with pytest.raises(ValueError, match="none of"):
        run("best", {}, work, SMALL)
    with pytest.raises(ValueError, match="dwell"):
        run("fifo", {}, work, SMALL, settings={"resize.dwell": 3})


@pytest.mark.parametrize(
    ("gpus", "shape"), [(1, "1x1"), (3, "1x3"), (4, "1x4"), (6, "2x3"), (7, "2x4"), (24, "6x4"), (500, "16x4")]
)
def test_a_request_becomes_a_uniform_shape(gpus: int, shape: str) -> None:
    """Equally many GPUs on each node, as Slurm must be asked for them, and no fewer than asked for."""
    assert asked_shape(gpus, ClusterSpec(16, 4)) == Shape.parse(shape)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [Requeue(0.0), Hot(launch_s=0.0)])
def test_a_job_on_a_slow_node_trains_at_its_pace(mechanism: Mechanism) -> None:
    """At half the speed the one GPU of the only node takes twice as long, but for the start."""
    alone = replace(workload(1), submissions=(Submission("one", 0.0, "cnn", 1, 128),))
    seconds = []
    for slow in ((), (0.5,)):
        outcome = run("fifo", {}, alone, ClusterSpec(1, 4, slow_nodes=slow), mechanism=mechanism)
        seconds.append(outcome.jobs[0].running_s)
    assert seconds[1] / seconds[0] == pytest.approx(2.0, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("whole_nodes", [False, nightly(True)])
def test_jobs_of_blocks_change_while_they_train(whole_nodes: bool) -> None:
    """All of them end, having been resized many times, and hardly a GPU stands still for it."""
    spec = ClusterSpec(4, 4, whole_nodes)
    hot, requeued = (with_changing_policy(workload(3), mechanism=resize, spec=spec) for resize in (Hot(), Requeue()))
    assert all(job.ended is not None for job in (*hot.jobs, *requeued.jobs))
    assert sum(job.resizes for job in hot.jobs) > 4
    assert hot.notes == ()

    def idle(outcome: Outcome) -> float:
        """Share of the GPUs held that did not train."""
        return sum(job.lost_gpu_s for job in outcome.jobs) / sum(job.gpu_s for job in outcome.jobs)

    assert idle(hot) < 0.6 * idle(requeued)


@pytest.mark.slow
def test_a_promise_is_stored_and_kept_through_the_companion() -> None:
    """Protects the road of a deadline: comment, view, decision, database, outcome. One that cannot be met is refused,
    and that job runs to its end as well."""
    work = generate("ones-sc21", jobs=3, seed=4)
    due = []
    for i, (one, share) in enumerate(zip(work.submissions, (6.0, 0.02, None), strict=True)):
        alone = undisturbed_s(work.applications[one.application], one, 4)
        due.append(replace(one, time=float(i), deadline_s=None if share is None else share * alone))
    outcome = run(
        "ones", {}, replace(work, submissions=tuple(due)), ClusterSpec(2, 4), interval_s=10.0, mechanism=Requeue(5.0)
    )
    first, second, third = outcome.jobs
    assert (first.promised, first.in_time) == (True, True)
    assert second.promised is not True
    assert third.deadline is None
    assert all(job.ended is not None for job in outcome.jobs)


LONG = build(KINDS["bert-glue"], name="long")
BRIEF = build(replace(KINDS["resnet18-cifar10"], epochs=8), name="brief")
AT = 400.0
"""When the rigid job comes."""


def outcomes(asked: int, *, share: float = 1.0, **settings: Any) -> tuple[JobOutcome, JobOutcome]:
    """An elastic job of so many GPUs, alone on 4 of them, and a rigid one of 2 that comes later."""
    jobs = (
        Submission("elastic", 0.0, "long", asked, LONG.base_batch),
        Submission("rigid", AT, "brief", 2, BRIEF.base_batch, elastic=False),
    )
    work = Workload("two", jobs, {"long": LONG, "brief": BRIEF})
    settings = {**AT_ONCE, "limits.share": share} | settings
    elastic, rigid = run("ones", {}, work, ClusterSpec(1, 4), settings=settings).jobs
    return elastic, rigid


def waited(rigid: JobOutcome) -> float:
    assert rigid.started is not None
    return rigid.started - rigid.submitted


def test_a_rigid_job_starts_soon() -> None:
    """One that wants what the elastic job has grown into: after a tick, a drain and a look of the scheduler. Without
    that it waits for the elastic job's end."""
    elastic, rigid = outcomes(1)
    assert waited(rigid) < 60 + 60
    assert elastic.ended is not None and elastic.resizes >= 1
    alone, late = outcomes(1, **{"resize.shrink": False})
    assert alone.ended is not None and waited(late) >= alone.ended - AT > 240


def test_what_a_job_asked_for_is_not_given_to_others() -> None:
    elastic, rigid = outcomes(4)
    assert elastic.ended is not None and elastic.resizes == 0
    assert waited(rigid) >= elastic.ended - AT
