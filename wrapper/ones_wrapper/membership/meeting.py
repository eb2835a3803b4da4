"""Search for the job's leader, claim of a term, and errors of lost blocks."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import torch.distributed as dist

from ones_wrapper.membership import rescue
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.coming import GATHER, find_coming
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.process.block import Block
from ones_wrapper.process.faults import Fault, fault_of

DYING_S = 15.0
"""Seconds in which a leader must end after it has posted that its membership is lost."""
_TRY_S = 2.0
"""Seconds in which a living leader must accept a connection."""
_LOOK_S = 0.02
"""Seconds between two searches for the leader of an announced term. No rank trains until the leader is found."""


class PeersLostError(RuntimeError):
    """Error: the leader or ranks of other blocks are lost. This block's ranks must start again."""


class NotWantedError(Exception):
    """Error: this block has nothing to do. The message says why."""


def is_peer_lost(error: BaseException) -> bool:
    """Return True if an error is due to the loss of other blocks' ranks, and not to the script."""
    if isinstance(error, (PeersLostError, StoreLostError)):
        return True
    fault = fault_of(error)
    # NCCL's errors of this rank's own card come as DistBackendError, too.
    return fault is Fault.PEER or (isinstance(error, dist.DistError) and fault is Fault.SCRIPT)


def find_or_found(folder: HotFolder, block: Block, network: JobNetwork) -> tuple[Leader | None, Board | None]:
    """Return (leader, connection to the board that this block hosts as the leader). If another block leads, the
    connection is None; if the job is over, both are None.

    A block that may lead an announced term claims it; other blocks wait for that claim. Before a claim, it waits until
    the rescue checkpoint of the previous term is written.
    """
    until = time.monotonic() + DYING_S
    patience: float | None = None
    while not folder.over():
        leader = folder.newest()
        coming = find_coming(folder, leader)
        if coming is not None and not coming.may_lead(block):
            patience = patience or time.monotonic() + coming.patience_s()
            if time.monotonic() < patience:
                time.sleep(_LOOK_S)
                continue
        if coming is None and leader is not None:
            try:
                if Board(network, leader.host, leader.port, leader.place, _TRY_S).read("lost") is None:
                    return leader, None
                if time.monotonic() < until:
                    time.sleep(0.1)
                    continue
            except StoreLostError:
                if find_coming(folder, leader) is not None:  # the leader's last act
                    continue
        term = folder.next_term(leader)
        waited_s = rescue.wait(folder.path, term - 1)
        if coming is not None:  # all that come wait for the checkpoint: then they need no more time for each other
            coming = replace(coming, at=coming.at + waited_s)
        board = Board.hosted(network, term)
        board.put(GATHER, json.dumps(coming.fields()) if coming is not None else "")
        leader = Leader(term, *board.address, board.place, block.task, block.restart)
        if folder.claim(leader):
            return leader, board
        time.sleep(0.02)
    return None, None
