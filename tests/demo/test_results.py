"""The table at the end of `make demo`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ones_wrapper.protocol import Hello, Membership, Report
from slurm_ones.demo.jobs import ON_CLUSTER
from tests.demo.results import result, table
from tests.demo.scenario import Outcome, Size, _read


def trained(number: int, worlds: list[int], preempted: int) -> Outcome:
    """A job that trained at these sizes, of which Slurm took the last `preempted` changes."""
    outcome = Outcome(ON_CLUSTER[number], number, 0.0, "COMPLETED", ended=3725.0, accuracy=0.5)
    told: list[tuple[float, Report]] = [(1.0, Hello(1, 1, 1, 32, 1.0, 32, 256, 1000, 5, 0, 0, 0, ""))]
    for at, world in enumerate(worlds):
        order = None if at >= len(worlds) - preempted else at
        told.append((2.0 + at, Membership(at, (0,), (0,), 1, world, world, at, 32 * world, 0.25, order=order)))
    _read(outcome, told)
    return outcome


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_and_a_preemption_is_no_resize(width: int) -> None:
    """At the width of a terminal, each job's sizes, batches and times stand whole, whichever lines they take."""
    worlds = [1, 4, 8, 16, 12, 8, 16, 12]
    ones = [trained(number, worlds, 2) for number in range(len(ON_CLUSTER))]
    found = result(ones, [trained(number, [4], 0) for number in range(len(ON_CLUSTER))])
    assert {(job["resizes"], job["preempted"]) for job in found["ones"]["jobs"]} == {(5, 2)}
    console = Console(file=io.StringIO(), width=width)
    console.print(table(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for word in ("preempted", "accuracy", *(job.name for job in ON_CLUSTER)):
        assert word in text
    assert (text.split().count("512"), text.split().count("384")) == (2 * len(ON_CLUSTER), 2 * len(ON_CLUSTER))
    assert text.count("1 h 02 m") == 2 * len(ON_CLUSTER) + 2


def test_a_rigid_job_has_no_batch() -> None:
    rigid = Outcome(ON_CLUSTER[0], 1, 0.0, "COMPLETED", ended=20.0, sizes=[Size(1.0, 20.0, 1, 2, 2, 0)])
    console = Console(file=io.StringIO(), width=80)
    console.print(table(result([rigid], [rigid])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in text.splitlines() if " 2 " in line]
    assert [row[row.index("2") + 1] for row in rows] == ["–", "–"]
