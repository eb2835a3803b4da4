"""Proofs between all pairs of ranks of a group that they have the job's secret.

gloo identifies a peer by a small number, which any process could send first. So a group is used only after all pairs of
ranks have exchanged proofs over the group's own connections.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ones_wrapper.network.proof import ProofError

PAIRWISE_S = 20.0
"""Seconds for the exchange. In place of a rank, a process without the secret may send nothing."""
_SIZE = hashlib.sha256().digest_size


def prove_pairwise(group: Any, key: bytes, rank: int, world: int, timeout_s: float = PAIRWISE_S) -> None:
    """Exchange proofs between all pairs of ranks. Collective over a gloo group, of torch.distributed or raw. Raises
    `ProofError` for a rank without the key, and RuntimeError for a rank that does not answer."""
    if world == 1:
        return
    mine = b"".join(_proof(key, rank, to) for to in range(world))
    found = torch.empty(world * _SIZE, dtype=torch.uint8)
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=timeout_s)
    group.alltoall_base(found, torch.frombuffer(bytearray(mine), dtype=torch.uint8), [], [], options).wait()
    theirs = found.numpy().tobytes()
    strangers = [
        sender
        for sender in range(world)
        if not hmac.compare_digest(theirs[sender * _SIZE : (sender + 1) * _SIZE], _proof(key, sender, rank))
    ]
    if strangers:
        raise ProofError(f"rank {strangers[0]} of the group does not belong to this job")


def prove_groups(control: Any, key: bytes, rank: int, world: int) -> None:
    """Exchange proofs in the gloo group `control`, and in torch.distributed's default group if it uses gloo."""
    if dist.get_backend() == "gloo":
        prove_pairwise(dist.group.WORLD, key, rank, world)
    prove_pairwise(control, key, rank, world)


def _proof(key: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"{sender} {receiver}".encode(), hashlib.sha256)
