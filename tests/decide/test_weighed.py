"""What a decision weighed for each job, as `why` and the database tell it."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from slurm_ones.decide.ones.explain import WEIGHED
from slurm_ones.decide.ones.search import Ones
from slurm_ones.schedule.policy import Allocation
from tests.decide.contract import cluster, job
from tests.decide.strategies import Round, rounds, seeded

some = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@some
@given(rounds())
def test_sizes_that_the_job_may_have_best_first(drawn: Round) -> None:
    """Protects from alternatives that were none: each is a size of the job's own, once, with a batch within limits."""
    view, queue = drawn
    schedule = Ones().decide(view, queue, 100.0, seeded())
    jobs = {j.job_id: j for j in queue}
    for job_id, weighed in schedule.weighed.items():
        limits, shape = jobs[job_id].limits, jobs[job_id].shape
        assert 0 < len(weighed) <= WEIGHED
        assert [w for _, w in weighed] == sorted((w for _, w in weighed), reverse=True)
        sizes = [a.shape.gpus if a is not None else 0 for a, _ in weighed]
        assert len(set(sizes)) == len(sizes)
        for allocation, _ in weighed:
            if allocation is not None and (shape is None or allocation.shape.gpus != shape.gpus):
                assert allocation.shape.gpus in limits.gpus
                assert limits.min_batch <= allocation.batch <= limits.max_batch


def test_a_job_alone_gets_the_best_of_them() -> None:
    """Protects that the worth told is the worth that decided."""
    schedule = Ones().decide(cluster(2, 4), [job(1, gpus=(1, 2, 4))], 100.0, seeded())
    best, _ = schedule.weighed[1][0]
    assert isinstance(best, Allocation) and best == schedule.allocations[1]
