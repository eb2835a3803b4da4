"""The same job, however Slurm shows it: squeue's fields, its JSON and PySlurm make the same `SlurmJob` of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.slurm import parse
from slurm_ones.slurm.model import SlurmJob

Facts = dict[str, Any]
NO_VAL = 0xFFFFFFFE
STATES = [
    "PENDING",
    "RUNNING",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "COMPLETING",
    "REQUEUE_HOLD",
    "SUSPENDED",
]
WORDS = "job requeued in held state"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30).filter(
    lambda text: text not in ("(null)", "N/A")
)
TIME = st.integers(1_700_000_000, 1_800_000_000)


@dataclass(frozen=True)
class Array:
    """What is so of a job of an array: it is one task, or several that wait."""

    id: int
    tasks: tuple[int, ...]
    alone: bool
    """A record of its own, of which the task's number is told and no list."""

    @property
    def list(self) -> str:
        """The tasks as Slurm lists them: evenly spaced ones, and ranges among others."""
        steps = {b - a for a, b in pairwise(self.tasks)}
        if len(self.tasks) > 2 and len(steps) == 1 and steps != {1}:
            return f"{self.tasks[0]}-{self.tasks[-1]}:{steps.pop()}"
        found: list[list[int]] = []
        for task in self.tasks:
            if found and task == found[-1][-1] + 1:
                found[-1].append(task)
            else:
                found.append([task])
        return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    tasks = tuple(sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12))))
    return Array(draw(st.integers(1, 10**9)), tasks, len(tasks) == 1 and draw(st.booleans()))


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    """What is so of a job, in Slurm's terms, as far as all three can show it."""
    nodes = draw(st.integers(1, 40))
    waits = (state := draw(st.sampled_from(STATES))) in ("PENDING", "REQUEUE_HOLD")
    # A waiting task is shown with its nodes of before a change, and as many at most.
    shown = draw(st.sampled_from([nodes, 1])) if waits else nodes
    most = shown if shown != nodes else draw(st.sampled_from([None, nodes, nodes + 3]))
    cause = draw(st.sampled_from(["None", "Resources", "JobHeldUser", "JobHeldAdmin", "requeue"]))
    # The words of a requeue into a hold hide the reason of a job that is not held any more.
    priority = 0 if cause == "requeue" else draw(st.sampled_from([0, 1, 4294901759]))
    code, signal = draw(st.sampled_from([(0, 0), (7, 0), (0, 9), (0, 15), (255, 0)]))
    return {
        "id": draw(st.integers(1, 10**9)),
        "name": draw(TEXT),
        "user": draw(TEXT),
        "uid": draw(st.integers(0, 2**31)),
        "account": draw(st.just("") | TEXT),
        "partition": draw(st.sampled_from(["gpu", "gpu,whole"])),
        "state": state,
        "reason": cause,
        "priority": priority,
        "restart": draw(st.integers(0, 99)),
        "requeue": draw(st.booleans()),
        "nodes": nodes,
        "shown": shown,
        "most": most,
        "gpus": draw(st.sampled_from([0, 1, 8])),
        "type": draw(st.sampled_from(["", "a100:"])),
        "tasks": draw(st.sampled_from([nodes, nodes + 3, 4 * nodes])),
        "tasks_per_node": draw(st.sampled_from([None, 0, 4])),
        "hosts": "" if waits else f"n[1-{nodes}]",
        "submit": draw(TIME),
        "start": draw(st.none() | TIME),
        "end": draw(st.none() | TIME),
        "eligible": draw(st.none() | TIME),
        "limit_min": draw(st.none() | st.integers(1, 10**5)),
        "work_dir": f"/home/{draw(TEXT)}",
        "comment": draw(st.just("") | TEXT),
        "array": draw(st.none() | arrays()),
        "het": draw(st.none() | st.integers(1, 99)),
        "batch": draw(st.booleans()),
        "code": code,
        "signal": signal,
        "qos": draw(st.just("") | TEXT),
        "cpus": draw(st.integers(1, 999)),
        "licenses": draw(st.sampled_from(["", "matlab:2", "matlab,abaqus@far:3"])),
        "requested": draw(st.sampled_from(["", "n[1-2]"])),
        "reservation": draw(st.just("") | TEXT),
        "preempted": draw(st.none() | TIME),
        "deadline": draw(st.none() | TIME),
        "features": draw(st.sampled_from(["", "a100&ib", "[a100|h100]"])),
        "others": draw(st.sampled_from(["", "nvme:2"])),
    }


def reason(f: Facts) -> str:
    """A reason's name, or the words that stand in its place."""
    return WORDS if f["reason"] == "requeue" else str(f["reason"])


def gres(f: Facts) -> str:
    gpus = f"gres/gpu:{f['type']}{f['gpus']}" if f["gpus"] else ""
    return ",".join(filter(None, (gpus, f["others"] and f"gres/{f['others']}")))


def tres(f: Facts) -> str:
    """GPUs of a type stand beside the sum of all."""
    gpus = f["nodes"] * f["gpus"]
    typed = f",gres/gpu:{f['type'][:-1]}={gpus}" if f["type"] else ""
    return f"cpu=4,node={f['nodes']},billing=4" + (f",gres/gpu={gpus}{typed}" if gpus else "")


def lone(f: Facts) -> int | None:
    """The number of a task that has a record of its own."""
    return f["array"].tasks[0] if f["array"] and f["array"].alone else None


def listed(f: Facts) -> str:
    """Tasks that share a record, with what a throttle adds."""
    return f"{f['array'].list}%3" if f["array"] and not f["array"].alone else ""


def by_fields(f: Facts, *, old: bool) -> SlurmJob:
    """As squeue prints its fields."""
    minutes = f["limit_min"]
    limit = "UNLIMITED" if minutes is None else f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
    shown = {
        "JobID": f["id"],
        "Name": f["name"],
        "UserName": f["user"],
        "UserID": f["uid"],
        "Account": f["account"] or "(null)",
        "Partition": f["partition"],
        "State": f["state"],
        "Reason": reason(f).replace(" ", "_" if old else " "),
        "PriorityLong": f["priority"],
        "RestartCnt": f["restart"],
        "Requeue": int(f["requeue"]),
        "NumNodes": f["shown"],
        "MaxNodes": f["most"] if f["most"] is not None else f["shown"] if old else 0,
        "tres-per-node": gres(f) or "N/A",
        "tres-per-job": "N/A",
        "tres-per-task": "N/A",
        "tres-alloc": tres(f),
        "NumTasks": f["tasks"],
        "NTPerNode": "N/A" if f["tasks_per_node"] is None else f["tasks_per_node"],
        "NodeList": f["hosts"],
        "SubmitTime": f["submit"],
        "StartTime": f["start"] or "N/A",
        "EndTime": f["end"] or "N/A",
        "EligibleTime": f["eligible"] or "N/A",
        "TimeLimit": limit,
        "WorkDir": f["work_dir"],
        "Comment": f["comment"] or "(null)",
        "ArrayJobID": f["id"] if f["array"] is None else f["array"].id,
        "HetJobID": "N/A" if f["het"] is None else f["het"],
        "BatchFlag": int(f["batch"]),
        "exit_code": f["code"] << 8 | f["signal"] if old else f"{f['code']}:{f['signal']}",
        "QOS": f["qos"] or "(null)",
        "NumCPUs": f["cpus"],
        "Licenses": f["licenses"] or "(null)",
        "ReqNodes": f["requested"],
        "ExcNodes": "",
        "Feature": f["features"] or "(null)",
        "Reservation": f["reservation"] or "(null)",
        "PreemptTime": f["preempted"] or "N/A",
        "Deadline": f["deadline"] or "N/A",
        "Exclusive": "NO",
        "OverSubscribe": "OK",
    }
    between = parse.separator()
    # A row for each task.
    rows = [{**shown, "ArrayTaskID": task} for task in (["N/A"] if f["array"] is None else f["array"].tasks)]
    names = parse.columns_of((22, 5) if old else (26, 5))
    text = "".join("".join(f"{row[name]}{between}" for name in names) + "\n" for row in rows)
    (job,) = parse.parse_queue(text, names, between).values()
    return job


def by_json(f: Facts, *, old: bool) -> SlurmJob:
    """As squeue --json prints it, by 22.05 with plain numbers, by 26.05 with numbers that may be unset."""

    def number(value: int | None, none: int = 0) -> Any:
        if old:
            return none if value is None else value
        return {"set": value is not None, "infinite": False, "number": value or 0}

    status = {"return_code": number(f["code"]), "signal": {"id": number(f["signal"] or None), "name": ""}}
    running = not (f["state"] == "PENDING" or f["hosts"] == "")
    detail = [f"gpu:{f['type']}{f['gpus']}(IDX:0-{f['gpus'] - 1})"] * f["nodes"] if f["gpus"] and running else []
    entry = {
        "job_id": f["id"],
        "name": f["name"],
        "user_name": f["user"],
        "user_id": f["uid"],
        "account": f["account"],
        "partition": f["partition"],
        "job_state": f["state"] if old else [f["state"]],
        "state_reason": "JobHeldUser" if f["reason"] == "requeue" else f["reason"],
        "state_description": WORDS if f["reason"] == "requeue" else "",
        "priority": number(f["priority"]),
        "restart_cnt": f["restart"],
        "requeue": f["requeue"],
        "node_count": number(f["shown"]),
        "max_nodes": number(f["most"]),
        "tres_req_str": tres(f),
        "tres_per_node": gres(f).replace("gres/", "gres:" if old else "gres/"),
        "tres_per_job": "",
        "gres_detail": detail,
        "tasks": number(f["tasks"]),
        "tasks_per_node": number(f["tasks_per_node"], NO_VAL),
        "flags": [],
        "nodes": f["hosts"],
        "submit_time": number(f["submit"]),
        "start_time": number(f["start"]),
        "end_time": number(f["end"]),
        "eligible_time": number(f["eligible"]),
        "time_limit": number(f["limit_min"], NO_VAL),
        "current_working_directory": f["work_dir"],
        "comment": f["comment"],
        "array_job_id": number(f["array"] and f["array"].id),
        "array_task_id": None if old and f["array"] is None else number(lone(f), NO_VAL),
        "array_task_string": listed(f),
        "array_max_tasks": number(0),
        "het_job_id": number(f["het"]),
        "batch_flag": f["batch"],
        "exit_code": f["code"] << 8 | f["signal"] if old else status,
        "qos": f["qos"],
        "cpus": number(f["cpus"]),
        "licenses": f["licenses"],
        "required_nodes": f["requested"],
        "features": f["features"],
        "resv_name": f["reservation"],
        "preempt_time": number(f["preempted"]),
        "deadline": number(f["deadline"]),
    }
    (job,) = parse.parse_jobs(json.loads(json.dumps({"jobs": [entry]}))).values()
    return job


def by_pyslurm(f: Facts, pyslurm: ModuleType) -> SlurmJob:
    """As PySlurm's attributes give it."""
    gpus = (f"gpu:{f['type']}".rstrip(":"), f["gpus"]) if f["gpus"] else None
    raw = SimpleNamespace(
        id=f["id"],
        name=f["name"],
        user_name=f["user"],
        user_id=f["uid"],
        account=f["account"] or None,
        partition=f["partition"],
        state=f["state"],
        state_reason=reason(f),
        priority=f["priority"],
        requeue_count=f["restart"],
        is_requeueable=f["requeue"],
        num_nodes=f["shown"],
        max_nodes=f["most"],
        requested_tres=SimpleNamespace(node=SimpleNamespace(count=f["nodes"])),
        gres_per_node=dict(filter(None, (gpus, f["others"] and ("nvme", 2)))),
        ntasks=f["tasks"],
        ntasks_per_node=f["tasks_per_node"],
        submit_line="sbatch --nodes=2 job.sbatch",
        allocated_nodes=f["hosts"] or None,
        submit_time=f["submit"],
        start_time=f["start"],
        end_time=f["end"],
        eligible_time=f["eligible"],
        time_limit="UNLIMITED" if f["limit_min"] is None else f["limit_min"],
        working_directory=f["work_dir"],
        comment=f["comment"] or None,
        array_id=f["array"] and f["array"].id,
        array_task_id=lone(f) or None,
        array_tasks_waiting=listed(f).partition("%")[0] or None,
        array_tasks_parallel=0,
        heterogeneous_id=f["het"],
        is_batch_job=f["batch"],
        exit_code=f["code"],
        exit_code_signal=f["signal"],
        qos=f["qos"] or None,
        cpus=f["cpus"],
        licenses=f["licenses"].split(",") if f["licenses"] else [],
        required_nodes=f["requested"] or None,
        excluded_nodes=None,
        constraints=f["features"].split(",") if f["features"] else [],
        reservation=f["reservation"] or None,
        preempt_time=f["preempted"],
        deadline=f["deadline"],
        memory=None,
    )
    read: Callable[[Any], dict[int, SlurmJob]] = pyslurm.jobs_of
    (job,) = read([raw]).values()
    return job


@pytest.fixture(scope="module")
def pyslurm_client() -> ModuleType:
    """The adapter of PySlurm, where PySlurm itself need not be installed."""
    sys.modules.setdefault("pyslurm", ModuleType("pyslurm"))
    try:
        return importlib.import_module("slurm_ones.slurm.pyslurm")
    finally:
        sys.modules.pop("slurm_ones.slurm.pyslurm", None)
        if not hasattr(sys.modules["pyslurm"], "Job"):
            del sys.modules["pyslurm"]


@given(f=facts())
def test_the_same_job_whoever_shows_it(pyslurm_client: ModuleType, f: Facts) -> None:
    """By fields and by JSON of both releases, and by PySlurm."""
    job = by_fields(f, old=False)
    assert by_json(f, old=False) == job
    assert by_fields(f, old=True) == job
    assert by_json(f, old=True) == job
    assert by_pyslurm(f, pyslurm_client) == job
