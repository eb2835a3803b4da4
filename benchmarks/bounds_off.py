"""Runs without some of the bounds on claims: constants and functions of modules that are others for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Off = tuple[Any, str, Any]
"""A module, a name in it, and the value with which it bounds nothing."""


@contextmanager
def without(off: Sequence[Off]) -> Iterator[None]:
    """Without these bounds."""
    before = [getattr(module, name) for module, name, _ in off]
    try:
        for module, name, value in off:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(off, before, strict=True):
            setattr(module, name, value)
