"""The store that a job's processes share, and torch's groups over it."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ones_wrapper.network import client as client_module
from ones_wrapper.network.client import StoreClient, StoreLostError
from ones_wrapper.network.job_network import JobNetwork, node_name
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import HOST, MEET, MEMBER, StoreServer
from ones_wrapper.network.store import GroupStore
from tests.waiting import until


@pytest.fixture
def network() -> Iterator[JobNetwork]:
    secret = JobSecret.fresh()
    server = StoreServer.at("127.0.0.1", secret)
    yield JobNetwork(secret, "127.0.0.1", server.port)
    server.close()


def test_what_torch_asks_of_a_store(network: JobNetwork) -> None:
    """Through torch's own C++ half, as groups ask."""
    inner = GroupStore(network.client(MEET, "start"), "a", 5.0)
    store = PrefixStore("p", inner)
    store.set("k", "v")
    assert store.get("k") == b"v" and store.check(["k"]) and not store.check(["k", "other"])
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    store.append("k", "w")
    store.multi_set(["x", "y"], ["1", ""])
    assert store.multi_get(["k", "x", "y"]) == [b"vw", b"1", b""]
    assert store.compare_set("k", "no", "new") == b"vw"
    assert store.compare_set("k", "vw", "new") == b"new" == store.get("k")
    assert store.compare_set("fresh", "", "set") == b"set" and store.compare_set("gone", "old", "x") == b"old"
    assert store.has_extended_api()
    assert inner.num_keys() == 5 and store.delete_key("x") and not store.delete_key("x") and inner.num_keys() == 4
    with pytest.raises(Exception, match="did not come in time"):
        store.wait(["never"], timedelta(seconds=0.05))
    inner.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(Exception, match="did not come in time"):
        store.get("never")
    assert GroupStore(network.client(MEET, "start"), "b").num_keys() == 0


def test_who_waits_is_answered_at_once(network: JobNetwork) -> None:
    """And holds nobody up."""
    store, other = (GroupStore(network.client(MEET, "start"), "a", 20.0) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.multi_get, ["x", "y"])
        time.sleep(0.1)
        other.set("x", "1")
        other.set("y", "2")
        assert asked.result(15.0) == [b"1", b"2"]


def test_a_key_that_goes_while_others_wait_for_it_is_awaited_again(network: JobNetwork) -> None:
    """A board is cleared of old groups while a slow rank may still form one."""
    store, other = (GroupStore(network.client(MEET, "start"), "a", 20.0) for _ in range(2))
    other.set("x", "1")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.multi_get, ["x", "y"])
        time.sleep(0.1)
        other.delete_key("x")
        other.set("y", "2")
        assert other.check(["y"]) and not other.check(["x"])  # it still serves
        other.set("x", "3")
        assert asked.result() == [b"3", b"2"]


def test_a_place_ends_with_its_host(network: JobNetwork) -> None:
    """Others know by that that the leader is gone, also those that wait; the next term's place is not touched."""
    host, next_one = network.client(HOST, "term-1"), network.client(HOST, "term-2")
    member, waiting = network.client(MEMBER, "term-1"), network.client(MEMBER, "term-1")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(waiting.ask, "get", b"20000", b"never", wait_s=20.0)
        host.close()
        with pytest.raises(StoreLostError):
            asked.result(15.0)
    with pytest.raises(StoreLostError):
        member.ask("peek", b"x")
    with pytest.raises(StoreLostError, match="nobody hosts"):
        network.client(MEMBER, "term-1")
    assert next_one.ask("peek", b"x") == [b""]


def test_a_forked_process_holds_no_connection_open(network: JobNetwork) -> None:
    """Workers that fetch data outlive a rank that was killed, for a while."""
    host, member = network.client(HOST, "term-1"), network.client(MEMBER, "term-1")
    child = os.fork()
    if child == 0:
        time.sleep(20.0)
        os._exit(0)
    try:
        host.close()
        with pytest.raises(StoreLostError, match="closed"):
            for _ in range(100):
                member.ask("peek", b"x")
                time.sleep(0.01)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_values_larger_than_a_buffer(network: JobNetwork) -> None:
    client, large = network.client(MEET, "start"), os.urandom(10 << 20)
    client.ask("set", b"k", large)
    assert client.ask("get", b"0", b"k") == [large] and client.ask("peek", b"k", b"l") == [b"+" + large, b""]


def test_groups_form_over_it(network: JobNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks, as threads of one process: gloo's C++ threads call the store."""
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")

    def rank(number: int) -> float:
        store = GroupStore(network.client(MEET, "start"), "group", 20.0)
        group = dist.ProcessGroupGloo(store, number, 4, timedelta(seconds=20))
        value = torch.full((1,), float(number))
        group.allreduce([value], dist.AllreduceOptions()).wait()
        return float(value)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(rank, range(4), timeout=30.0)] == [6.0] * 4


def test_a_store_that_is_gone_is_said(network: JobNetwork) -> None:
    with pytest.raises(StoreLostError, match=r"127\.0\.0\.1:1"):
        StoreClient("127.0.0.1", 1, network.secret, MEMBER, "term-1")


def test_the_interface_that_is_named_counts() -> None:
    """A node's name may lead to a slow network."""
    env = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    assert node_name(env) == "n1"
    assert node_name(env | {"ONES_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    with pytest.raises(OSError, match="ONES_SOCKET_IFNAME=none"):
        node_name(env | {"ONES_SOCKET_IFNAME": "none"})


def test_what_is_followed_is_pushed(network: JobNetwork) -> None:
    """By kind, what is there and what comes, also between a question and its answer; nobody else is told."""
    host, member, other = network.client(HOST, "term-1"), *(network.client(MEMBER, "term-1") for _ in range(2))
    host.ask("set", b"plan-1", b"one", b"sign-1", b"x")
    member.follow("plan", "lost")
    host.ask("set", b"plan-2", b"two")
    host.ask("set", b"lost", b"why", b"planet", b"x", b"sign-1", b"y")
    assert member.ask("peek", b"plan-1") != [b""]
    assert member.news == {b"plan-1": b"one", b"plan-2": b"two", b"lost": b"why"}
    host.ask("set", b"plan-2", b"three")
    member.listen(5.0)
    assert member.news[b"plan-2"] == b"three"
    began = time.monotonic()
    member.listen(0.05)
    assert time.monotonic() - began < 10.0 and other.news == {}
    member.close()
    host.ask("set", b"plan-3", b"four")
    host.close()
    with pytest.raises(StoreLostError):
        other.listen(5.0)


def test_a_connection_that_another_thread_closes(network: JobNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that keeps up a membership knows a lost store by one error."""
    member, poll = network.client(MEET, "start"), select.poll
    monkeypatch.setattr(select, "poll", lambda: (member.close(), poll())[1])
    with pytest.raises(StoreLostError, match="closed"):
        member.listen(1.0)


def test_a_last_will(network: JobNetwork) -> None:
    """One that ends as planned takes its will back."""
    host, *members = network.client(HOST, "term-1"), *(network.client(MEMBER, "term-1") for _ in range(3))
    host.follow("gone")
    for number, member in enumerate(members):
        member.ask("will", b"gone-%d" % number, b"1")
    members[1].ask("will")
    with pytest.raises(ValueError, match="without a value"):
        members[2].ask("will", b"gone-2")
    members[0].close()
    members[1].close()
    host.listen(5.0)
    assert host.news == {b"gone-0": b"1"}


def test_many_that_end_at_once(network: JobNetwork) -> None:
    """The store outlives a block whose ranks are all killed, and tells of each."""
    host = network.client(HOST, "term")
    members = [network.client(MEMBER, "term") for _ in range(300)]
    for number, one in enumerate(members):
        one.follow("gone")
        one.ask("will", b"gone-%d" % number, b"1")
        assert one._socket is not None
        one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for one in members:
        one.close(socket.socket.close)
    until(lambda: len(host.ask("keys", b"gone-")) == len(members))
    host.close()


def test_a_connection_that_nobody_uses_rests(network: JobNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the host, whose end is the place's, nor one by which things are pushed."""
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    host, idle, follower = network.client(HOST, "term-1"), *(network.client(MEMBER, "term-1") for _ in range(2))
    follower.follow("plan")
    time.sleep(0.01)
    client_module.rest_idle()
    assert idle._socket is None and host._socket is not None and follower._socket is not None
    assert idle.ask("peek", b"x") == [b""]
    client_module.rest_idle()
    host.close()
    with pytest.raises(StoreLostError, match="nobody hosts"):
        idle.ask("peek", b"x")


def test_ranks_that_have_met_rest_too(network: JobNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they wrote is there as they come back; ranks that start again find nothing of it."""
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    met = GroupStore(network.client(MEET, "start-0"), "a")
    met.set("k", "v")
    time.sleep(0.01)
    client_module.rest_idle()
    (client,) = (one for one in client_module._clients if one.place == "start-0")
    assert client._socket is None and met.get("k") == b"v"
    time.sleep(0.01)
    client_module.rest_idle()
    monkeypatch.setattr(client_module, "IDLE_S", 10.0)
    again = GroupStore(network.client(MEET, "start-1"), "a")
    assert met.num_keys() == again.num_keys() == 0
    client.close()
    assert GroupStore(network.client(MEET, "start-0"), "a").num_keys() == 0


def test_a_rank_that_rests_finds_what_the_last_one_wrote(network: JobNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end one after the other."""
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    rests, last = (network.client(MEET, "start-0") for _ in range(2))
    rests.ask("keys", b"")
    time.sleep(0.01)
    rests.rest()
    last.ask("set", b"k", b"v")
    last.close()
    time.sleep(0.1)
    assert rests.ask("peek", b"k") == [b"+v"]
