"""Deadlines in `ones`: what is promised, what it needs now, and that others give way to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ones_db.reasons import reason
from slurm_ones.ones.deadlines import work_of
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import JobView, Progress, Reserved, Schedule
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import Power, cluster, job

SPEED = Power(table={n: 100.0 * n**0.9 for n in (1, 2, 4, 8, 16)})


def due(job_id: int, seconds: float, to_come: float, held: dict[str, int] | None = None, **values: object) -> JobView:
    """A job with a deadline and so many epochs of 1000 samples to come; 100 samples/s on a GPU."""
    made = job(job_id, held, model=SPEED, **values)
    progress = Progress(2.0, to_come, most=to_come)
    return replace(made, deadline=seconds, progress=progress, dataset=1000, resize_s=1.0)


def decide(jobs: list[JobView], nodes: int = 2, **options: object) -> Schedule:
    """What `ones` decides on nodes of four GPUs."""
    return make_policy("ones", **options).decide(cluster(nodes), jobs, 0.0, seeded())


def promised(made: JobView) -> JobView:
    return replace(made, promised=True)


@pytest.mark.parametrize(
    ("others", "asked", "code"),
    [
        ([], due(2, 1000.0, 580.0), "deadline_promised"),
        ([promised(due(1, 900.0, 500.0))], due(2, 1000.0, 580.0), "deadline_no_room"),
        ([promised(due(1, 1000.0, 580.0))], due(2, 400.0, 200.0), "deadline_breaks"),
        ([], due(2, 1000.0, 640.0), "deadline_too_soon"),  # it would just end in time, with nothing in reserve
        ([], due(2, 1000.0, 5800.0), "deadline_too_soon"),
        ([], due(2, -1.0, 5.0), "deadline_passed"),
    ],
)
def test_a_promise_is_given_only_where_it_can_be_kept(others: list[JobView], asked: JobView, code: str) -> None:
    """Next to what was promised before, and without breaking it; the reason is the job's own if it is alone."""
    found = decide([*others, asked]).promises
    assert found.keys() == {2}
    assert (found[2].given, found[2].reason.code) == (code == "deadline_promised", code)


def test_a_promised_job_gets_what_it_needs_and_why_says_so() -> None:
    """A job that would rather share gives way, and the need is named."""
    urgent = replace(due(1, 1000.0, 330.0, {"n1": 1}, epochs=3), promised=True)
    other = job(2, {"n1": 3}, epochs=3, model=SPEED)
    schedule = decide([urgent, replace(other, resize_s=1.0)], nodes=1)
    assert schedule.allocations[1].shape.gpus >= 2
    assert schedule.allocations[2].shape.gpus < 3
    assert schedule.reasons[1].code == "deadline_needs"
    free = decide([urgent, replace(other, resize_s=1.0)], nodes=1, deadlines=False)
    assert not free.promises


def test_who_gives_way_keeps_what_is_left() -> None:
    """The other job is so young that no change repays its pause. It gives up what is needed and no more."""
    urgent = replace(due(1, 880.0, 220.0, {"n4": 1}, gpus=(1, 4)), promised=True, resize_s=30.0)
    other = job(2, {"n1": 4, "n2": 4, "n3": 4}, gpus=(1, 2, 4, 8, 12), model=SPEED, to_come=1e4, running_s=5.0)
    view = cluster(4, free=(4, 4, 4, 2))
    made = make_policy("ones").decide(view, [urgent, replace(other, resize_s=30.0)], 0.0, seeded())
    assert made.reasons[1].code == "deadline_needs"
    assert [made.allocations[id_].shape.gpus for id_ in (1, 2)] == [4, 8]


def test_what_is_not_needed_yet_is_put_off() -> None:
    """A job with time to spare holds nobody up."""
    idle = replace(due(1, 1e6, 330.0), promised=True)
    short = job(2, model=SPEED)
    without = decide([replace(idle, deadline=None), short], nodes=1)
    assert decide([idle, short], nodes=1).allocations[2] == without.allocations[2]


def test_reserved_gpus_are_not_promised() -> None:
    """A reservation that is known in advance speaks against a promise."""
    asked = due(1, 1000.0, 580.0)
    view = cluster(2)
    taken = replace(view, reserved=(Reserved(200.0, 900.0, 6),))
    policy = make_policy("ones")
    assert policy.decide(view, [asked], 0.0, seeded()).promises[1].given
    assert not make_policy("ones").decide(taken, [asked], 0.0, seeded()).promises[1].given


def test_nothing_is_promised_while_a_promised_job_that_may_not_change_needs_more() -> None:
    """What it holds now is not all that it will need; one that ends in time where it is stands in nobody's way."""
    kept = replace(due(1, 1000.0, 330.0, {"n1": 1}, epochs=3), promised=True, fixed=reason("size_kept", gpus=1))
    asked = due(2, 1000.0, 250.0)
    assert not decide([kept, asked]).promises
    ends = replace(kept, progress=Progress(2.0, 90.0, most=90.0))
    assert decide([ends, asked]).promises[2].given
    assert decide([replace(kept, deadline=-1.0), asked]).promises[2].given


def test_what_a_job_holds_beyond_its_deadline_is_not_promised() -> None:
    """It missed a promise and trains on: its GPUs are free once it is expected to end."""
    late = replace(due(1, -10.0, 3000.0, {"n1": 4}, epochs=3, gpus=(4,)), promised=True)
    asked = due(2, 1000.0, 250.0, gpus=(4,))
    assert not decide([late, asked], nodes=1).promises[2].given
    assert decide([replace(late, progress=Progress(2.0, 10.0, most=10.0)), asked], nodes=1).promises[2].given


def test_nothing_is_promised_of_an_unknown_speed() -> None:
    """Not refused either: it is asked about again once its speed is known."""

    class Guess(Power):
        def uncertainty(self, nodes: np.ndarray, gpus: np.ndarray, batches: np.ndarray) -> np.ndarray:
            return np.ones(np.shape(gpus))

    asked = replace(due(1, 1000.0, 5.0), model=Guess(table=SPEED.table))
    assert not decide([asked]).promises


def test_doubt_about_the_work_is_in_the_promise() -> None:
    """The quantile of the progress counts, up to what the job itself declares."""
    wide = replace(due(1, 1.0, 10.0), progress=Progress(2.0, 10.0))
    assert work_of(wide, 0.9) > work_of(wide, 0.5) > 0
    assert work_of(replace(wide, progress=Progress(2.0, 10.0, most=10.0)), 0.9) == pytest.approx(10_000.0)
