"""One job over three resizes and two nodes, on a real Slurm: no sample is lost, none is used twice."""

from __future__ import annotations

import pytest

from ones_wrapper.protocol import Bye, Epoch, Hello
from slurm_ones.act.transitions import State
from tests.endtoend.harness import TRAIN, Harness
from tests.wrapper.runs import assert_exactly_once

pytestmark = pytest.mark.nightly

EPOCHS, SAMPLES = 40, 203
SHAPES = [(1, 1), (1, 4), (2, 4), (1, 2)]
STEPS = [[1, 4, 24], [2, 4, 48], [1, 2, 20]]


@pytest.mark.cluster
def test_every_sample_of_every_epoch_is_used_once(harness: Harness) -> None:
    """1 → 4 → 8 → 2 GPUs with another batch each time; database, reports and Slurm agree on how it went."""
    traces = harness.folder("traces")
    hurry = traces / "hurry"
    arguments = ["--epochs", EPOCHS, "--samples", SAMPLES, "--batch", 16, "--step-ms", 250]
    arguments += ["--hurry", f"/scratch/{traces.name}/{hurry.name}"]
    trace = f"/scratch/{traces.name}/trace-{{restart}}-{{rank}}.jsonl"
    options = ("--comment=ones: gpus=1-8 batch=16-64", "--time=10")
    job_id = harness.submit(str(TRAIN), *map(str, arguments), options=options, ONES_TRACE=trace)
    harness.report(job_id, 0, lambda report: isinstance(report, Epoch), "epoch")
    settings = harness.settings(scope='"own"')
    harness.carry_out(settings, {job_id: STEPS})

    # The companion is gone now, and training goes on without it.
    during = harness.job(job_id)
    assert (during.running, during.nodes, during.gpus_per_node, during.restart) == (True, 1, 2, 3), during
    hurry.touch()
    job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    assert (job.state.value, job.exit_code, job.restart) == ("COMPLETED", 0, 3), harness.log(job_id)
    assert_exactly_once(traces, EPOCHS, SAMPLES)

    hellos = [next(r for r in harness.reports(job_id, n) if isinstance(r, Hello)) for n in range(4)]
    assert [(hello.nodes, hello.gpus_per_node) for hello in hellos] == SHAPES
    assert [hello.batch for hello in hellos] == [16, 24, 48, 20]
    assert all(hello.epoch > 0 and hello.checkpoint for hello in hellos[1:])
    assert [bye.reason for bye in harness.reports(job_id, 3) if isinstance(bye, Bye)] == ["finished"]
    with harness.store(settings) as store:
        runs, resizes = store.runs(job_id), store.resizes(job_id)
        restart = store.jobs([job_id])[job_id].restart
    assert [(run.restart, run.shape.nodes, run.shape.gpus_per_node) for run in runs] == [
        (n, *s) for n, s in enumerate(SHAPES)
    ]
    assert [(r.state, r.restart, r.new_shape.nodes, r.new_shape.gpus_per_node, r.new_batch) for r in resizes] == [
        (State.DONE, n, *step) for n, step in enumerate(STEPS)
    ]
    assert all(resize.pause_s is not None and 0 < resize.pause_s < 60 for resize in resizes)
    assert restart == 3
