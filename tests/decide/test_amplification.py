"""The cap on GPU-seconds: how far a job may grow for the sake of its own speed."""

from __future__ import annotations

import pytest

from slurm_ones.decide import make_policy
from slurm_ones.decide.ones import Ones, Options
from slurm_ones.testing import policy_contract
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import Power, cluster, job

TestCapped = policy_contract(lambda: Ones(Options(amplification=1.5)))

SLOWER = Power(table={n: 100.0 * n**0.5 for n in (1, 2, 4, 8)})
"""On n GPUs a sample takes n ** 0.5 times the GPU-seconds that it takes on one."""


@pytest.mark.parametrize(("amplification", "gpus"), [(0.0, 8), (1.5, 2), (2.0, 4), (4.0, 8)])
def test_a_job_alone_grows_up_to_the_cap(amplification: float, gpus: int) -> None:
    """At 1.5 it stops at 2 GPUs, which cost it 1.41 times as many GPU-seconds, at 2 at 4; 0 is no cap."""
    policy = make_policy("ones", amplification=amplification)
    alone = job(1, gpus=(1, 2, 4, 8), model=SLOWER, requested=8)
    assert policy.decide(cluster(2), [alone], 0.0, seeded()).allocations[1].shape.gpus == gpus


def test_a_running_job_beyond_the_cap_may_stay() -> None:
    """It is not made to change by the cap alone."""
    policy = make_policy("ones", amplification=1.5)
    wide = job(1, {"n1": 4, "n2": 4}, epochs=3, gpus=(1, 2, 4, 8), model=SLOWER, requested=8)
    assert policy.decide(cluster(2), [wide], 0.0, seeded()).allocations[1].shape.gpus == 8
