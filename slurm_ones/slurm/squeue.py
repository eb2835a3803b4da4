"""Jobs as `squeue` prints them, of releases 22.05 to 26.05: the queue field by field, single jobs as JSON.

`squeue --json` takes ten kilobytes and half a millisecond a job, the fields below a few hundred bytes. A user's text
cannot pass for a field: what stands between fields is drawn anew for each call, and is handed to squeue in its
environment, which other users cannot read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import Job
from slurm_ones.slurm.parse import (
    DIGITS,
    MOST_TASKS,
    allocated_gpus,
    exit_status,
    gpu_kind,
    gpus,
    job_of,
    number,
    seconds,
    tasks_of,
    text_of,
)

FIELDS = (
    "JobID",
    "Name",
    "UserName",
    "UserID",
    "Account",
    "Partition",
    "State",
    "Reason",
    "PriorityLong",
    "RestartCnt",
    "Requeue",
    "NumNodes",
    "MaxNodes",
    "tres-per-node",
    "tres-per-job",
    "tres-alloc",
    "NumTasks",
    "NTPerNode",
    "NodeList",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "EligibleTime",
    "TimeLimit",
    "WorkDir",
    "Comment",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "BatchFlag",
    "exit_code",
)
FORMAT = "SQUEUE_FORMAT2"
"""The variable that squeue takes its fields from."""
COMMAND = ("squeue", "--noheader", "--states=all", "--array")
"""Without `--array` squeue shows all waiting tasks of an array as one job, of the shape of the first, whatever shape
each asks for and whether it is held."""
_TASK = FIELDS.index("ArrayTaskID")

_ID = re.compile(r"\s*[0-9]{1,15}")


# Of thousands of jobs many ask for the same.
_gpus, _allocated_gpus, _seconds = lru_cache(4096)(gpus), lru_cache(4096)(allocated_gpus), lru_cache(4096)(seconds)
_gpu_kind = lru_cache(4096)(gpu_kind)


def separator() -> str:
    """What is to stand after each field, known to nobody before. Not a digit first: that would be a width."""
    return f"~{secrets.token_hex(12)}~"


def asked(between: str) -> str:
    """The value of `FORMAT`. With something after it a field is neither padded nor cut short."""
    return ",".join(f"{name}:{between}" for name in FIELDS)


def parse_queue(text: str, between: str) -> dict[int, Job]:
    """Jobs from what `squeue --noheader` printed. Raises `Refused` where that is not what was asked for."""
    values = text.split(between)
    if (len(values) - 1) % len(FIELDS) or values[-1].strip("\n"):
        raise Refused(f"squeue: {len(values) - 1} fields are no whole number of jobs with {len(FIELDS)} each")
    jobs: dict[int, Job] = {}
    tasks: dict[int, list[int]] = {}
    for first in range(0, len(values) - 1, len(FIELDS)):
        try:
            job_id = _id(values[first])
            if job_id not in jobs:
                jobs[job_id] = _job_of_fields(values[first : first + len(FIELDS)])
            elif DIGITS.fullmatch(task := values[first + _TASK]):
                # Tasks that wait in one record are told apart by nothing else.
                tasks.setdefault(job_id, []).append(int(task))
        except ValueError:
            raise Refused(f"squeue: {values[first]!r:.40} is no job, or has no user") from None
    for job_id, more in tasks.items():
        job = jobs[job_id]
        jobs[job_id] = replace(job, array_tasks=tuple(sorted({*job.array_tasks, *more})[:MOST_TASKS]))
    return jobs


def _count(text: str) -> int:
    """A count; 0 where there is none, or as many as one likes."""
    if not (len(text) < 16 and text.isascii() and text.isdigit()):
        return 0
    count = int(text)
    return 0 if 0xFFFFFFF0 <= count < 2**33 else count


def _id(text: str) -> int:
    if _ID.fullmatch(text) is None:
        raise ValueError
    return int(text)


def _asks(text: str) -> str:
    return "" if text in ("N/A", "(null)") else text


def _job_of_fields(values: list[str]) -> Job:
    (
        job_id,
        name,
        user,
        uid,
        account,
        partition,
        shown,
        reason,
        priority,
        restart,
        requeue,
        num_nodes,
        max_nodes,
        per_node,
        per_job,
        tres,
        tasks,
        tasks_per_node,
        node_list,
        submitted,
        started,
        ended,
        eligible,
        limit,
        work_dir,
        comment,
        array_id,
        task_id,
        het_id,
        batch,
        status,
    ) = values
    code, colon, signal = status.partition(":")
    return job_of(
        job_id=_id(job_id),
        name=name,
        user=user,
        uid=_id(uid),
        account="" if account == "(null)" else account,
        partition=partition,
        states=[text_of(shown)],
        reason=reason,
        priority=0 if priority == "0" else _count(priority) or None,
        restart=_count(restart),
        requeue=requeue == "1",
        nodes=_count(num_nodes),
        max_nodes=_count(max_nodes),
        tres=tres,
        gpus_per_node=_gpus(per_node),
        kind=_gpu_kind(per_node),
        gpus_per_job=_gpus(per_job),
        gpus_allocated=_allocated_gpus(tres),
        tasks=_count(tasks),
        # squeue does not print the flag of an exact task count: `SlurmClient.details` shows it.
        tasks_per_node=_count(tasks_per_node),
        node_list=_asks(node_list),
        submit_time=float(_count(submitted)),
        start_time=float(_count(started)),
        end_time=float(_count(ended)),
        eligible_time=float(_count(eligible)),
        time_limit_s=_seconds(limit),
        work_dir=work_dir,
        comment="" if comment == "(null)" else comment,
        part=task_id != "N/A" or _count(het_id) > 0,
        array_id=_count(array_id),
        array_tasks=tasks_of(task_id),
        batch=batch == "1",
        exit_code=(_count(code), _count(signal)) if colon else exit_status(_count(code)),
    )


def json_fault(data: Any) -> str:
    """What the JSON says went wrong, empty when nothing did."""
    errors = data.get("errors") if isinstance(data, Mapping) else None
    found = [error for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    return "; ".join(f"{error.get('description') or ''} ({error.get('error') or ''})" for error in found)


def parse_jobs(data: Any) -> dict[int, Job]:
    """Jobs from `squeue --json`."""
    entries = data.get("jobs") if isinstance(data, Mapping) else None
    jobs = (_job_of_json(entry) for entry in entries if isinstance(entry, Mapping)) if isinstance(entries, list) else ()
    return {job.job_id: job for job in jobs}


def _job_of_json(entry: Mapping[str, Any]) -> Job:
    uid, status, waiting = entry.get("user_id"), entry.get("exit_code"), entry.get("array_task_string")
    if isinstance(status, Mapping):
        signal = status.get("signal")
        killed = number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, Mapping) else 0
        exit_code = (number(status.get("return_code")), killed)
    else:
        exit_code = exit_status(number(status))
    return job_of(
        job_id=number(entry.get("job_id")),
        name=entry.get("name"),
        user=entry.get("user_name") or uid,
        uid=number(uid, -1),
        account=entry.get("account"),
        partition=entry.get("partition"),
        states=_texts(entry.get("job_state")),
        reason=text_of(entry.get("state_reason")),
        description=text_of(entry.get("state_description")),
        priority=None if (priority := number(entry.get("priority"), -1)) < 0 else priority,
        restart=number(entry.get("restart_cnt")),
        requeue=entry.get("requeue") is True or number(entry.get("requeue")) != 0,
        nodes=number(entry.get("node_count")),
        max_nodes=number(entry.get("max_nodes")),
        tres=str(entry.get("tres_req_str") or ""),
        gpus_per_node=gpus(entry.get("tres_per_node")),
        kind=gpu_kind(entry.get("tres_per_node")),
        gpus_per_job=gpus(entry.get("tres_per_job")),
        gpus_allocated=sum(map(gpus, _texts(entry.get("gres_detail")))),
        tasks=number(entry.get("tasks")),
        tasks_per_node=number(entry.get("tasks_per_node")),
        exact_tasks="EXACT_TASK_COUNT_REQUESTED" in _texts(entry.get("flags")),
        node_list=entry.get("nodes"),
        submit_time=float(number(entry.get("submit_time"))),
        start_time=float(number(entry.get("start_time"))),
        end_time=float(number(entry.get("end_time"))),
        eligible_time=float(number(entry.get("eligible_time"))),
        time_limit_s=60.0 * number(entry.get("time_limit")),
        work_dir=entry.get("current_working_directory"),
        comment=entry.get("comment"),
        part=number(entry.get("array_job_id")) != 0 or number(entry.get("het_job_id")) != 0,
        array_id=number(entry.get("array_job_id")),
        array_tasks=(task,) if (task := number(entry.get("array_task_id"), -1)) >= 0 else tasks_of(waiting),
        throttle=number(entry.get("array_max_tasks")),
        batch=bool(entry.get("batch_flag", True)),
        switches=number(entry.get("required_switches")),
        excluded=entry.get("excluded_nodes"),
        required=entry.get("required_nodes"),
        switch_wait_s=float(number(entry.get("maximum_switch_wait_time"))),
        command=entry.get("command"),
        submit_line=entry.get("submit_line"),
        stdout=_log(entry),
        exit_code=exit_code,
    )


def _log(entry: Mapping[str, Any]) -> str:
    """The path of its log: with `%` for what Slurm fills in only where the release does not fill it in itself."""
    path = text_of(entry.get("stdout_expanded") or entry.get("standard_output"))
    job_id, array = str(number(entry.get("job_id"))), number(entry.get("array_job_id"))
    task = number(entry.get("array_task_id"), -1)
    path = path.replace("%j", job_id).replace("%A", str(array or job_id)).replace("%a", str(task) if task >= 0 else "")
    if not path:
        path = f"slurm-{array}_{task}.out" if array and task >= 0 else f"slurm-{job_id}.out"
    return str(PurePosixPath(text_of(entry.get("current_working_directory")), path))


def _texts(value: Any) -> list[str]:
    return [text_of(v) for v in value] if isinstance(value, list) else [text_of(value)] if value else []
