"""How the ranks that came into their job begin its run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ones_wrapper.files.places import find_job_directory
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership.entered import Entered
from ones_wrapper.membership.too_few import wait_for_others
from ones_wrapper.protocol import Spec
from ones_wrapper.run.hot_run import HotRun
from ones_wrapper.run.settings import Identity, Settings


def start(
    entered: Entered,
    settings: Settings,
    started: float,
    spec_of: Callable[[], Spec],
    fits: Callable[[int], bool] = lambda world: True,
) -> HotRun:
    """The run. Collective. `fits` says whether the strategy can use so many ranks, and `spec_of` is called once it can.
    Leaves the process where ranks have to start again.
    """
    group, blocks, leads = entered.group, entered.blocks, entered.leads
    assert isinstance(group, TorchGroup) and blocks is not None
    block, term = blocks.block, blocks.leader.term
    identity = Identity(block.array, term, leads, f"{block.task}.{block.restart}.{blocks.local_rank}")
    with entered.losing():
        blocks.fits = fits
        if leads and term > 0 and not fits(group.world):
            wait_for_others(group, blocks, find_job_directory(os.environ, Path.cwd()))
        run = HotRun(group, spec_of(), settings, started, identity, blocks)
    entered.begun = True
    return run
