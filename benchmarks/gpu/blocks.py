"""Blocks of one job that join, leave and die on this machine's cards, as node launchers start them."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import Lab
from ones_wrapper.protocol import First, Membership
from tests.wrapper.membership.blocks import Job
from tests.wrapper.membership.forked import ForkedBlock
from tests.wrapper.runs import samples_wrong

SCRIPT = Path(__file__).with_name("blocks_train.py")
SAMPLES = 104
"""No step has a rank with a single sample, which batch normalisation refuses."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class CardJob(Job):
    """A job whose blocks have a card each, as far as there are cards."""

    def __init__(self, lab: Lab, blocks: int, *arguments: str) -> None:
        epochs = lab.size(400, 60)
        arguments = (f"--samples={SAMPLES}", *arguments)
        super().__init__(lab.folder / "job", *arguments, epochs=epochs, script=SCRIPT, **lab.env(blocks))
        self._cards = os.environ.get(_VISIBLE, ",".join(map(str, range(lab.gpus)))).split(",")

    def start(self, task: int, ranks: int = 1, restart: int = 0) -> ForkedBlock:
        before = os.environ.get(_VISIBLE)
        if self._cards != [""]:
            os.environ[_VISIBLE] = self._cards[task % len(self._cards)]
        try:
            return super().start(task, ranks, restart)
        finally:
            os.environ.pop(_VISIBLE, None) if before is None else os.environ.update({_VISIBLE: before})

    def lines(self) -> list[dict[str, Any]]:
        """What all ranks wrote of their steps, by time."""
        files = self.directory.glob("steps-*.jsonl")
        found = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return sorted(found, key=lambda line: float(line["time"]))

    def grow(self, *tasks: int, restart: int = 0) -> Membership:
        """The last of these tasks joins the others."""
        self.start(tasks[-1], restart=restart)
        generation = self.of(Membership)[-1].generation
        self.order(*tasks)
        return self.wait_for(*tasks, after=generation)

    def shrink(self, *tasks: int) -> Membership:
        """These tasks train on."""
        generation = self.of(Membership)[-1].generation
        self.order(*tasks)
        return self.wait_for(*tasks, after=generation)


@contextmanager
def training(lab: Lab, blocks: int, *arguments: str, killed: bool = False) -> Iterator[CardJob]:
    """A job whose first block trains; at the end it trains to its end, and each sample was used once."""
    job = CardJob(lab, blocks, *arguments)
    try:
        job.start(0)
        job.wait(First)
        yield job
        job.hurry()
        codes = job.end()
        assert killed or not any(codes), job.errors()
        lab.require("samples lost and repeated", samples_wrong(job.directory, SAMPLES)[1:], (0, 0))
    finally:
        job.kill()


def _equal(job: CardJob, world: int) -> tuple[int, int]:
    """(steps that these ranks made, those after which their states differed)."""
    states: dict[int, list[int]] = defaultdict(list)
    for line in job.lines():
        if line["world"] == world:
            states[line["step"]].append(line["bits"])
    whole = [bits for bits in states.values() if len(bits) == world]
    return len(whole), sum(len(set(bits)) > 1 for bits in whole)


def change(lab: Lab, megabytes: float, most: int = 2, pause_s: float | None = 1.5) -> None:
    """1 → 2 → … → 1; `most` blocks at most."""
    most = max(2, min(most, lab.size(lab.gpus, 2)))
    with training(lab, most, "--megabytes", str(lab.size(megabytes, 0.5))) as job:
        time.sleep(0.5)
        before = job.lines()[-1]
        for task in range(1, most):
            grown = job.grow(*range(task + 1))
            lab.measure(f"s of pause to {task + 1}, as reported", grown.pause_s, most=pause_s)
            lab.measure(f"GB/s to {task + 1}", grown.bytes / 1e9 / max(1e-9, grown.transfer_s))
        time.sleep(1.0)
        alone = job.shrink(0)
        lab.measure("s of pause to 1", alone.pause_s, most=pause_s)
        time.sleep(1.0)
        after = job.lines()[-1]
        for kind in ("allocated", "reserved"):
            lab.measure(f"MiB more {kind} after it", (after.get(kind, 0) - before.get(kind, 0)) / (1 << 20), most=64)
    steps, unequal = _equal(job, most)
    lab.require("(trained together, states that differ)", (steps > 0, unequal), (True, 0))


def pause_by_part(lab: Lab, megabytes: float) -> None:
    """From the last step of one rank to the end of the first of two, and what of it is reported."""
    with training(lab, 2, "--megabytes", str(lab.size(megabytes, 0.5))) as job:
        time.sleep(0.5)
        grown = job.grow(0, 1)
        time.sleep(1.0)
    own = [line for line in job.lines() if line["task"] == 0]
    usual = statistics.median(b["time"] - a["time"] for a, b in pairwise(own))
    first = next(i for i, line in enumerate(own) if line["world"] == 2)
    lab.measure("s without a step", own[first]["time"] - own[first - 1]["time"] - usual)
    lab.measure("s of these reported as pause", grown.pause_s)
    lab.measure("s of these for the transfer", grown.transfer_s)
    lab.measure("s of the second step beyond a usual one", own[first + 1]["time"] - own[first]["time"] - usual)


def killed_peer(lab: Lab) -> None:
    with training(lab, 2, "--megabytes", str(lab.size(300, 0.5)), killed=True) as job:
        whole = job.grow(0, 1)
        time.sleep(1.0)
        began = time.time()
        os.kill(job.blocks[1].ranks()[0], signal.SIGKILL)
        job.blocks[1].kill()
        job.wait(Membership, lambda report: report.generation > whole.generation and report.world == 1)
        lab.measure("s until the survivor trains", time.time() - began, most=20.0)


def leavers(lab: Lab, times: int) -> None:
    pauses = []
    with training(lab, 2) as job:
        for number in range(lab.size(times, 2)):
            job.grow(0, 1, restart=number)
            pauses.append(job.shrink(0).pause_s)
    lab.measure("longest pause in s", max(pauses), most=5.0)


def killed_newcomer(lab: Lab) -> None:
    with training(lab, 2, killed=True) as job:
        job.order(0, 1)
        for number, delay in enumerate((1.0, 3.0, 6.0)):
            block = job.start(1, restart=number)
            time.sleep(lab.size(delay, delay / 6))
            for pid in block.ranks():
                os.kill(pid, signal.SIGKILL)
            block.kill()
        job.start(1, restart=3)
        job.wait_for(0, 1)
        time.sleep(0.5)
    own = [line["step"] for line in job.lines() if line["task"] == 0]
    lab.require("a step was taken twice by the one that stayed", len(own) != len(set(own)), False)


def full_cache(lab: Lab) -> None:
    with training(lab, 2, "--megabytes", str(lab.size(300, 0.5)), "--fill", "0.95") as job:
        grown = job.grow(0, 1)
        time.sleep(0.5)
    lab.require("ranks", grown.world, 2)
    lab.measure("s of pause", grown.pause_s)


def term(lab: Lab) -> None:
    with training(lab, 2, "--sharded", "--megabytes", str(lab.size(300, 0.5))) as job:
        grown = job.grow(0, 1)
        time.sleep(0.5)
    lab.require("ranks", grown.world, 2)
    own = [line["time"] for line in job.lines() if line["task"] == 0]
    lab.measure("s from the stop to the first step", max(b - a for a, b in pairwise(own)), most=30.0)


def slow_newcomer(lab: Lab, gigabytes: float, slow_s: float) -> None:
    """A large state to a newcomer that takes long: it arrives at the first try, and training stands still once."""
    with training(lab, 2, "--frozen-gb", str(gigabytes), "--slow-s", str(slow_s)) as job:
        began = time.monotonic()
        grown = job.grow(0, 1)
        lab.measure("s from order to size", time.monotonic() - began)
        time.sleep(1.0)
    own = [line["time"] for line in job.lines() if line["task"] == 0]
    still = [b - a for a, b in pairwise(own) if b - a > 0.5 * slow_s]
    lab.require("GB that arrived", round(grown.bytes / 1e9, 1), gigabytes)
    lab.require("times that training stood still", len(still), 1)
    lab.measure("s that it stood still", still[0], least=slow_s)
