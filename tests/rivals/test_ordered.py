"""Policies that serve jobs in an order: FIFO, SRTF, SRSF and Tiresias."""

from __future__ import annotations

import math

import pytest

from ones_db.shape import Shape
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import ClusterView, JobView, Schedule
from slurm_ones.testing.rounds import cluster, job
from tests import decided
from tests.decided import gpus

ORDERED = ("fifo", "srtf", "srsf", "tiresias")


def decide(name: str, view: ClusterView, jobs: list[JobView], **options: object) -> Schedule:
    return decided.decide(make_policy(name, **options), view, jobs)


@pytest.mark.parametrize("name", ORDERED)
def test_jobs_get_what_they_asked_for(name: str) -> None:
    """Size and batch are the user's; a size that has no shape here becomes the nearest smaller one."""
    asks = [(1, 1), (2, 2), (3, 2), (6, 4), (100, 8)]
    for requested, given in asks:
        got = decide(name, cluster(2), [job(1, requested=requested, requested_batch=200)]).allocations[1]
        assert (got.shape.gpus, got.batch) == (given, 200)
    least = decide(name, cluster(2), [job(1, requested=1, gpus=(4, 8))])
    assert gpus(least) == {1: 4}, "what takes no less starts on its least"


@pytest.mark.parametrize("name", ORDERED)
def test_running_jobs_are_not_resized(name: str) -> None:
    """These policies know one size a job: what runs at another one, after a change of policy, keeps it."""
    assert gpus(decide(name, cluster(2), [job(1, {"n1": 2}, requested=4, batch=77)])) == {1: 2}


@pytest.mark.parametrize("name", ORDERED)
def test_nobody_moves_without_need(name: str) -> None:
    """A decision on its own outcome changes nothing: equal jobs do not take turns, and no restart is wasted."""
    view = cluster(2)
    jobs = [job(1, {"n1": 4}, true_remaining_s=50.0, submitted=5.0), job(2, true_remaining_s=50.0, submitted=1.0)]
    jobs += [job(3, {"n2": 4}, true_remaining_s=50.0, submitted=5.0)]
    if name == "tiresias":  # its order is that of submission, running or not
        jobs[1] = job(2, true_remaining_s=50.0, submitted=9.0)
    assert gpus(decide(name, view, jobs)) == {1: 4, 3: 4}


def test_fifo_blocks_or_backfills() -> None:
    """Without backfill a job that does not fit holds up all later ones; with it those that fit start."""
    view = cluster(2)
    jobs = [job(1, {"n1": 4}), job(2, requested=8), job(3, requested=1)]
    assert gpus(decide("fifo", view, jobs, backfill=False)) == {1: 4}
    assert gpus(decide("fifo", view, jobs)) == {1: 4, 3: 1}
    assert decide("fifo", view, jobs).parked == {2}, "Slurm must not start it on its own"


def test_srtf_preempts_the_job_that_ends_last() -> None:
    """A short job takes the GPUs of the longest one, not those of one that ends sooner."""
    jobs = [job(1, {"n1": 4}, true_remaining_s=100.0), job(2, {"n2": 4}, true_remaining_s=900.0)]
    schedule = decide("srtf", cluster(2), [*jobs, job(3, true_remaining_s=200.0)])
    assert gpus(schedule) == {1: 4, 3: 4}
    assert schedule.parked == {2}
    assert schedule.reasons[2].code == "interrupted"


def test_srtf_passes_over_who_does_not_fit() -> None:
    jobs = [job(1, {"n1": 4}, true_remaining_s=1.0), job(2, requested=8, true_remaining_s=2.0)]
    assert gpus(decide("srtf", cluster(2), [*jobs, job(3, requested=2, true_remaining_s=3.0)])) == {1: 4, 3: 2}


def test_srsf_counts_gpus() -> None:
    """Half as long on four times the GPUs is more service: SRTF and SRSF disagree."""
    jobs = [job(1, requested=4, true_remaining_s=50.0), job(2, requested=1, true_remaining_s=100.0)]
    assert gpus(decide("srtf", cluster(1), jobs)) == {1: 4}
    assert gpus(decide("srsf", cluster(1), jobs)) == {2: 1}


def test_untold_they_predict() -> None:
    """On a real cluster nobody knows the remaining time: progress and speed say it."""
    jobs = [job(1, to_come=50.0), job(2, to_come=5.0)]
    assert all(math.isnan(j.true_remaining_s) for j in jobs)
    assert gpus(decide("srtf", cluster(1), jobs)) == {2: 4}


def test_tiresias_demotes_by_service() -> None:
    """16 GPU-hours attained send a job behind new ones; a second's less does not."""
    view = cluster(1)
    for seconds, winner in ((4 * 3600.0 - 1, 1), (4 * 3600.0, 2)):
        jobs = [job(1, {"n1": 4}, running_s=seconds), job(2)]
        assert list(gpus(decide("tiresias", view, jobs))) == [winner]
    jobs = [job(1, {"n1": 4}, running_s=100.0), job(2)]
    assert list(gpus(decide("tiresias", view, jobs, thresholds=(400.0,)))) == [2]


def test_tiresias_keeps_order_inside_a_queue() -> None:
    """Jobs that both attained much are served by submission, whatever they attained beyond."""
    jobs = [job(1, {"n1": 4}, running_s=9e6, submitted=3.0), job(2, running_s=8e5, submitted=1.0)]
    assert list(gpus(decide("tiresias", cluster(1), jobs))) == [2]


def test_fragments_make_way_for_whole_nodes() -> None:
    """A job of two nodes whose turn is first gets them although small jobs sit on every node: as few as needed are
    parked, and those that come last."""
    small = [job(i, {f"n{i}": 1}, requested=1, true_remaining_s=100.0 + i) for i in (1, 2, 3)]
    schedule = decide("srtf", cluster(3), [*small, job(9, requested=8, true_remaining_s=1.0)])
    assert gpus(schedule)[9] == 8
    assert schedule.allocations[9].shape == Shape(2, 4)
    assert len(schedule.parked) == 2


def test_where_shapes_may_be_spread_fragments_do_not_matter() -> None:
    """Published simulators put a job on any GPUs: there nobody gives way while GPUs are left."""
    small = [job(i, {f"n{i}": 1}, requested=1, true_remaining_s=100.0 + i) for i in (1, 2, 3)]
    schedule = decide("srtf", cluster(3, uniform=False), [*small, job(9, requested=8, true_remaining_s=1.0)])
    assert gpus(schedule) == {9: 8, 1: 1, 2: 1, 3: 1}


def test_a_start_prefers_nodes_that_nobody_sits_on() -> None:
    """An earlier turn costs a later job its node only where there is no other."""
    jobs = [job(1, {"n1": 1}, requested=1, true_remaining_s=900.0), job(2, requested=4, true_remaining_s=1.0)]
    schedule = decide("srtf", cluster(2), jobs)
    assert gpus(schedule) == {2: 4, 1: 1}
