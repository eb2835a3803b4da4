"""Deadlines through the companion on a simulated Slurm: from the comment to the promise that is stored, and kept."""

from __future__ import annotations

from dataclasses import replace

from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Requeue
from slurm_ones.simulate.workloads.generate import generate, undisturbed_s


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
