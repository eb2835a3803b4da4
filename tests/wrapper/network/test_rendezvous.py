"""Ranks that `ones-run` started find each other by `env://`, over the job's own store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ones_wrapper import testing
from ones_wrapper.launch import serve
from ones_wrapper.network import rendezvous
from ones_wrapper.network.job_network import PLACE, STORE, JobNetwork
from ones_wrapper.network.server import HOST, MEET
from ones_wrapper.network.store import GroupStore, native_store


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of rank 0 of two."""
    return {STORE: serve(tmp_path, {}), "ONES_JOB_DIR": str(tmp_path), "RANK": "0", "WORLD_SIZE": "2"}


def groups_again_and_again() -> float:
    """A script may set torch.distributed up twice, and make groups of its own."""
    found = 0.0
    for _ in range(2):
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        value = torch.full((1,), float(rank + 1))
        dist.all_reduce(value, group=dist.new_group(list(range(world))))
        found += float(value)
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_script_s_own_groups(ranks: int) -> None:
    """Scripts and frameworks know env:// alone."""

    def body() -> None:
        assert groups_again_and_again() == 2.0 * sum(range(1, ranks + 1))

    testing.run(body, ranks=ranks)


def test_a_lone_rank_opens_no_store(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "meet", lambda *_: pytest.fail("it asked somebody"))
    assert isinstance(rendezvous._store(env, 0, 1, timedelta(seconds=1)), HashStore)


def test_starts_have_places_of_their_own(env: dict[str, str]) -> None:
    """Keys of ranks that crashed lead nowhere."""
    network = JobNetwork.found(env, Path(env["ONES_JOB_DIR"]) / "hot")
    for more in ({}, {"ONES_ATTEMPT": "1"}, {"ONES_FORK": "1"}):
        client = rendezvous.meet(env | more, network)
        assert client.ask("keys", b"") == []
        client.ask("set", b"k", b"v")
    board = network.client(HOST, "term-0-aa")
    board.ask("set", b"of", b"board")
    again = rendezvous.meet(env | {PLACE: f"{network.host} {network.port} {board.place}"}, network)
    assert again.ask("keys", b"") == [b"of"]


@pytest.mark.parametrize("given", [{}, {"NCCL_SOCKET_MAGIC": "7", "NCCL_RAS_ENABLE": "1", "NCCL_SOCKET_IFNAME": "ib0"}])
def test_what_nccl_is_given(env: dict[str, str], monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """One number for all ranks of the job, that nobody else knows; what the user set stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kept: dict[str, Any] = dict(rendezvous._rendezvous_handlers)
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", kept)
    one, other, stranger = (env | given for _ in range(3))
    for mine in (one, other):
        rendezvous.install(mine)
    stranger.pop(STORE)
    rendezvous.install(stranger)
    assert one == other and ("NCCL_SOCKET_MAGIC" in stranger) == bool(given)
    if given:
        assert {name: one[name] for name in given} == given
    else:
        assert 0 < int(one["NCCL_SOCKET_MAGIC"]) < 2**63 and one["NCCL_RAS_ENABLE"] == "0"


def test_the_store_that_nccl_asks_is_torch_s_own() -> None:
    """At one address, by keys whose beginning only ranks that proved themselves know."""
    network = JobNetwork.here()

    def rank(number: int) -> Any:
        store = GroupStore(network.client(MEET, "start"), "nccl", 10.0)
        return native_store(store, "127.0.0.1", number, 10.0)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2), timeout=20.0)
    first.set("id", "x")
    assert second.get("id") == b"x" and not isinstance(second, GroupStore)
