"""The helper that runs a test's body in forked ranks."""

from __future__ import annotations

import gc
import os
import time
import unittest
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.process.hooks import FLAGS


@testing.elastic(ranks=2, timeout_s=180)
def test_each_start_is_a_new_run_of_one_job() -> int | None:
    """Protects: the ranks are a working group, a checkpoint of one start is there in the next, flags are clean."""
    job = ones.init(batch=4, epochs=2)
    start = int(os.environ["SLURM_RESTART_COUNT"])
    assert job.world == [2, 3, 1][start] and not FLAGS.stop
    model = job.ddp(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = job.register(model=model, optimizer=optimizer)
    loader = job.loader(TensorDataset(torch.ones(10, 1)))
    assert (job.progress.step, job.progress.cursor) == [(0, 0), (2, 8), (2, 8)][start]
    assert [v.value for v in testing.values()] == [(s, r) for s in range(start) for r in range([2, 3][s])]
    testing.put((start, job.rank))
    FLAGS.stop = start == 1  # must not outlive this start
    for _ in job.epochs():
        for (x,) in loader:
            if start == 1:
                testing.die(1)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if start == 0 and job.progress.step == 1:
                break
        if start == 0:
            job.checkpoint()
            return 3
    assert job.progress.step == 6
    return None


def test_values_are_returned() -> None:
    """Protects: what ranks put reaches the test, tensors included, and no test sees another's."""

    def body() -> int | None:
        rank = int(os.environ["RANK"])
        testing.put(torch.full((70_000,), rank))
        return 1 if os.environ["WORLD_SIZE"] == "2" else None

    for _ in range(2):
        put = testing.run(body, ranks=2)
        assert [(v.start, v.rank, v.world, int(v.value[-1])) for v in put] == [(0, 0, 2, 0), (0, 1, 2, 1), (1, 0, 1, 0)]
    assert testing.values() == []
    with pytest.raises(RuntimeError, match=r"testing.put: call it in a body"):
        testing.put(1)


def failing(how: str) -> int | None:
    rank = int(os.environ["RANK"])
    if how == "skips":
        pytest.skip("not here")
    if how == "differs":
        return rank + 1
    if how == "for ever":
        return 1
    if rank == 1:
        if how == "raises":
            assert [rank] == [2], "no two"
        if how == "leaves":
            raise SystemExit(7)
        if how == "vanishes":
            os._exit(3)
        if how == "nonsense":
            return 0
    if how == "hangs" or rank == 0:
        time.sleep(600)
    return None


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"(?s)rank 1 of 2, start 0:.*in failing.*no two"),
        ("leaves", r"(?s)rank 1 of 2, start 0:.*SystemExit: 7"),
        ("vanishes", "rank 1 of 2, start 0:\nit ended without a word, by exit code 3"),
        ("nonsense", "next world size or None, not 0"),
        ("differs", r"different sizes: \[1, 2\]"),
        ("for ever", "not ended after 3 starts"),
        ("hangs", r"(?s)still running after 4 s.*rank 0 of 2.*after 2 s.*in failing.*after 4 s.*in failing.*rank 1"),
    ],
)
def test_failures_of_ranks_reach_the_test(how: str, message: str) -> None:
    """Protects: a rank that fails in whatever way fails the test soon, with its number and where it was."""
    began, before = time.monotonic(), children()
    with pytest.raises(testing.RankFailed, match=message):
        testing.run(partial(failing, how), ranks=2, timeout_s=4 if how == "hangs" else 300, most_starts=3)
    assert time.monotonic() - began < 120
    assert not children() - before  # no rank is left


def test_a_skip_is_a_skip() -> None:
    """Protects: a body may find that it cannot run here."""
    with pytest.raises(unittest.SkipTest, match="not here"):  # which pytest takes as its own
        testing.run(partial(failing, "skips"), ranks=2)


@testing.elastic(ranks=1)
def test_fixtures_arrive(tmp_path: Path) -> int | None:
    """Protects: the decorated test takes pytest's fixtures."""
    (tmp_path / "seen").mkdir(exist_ok=True)
    return 2 if os.environ["WORLD_SIZE"] == "1" else None


def test_a_process_with_a_group_is_not_forked() -> None:
    """Protects: a clear error, not a hang."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="no fork survives"):
            testing.run(lambda: None)
    finally:
        dist.destroy_process_group()


class Waits:
    """Garbage whose end waits for a thread of the process that made it, as that of a group does."""

    def __init__(self) -> None:
        self.itself, self.made_in = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_in:
            time.sleep(60)


def collect() -> None:
    gc.collect()


def test_garbage_of_the_test_is_not_collected_in_its_ranks() -> None:
    """Protects: the ranks do not hang in the ends of what earlier tests left."""
    gc.disable()
    try:
        Waits()
        testing.run(collect, timeout_s=30)
    finally:
        gc.enable()
