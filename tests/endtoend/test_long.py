"""A long training on a real Slurm, disturbed in every way that is foreseen, ends where an undisturbed one ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence

import pytest
import torch

from ones_db.shape import Shape
from ones_wrapper.protocol import Batch, Bye, Checkpoint, Hello, Order, Report, Throughput
from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import JobState
from tests.endtoend.harness import TRAIN, Harness, processes
from tests.wrapper.reference import batches_by_step, train
from tests.wrapper.runs import assert_exactly_once, write_order

pytestmark = pytest.mark.nightly

EPOCHS, SAMPLES, GAMMA = 220, 203, 0.99
STEPS = [[1, 4, 16], [2, 4, 16], [1, 2, 32], [1, 1, 32], [2, 4, 32], [1, 4, 32], [1, 2, 32], [1, 4, 32]]
"""Shapes (nodes, GPUs per node) and batches of eight resizes: world sizes 1, 2, 4 and 8."""


def runs_of(harness: Harness, job_id: int, restarts: int) -> Sequence[Sequence[Report]]:
    return [harness.reports(job_id, restart) for restart in range(restarts + 1)]


@pytest.mark.cluster
def test_a_training_that_is_disturbed_ends_where_one_that_is_not_does(harness: Harness) -> None:
    """Protects everything a resize may break: eight resizes over four world sizes, a batch order without a restart, the
    SIGKILL of a rank, and the time limit; each sample once, and the parameters of plain PyTorch in one process. The
    database has each run and resize."""
    traces = harness.folder("traces")
    inside = f"/scratch/{traces.name}"
    arguments = ["--epochs", EPOCHS, "--samples", SAMPLES, "--batch", 16, "--step-ms", 100, "--gamma", GAMMA]
    arguments += ["--hurry", f"{inside}/hurry", "--out", f"{inside}/out.json"]
    options = ("--comment=ones: gpus=1-8 batch=16-64", "--time=30", "--signal=B:USR2@90")
    trace = f"{inside}/trace-{{restart}}-{{rank}}.jsonl"
    job_id = harness.submit(str(TRAIN), *map(str, arguments), options=options, ONES_TRACE=trace)
    harness.trains(job_id)
    settings = harness.settings(scope='"own"')
    harness.carry_out(settings, {job_id: STEPS}, timeout_s=480.0)
    last = len(STEPS)
    with harness.store(settings) as store:
        runs, resizes = store.runs(job_id), store.resizes(job_id)
    shapes = [Shape(nodes, gpus) for nodes, gpus, _ in STEPS]
    assert [(run.restart, run.shape) for run in runs] == [*enumerate([Shape(1, 1), *shapes])]
    assert [(one.state, one.restart, one.new_shape) for one in resizes] == [
        (State.DONE, number, shape) for number, shape in enumerate(shapes)
    ]
    assert [one.new_batch for one in resizes] == [batch for *_, batch in STEPS]
    assert all(one.pause_s for one in resizes), resizes
    harness.trains(job_id, restart=last)

    # A batch order takes effect in the run that is.
    write_order(harness.directory(job_id), Order(2**50, last, batch=48))
    harness.report(job_id, last, lambda report: isinstance(report, Batch) and report.batch == 48, "batch of 48")

    # A rank is killed: the ranks are started again from the last checkpoint, in the same allocation.
    harness.cluster.run(["scancel", "--signal=USR1", str(job_id)])
    passing = harness.report(
        job_id, last, lambda report: isinstance(report, Checkpoint) and report.order is None, "checkpoint"
    )
    assert isinstance(passing, Checkpoint)
    harness.report(job_id, last, lambda r: isinstance(r, Throughput) and r.step > passing.step + 3, "further steps")
    os.kill(processes(harness.cluster, [f"SLURM_JOB_ID={job_id}"])[-1], signal.SIGKILL)
    harness.report(job_id, last, lambda report: isinstance(report, Hello) and report.attempt == 1, "second start")
    assert harness.job(job_id).restart == last

    # The time limit comes near: a checkpoint, and a requeue by the job itself.
    harness.cluster.run(["scontrol", "update", f"JobId={job_id}", "TimeLimit=2"])
    harness.wait(job_id, lambda job: job.restart > last, "requeued", timeout_s=180.0)
    # Not again: on a busy machine a run of half a minute has hardly begun.
    harness.cluster.run(["scontrol", "update", f"JobId={job_id}", "TimeLimit=30"], user="root")
    harness.trains(job_id, restart=last + 1)
    (traces / "hurry").touch()
    ended = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended", timeout_s=300.0)
    assert (ended.state, ended.exit_code) == (JobState.COMPLETED, 0), harness.log(job_id)
    assert ended.restart == last + 1, harness.log(job_id)
    reports = runs_of(harness, job_id, ended.restart)
    assert [r.reason for r in reports[last] if isinstance(r, Bye)][-1] == "signal"
    assert [r.resizes for r in reports[-1] if isinstance(r, Hello)] == [len(STEPS)]

    assert_exactly_once(traces, EPOCHS, SAMPLES)
    found = torch.tensor(json.loads((traces / "out.json").read_text())["parameters"], dtype=torch.float64)
    changes = batches_by_step(reports)
    assert {*changes.values()} >= {16, 32, 48}
    torch.testing.assert_close(found, train(EPOCHS, SAMPLES, GAMMA, changes), rtol=1e-7, atol=1e-9)
