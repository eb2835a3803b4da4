"""What fixed jobs leave, and how wanted sizes become a schedule."""

from __future__ import annotations

from ones_db.reasons import Reason, reason
from slurm_ones.policy.build import build_schedule, free_after_fixed
from slurm_ones.policy.tables import build_tables
from slurm_ones.testing.policies import check
from slurm_ones.testing.rounds import cluster, job


def test_fixed_jobs_leave_the_rest_of_their_nodes() -> None:
    """Jobs that move leave everything, and a node that is overbooked leaves nothing."""
    view = cluster(3, 4, free=(4, 4, 1))
    jobs = [job(1, {"n1": 3}), job(2, {"n2": 2}), job(3, {"n3": 4}), job(4, {"n9": 4})]
    assert free_after_fixed(view, jobs, {1, 3, 4}).tolist() == [1, 4, 0]


def test_growth_that_fragments_prevent_is_no_loss() -> None:
    """A job on 2 GPUs is to grow to 4 where no node has 4 for it: it keeps its 2 and is not shrunk to what is left."""
    view = cluster(2, 4)
    jobs = [job(1, {"n1": 2}), job(2, {"n2": 2}), job(3, {"n1": 2}), job(4, {"n2": 2})]
    tables = build_tables(view, jobs)
    schedule = build_schedule(view, jobs, {}, tables, {1: 4, 2: 0, 3: 2, 4: 2}, Reason("so it goes"))
    check(view, jobs, schedule)
    assert {i: a.shape.gpus for i, a in schedule.allocations.items()} == {1: 2, 3: 2, 4: 2}
    assert schedule.parked == {2}


def test_everybody_is_told_why() -> None:
    """Who gets what was wanted is told what it serves, who does not finds no room; what fixes a job is its reason."""
    view = cluster(4, 4)
    writing, held = Reason("checkpoint is written"), Reason("held")
    jobs = [
        job(1),
        job(2, {"n1": 1}),
        job(3, {"n2": 4}),
        job(4, {"n1": 1}),
        job(5, {"n3": 4}),
        job(6),
        job(7, gpus=(64,)),
        job(8, {"n1": 1}, fixed=writing),
        job(9, fixed=held),
        job(10),
    ]
    tables = build_tables(view, [j for j in jobs if not j.fixed])
    fixed = {j.job_id: j.fixed for j in jobs if j.fixed}
    serves = Reason("so it goes")
    schedule = build_schedule(view, jobs, fixed, tables, {1: 1, 2: 4, 3: 2, 4: 1, 5: 0, 6: 0, 7: 0, 10: 16}, serves)
    check(view, jobs, schedule)
    assert all(schedule.reasons[i] == serves for i in range(1, 7))
    assert schedule.reasons[7] == reason("fits_nowhere", counts="64")
    assert (schedule.reasons[8], schedule.reasons[9]) == (writing, held)
    assert schedule.reasons[10] == reason("no_room", gpus=16)
    assert schedule.parked == {5, 6, 7, 10}
