"""Many changes in a row: nothing hangs, and nothing is left behind. ONES_TRANSITIONS says how many."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from ones_wrapper.protocol import First, Hello, Membership, encode_report, reports_name
from tests.wrapper.membership.blocks import Job
from tests.wrapper.membership.histories import History

TRANSITIONS = int(os.environ.get("ONES_TRANSITIONS", "12"))
MEMORY_MB = 4.0 + 0.01 * TRANSITIONS
"""Most that a rank's memory grows: by what torch and its allocator keep, and by 10 KB a change."""


@pytest.fixture
def job(tmp_path: Path, kept: Callable[[Job], Job]) -> Job:
    return kept(Job(tmp_path / "job", "--step-ms", "5", epochs=100_000))


class Held(NamedTuple):
    threads: int
    files: int
    memory: float
    """Resident, in MB."""

    @classmethod
    def of(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        threads, files = (len([*(process / name).iterdir()]) for name in ("task", "fd"))
        return cls(threads, files, pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


@pytest.mark.nightly
def test_nothing_is_left_of_many_changes(job: Job) -> None:
    """Threads, sockets, groups and memory of memberships that were left are given back."""
    job.start(0, ranks=2)
    job.wait(First)
    ranks = dict(zip(("leader", "other rank"), job.blocks[0].ranks(), strict=True))
    counts: dict[str, list[Held]] = {name: [] for name in ranks}
    for cycle in range(TRANSITIONS // 2):
        generation = job.of(Membership)[-1].generation
        job.order(0, 1)
        block = job.start(1, restart=cycle)
        job.wait_for(0, 1, after=generation)
        job.order(0)
        job.wait_for(0, after=generation + 1)
        assert block.end() == 0, job.errors()
        for name, pid in ranks.items():
            counts[name].append(Held.of(pid))
    pauses = job.of(Membership)
    for name, found in (("growing", [m for m in pauses if m.world == 3]), ("shrinking", pauses[2::2])):
        middle = sorted(m.pause_s for m in found)
        print(name, f"median {middle[len(middle) // 2]:.4f} s, most {middle[-1]:.4f} s of {len(middle)}")
    for name, held in counts.items():
        print(name, *(held[len(held) * number // 4] for number in range(4)), held[-1])
        settled = held[2:]
        assert settled[-1].threads <= settled[0].threads + 3 and settled[-1].files <= settled[0].files + 6, held
        # The last quarter has no more than the first.
        quarter = -(-len(settled) // 4)
        first, last = ([one.memory for one in part] for part in (settled[:quarter], settled[-quarter:]))
        assert min(last) <= max(first) + MEMORY_MB, held


def test_a_batch_that_its_leader_had_no_time_to_report(tmp_path: Path) -> None:
    """A leader was killed right after a change: the run to compare with took the next step at the batch before."""
    job, hello = Job(tmp_path), Hello(1, 1, 1, 16, 1.0, 16, 64, 97, 1, 0, 0, 0, "")
    runs = [hello], [replace(hello, step=2, batch=32)]
    steps = [(0, 0, 16), (0, 1, 24), (1, 2, 32), (1, 3, 25)]
    for term, reports in enumerate(runs):
        lines = [encode_report(number, 1.0, report) for number, report in enumerate(reports, 1)]
        (tmp_path / reports_name(term)).write_bytes(b"".join(lines))
        trace = [{"begin": reports[0].step}] + [
            {"epoch": 0, "step": step, "samples": [0] * count} for at, step, count in steps if at == term
        ]
        text = "".join(json.dumps({"restart": term, "attempt": 0, **line}) + "\n" for line in trace)
        (tmp_path / f"trace-{term}-0.jsonl").write_text(text)
    assert job.batches(97) == {0: 16, 1: 24, 2: 32}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("arguments", "apart"),
    [((), False), (("--sharded",), False), (("--sharded",), True)],
    ids=["memory to memory", "terms", "terms of nodes apart"],
)
def test_any_history_ends_as_undisturbed(tmp_path: Path, arguments: tuple[str, ...], apart: bool, seed: int) -> None:
    History(tmp_path / "job", seed, *arguments, apart=apart).run(5)
