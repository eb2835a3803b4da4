"""What the invariants of jobs of blocks and their guests say, without any Slurm."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_wrapper.files.job_io import ReportWriter
from ones_wrapper.protocol import Membership
from slurm_ones.slurm.model import JobState, SlurmJob
from tests.endtoend.fault_site import GUEST, JobExpectation
from tests.endtoend.harness import BlockTask
from tests.endtoend.invariants import check_blocks, check_guests, guests_of, left_held, waits_for_guests
from tests.slurm.make import PENDING

RUNS = BlockTask("RUNNING", "None", 1, 1, "n1")
BLOCK = replace(PENDING, array=True, array_id=7, qos="normal")
BASE = replace(BLOCK, state=JobState.RUNNING, held=False, reason="None", node_list=("n1",))


def block(of: SlurmJob, task: int, **changes: Any) -> SlurmJob:
    return replace(of, job_id=70 + task, array_tasks=(task,), **changes)


def guest(of: SlurmJob, task: int, **changes: Any) -> SlurmJob:
    return block(of, task, qos=GUEST, **changes)


def expects(**changes: Any) -> JobExpectation:
    return JobExpectation("elastic", "alice", blocks=True, **changes)


@pytest.mark.parametrize(
    ("pids", "found"),
    [
        ({0: [10], 1: []}, []),
        ({0: [10], 1: [11]}, ["job 7: (0,) train, [0, 1] run"]),
    ],
)
def test_a_task_that_only_slurm_believes_to_run_is_no_fault(
    tmp_path: Path, pids: dict[int, list[int]], found: list[str]
) -> None:
    """Protects from faults of Slurm's own: a killed slurmctld forgets that a task has ended. A block that does run and
    trains by itself is found."""
    seen = Membership(1, (0,), (0,), 1, 1, 1, 0, 16, 0.01, 0, 0.0, 0.0, None, "first")
    ReportWriter(tmp_path, 0).send(seen)
    site: Any = SimpleNamespace(
        directory=lambda job_id: tmp_path, tasks=lambda job_id: {0: RUNS, 1: RUNS}, pids=lambda job_id, task: pids[task]
    )
    running = SimpleNamespace(value="RUNNING")
    job: Any = SimpleNamespace(job_id=7, state=running, restart=0, running=True)
    store: Any = SimpleNamespace(
        jobs=lambda ids: {7: SimpleNamespace(state="RUNNING", restart=0)},
        runs=lambda job_id: [],
        memberships=lambda job_id, count: [SimpleNamespace(report=seen)],
    )
    assert check_blocks(site, job, JobExpectation("elastic", "alice", blocks=True), store) == found


@pytest.mark.parametrize(
    ("job", "expected", "found"),
    [
        (guest(BLOCK, 1), expects(), ""),
        (guest(BLOCK, 2), expects(), "neither the companion nor its owner set (JobHeldUser)"),
        (guest(BLOCK, 2), expects(kept={2}), ""),
        (guest(BLOCK, 1, admin_held=True, reason="JobHeldAdmin"), expects(), "nor its owner set (JobHeldAdmin)"),
        (guest(BASE, 1, held=True), expects(), ""),
        (guest(BASE, 1, held=True), expects(opted_out=True), "is left held"),
        (block(BASE, 1, held=True), expects(), "is left held"),
        (block(BASE, 1, held=True), expects(kept={1}), ""),
        (guest(BASE, 1, state=JobState.PREEMPTED), expects(), "is not put back"),
        (guest(BASE, 1, state=JobState.PREEMPTED), expects(opted_out=True), ""),
        (guest(BASE, 1, state=JobState.PREEMPTED, requeue=False), expects(), ""),
    ],
)
def test_a_block_that_nobody_sees_to_is_found(job: SlurmJob, expected: JobExpectation, found: str) -> None:
    """Next to a base block, which runs; the companion holds task 1."""
    told = list(guests_of(7, [block(BASE, 0), job], {1}, expected))
    assert found in "".join(told) and len(told) == bool(found)


@pytest.mark.parametrize(
    ("others", "expected", "found"),
    [
        ([block(BLOCK, 1)], expects(), ["job 7: guests train without a base"]),
        ([guest(BLOCK, 1)], expects(), ["job 7: guests train without a base"]),
        # There is base, it is about to start, its owner keeps the task, no task is left, or nobody may change the job.
        ([block(BLOCK, 1), block(BASE, 2)], expects(), []),
        ([block(BLOCK, 1), block(BLOCK, 2, held=False, reason="Resources")], expects(), []),
        ([block(BLOCK, 1)], expects(kept={1}), []),
        ([block(BASE, 1, state=JobState.COMPLETED)], expects(), []),
        ([block(BLOCK, 1)], expects(opted_out=True), []),
    ],
)
def test_guests_without_a_base_are_found(others: list[SlurmJob], expected: JobExpectation, found: list[str]) -> None:
    """Protects a job from waiting behind everybody: of task 1 the companion may make a base block."""
    assert list(guests_of(7, [guest(BASE, 0), *others], {1}, expected)) == found


@pytest.mark.parametrize(
    ("qos", "job_id", "found"),
    [
        (GUEST, 70, []),
        ("normal", 70, ["base block 7_0 was preempted, in QOS normal"]),
        # A job of an earlier part, and one that Slurm has forgotten.
        ("normal", 7, []),
        ("normal", 71, []),
    ],
)
def test_a_base_block_that_was_preempted_is_found(qos: str, job_id: int, found: list[str]) -> None:
    """Also if it runs again, by now as a guest."""
    records = {70: guest(BASE, 0), 7: PENDING}
    site: Any = SimpleNamespace(
        expected={7: expects()},
        records=lambda: records,
        preempted=lambda: [(job_id, qos)],
        usable_nodes=lambda: ["n1"],
        store=lambda: nullcontext(None),
        elastic=dict,
    )
    assert check_guests(site) == found


WAITS = replace(PENDING, user="bob", held=False, reason="Resources", qos="normal", partitions=("gpu",), priority=1)


@pytest.mark.parametrize(
    ("queue", "found"),
    [
        ([WAITS], 1),
        ([replace(WAITS, partitions=("high",), gpus_per_node=3)], 1),
        ([replace(WAITS, gpus_per_node=0, exclusive=True, requested_nodes=("n2",))], 1),
        # There is base on each node that it could have, or it waits for something else, or for nobody.
        ([replace(WAITS, gpus_per_node=4, requested_nodes=("n1",))], 0),
        ([replace(WAITS, exclusive=True, requested_nodes=("n1",))], 0),
        ([replace(WAITS, nodes=3)], 0),
        ([replace(WAITS, reason="AssocGrpGRES")], 0),
        ([replace(WAITS, qos=GUEST)], 0),
        # It waits for one that comes first.
        ([WAITS, replace(WAITS, nodes=3, priority=2)], 0),
        ([WAITS, replace(WAITS, nodes=3, partitions=("other",))], 0),
    ],
)
def test_who_waits_for_guests_is_found(queue: list[SlurmJob], found: int) -> None:
    """On two nodes of 4 GPUs: base has 1 of them, guests have the others."""
    guests = [guest(BASE, 1, gpus_per_node=3), guest(BASE, 2, gpus_per_node=4, node_list=("n2",))]
    assert len(list(waits_for_guests([block(BASE, 0), *guests, *queue], ["n1", "n2"]))) == found


@pytest.mark.parametrize(
    ("job", "expected", "found"),
    [
        (block(BLOCK, 0), expects(), True),
        (block(BLOCK, 0), expects(hold="owner"), False),
        (block(BLOCK, 0), expects(kept={0}), False),
        (block(BLOCK, 0), expects(kept={3}), False),
        (block(BLOCK, 0), expects(kept={5}), True),
        (block(BASE, 0), expects(), False),
    ],
)
def test_a_job_in_a_hold_that_nobody_set_is_found(job: SlurmJob, expected: JobExpectation, found: bool) -> None:
    """Task 3 trained last: while its owner keeps it in a hold, the whole job waits."""
    assert bool(left_held(job, expected, [3])) == found
