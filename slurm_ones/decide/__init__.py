"""Which GPUs and batch each job should have: policies behind one protocol, all of them pure."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from slurm_ones.decide.drl import Drl
from slurm_ones.decide.ees import Ees
from slurm_ones.decide.ones.ones import Ones
from slurm_ones.decide.ones_sc21.ones_sc21 import OnesSc21
from slurm_ones.decide.optimus import Optimus
from slurm_ones.decide.ordered import Fifo, Srsf, Srtf, Tiresias
from slurm_ones.decide.pollux import Pollux
from slurm_ones.decide.sia import Sia
from slurm_ones.schedule.policy import Policy

POLICIES: dict[str, Any] = {
    policy.name: policy for policy in (Ones, OnesSc21, Fifo, Srtf, Srsf, Tiresias, Optimus, Pollux, Sia, Ees, Drl)
}
"""Each policy's class by name. It takes one argument, of the dataclass `options_type`."""


def make_policy(name: str, **options: Any) -> Policy:
    """A fresh policy; raises ValueError naming the accepted policies or options."""
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is none of {', '.join(sorted(POLICIES))}")
    cls = POLICIES[name]
    known = [field.name for field in fields(cls.options_type)]
    for option in options:
        if option not in known:
            raise ValueError(f"policy {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    policy: Policy = cls(cls.options_type(**options))
    return policy
