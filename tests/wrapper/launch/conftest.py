"""The tests of `ones-run` itself start it as users do, imports and all."""

from __future__ import annotations

import pytest

from tests.wrapper.runs import Run


@pytest.fixture(autouse=True)
def true_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "forked", False)
