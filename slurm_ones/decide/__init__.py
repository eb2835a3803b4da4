"""Which GPUs and batch each job should have: policies behind one protocol, all of them pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from slurm_ones.decide.ones.search import Ones, Options
from slurm_ones.decide.policy import Policy


def _ones(**options: Any) -> Policy:
    known = [field.name for field in fields(Options)]
    for name in options:
        if name not in known:
            raise ValueError(f"policy ones has no option {name!r}; it has {', '.join(known)}")
    return Ones(Options(**options))


POLICIES: dict[str, Callable[..., Policy]] = {Ones.name: _ones}
"""Maker of each policy by name; options are keyword arguments, a wrong one raises ValueError."""


def make_policy(name: str, **options: Any) -> Policy:
    """A fresh policy; raises ValueError naming the accepted policies or options."""
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is none of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](**options)
