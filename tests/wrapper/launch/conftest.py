"""The tests of `ones-run` itself start it as users do, imports and all; of some files those that ask for it."""

from __future__ import annotations

import pytest

from tests.wrapper.runs import Run

FORKED = {
    *("test_blocks.py", "test_claim.py", "test_ending.py", "test_fused_start.py", "test_job_log.py"),
    "test_restart_policy.py",
}
"""Files whose tests start it many times: one test of each kind asks for `true_command`."""


@pytest.fixture
def true_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "forked", False)


@pytest.fixture(autouse=True)
def _as_users_do(request: pytest.FixtureRequest) -> None:
    if request.path.name not in FORKED:
        request.getfixturevalue("true_command")
