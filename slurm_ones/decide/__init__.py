"""Which GPUs and batch each job should have: policies behind one protocol, all of them pure."""

from __future__ import annotations

import importlib
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from slurm_ones.decide.drl import Drl
from slurm_ones.decide.ees import Ees
from slurm_ones.decide.elasticflow import ElasticFlow
from slurm_ones.decide.gavel import Gavel
from slurm_ones.decide.ones import Ones
from slurm_ones.decide.ones_sc21 import OnesSc21
from slurm_ones.decide.optimus import Optimus
from slurm_ones.decide.ordered import Edf, Fifo, Srsf, Srtf, Tiresias
from slurm_ones.decide.pollux import Pollux
from slurm_ones.decide.sia import Sia
from slurm_ones.decide.wham import Wham
from slurm_ones.schedule.policy import Policy

POLICIES: dict[str, Any] = {
    policy.name: policy
    for policy in (
        Ones,
        OnesSc21,
        Fifo,
        Srtf,
        Srsf,
        Edf,
        Tiresias,
        Optimus,
        Pollux,
        Sia,
        Gavel,
        ElasticFlow,
        Ees,
        Wham,
        Drl,
    )
}
"""The class of each policy of ours, by name. One with an `options_type` takes one argument, of that dataclass."""
GROUP = "slurm_ones.policies"
"""The group of entry points in which other distributions name their policies: `name = package.module:Class`."""


def find_policy(name: str) -> Any:
    """The class of a policy: one of ours, one of another distribution, or `package.module:Class`.

    Raises ValueError, in one sentence, where there is none of that name or its module cannot be imported.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        return _load(f"policy: {name!r}", EntryPoint(name, name, GROUP))
    others = {found.name: found for found in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join(sorted({*POLICIES, *others}))
        raise ValueError(f"policy: {name!r} is none of {known}, and no package.module:Class")
    dist = others[name].dist
    return _load(f"policy: {name!r} of {dist.name} {dist.version}" if dist else f"policy: {name!r}", others[name])


def make_policy(name: str, **options: Any) -> Policy:
    """A fresh policy; raises ValueError naming the accepted policies or options.

    A policy without an `options_type` takes no options and is made without arguments.
    """
    cls = find_policy(name)
    options_type = getattr(cls, "options_type", None)
    known = [field.name for field in fields(options_type)] if options_type else []
    for option in options:
        if option not in known:
            raise ValueError(f"policy {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    policy: Policy = cls(options_type(**options)) if options_type else cls()
    return policy


def _load(what: str, point: EntryPoint) -> Any:
    module, _, attribute = point.value.partition(":")
    try:
        cls: Any = importlib.import_module(module.strip())
        for part in attribute.strip().split("."):
            cls = getattr(cls, part)
    except Exception as error:
        raise ValueError(f"{what} cannot be loaded from {point.value}: {type(error).__name__}: {error}") from error
    if not callable(getattr(cls, "decide", None)) or not isinstance(getattr(cls, "name", None), str):
        raise ValueError(f"{what} is no policy: {point.value} has no name or no method decide")
    return cls
