"""What tests are told of an `ones-run` that is a fork."""

from __future__ import annotations

import os

import pytest

from tests.wrapper.preloaded import Started


def test_an_end_that_nobody_saw_is_no_success() -> None:
    """Protects tests that assert exit code 0 where the process between them and `ones-run` was killed."""
    started = object.__new__(Started)
    ours, theirs = os.pipe()
    started.args, started.returncode, started._status = [], None, os.fdopen(ours, "rb", buffering=0)
    os.close(theirs)
    with started._status, pytest.raises(ChildProcessError, match="nobody says"):
        started.wait(1.0)
