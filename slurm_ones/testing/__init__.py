"""Contract suites for what others write: a policy, or a client of Slurm, is checked by one line of pytest.

    from slurm_ones.testing import policy_contract

    TestMine = policy_contract(MyPolicy)

A client is tried on a cluster: `client_contract` takes a `slurm_ones.testing.site.Site`.

They need pytest and hypothesis: `pip install slurm-ones[testing]`.
"""

from __future__ import annotations

from slurm_ones.testing.clients import client_contract
from slurm_ones.testing.policies import policy_contract

__all__ = ["client_contract", "policy_contract"]
