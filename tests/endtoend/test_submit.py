"""A function that was submitted from Python, on a real Slurm: it is resized, and what it returns comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ones_wrapper.protocol import Throughput
from tests.endtoend.harness import Harness

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
"""By day `tests/wrapper/launch/test_submit.py` submits to a stand-in for Slurm, and other journeys resize."""

SUBMIT = """
import json, sys
import ones_wrapper

def train(gate):
    import os, time
    from pathlib import Path
    import torch
    job = ones_wrapper.init(batch=16)
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None] / 64)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    for epoch in job.epochs():
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)
        if job.any(Path(gate).exists()):
            break
    return job.world, os.environ["SLURM_RESTART_COUNT"]

job = ones_wrapper.submit(train, sys.argv[1], gpus="1-4", options={"time": 10})
print(json.dumps([job.job_id, str(job.folder)]))
"""
WAIT = """
import json, sys
from pathlib import Path
from ones_wrapper.launch.submit import SubmittedFunction
print(json.dumps(SubmittedFunction(int(sys.argv[1]), Path(sys.argv[2])).result(300)))
"""


def test_a_function_is_resized_and_returns(harness: Harness) -> None:
    """Protects the call after a requeue: in the new allocation, from the checkpoint, with the same arguments."""
    gate = harness.folder("gate")

    def python(script: str, *arguments: str) -> list[object]:
        command = [harness.cluster.python, "-c", script, *arguments]
        done = harness.cluster.run(command, env={"ONES_REPORT_EVERY_S": "0.3"}, timeout=330.0)
        found: list[object] = json.loads(done.stdout)
        return found

    number, folder = python(SUBMIT, f"/scratch/{gate.name}/go")
    job_id = int(str(number))
    harness.report(job_id, 0, lambda report: isinstance(report, Throughput), "steps")
    harness.carry_out(harness.settings(scope='"own"'), {job_id: [[1, 2, 16]]}, 400.0)
    Path(gate, "go").touch()
    assert python(WAIT, str(job_id), str(folder)) == [2, "1"]
