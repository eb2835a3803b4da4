"""Blocks that are left of a membership, and are none that the job's strategy can train with: they wait for others."""

from __future__ import annotations

import time

from ones_wrapper.group import TorchGroup
from ones_wrapper.job_io import log
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.entrance import NextTermError
from ones_wrapper.membership.meeting import NotWantedError

WAIT_S = 1800.0
"""How long they wait; then the strategy says what is wrong, which ends them."""
_LOOK_S = 0.1


def wait_for_others(group: TorchGroup, blocks: Blocks) -> bool:
    """Train nothing, until blocks that joined make a membership which the strategy can use: with them the next term
    begins, from the checkpoint that there is. Collective. True where all were told to end, False where nobody came.

    Raises `NextTermError`, `NotWantedError` where this block is none of that membership, and `PeersLostError`.
    """
    if group.rank == 0:
        log(f"{group.world} ranks are none that the strategy can use; waiting for other blocks of the job")
    until = time.monotonic() + WAIT_S
    while True:
        over = group.rank == 0 and time.monotonic() > until
        newest, change, stop, late = group.maximum([*blocks.proposal(), int(blocks.stop_all()), int(over)])
        if stop or late:
            return bool(stop)
        if blocks.obey(newest, change):
            why = group.on_first(lambda: blocks.announce(time.time()))
            if not why and blocks.leaves:
                raise NotWantedError("the others train on without it")
            if not why:
                raise NextTermError
            blocks.stay(why)
        time.sleep(_LOOK_S)
