"""Groups that are formed, entered and dropped, by the machinery of blocks, in ranks of one team."""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.harness import Lab
from benchmarks.gpu.work import Work, perceptron, threads, used
from ones_wrapper import testing
from ones_wrapper.api import join
from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.devices import streams
from ones_wrapper.gradients.exchange import DdpExchange
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import FORM_S, Formed, Former, try_groups
from ones_wrapper.membership.plan import Member, Plan
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.protocol import HOT

WARM = 3
"""Rounds after which memory and threads no longer grow."""
ROOM_MIB = 64


class Team:
    """The ranks of this process's start, which form groups of themselves again and again."""

    def __init__(self) -> None:
        group = join()
        assert isinstance(group, TorchGroup)
        self.group, self.backend = group, dist.get_backend_config()
        network = JobNetwork.found(os.environ, Path(os.environ["ONES_JOB_DIR"]) / HOT)
        hosted = Board.hosted(network, 0) if group.rank == 0 else None
        host, port, place = group.on_first(lambda: [*hosted.address, hosted.place] if hosted else [])
        self.board = hosted or Board(network, host, port, place)
        self._generation = 0

    def begin(self) -> Former:
        """Begin to form the next generation's groups."""
        self._generation += 1
        group = self.group
        plan = Plan(self._generation, 0, (Member(0, 0, "0.0.gpu", group.world, 1, group.world),))
        former = Former(plan, group.rank, self.board.again(), self.backend, group.device, "127.0.0.1")
        former.start()
        return former

    def form(self) -> Formed:
        """Form them, and wait for it."""
        former = self.begin()
        former.join()
        assert former.formed is not None, former.error
        return former.formed

    def enter(self, formed: Formed) -> None:
        """Try them and change over to them, as `Blocks` does."""
        group = self.group
        streams.wait(group.device)
        why = try_groups(formed, group.device, FORM_S)
        assert not group.maximum([int(bool(why))])[0], why
        connections.enter(formed)
        connections.keep(group.control)
        group.become(group.rank, group.world, 1, group.world, formed.control, formed.duplicate)


def _pass(exchange: DdpExchange, x: torch.Tensor) -> None:
    part = AccumulationStep(Share(0, len(x), len(x)), 0, len(x), 0, 1, len(x))
    assert exchange.model is not None
    with exchange.during(part):
        exchange.model(x).square().mean().backward()


def _changes(rounds: int) -> None:
    team = Team()
    device = team.group.device
    exchange = DdpExchange(team.group, None)
    exchange.wrap(perceptron().to(device))
    x, seen = torch.ones(4, 64, device=device), []
    for number in range(rounds):
        team.enter(team.form())
        exchange.ranks_changed()
        _pass(exchange, x)
        dist.barrier()
        later = dist.new_group()
        dist.all_reduce(one := torch.ones(1, device=device), group=later)
        assert float(one) == team.group.world
        if number >= WARM:
            seen.append((used(device), threads()))
    team.group.maximum([0])  # none ends before all are done
    testing.put((seen[0], seen[-1]))


def changes(lab: Lab, ranks: int, rounds: int) -> None:
    for before, after in lab.ranks(_changes, lab.size(rounds, WARM + 3), ranks=ranks):
        lab.measure("MiB more after all rounds", after[0] - before[0], most=ROOM_MIB)
        lab.measure("threads more", after[1] - before[1], most=8)


def _dropped(rounds: int) -> None:
    team, seen = Team(), []
    for number in range(rounds):
        connections.drop(team.form())
        for thread in threading.enumerate():
            if thread.name == "ones-abort":
                thread.join()
        if number >= connections._kept.maxlen:  # type: ignore[operator]
            seen.append((used(team.group.device), threads()))
    testing.put((seen[0], seen[-1]))


def dropped(lab: Lab) -> None:
    for before, after in lab.ranks(_dropped, lab.size(20, 11)):
        lab.measure("MiB more after all plans", after[0] - before[0], most=ROOM_MIB)
        lab.measure("threads more", after[1] - before[1], most=2)


def _next_to_training(step_ms: float, steps: int) -> None:
    team = Team()
    device = team.group.device
    work, exchange = Work(device), DdpExchange(team.group, None)
    exchange.wrap(perceptron().to(device))
    x, lengths, former, over = torch.ones(4, 64, device=device), [], None, threading.Event()
    late = [0.0]

    def beat() -> None:
        last = time.monotonic()
        while not over.wait(0.05):
            late[0], last = max(late[0], time.monotonic() - last), time.monotonic()

    threading.Thread(target=beat, daemon=True).start()
    formed_s = 0.0
    for number in range(steps):
        if number == steps // 3:
            former, began = team.begin(), time.perf_counter()
        start = time.perf_counter()
        work(step_ms)
        _pass(exchange, x)
        streams.wait(device)
        lengths.append(time.perf_counter() - start)
        if former is not None and not formed_s and not former.is_alive():
            formed_s = time.perf_counter() - began
    assert former is not None
    former.join()
    over.set()
    assert former.formed is not None, former.error
    team.group.maximum([0])
    usual = lengths[5:]
    testing.put((max(usual) / statistics.median(usual), late[0], formed_s))


def next_to_training(lab: Lab, step_ms: float, steps: int, ranks: int = 1) -> None:
    ranks = max(ranks, lab.gpus if ranks > 1 else 1)
    for longest, late, formed in lab.ranks(_next_to_training, lab.size(step_ms, 2), lab.size(steps, 30), ranks=ranks):
        lab.measure("longest step over the median", longest, most=5)
        lab.measure("s between two heartbeats", late, most=0.5)
        lab.measure("s to form", formed)


def _patient(seconds: float) -> None:
    team = Team()
    if team.group.rank == 0:
        time.sleep(seconds)
    began = time.monotonic()
    dist.barrier()
    streams.wait(team.group.device)
    testing.put(time.monotonic() - began)


def patient(lab: Lab, seconds: float) -> None:
    seconds = lab.size(seconds, 0.5)
    waited = lab.ranks(_patient, seconds, ranks=2, limit_s=seconds + 60.0)
    lab.require("the other rank waited", waited[1] > 0.5 * seconds)
