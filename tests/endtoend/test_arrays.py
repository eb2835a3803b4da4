"""A sweep on a real Slurm: the tasks of an ordinary job array are elastic jobs, each by itself."""

from __future__ import annotations

import json

import pytest

from slurm_ones.slurm.parse import parse_jobs
from tests.endtoend.harness import Harness


def ids(harness: Harness, array_id: int) -> dict[int, int]:
    """Job ids of an array's tasks that have their own."""
    text = harness.cluster.run(["squeue", "--json", "--states=all", f"--jobs={array_id}"], user="root").stdout
    found = parse_jobs(json.loads(text)).values()
    return {job.array_tasks[0]: job.job_id for job in found if len(job.array_tasks) == 1}


@pytest.mark.nightly
@pytest.mark.cluster
def test_tasks_of_a_sweep_are_resized_each_by_itself(harness: Harness) -> None:
    """Two of three tasks go 1 → 2 GPUs: held, reshaped and released alone, with directories of their own. The third
    has the array's number, which names all tasks to Slurm's commands, so it keeps its size, with that reason.
    """
    array_id = harness.light("--array=0-2", "--comment=ones: gpus=1-4 batch=16-64")
    harness.wait(array_id, lambda job: job.running, "RUNNING")
    of_task = ids(harness, array_id)
    assert len(of_task) == 3 and array_id in of_task.values()
    moved = sorted(set(of_task.values()) - {array_id})
    harness.trains(*of_task.values())
    settings = harness.settings(scope='"own"')
    harness.carry_out(settings, {job_id: [[1, 2, 32]] for job_id in moved})
    for job_id in of_task.values():
        job = harness.job(job_id)
        assert job.running and not job.held, job
        expected = (2, 1) if job_id in moved else (1, 0)
        assert (job.gpus_per_node, job.restart) == expected
    with harness.store(settings) as store:
        assert [len(store.resizes(job_id)) for job_id in (*moved, array_id)] == [1, 1, 0]
    assert "every task" in json.dumps(harness.why(settings, array_id))
    assert len({harness.directory(job_id) for job_id in of_task.values()}) == 3
