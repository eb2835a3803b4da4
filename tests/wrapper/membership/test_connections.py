"""What a script and its libraries ask of torch.distributed after a change of ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ones_wrapper.group import Group
from ones_wrapper.membership.connections import Formed, destroy, enter
from ones_wrapper.membership.plan import Plan
from tests.wrapper.forked import Team
from tests.wrapper.membership.test_plan import member


def after_a_change(group: Group) -> None:
    """In a process of its own, which has a default group."""
    for generation in (1, 2):
        data = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
        plan = Plan(generation, 0, (member(0),))
        enter(Formed(plan, 0, None, data, None, dist.HashStore()), "gloo")  # type: ignore[arg-type]
        later = dist.new_group()
        dist.all_reduce(value := torch.ones(1), group=later)
        dist.all_reduce(value)
        devices = {device.type for device in dist.group.WORLD._device_types}
        assert (float(value), devices) == (1.0, {"cpu", "cuda"})
    destroy()


def test_groups_can_be_made_after_a_change() -> None:
    """Protects device meshes and libraries that make groups later, and gloo with tensors on GPUs."""
    team = Team(1)
    try:
        team.run(after_a_change)
    finally:
        team.close()
