"""Variants of a test that run in `make nightly` alone."""

from __future__ import annotations

import os
from functools import partial

import pytest
from hypothesis import settings

NIGHTLY = "ONES_NIGHTLY" in os.environ
"""`make nightly` sets it: more examples and faults, and other ones each night."""

nightly = partial(pytest.param, marks=pytest.mark.nightly)
"""In place of `pytest.param`."""


def examples(by_day: int) -> settings:
    """Of a property whose examples take long: how many by day; by night as many as of others."""
    return settings(max_examples=200 if NIGHTLY else by_day)
