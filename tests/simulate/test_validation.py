"""The plain engine against a public study's figures, where its data is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurm_ones.policies import make_policy
from slurm_ones.simulate.engines.idealized import run_idealized
from slurm_ones.simulate.engines.spec import ClusterSpec
from slurm_ones.simulate.workloads.profiles import read_profiles
from slurm_ones.simulate.workloads.workload import read_workload

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "adaptdl"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data of Pollux's study in {DATA}")
@pytest.mark.parametrize(("policy", "known"), [("fifo", 5020.7), ("tiresias", 2473.7)])
def test_within_a_tenth_of_the_study(policy: str, known: float) -> None:
    """Mean JCT of workload-1; `benchmarks/validation.py` does all policies and both workloads."""
    workload = read_workload(DATA / "workloads" / "workload-1.csv", read_profiles(DATA / "profiles"))
    outcome = run_idealized(make_policy(policy), workload, ClusterSpec(16, 4), spread=True)
    assert np.mean([job.jct_s for job in outcome.jobs]) == pytest.approx(known, rel=0.1)
