"""A group in which somebody has not the job's secret does not count as formed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.pairwise import prove_pairwise
from ones_wrapper.network.proof import ProofError
from ones_wrapper.network.server import MEET
from ones_wrapper.network.store import GroupStore


def outcomes(world: int, name: str, prove: Callable[[dist.ProcessGroupGloo, int], None]) -> list[str]:
    """What each rank of a group finds, the name of an error or nothing."""
    network = JobNetwork.here()

    def rank(number: int) -> str:
        store = GroupStore(network.client(MEET, "start"), name, 20.0)
        try:
            prove(dist.ProcessGroupGloo(store, number, world, timedelta(seconds=20)), number)
        except Exception as error:
            return type(error).__name__
        return ""

    with ThreadPoolExecutor(world) as pool:
        return [*pool.map(rank, range(world), timeout=30.0)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_of_one_job_find_nobody_else(world: int) -> None:
    assert outcomes(world, "all", lambda group, rank: prove_pairwise(group, b"key", rank, world)) == [""] * world


def test_a_stranger_is_found_by_everybody() -> None:
    """Also who has the key of another group, and one that repeats what it got."""

    def wrong(group: dist.ProcessGroupGloo, rank: int) -> None:
        prove_pairwise(group, b"another" if rank == 1 else b"key", rank, 3)

    assert outcomes(3, "wrong", wrong) == ["ProofError"] * 3

    def other_place(group: dist.ProcessGroupGloo, rank: int) -> None:
        prove_pairwise(group, b"key", {0: 0, 1: 2, 2: 1}[rank], 3)

    assert outcomes(3, "places", other_place) == ["ProofError"] * 3


def test_a_stranger_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds nobody up for longer than a proof may take."""

    def silent(group: dist.ProcessGroupGloo, rank: int) -> None:
        if rank == 1:
            threading.Event().wait(2.0)
        else:
            prove_pairwise(group, b"key", rank, 2, 0.5)

    assert outcomes(2, "silent", silent)[0] == "RuntimeError"


def test_keys_are_of_one_group() -> None:
    """A proof for one group, or place, is none for another."""
    network = JobNetwork.here()
    client = network.client(MEET, "start")
    keys = {GroupStore(client, name).key() for name in ("control-1", "data-1", "control-2")}
    assert len({*keys, GroupStore(network.client(MEET, "other"), "control-1").key()}) == 4


def test_the_error_names_the_rank() -> None:
    class Group:
        def alltoall_base(self, found: torch.Tensor, *_: object) -> torch.futures.Future[None]:
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done

    with pytest.raises(ProofError, match="rank 0 of the group"):
        prove_pairwise(Group(), b"key", 1, 2)
    prove_pairwise(None, b"key", 0, 1)  # one rank needs nobody
