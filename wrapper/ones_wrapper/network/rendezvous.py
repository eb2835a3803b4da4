"""Rendezvous of the ranks that `ones-run` started. `env://`, which scripts and frameworks use, connects to the job's
store. torch's own port could be guessed, or taken, by another process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _rendezvous_handlers

from ones_wrapper.network.client import StoreClient, StoreLostError
from ones_wrapper.network.job_network import PLACE, STORE, JobNetwork, node_name
from ones_wrapper.network.server import MEET, MEMBER
from ones_wrapper.network.store import GroupStore, native_store
from ones_wrapper.protocol import HOT

_MEET_S = 60.0
"""Seconds in which the store must answer, when all ranks connect at once."""
_kept: list[GroupStore] = []
_torch_env = _rendezvous_handlers["env"]


def install(env: MutableMapping[str, str]) -> None:
    """Make `env://` connect the ranks of `ones-run` to the job's store, and other processes to torch's own store. NCCL
    then accepts only ranks of this job, if its release supports that and the user has not set its variables."""
    _rendezvous_handlers["env"] = _find
    if STORE in env and torch.cuda.is_available():
        network = JobNetwork.found(env, Path(env["ONES_JOB_DIR"]) / HOT)
        env.setdefault("NCCL_SOCKET_MAGIC", str(network.number("nccl")))
        env.setdefault("NCCL_RAS_ENABLE", "0")


def meet(env: Mapping[str, str], secret_from: JobNetwork) -> StoreClient:
    """Connect to the store's place where the ranks of this start meet. Raises `StoreLostError`."""
    until = time.monotonic() + _MEET_S
    while True:
        try:
            if given := env.get(PLACE):
                host, port, name = given.split()
                return StoreClient(host, int(port), secret_from.secret, MEMBER, name)
            return secret_from.client(MEET, f"start-{env.get('ONES_ATTEMPT', '0')}-{env.get('ONES_FORK', '0')}")
        except StoreLostError:
            if time.monotonic() > until or env.get(PLACE):
                raise
            time.sleep(0.2)


def group_key() -> bytes | None:
    """Return the key for `prove_pairwise` of the newest group that was formed by `env://`; None if there is none."""
    return _kept[-1].key() if _kept else None


def _find(url: str, timeout: timedelta = timedelta(minutes=30), **others: Any) -> Iterator[tuple[Store, int, int]]:
    env = os.environ
    alone = env.get("WORLD_SIZE") == "1" and "ONES_LAUNCHED" in env
    if not (alone or STORE in env):
        yield from _torch_env(url, timeout=timeout, **others)
        return
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    yield _store(env, rank, world, timeout), rank, world
    raise RuntimeError("env:// leads to one store at a time")


def _store(env: Mapping[str, str], rank: int, world: int, timeout: timedelta) -> Store:
    if world == 1:  # it needs nobody, and so no port
        return HashStore()
    network = JobNetwork.found(env, Path(env["ONES_JOB_DIR"]) / HOT)
    # Each set-up of torch.distributed has a number, equal on all ranks: older keys lead to closed connections.
    mine = GroupStore(meet(env, network), f"init-{len(_kept)}", timeout.total_seconds())
    _kept.append(mine)
    if torch.cuda.is_available():  # NCCL might use the store
        return native_store(mine, node_name(env), rank, timeout.total_seconds())
    return mine
