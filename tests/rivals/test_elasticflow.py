"""ElasticFlow: who is admitted, and who gets what is left."""

from __future__ import annotations

from dataclasses import replace

from slurm_ones.policy.contract import JobView, Progress
from slurm_ones.rivals.elasticflow import ElasticFlow, _limited
from slurm_ones.rivals.ordered import Edf
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import Power, cluster, job


def due(job_id: int, seconds: float, to_come: float, **values: object) -> JobView:
    """A waiting job with a deadline and so many epochs of 1000 samples to come; 100 samples/s on a GPU."""
    made = job(job_id, model=Power(table={n: 100.0 * n**0.9 for n in (1, 2, 4, 8, 16)}), **values)
    return replace(made, deadline=seconds, progress=Progress(0.5, to_come), dataset=1000, resize_s=0.0)


def test_only_what_can_be_met_is_promised() -> None:
    """Two jobs that need a node each are, a third on their nodes is not, and the reason says why."""
    view = cluster(2)
    jobs = [due(1, 1000.0, 340.0), due(2, 1000.0, 340.0), due(3, 1000.0, 340.0)]
    schedule = ElasticFlow().decide(view, jobs, 0.0, seeded())
    assert [schedule.promises[i].given for i in (1, 2, 3)] == [True, True, False]
    assert schedule.promises[3].reason.code == "deadline_no_room"
    assert schedule.allocations[1].shape.gpus == schedule.allocations[2].shape.gpus == 4
    assert 3 not in schedule.allocations


def test_an_admitted_job_stays_admitted_and_comes_first() -> None:
    """It gets its share before jobs without a deadline, and is not asked about again."""
    view = cluster(1)
    jobs = [job(1), replace(due(2, 1000.0, 340.0), promised=True)]
    schedule = ElasticFlow().decide(view, jobs, 0.0, seeded())
    assert not schedule.promises
    assert schedule.allocations[2].shape.gpus == 4
    assert 1 not in schedule.allocations


def test_what_is_left_is_lent() -> None:
    """Jobs without GPUs come first, and nothing idles while anybody gets faster by it."""
    view = cluster(2)
    schedule = ElasticFlow().decide(view, [due(1, 1e5, 10.0), job(2), job(3)], 0.0, seeded())
    assert schedule.allocations.keys() == {1, 2, 3}
    assert sum(one.shape.gpus for one in schedule.allocations.values()) == 8


def test_sizes_are_powers_of_two() -> None:
    """As its placement by buddies needs them; of a job that takes none, its own."""
    view = cluster(4, 4, uniform=False)
    assert _limited(view, job(1, gpus=tuple(range(1, 17)))).limits.gpus == (1, 2, 4, 8, 16)
    assert _limited(view, job(1, gpus=(3,))).limits.gpus == (3,)


def test_edf_serves_the_earliest_deadline_first() -> None:
    view = cluster(1)
    jobs = [job(1, requested=4), due(2, 900.0, 1.0, requested=4), due(3, 600.0, 1.0, requested=4)]
    schedule = Edf().decide(view, jobs, 0.0, seeded())
    assert schedule.allocations.keys() == {3}
    assert not schedule.promises
