"""Test suites for policies and Slurm clients that others write. One line of pytest runs a suite.

    from slurm_ones.testing import policy_contract

    TestMine = policy_contract(MyPolicy)

`client_contract` takes a cluster for tests, a `slurm_ones.testing.site.Site`.

The suites need pytest and hypothesis: `pip install slurm-ones[testing]`.
"""

from __future__ import annotations

from slurm_ones.testing.clients import client_contract
from slurm_ones.testing.policies import policy_contract

__all__ = ["client_contract", "policy_contract"]
