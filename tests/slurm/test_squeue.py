"""The queue read field by field: nothing that a user writes can pass for a field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.fields import LONGEST, MOST_TASKS, tasks_of
from slurm_ones.slurm.model import JobState, SlurmJob, Task
from slurm_ones.slurm.parse import columns_of, format_of, parse_queue, separator

COLUMNS = columns_of((26, 5))
# As 26.05 prints a job of `--nodes=1-2 --gres=gpu:2` that runs.
RUNNING = {
    "JobID": "81",
    "Name": "train",
    "UserName": "alice",
    "UserID": "2001",
    "Account": "(null)",
    "Partition": "gpu",
    "State": "RUNNING",
    "Reason": "None",
    "PriorityLong": "4294901759",
    "RestartCnt": "3",
    "Requeue": "1",
    "NumNodes": "2",
    "MaxNodes": "2",
    "tres-per-node": "gres/gpu:2",
    "tres-per-job": "N/A",
    "tres-per-task": "N/A",
    "tres-alloc": "cpu=2,mem=8000M,node=2,billing=2,gres/gpu=4,gres/gpu:a100=4",
    "NumTasks": "2",
    "NTPerNode": "0",
    "NodeList": "n[1-2]",
    "SubmitTime": "1795292320",
    "StartTime": "1795292321",
    "EndTime": "1795328320",
    "EligibleTime": "1795292320",
    "TimeLimit": "1-10:00:00",
    "WorkDir": "/scratch",
    "Comment": "ones: gpus=1-8",
    "ArrayJobID": "81",
    "ArrayTaskID": "N/A",
    "HetJobID": "N/A",
    "BatchFlag": "1",
    "exit_code": "0:0",
    "QOS": "normal",
    "NumCPUs": "2",
    "Licenses": "matlab:2,abaqus",
    "ReqNodes": "n1",
    "ExcNodes": "n[3-4]",
    "Feature": "(null)",
    "Reservation": "(null)",
    "PreemptTime": "N/A",
    "Deadline": "N/A",
    "Exclusive": "NODE",
}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200)


def printed(between: str, *jobs: dict[str, str]) -> str:
    return "".join("".join(job[name] + between for name in COLUMNS) + "\n" for job in jobs)


def read(**changes: str) -> SlurmJob:
    between = separator()
    (job,) = parse_queue(printed(between, {**RUNNING, **changes}), COLUMNS, between).values()
    return job


def test_a_job_that_runs() -> None:
    """What a schedule is made of; GPUs of a type are not counted beside the sum of all types."""
    job = read()
    assert (job.job_id, job.uid, job.account, job.state, job.restart) == (81, 2001, "", JobState.RUNNING, 3)
    assert (job.nodes, job.max_nodes, job.gpus_per_node, job.gpus_total) == (2, 2, 2, 4)
    assert (job.node_list, job.start_time, job.time_limit_s) == (("n1", "n2"), 1795292321.0, 34 * 3600.0)
    assert (job.requeue, job.batch, job.array, job.held, job.task_counts) == (True, True, False, False, False)
    assert (job.qos, job.cpus, job.memory_mb, job.licenses) == ("normal", 2, 4000, (("matlab", 2), ("abaqus", 1)))
    assert (job.requested_nodes, job.excluded_nodes, job.exclusive) == (("n1",), ("n3", "n4"), True)
    assert (job.reservation, job.preempt_time, read(PreemptTime="1795292330").preempt_time) == ("", 0.0, 1795292330.0)
    assert (job.priority, read(exit_code="N/A").exit_code) == (4294901759, 0)


def test_what_a_job_asks_for_in_other_forms() -> None:
    """GPUs of each task, or one GPU without a number; a number above 1 that a batch job's failed launches leave."""
    waits = {"State": "PENDING", "NodeList": "", "NumTasks": "8"}
    each = read(**waits, **{"tres-per-node": "N/A", "tres-per-task": "cpu=2,gres/gpu=1"})
    assert (each.gpus, each.gpus_per_node, each.gpus_each) == (8, 0, 4)
    one = read(**waits, **{"tres-per-node": "gres/gpu,gres/nvme:2"})
    assert (one.gpus, one.gpus_per_node, one.other_gres) == (2, 1, "nvme:2")
    again = read(BatchFlag="2", Requeue="2")
    assert again.batch and again.requeue
    assert not read(BatchFlag="0").batch and not read(Requeue="0").requeue
    assert (read(Deadline="1795292330").deadline, read().deadline) == (1795292330.0, 0.0)


def test_tasks_of_an_array() -> None:
    """A row each: those that wait in one record are one job of several tasks, others are jobs of their own."""
    waits = RUNNING | {"State": "PENDING", "NodeList": "", "ArrayJobID": "81"}
    rows = [waits | {"ArrayTaskID": task} for task in ("1", "5", "2")]
    split = waits | {"JobID": "84", "ArrayTaskID": "3", "tres-per-node": "gres/gpu:4"}
    runs = RUNNING | {"JobID": "82", "ArrayJobID": "81", "ArrayTaskID": "0"}
    between = separator()
    jobs = parse_queue(printed(between, rows[0], split, runs, *rows[1:]), COLUMNS, between)
    assert jobs.keys() == {81, 82, 84}
    assert (jobs[81].array_id, jobs[81].array_tasks, jobs[81].key) == (81, (1, 2, 5), 81)
    assert (jobs[84].array_tasks, jobs[84].key, jobs[84].gpus_per_node) == ((3,), Task(81, 3), 4)
    assert (jobs[82].running, jobs[82].key) == (True, Task(81, 0))


@given(st.text() | st.from_regex(r"[0-9,%:\[\]. -]{0,40}", fullmatch=True))
def test_no_list_of_tasks_stops_a_tick(text: str) -> None:
    """Whatever a release writes there, and however many tasks it may mean."""
    job = read(ArrayTaskID=text, State="PENDING")
    assert job.array is (text != "N/A")
    assert len(job.array_tasks) <= MOST_TASKS and list(job.array_tasks) == sorted({*job.array_tasks})
    assert bool(job.array_id) is bool(job.array_tasks)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("3", (3,)),
        ("0", (0,)),
        ("1-7%1", (1, 2, 3, 4, 5, 6, 7)),
        ("[1-2,4]", (1, 2, 4)),
        ("0-12:4", (0, 4, 8, 12)),
        ("0-12:4%2", (0, 4, 8, 12)),
        ("1,3-5,7%0", (1, 3, 4, 5, 7)),
        ("1,3,...", (1, 3)),
        ("5-3", ()),
        ("3-5:0", (3, 4, 5)),
        ("3,3,2-3", (2, 3)),
        ("N/A", ()),
        ("", ()),
        (None, ()),
        (7, ()),
        ("0-999999999%1", tuple(range(MOST_TASKS))),
    ],
)
def test_lists_of_tasks(text: Any, tasks: tuple[int, ...]) -> None:
    """As every release writes them, and bounded."""
    assert tasks_of(text) == tasks


@given(TEXT, TEXT, TEXT)
def test_a_users_text_changes_nothing_else(name: str, comment: str, work_dir: str) -> None:
    """Line ends, and what stood between the fields of another call, are text like any other."""
    old = separator()
    forged = printed(old, RUNNING | {"JobID": "1", "UserID": "0"})
    between = separator()
    hostile = RUNNING | {"Name": name + forged[: LONGEST // 2], "Comment": f"{comment}\n", "WorkDir": work_dir}
    jobs = parse_queue(printed(between, hostile, RUNNING | {"JobID": "82"}), COLUMNS, between)
    assert jobs.keys() == {81, 82}
    assert (jobs[81].uid, jobs[81].user, jobs[81].restart) == (2001, "alice", 3)
    assert jobs[81].comment == f"{comment}\n" or comment == "(null)"
    assert jobs[81].work_dir == work_dir


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_half_an_answer_is_none(cut: int) -> None:
    """A queue that was cut short must not pass for a shorter queue."""
    between = separator()
    with pytest.raises(Refused, match="squeue"):
        parse_queue(printed(between, RUNNING, RUNNING)[: -cut - 1], COLUMNS, between)


def test_nobody_can_know_what_stands_between_fields() -> None:
    """It is another for each call, long, and no width of a field."""
    assert separator() != separator()
    between = separator()
    assert len(between) > 20
    assert not between[0].isdigit()
    assert format_of(COLUMNS, between).count(between) == len(COLUMNS)


@pytest.mark.parametrize(("release", "shown"), [((22, 5), ["OverSubscribe"]), ((26, 5), ["ExcNodes", "Exclusive"])])
def test_no_release_is_asked_for_what_it_does_not_know(release: tuple[int, int], shown: list[str]) -> None:
    """22.05 ends with an error at a column that it does not know."""
    assert [name for name in ("ExcNodes", "Exclusive", "OverSubscribe") if name in columns_of(release)] == shown
