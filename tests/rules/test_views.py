"""What a policy weighs: the nodes it may dispose of, and what each job can take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ones_db import EpochPoint, JobHistory, NoisePoint, PromiseRecord, ResizeRecord, ThroughputPoint
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.jobs.elastic import Observation, WholeJob, elastic_job
from slurm_ones.learn.learner import Learner
from slurm_ones.policy.contract import ClusterView, JobView, Limits, NodeView, Reserved
from slurm_ones.policy.shapes import least_and_most
from slurm_ones.rules.views import ANY_BATCH, job_models, job_views
from slurm_ones.rules.views import limits_of as limits
from slurm_ones.slurm.model import JobState, Node, Partition, Reservation, SlurmJob, Snapshot
from tests.act.make import history
from tests.rules.make import round_of, shown
from tests.slurm.make import job_of

FOUR = ("n1", "n2", "n3", "n4")


def running(job_id: int, shape: Shape, *names: str, **other: Any) -> SlurmJob:
    changes: dict[str, Any] = {
        "job_id": job_id,
        "state": JobState.RUNNING,
        "held": False,
        "reason": "None",
        "max_nodes": 0,
        "node_list": names,
    }
    return replace(job_of(shape), **(changes | other))


def waiting(job_id: int, shape: Shape, **other: Any) -> SlurmJob:
    changes: dict[str, Any] = {"job_id": job_id, "held": False, "reason": "Resources"}
    return replace(job_of(shape), **(changes | other))


def seen(
    *jobs: SlurmJob, used: dict[str, int] | None = None, unusable: tuple[str, ...] = (), up: bool = True
) -> Observation:
    """A partition of 4 × 4 GPUs with these jobs, of which `used` GPUs are used on each node."""
    nodes = {
        name: Node(name, "", name not in unusable, 4, (used or {}).get(name, 0), ("gpu",), not (used or {}).get(name))
        for name in FOUR
    }
    queue = {job.job_id: job for job in jobs}
    snapshot = Snapshot(0.0, queue, nodes, {"gpu": Partition("gpu", up, FOUR, 0.0, 0, False)})
    found = {job.job_id: elastic_job(WholeJob.of(job), snapshot, {}, None) for job in jobs}
    return Observation(snapshot, {job_id: elastic for job_id, elastic in found.items() if elastic is not None})


def gpus(view: ClusterView) -> dict[str, int]:
    return {node.name: node.gpus for node in view.nodes}


def test_reservations_to_come_are_not_the_policys() -> None:
    """Those of this partition's nodes; one that is in force is in the nodes already."""
    look_ = seen()
    reserved = (Reservation("soon", ("n1", "n2", "x1"), 50.0, 90.0), Reservation("now", ("n3",), -9.0, 20.0))
    view = shown(replace(look_, snapshot=replace(look_.snapshot, reservations=reserved)))
    assert view.reserved == (Reserved(50.0, 90.0, 8),)


@pytest.mark.parametrize(("deadline", "promised"), [(100.0, True), (99.0, None), (None, None)])
def test_a_deadline_counts_from_the_first_submission(deadline: float | None, promised: bool | None) -> None:
    """And what was promised of another one than the comment names now is void."""
    words = "ones: gpus=1-4" + ("" if deadline is None else f" deadline={deadline:.0f}s")
    look_ = seen(waiting(1, Shape(1, 1), comment=words, submit_time=5.0))
    said = {1: PromiseRecord(1, 105.0, 10.0, True)}
    round_ = replace(round_of(look_), promises=said)
    rules = round_.partition("gpu")
    (view,) = job_views(round_, rules, shown(look_), job_models(round_, Learner()))
    assert view.deadline == (None if deadline is None else 5.0 + deadline)
    assert view.promised is promised


def test_gpus_that_elastic_jobs_hold_are_the_policys_and_rigid_ones_are_not() -> None:
    """3 on n1 are an elastic job's, 2 on n2 somebody else's."""
    look_ = seen(running(1, Shape(1, 3), "n1"), running(2, Shape(1, 2), "n2", comment=""), used={"n1": 3, "n2": 2})
    view = shown(look_)
    assert gpus(view) == {"n1": 4, "n2": 2, "n3": 4, "n4": 4}
    assert (view.gpus_per_node, view.whole_nodes) == (4, False)


def test_a_drained_node_keeps_what_runs_on_it_and_offers_no_more() -> None:
    """A schedule must not put anybody there."""
    look_ = seen(running(1, Shape(1, 1), "n1"), used={"n1": 1}, unusable=("n1", "n2"))
    assert gpus(shown(look_)) == {"n1": 1, "n2": 0, "n3": 4, "n4": 4}


def test_while_rigid_jobs_wait_nothing_is_free() -> None:
    """Growing would be at their cost."""
    runs = running(1, Shape(1, 2), "n1")
    rigid = waiting(2, Shape(4, 4), comment="")
    assert shown(seen(runs, rigid, used={"n1": 2})).gpus == 2


def test_a_partition_that_is_down_or_gone() -> None:
    """It offers nothing."""
    assert shown(seen(up=False)).gpus == 0
    assert shown(seen(), partition="gone") == ClusterView(())


def test_whole_nodes_are_free_or_not() -> None:
    """A node that anybody has a part of is nobody else's."""
    view = shown(seen(running(2, Shape(1, 1), "n2", comment=""), used={"n2": 1}), whole_node_gpus={"gpu": 8})
    assert (gpus(view), view.whole_nodes, view.gpus_per_node) == ({"n1": 8, "n2": 0, "n3": 8, "n4": 8}, True, 8)


def test_what_a_resize_under_way_needs_is_offered_to_nobody() -> None:
    """A held job is about to start on two nodes."""
    held = waiting(1, Shape(2, 4), held=True)
    resize = ResizeRecord(
        job_id=1,
        restart=0,
        old_shape=Shape(1, 1),
        old_batch=None,
        new_shape=Shape(2, 4),
        new_batch=None,
        state="releasing",
        started=0.0,
    )
    assert shown(seen(held), resize).gpus == 8
    assert shown(seen(held), replace(resize, back=True)).gpus == 15


CLUSTER = ClusterView(tuple(NodeView(name, 4) for name in FOUR), node_gpus=4)
SPEC = Spec(base_batch=32, max_batch=512, max_local_batch=64, dataset=1000, epochs=5)


def limits_of(comment: str, spec: Spec | None = None, shape: Shape = Shape(1, 1)) -> Limits:
    job = waiting(1, shape, comment=comment)
    return limits(seen(job).elastic[1], CLUSTER, spec)


@pytest.mark.parametrize(
    ("comment", "counts"),
    [
        ("ones: gpus=1-16", (1, 2, 4, 8, 12, 16)),
        ("ones: gpus=2-8", (1, 2, 4, 8)),
        ("ones: gpus=1-1000", (1, 2, 4, 8, 12, 16)),
        ("ones: nodes=1-2", (1, 4, 8)),
        ("ones: resize=off", (1,)),
    ],
)
def test_gpu_counts(comment: str, counts: tuple[int, ...]) -> None:
    """What its owner allows, as shapes of this cluster, and the size that it was submitted with."""
    assert limits_of(comment).gpus == counts


def test_an_odd_size_that_its_owner_asked_for_is_valid() -> None:
    """It runs there already, or is to run there by hand, if nodes have that many."""
    assert limits_of("ones: gpus=1-4", shape=Shape(1, 3)).gpus == (1, 2, 3, 4)
    assert limits_of("ones: gpus=1-4 size=3").gpus == (1, 2, 3, 4)
    assert limits_of("ones: gpus=1-8 size=5").gpus == (1, 2, 4, 8)
    assert limits_of("ones: nodes=1-2 size=16").gpus == (1, 4, 8)  # the comment allows no more
    assert limits_of("ones: nodes=1-2 size=3").gpus == (1, 4, 8)


@pytest.mark.parametrize(
    ("comment", "spec", "batches"),
    [
        ("ones: gpus=1-4 batch=64-256", SPEC, (64, 256, 64)),
        ("ones: gpus=1-4 batch=64-4096", SPEC, (64, 512, 64)),
        ("ones: gpus=1-4 batch=1024-4096", SPEC, (1024, 1024, 64)),
        ("ones: gpus=1-4 batch=128", SPEC, (128, 128, 64)),
        ("ones: gpus=1-4", SPEC, (32, 32, 64)),
        ("ones: gpus=1-4 batch=64-256", None, (64, 256, ANY_BATCH)),
        ("ones: gpus=1-4", None, (1, 1, ANY_BATCH)),
    ],
)
def test_batches(comment: str, spec: Spec | None, batches: tuple[int, int, int]) -> None:
    """What its owner allows as far as its script can; without batch= the global batch stays."""
    found = limits_of(comment, spec)
    assert (found.min_batch, found.max_batch, found.max_local_batch) == batches


@pytest.mark.parametrize(
    ("rule", "measured", "batch", "most"),
    [("adam", False, None, 32), ("adam", False, 128, 128), ("other", False, None, 32), ("adam", True, None, 256),
     ("", False, None, 256), ("none", False, None, 256)],
)  # fmt: skip
def test_no_batch_grows_before_its_noise_is_known(rule: str, measured: bool, batch: int | None, most: int) -> None:
    """Protects the result: what a larger batch costs is not guessed, unless the script sees to it itself."""
    noise = (NoisePoint(1e4, 1.0),) if measured else ()
    spec = replace(SPEC, rule=rule)
    elastic = seen(waiting(1, Shape(1, 1), comment="ones: gpus=1-4 batch=32-256")).elastic[1]
    found = limits(elastic, CLUSTER, spec, history(1, spec=spec, noise=noise, batch=batch))
    assert (found.min_batch, found.max_batch) == (32, most)
    assert limits(elastic, CLUSTER, spec).max_batch == (256 if rule in ("", "none") else 32)


@pytest.mark.parametrize(
    ("grown", "noise", "free"), [(64, 1e4, 64), (256, 1e4, 256), (4096, 1e4, 256), (256, 128.0, 64), (0, 1e4, 32)]
)
def test_what_costs_no_samples(grown: int, noise: float, free: int) -> None:
    """Protects the clocks of job and companion from running apart, and the companion from a job that claims much."""
    told = history(1, spec=replace(SPEC, rule="adam", grown=grown), noise=(NoisePoint(noise, 1.0),))
    model = view_of(told, running(1, Shape(1, 2), "n1")).efficiency
    assert model.efficiency(np.array([free, free + 1])).tolist() == [
        1.0,
        pytest.approx((noise + 32) / (noise + free + 1)),
    ]


@pytest.mark.parametrize(
    ("local", "passes", "most"),
    [(64, 1, 64), (64, 4, 256), (64, 2**53, ANY_BATCH), (2**53, 2**53, ANY_BATCH), (64, 0, 1), (0, 4, 1)],
)
def test_a_gpu_takes_all_passes_of_a_step(local: int, passes: int, most: int) -> None:
    """Accumulation lets few GPUs train a large batch; what no GPU could take is not believed."""
    spec = replace(SPEC, max_local_batch=local, max_passes=passes)
    found = limits_of("ones: gpus=1-16 batch=64-256", spec)
    assert found.max_local_batch == most
    # The tables of all policies multiply it with GPUs.
    assert np.array([found.max_local_batch]) * np.array([16]) == most * 16


@pytest.mark.parametrize(("multiple", "quantum"), [(1, 1), (48, 48), (0, 1), (2**53, ANY_BATCH)])
def test_batches_are_multiples_of_what_the_script_said(multiple: int, quantum: int) -> None:
    """Policies pick no batch that the job would round; what nobody could mean is bounded, as tables multiply it."""
    found = limits_of("ones: gpus=1-16 batch=64-256", replace(SPEC, multiple_of=multiple))
    assert found.quantum == quantum
    assert least_and_most(found, 4) == {1: (64, 256), 48: (96, 240)}.get(quantum, (ANY_BATCH, 0))


def view_of(told: JobHistory | None, job: SlurmJob) -> JobView:
    look_ = seen(job)
    round_ = round_of(look_, histories={} if told is None else {1: told}, now=100.0, resize={"dwell_s": 0})
    rules = round_.partition("gpu")
    (view,) = job_views(round_, rules, CLUSTER, job_models(round_, Learner()))
    return view


def test_what_a_policy_is_told_of_a_job() -> None:
    """Progress rather than samples, the batch it first asked for, its losses, what its resizes cost; no oracle."""
    points = tuple(EpochPoint(e, loss, None, 10.0 * e, 0) for e, loss in enumerate((2.0, None, 1.5)))
    told = history(
        1,
        spec=SPEC,
        epochs=points,
        samples=3000.0,
        progress=2000.0,
        batch=128,
        first_batch=48,
        noise=(NoisePoint(96.0, 1.0),),
        pause_s=17.0,
        throughput=(ThroughputPoint(Shape(1, 2), 128, 900.0, 5.0),),
    )
    view = view_of(told, running(1, Shape(1, 2), "n1"))
    assert (view.requested_batch, view.batch, view.base_batch) == (48, 128, 32)
    assert (view.samples, view.progress.alpha, view.progress.beta) == (2000.0, 2.0, 3.0)
    assert view.losses == ((1.0, 2.0), (3.0, 1.5))
    assert view.resize_s == 17.0
    assert math.isnan(view.true_remaining_s)
    where = np.array([1]), np.array([2]), np.array([128])
    assert view.model.throughput(*where)[0] == pytest.approx(900.0, rel=0.02)
    assert view.efficiency.efficiency(np.array([128]))[0] == pytest.approx((96 + 32) / (96 + 128))


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_a_stream_of_unknown_length(epochs: int) -> None:
    """Progress is counted in epochs as they end; until then nothing is divided by a length of 0."""
    points = tuple(EpochPoint(e, 1.0, None, 10.0 * e, 0) for e in range(epochs))
    stream = replace(SPEC, dataset=0, epochs=4)
    length = 500.0 if epochs else None
    used = 500.0 * epochs + 100.0
    told = history(1, spec=stream, epochs=points, samples=used, progress=used, batch=32, epoch_samples=length)
    view = view_of(told, running(1, Shape(1, 2), "n1"))
    assert view.dataset == (500 if epochs else 100)
    assert view.progress.alpha == (pytest.approx(epochs + 0.2) if epochs else 0.5)
    assert view.progress.beta == pytest.approx(3.8 - epochs if epochs else 4.0)
    assert (view.epochs, view.samples) == (epochs, used)
    fresh = view_of(history(1, spec=stream, batch=32), running(1, Shape(1, 2), "n1"))
    assert (fresh.dataset, fresh.progress.alpha, fresh.progress.beta) == (0, 0.5, 4.0)


def test_what_a_policy_is_told_of_a_job_that_has_said_nothing() -> None:
    """Everything is there, and says that nothing is known."""
    for told in (None, history(1, spec=None, batch=None)):
        view = view_of(told, waiting(1, Shape(1, 2), comment="ones: gpus=1-4 batch=64-256"))
        assert (view.requested_batch, view.batch, view.base_batch, view.samples) == (64, 64, 64, 0.0)
        assert (view.losses, view.resize_s, view.resizes) == ((), 30.0, 0)
        assert view.model.uncertainty(np.array([1]), np.array([1]), np.array([64]))[0] > 1.0
