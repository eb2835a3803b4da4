"""Many changes in a row: nothing hangs, and nothing is left behind. ONES_TRANSITIONS says how many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_wrapper.protocol import First, Membership
from tests.wrapper.membership.blocks import Job
from tests.wrapper.membership.histories import History

TRANSITIONS = int(os.environ.get("ONES_TRANSITIONS", "12"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job", "--step-ms", "5", epochs=100_000)
    yield job
    job.kill()


def held(pid: int) -> tuple[int, int]:
    """(threads, open files) of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def test_nothing_is_left_of_many_changes(job: Job) -> None:
    """Protects long jobs: threads, sockets and groups of memberships that were left are given back."""
    job.start(0)
    job.wait(First)
    rank = job.blocks[0].ranks()[0]
    counts: list[tuple[int, int]] = []
    for cycle in range(TRANSITIONS // 2):
        generation = job.of(Membership)[-1].generation
        job.order(0, 1)
        block = job.start(1, restart=cycle)
        job.wait_for(0, 1, after=generation)
        job.order(0)
        job.wait_for(0, after=generation + 1)
        assert block.end() == 0, job.errors()
        counts.append(held(rank))
    pauses = job.of(Membership)
    print("threads, files:", counts[0], counts[len(counts) // 2], counts[-1])
    for name, found in (("growing", [m for m in pauses if m.world == 2]), ("shrinking", pauses[2::2])):
        middle = sorted(m.pause_s for m in found)
        print(name, f"median {middle[len(middle) // 2]:.4f} s, most {middle[-1]:.4f} s of {len(middle)}")
    settled = counts[2:]
    assert settled[-1][0] <= settled[0][0] + 3 and settled[-1][1] <= settled[0][1] + 6, counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_history_ends_as_undisturbed(tmp_path: Path, seed: int) -> None:
    """Protects the core promise over orders, deaths and signals in any order."""
    History(tmp_path / "job", seed).run(5)
