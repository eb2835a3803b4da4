"""The unchanged companion and simulated jobs of blocks: whole workloads. The engine raises where an invariant does not
hold."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import AT_ONCE, run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot, Mechanism, Requeue
from tests.simulate.changing_policy import ChangingPolicy
from tests.simulate.random_faults import RandomFaults
from tests.simulate.test_engine import SMALL, workload


def changing(mechanism: Mechanism, *, spec: ClusterSpec = SMALL, jobs: int = 3, **faults: Any) -> Outcome:
    """Every job resized at every tick."""
    return run(
        "fifo",
        {},
        workload(jobs),
        spec,
        interval_s=60.0,
        mechanism=mechanism,
        faults=RandomFaults(**faults),
        make=ChangingPolicy,
        settings=AT_ONCE,
    )


@pytest.mark.parametrize("whole_nodes", [False, True])
def test_jobs_of_blocks_change_while_they_train(whole_nodes: bool) -> None:
    """All of them end, having been resized many times, and hardly a GPU stands still for it."""
    spec = ClusterSpec(4, 4, whole_nodes)
    hot, requeued = (changing(resize, spec=spec) for resize in (Hot(), Requeue()))
    assert all(job.ended is not None for job in (*hot.jobs, *requeued.jobs))
    assert sum(job.resizes for job in hot.jobs) > 4
    assert hot.notes == ()

    def idle(outcome: Outcome) -> float:
        """Share of the GPUs held that did not train."""
        return sum(job.lost_gpu_s for job in outcome.jobs) / sum(job.gpu_s for job in outcome.jobs)

    assert idle(hot) < 0.6 * idle(requeued)


def test_nodes_that_fail_and_calls_that_get_no_answer() -> None:
    """Jobs of blocks come to their end on a cluster where much goes wrong."""
    outcome = changing(Hot(), jobs=4, unreachable=0.05, refused=0.1, node_mtbf_s=3000.0, node_repair_s=200.0)
    assert all(job.ended is not None for job in outcome.jobs)


def test_blocks_that_slurm_requeues() -> None:
    outcome = changing(Hot(), jobs=4, preempt_mtbf_s=1500.0)
    assert all(job.ended is not None for job in outcome.jobs)
