"""Variants of a test that run in `make nightly` alone."""

from __future__ import annotations

from functools import partial

import pytest

nightly = partial(pytest.param, marks=pytest.mark.nightly)
"""In place of `pytest.param`."""
