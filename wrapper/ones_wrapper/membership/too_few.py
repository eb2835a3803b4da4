"""Wait for further blocks when the job's strategy cannot use the present number of ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ones_wrapper.files.job_io import STOP, OwnerRequests, last_generation
from ones_wrapper.files.places import find_job_directory
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.entrance import NextTermError
from ones_wrapper.membership.machine import Carrier
from ones_wrapper.membership.meeting import NotWantedError, PeersLostError
from ones_wrapper.process.exit_codes import DONT_RESTART, STOP_CODE
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log

WAIT_S = 1800.0
"""Longest wait, in seconds. After that the strategy's error ends the ranks."""
_LOOK_S = 0.1


def wait_for_others(group: TorchGroup, blocks: Blocks) -> None:
    """Wait for other blocks until the strategy can use the number of ranks. Returns if no block came. Collective.

    If blocks came, the next term begins from the newest checkpoint: raises `NextTermError`, or `NotWantedError` if this
    block is not part of it. Ends the process if the block or the job is requested to end. Raises `PeersLostError` if
    another block ends.
    """
    FLAGS.armed = True
    directory = find_job_directory(os.environ, Path.cwd())
    generation = group.on_first(lambda: last_generation(directory, blocks.leader.term)) + 1
    blocks.lead_first(generation, Carrier.CHECKPOINT)
    group.say(f"the strategy cannot use {group.world} ranks; waiting for other blocks of the job")
    code = wait(group, blocks, OwnerRequests(directory))
    blocks.close()
    if code:
        raise SystemExit(code)


def wait(group: TorchGroup, blocks: Blocks, requests: OwnerRequests) -> int:
    """Return the exit code with which this rank must end; 0 if no block came. Collective. Raises the errors of
    `wait_for_others`. A block that is requested to end does so at once, because no block trains now."""
    until = time.monotonic() + WAIT_S
    while True:
        first = group.rank == 0
        owner = first and requests.due() and requests.requested(STOP)
        over = first and time.monotonic() > until
        asked = [*blocks.proposal(), int(owner), int(FLAGS.stop), int(over)]
        newest, change, stop, leaving, late = group.maximum(asked)
        if stop:
            group.on_first(lambda: _end(blocks, requests))
            return DONT_RESTART
        if leaving:
            if FLAGS.stop:
                return STOP_CODE
            raise PeersLostError("another block ends")
        if late:
            return 0
        if blocks.obey(newest, change):
            why = group.on_first(lambda: blocks.announce(time.time()))
            if not why and blocks.leaves:
                raise NotWantedError("the other blocks train without it")
            if not why:
                raise NextTermError
            blocks.stay(why)
        time.sleep(_LOOK_S)


def _end(blocks: Blocks, requests: OwnerRequests) -> None:
    requests.remove(STOP)
    blocks.folder.end()
    log(f"{STOP}: stopped for good")
