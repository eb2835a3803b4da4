"""Job arrays in the simulated Slurm: tasks with records of their own, as real ones were seen to keep them."""

from __future__ import annotations

import pytest

from ones_db.shape import Shape
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.slurm.client import Refused, UnknownJob
from slurm_ones.slurm.model import JobState, Task
from tests.simulate.harness import OWNER, Harness, Sleep
from tests.slurm.sbatch import read_request

TASKS = tuple(range(4))


@pytest.fixture
def harness() -> Harness:
    return Harness(ClusterSettings(min_job_age_s=300.0))


def array(harness: Harness, *, throttle: int = 1, runs_s: float = 1e9, **other: object) -> int:
    return harness.submit(1, 1, runs_s=runs_s, array_tasks=TASKS, throttle=throttle, **other)


def running(harness: Harness, job_id: int) -> list[int]:
    return [job.array_tasks[0] for job in harness.owner.tasks(job_id) if job.running]


def test_waiting_tasks_are_one_record_until_something_sets_one_apart(harness: Harness) -> None:
    """The rest keeps the array's id; the last task has it in the end."""
    job_id = array(harness, hold=True)
    (only,) = harness.owner.snapshot().jobs.values()
    assert (only.job_id, only.array_id, only.array_tasks, only.throttle) == (job_id, job_id, TASKS, 1)
    assert (only.array, only.key) == (True, job_id)
    harness.owner.reshape(Task(job_id, 2), Shape(2, 2))
    records = harness.owner.snapshot().jobs
    assert {id_: job.array_tasks for id_, job in records.items()} == {job_id: (0, 1, 3), job_id + 1: (2,)}
    assert records[job_id + 1].key == Task(job_id, 2)
    assert (records[job_id].nodes, records[job_id + 1].nodes) == (1, 2)
    for task in (0, 1):
        harness.owner.release(Task(job_id, task))
        harness.wait(2)
    records = harness.owner.snapshot().jobs
    assert records[job_id].array_tasks == (3,)
    assert records[job_id].key == Task(job_id, 3)
    assert [job.array_tasks for job in harness.owner.tasks(job_id)] == [(0,), (1,), (2,), (3,)]


def test_held_tasks_stay_held_when_the_others_end(harness: Harness) -> None:
    job_id = array(harness, runs_s=50.0)
    harness.wait(2)
    for task in (1, 2, 3):
        harness.owner.hold(Task(job_id, task))
    harness.owner.throttle(job_id, 0)
    harness.wait(200)
    tasks = harness.owner.tasks(job_id)
    assert [(job.state, job.held) for job in tasks] == [(JobState.COMPLETED, False), *3 * [(JobState.PENDING, True)]]


def test_a_completed_task_is_used_again_and_no_other(harness: Harness) -> None:
    """In a user hold, at any shape, as long as Slurm knows of it."""
    job_id = array(harness, runs_s=50.0)
    harness.wait(2)
    for task in (1, 2, 3):
        harness.owner.hold(Task(job_id, task))
    with pytest.raises(Refused, match="RUNNING"):
        harness.owner.reuse(Task(job_id, 0))
    before = harness.job(Task(job_id, 2))
    harness.owner.reuse(Task(job_id, 2))
    assert harness.job(Task(job_id, 2)) == before
    harness.wait(100)
    ended = harness.job(Task(job_id, 0))
    assert ended.state is JobState.COMPLETED
    harness.owner.reuse(Task(job_id, 0))
    again = harness.job(Task(job_id, 0))
    assert (again.pending, again.held, again.requeue_held, again.admin_held) == (True, True, True, False)
    assert (again.restart, again.job_id) == (1, ended.job_id)
    harness.wait(400)
    harness.owner.reshape(Task(job_id, 0), Shape(2, 4))
    harness.owner.release(Task(job_id, 0))
    harness.wait(2)
    assert harness.job(Task(job_id, 0)).running
    assert harness.free() == [0, 0, 4, 4]
    harness.wait(60 + 301)
    with pytest.raises(UnknownJob):
        harness.owner.reuse(Task(job_id, 0))
    harness.cluster.cancel(Task(job_id, 1))
    with pytest.raises(Refused, match="CANCELLED"):
        harness.owner.reuse(Task(job_id, 1))


def test_a_task_whose_processes_are_not_gone_is_not_used_again_yet(harness: Harness) -> None:
    job_id = array(harness, runs_s=50.0)
    harness.wait(51.5)
    assert harness.job(Task(job_id, 0)).completing
    with pytest.raises(Refused, match="COMPLETING"):
        harness.owner.reuse(Task(job_id, 0))


def test_a_requeued_task_takes_a_place_again(harness: Harness) -> None:
    job_id = array(harness)
    harness.wait(2)
    harness.cluster.preempt(Task(job_id, 0))
    harness.wait(200)
    assert running(harness, job_id) == [1]
    assert harness.job(Task(job_id, 0)).restart == 1


def test_deferred_tasks_stay_deferred_when_one_is_set_apart(harness: Harness) -> None:
    job_id = array(harness, throttle=0)
    harness.owner.defer(job_id, harness.timeline.now + 100)
    harness.owner.hold(Task(job_id, 1))
    harness.wait(50)
    assert running(harness, job_id) == []
    harness.wait(60)
    assert running(harness, job_id) == [0, 2, 3]
    harness.owner.release(Task(job_id, 1))
    harness.wait(2)
    assert running(harness, job_id) == list(TASKS)


@pytest.mark.parametrize(
    ("text", "tasks", "throttle"), [("0-3%1", (0, 1, 2, 3), 1), ("1,5,3", (1, 3, 5), 0), ("0-8:4%2", (0, 4, 8), 2)]
)
def test_sbatch_reads_arrays(harness: Harness, text: str, tasks: tuple[int, ...], throttle: int) -> None:
    def submit(array: str) -> int:
        options = ["--hold", f"--array={array}", "--nodes=1", "--gres=gpu:1"]
        request = read_request("", options, now=0.0, work_dir="/", user="ann", uid=OWNER)
        return harness.cluster.submit(request, lambda job_id: Sleep(lambda code: None, harness.timeline))

    found = harness.owner.tasks(submit(text))
    assert tuple(job.array_tasks[0] for job in found) == tasks
    assert {job.throttle for job in found} == {throttle}
    for bad in ("x", "3-1", "0-2000", "1-2%y"):
        with pytest.raises(Refused):
            submit(bad)
