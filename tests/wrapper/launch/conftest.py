"""The tests of `ones-run` itself start it as users do, imports and all; those of some files are forks."""

from __future__ import annotations

import pytest

from tests.wrapper.runs import Run

FORKED = {
    *("test_blocks.py", "test_claim.py", "test_ending.py", "test_fused_start.py", "test_job_log.py"),
    "test_restart_policy.py",
}
"""Files whose tests start it many times: of blocks tests/endtoend/test_blocks.py has the true command."""


@pytest.fixture(autouse=True)
def _as_users_do(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name not in FORKED:
        monkeypatch.setattr(Run, "forked", False)
