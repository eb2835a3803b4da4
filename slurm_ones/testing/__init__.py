"""Test suites for your own policies and Slurm clients. One line in a test file adds a whole suite to pytest.

    from slurm_ones.testing import policy_contract

    TestMine = policy_contract(MyPolicy)

`client_contract` likewise takes a subclass of `slurm_ones.testing.site.Site`, which describes a cluster for tests.

The suites need pytest and hypothesis: `pip install slurm-ones[testing]`.
"""

from __future__ import annotations

from slurm_ones.testing.clients import client_contract
from slurm_ones.testing.policies import policy_contract

__all__ = ["client_contract", "policy_contract"]
