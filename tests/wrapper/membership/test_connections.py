"""Groups that are formed beside training, tried, entered or dropped; and what a script asks of torch.distributed after
a change."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ones_wrapper.group import Group
from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import Formed, Former, backends_of, connect, destroy, drop, enter, try_groups
from ones_wrapper.membership.plan import Plan
from ones_wrapper.network.job_network import JobNetwork
from tests.waiting import until
from tests.wrapper.forked import Team
from tests.wrapper.membership.test_plan import member

CPU = torch.device("cpu")
PAIR = "cpu:gloo,cuda:nccl"


def gloo() -> Any:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))


def formed(data: dict[str, Any], generation: int = 1, control: Any = None) -> Formed:
    plan = Plan(generation, 0, (member(0),))
    return Formed(plan, 0, None, data, control, dist.HashStore())  # type: ignore[arg-type]


def after_a_change(group: Group) -> None:
    """In a process of its own, which has a default group."""
    for generation in (1, 2):
        enter(formed({"gloo": gloo()}, generation))
        later = dist.new_group()
        dist.all_reduce(value := torch.ones(1), group=later)
        dist.all_reduce(value)
        devices = {device.type for device in dist.group.WORLD._device_types}
        assert (float(value), devices) == (1.0, {"cpu", "cuda"})
    destroy()


def after_a_change_of_two(group: Group) -> None:
    """As above, where a second gloo group stands for NCCL's."""
    for generation in (1, 2):
        data = {"gloo": gloo(), "nccl": gloo()}
        enter(formed(data, generation))
        world: Any = dist.group.WORLD
        taken = [world._get_backend(torch.device(kind)) for kind in ("cpu", "cuda")]
        assert taken == list(data.values()) and taken[0] is not taken[1]
        dist.all_reduce(value := torch.ones(1))
        later = dist.new_group(backend="gloo")
        dist.all_reduce(value, group=later)
        assert dist.get_backend() == connections._PAIR
        assert dist.get_backend_config() == "cpu:ones_gloo,cuda:nccl"
    destroy()


@pytest.mark.parametrize("change", [after_a_change, after_a_change_of_two])
def test_groups_can_be_made_after_a_change(change: Callable[[Group], None]) -> None:
    """By device meshes and libraries, gloo with tensors on GPUs, and by scripts that have gloo for the CPU and NCCL for
    GPUs."""
    with closing(Team(1)) as team:
        team.run(change)


@pytest.mark.parametrize(
    ("config", "backends"),
    [("gloo", {"gloo"}), ("nccl", {"nccl"}), ("cuda:nccl", {"nccl"}), ("cpu:gloo,cuda:gloo", {"gloo"}),
     (PAIR, {"gloo", "nccl"}), ("cpu:gloo,cuda:nccl,mps:gloo", {"gloo", "nccl"})],
)  # fmt: skip
def test_backends_are_what_the_script_has(config: str, backends: set[str]) -> None:
    """Both groups of a script that names a pair, or none, change."""
    assert backends_of(config) == backends


class Card:
    """Stands for NCCL's groups on a GPU: their threads and memory, until they are aborted."""

    def __init__(self, world: int = 1, hangs: bool = False, wrong: bool = False) -> None:
        self.held, self.world, self.hangs, self.wrong = 0, world, hangs, wrong
        self.sums: list[int] = []

    def group(self, *_: Any) -> Card.Group:
        return Card.Group(self)

    class Group:
        def __init__(self, card: Card) -> None:
            self._card, self._over = card, threading.Event()
            card.held += 1
            threading.Thread(target=self._over.wait, daemon=True).start()

        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            self._card.sums.append(len(tensors[0]))
            if self._card.hangs:
                self._over.wait()
            tensors[0].fill_(float(self._card.world + self._card.wrong))
            return self

        def wait(self) -> None:
            """The sum is done."""

        def abort(self) -> None:
            self._card.held -= 1
            self._over.set()


def test_a_fork_destroys_no_group_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor would crash, or wait for a thread that only the parent has."""
    monkeypatch.setattr(connections, "_kept", deque((gloo() for _ in range(8)), maxlen=8))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for number in range(8):
            connections.keep(number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_plans_that_are_dropped_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory and threads."""
    card, board = Card(), Board.hosted(JobNetwork.here(), 0)
    monkeypatch.setattr(connections, "_nccl_group", card.group)
    tasks: list[int] = []
    for generation in range(1, 21):
        former = Former(Plan(generation, 0, (member(0),)), 0, board.again(), PAIR, CPU, "127.0.0.1")
        former.run()
        assert former.formed is not None and former.error == "" and card.held == 1
        drop(former.formed)
        until(lambda: card.held == 0)
        del former
        tasks.append(len(list(Path("/proc/self/task").iterdir())))
    # A thread that each leaves would make ten more; a few others of this process come and go.
    assert max(tasks[10:]) <= max(tasks[:10]) + 5


@pytest.mark.parametrize(("card", "why"), [(Card(), ""), (Card(wrong=True), "is 2"), (Card(hangs=True), "did not end")])
def test_groups_are_tried_before_they_count(card: Card, why: str) -> None:
    """NCCL may find a link bad in the first collective, or give wrong sums: each algorithm is tried."""
    one = formed({"gloo": gloo(), "nccl": card.group()}, control=gloo())
    found = try_groups(one, CPU, 0.1 if card.hangs else 20.0)
    assert (why in found) if why else (found, card.sums) == ("", list(connections.TRIED))
    drop(one)
    until(lambda: card.held == 0)


def tried(group: Group, bad: int | None) -> str:
    """The second rank's card may be bad."""
    card = Card(group.world, wrong=group.rank == bad)
    control = group.duplicate().control  # type: ignore[union-attr]
    plan = Plan(1, 0, (member(0), member(1)))
    one = Formed(plan, group.rank, None, {"nccl": card.group()}, control, None)  # type: ignore[arg-type]
    return try_groups(one, CPU, 20.0)


def test_all_ranks_find_the_same(teams: dict[int, Team]) -> None:
    assert teams[2].run(tried, None) == ["", ""]
    first, second = teams[2].run(tried, 1)
    assert first == "another rank could not" and "a sum of ones over 2 ranks is 3" in second


def test_a_trial_ends_with_the_verdict() -> None:
    """A newcomer whose plan was dropped is there for the next one at once."""
    card = Card(hangs=True)
    one = formed({"nccl": card.group()}, control=gloo())
    began = time.monotonic()
    assert try_groups(one, CPU, 20.0, lambda: "dropped") == "" and time.monotonic() - began < 15.0
    drop(one)


def test_a_communicator_that_never_comes_to_be_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer died in ncclCommInitRank: the plan fails in time, what comes late is given back, and a few that hang
    are the most that hold memory."""
    card, come = Card(), threading.Event()
    monkeypatch.setattr(connections, "_stuck", [])

    def make() -> Any:
        come.wait()
        return card.group()

    for _ in range(connections.MOST_STUCK):
        with pytest.raises(RuntimeError, match="no NCCL communicator was formed within"):
            connect(make, 0.01)
    with pytest.raises(RuntimeError, match="were not formed in time: no more are tried"):
        connect(card.group, 1.0)
    come.set()
    until(lambda: all(one.done() for one in connections._stuck) and card.held == 0)
    assert connect(card.group, 20.0) is not None and connections._stuck == []
