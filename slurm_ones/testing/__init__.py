"""Contract suites for what others write: a policy, or a client of Slurm, is checked by one line of pytest.

    from slurm_ones.testing import policy_contract

    TestMine = policy_contract(MyPolicy)

They need pytest and hypothesis: `pip install slurm-ones[testing]`.
"""

from __future__ import annotations

from slurm_ones.testing.policies import policy_contract

__all__ = ["policy_contract"]
