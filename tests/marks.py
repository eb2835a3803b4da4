"""Variants of a test that run in `make nightly` alone."""

from __future__ import annotations

import os
from functools import partial

import pytest

NIGHTLY = "ONES_NIGHTLY" in os.environ
"""`make nightly` sets it: more examples and faults, and other ones each night."""

nightly = partial(pytest.param, marks=pytest.mark.nightly)
"""In place of `pytest.param`."""
