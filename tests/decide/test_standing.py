"""What staying jobs leave, and how wanted sizes become a schedule."""

from __future__ import annotations

from slurm_ones.decide.build import conclude, left_over
from slurm_ones.schedule.tables import build_tables
from tests.decide.contract import check, cluster, job


def test_staying_jobs_leave_the_rest_of_their_nodes() -> None:
    """Jobs that move leave everything, and a node that is overbooked leaves nothing."""
    view = cluster(3, 4, free=(4, 4, 1))
    jobs = [job(1, {"n1": 3}), job(2, {"n2": 2}), job(3, {"n3": 4}), job(4, {"n9": 4})]
    assert left_over(view, jobs, {1, 3, 4}).tolist() == [1, 4, 0]


def test_growth_that_fragments_prevent_is_no_loss() -> None:
    """A job on 2 GPUs is to grow to 4 where no node has 4 for it: it keeps its 2 and is not shrunk to what is left."""
    view = cluster(2, 4)
    jobs = [job(1, {"n1": 2}), job(2, {"n2": 2}), job(3, {"n1": 2}), job(4, {"n2": 2})]
    tables = build_tables(view, jobs)
    schedule = conclude(view, jobs, {}, tables, {1: 4, 2: 0, 3: 2, 4: 2}, "so it goes")
    check(view, jobs, schedule)
    assert {i: a.shape.gpus for i, a in schedule.allocations.items()} == {1: 2, 3: 2, 4: 2}
    assert schedule.parked == {2}


def test_everybody_is_told_what_happens() -> None:
    """Starts, grows, shrinks, keeps, is parked, waits: each reason begins with what it is."""
    view = cluster(4, 4)
    jobs = [
        job(1),
        job(2, {"n1": 1}),
        job(3, {"n2": 4}),
        job(4, {"n1": 1}),
        job(5, {"n3": 4}),
        job(6),
        job(7, gpus=(64,)),
        job(8, {"n1": 1}, fixed="its checkpoint is being written"),
        job(9, fixed="it is held"),
    ]
    tables = build_tables(view, [j for j in jobs if not j.fixed])
    staying = {j.job_id: j.fixed for j in jobs if j.fixed}
    schedule = conclude(view, jobs, staying, tables, {1: 1, 2: 4, 3: 2, 4: 1, 5: 0, 6: 0, 7: 0}, "so it goes")
    check(view, jobs, schedule)
    begun = ["starts on 1 GPU", "grows 1 → 4 GPUs", "shrinks 4 → 2 GPUs", "keeps 1 GPU", "parked", "waits", "waits"]
    for job_id, words in enumerate([*begun, "keeps 1 GPU: its checkpoint", "waits: it is held"], 1):
        assert schedule.reasons[job_id].startswith(words)
    assert "64" in schedule.reasons[7]
    assert schedule.parked == {5, 6, 7}
