"""The queue as `squeue` prints it field by field, of releases 22.05 to 26.05.

`squeue --json` takes ten kilobytes and half a millisecond a job, the fields below a few hundred bytes. A user's text
cannot pass for a field: what stands between fields is drawn anew for each call, and is handed to squeue in its
environment, which other users cannot read.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache

from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import Job, JobState
from slurm_ones.slurm.parse import REQUEUE_HELD, allocated_gpus, gpus, hosts, nodes_asked, seconds, state_of, text_of

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
    "ArrayTaskID",
    "HetJobID",
    "BatchFlag",
    "exit_code",
)
FORMAT = "SQUEUE_FORMAT2"
"""The variable that squeue takes its fields from."""


_ID = re.compile(r"\s*[0-9]{1,15}")


# Of thousands of jobs many ask for the same.
_gpus, _allocated_gpus, _seconds = lru_cache(4096)(gpus), lru_cache(4096)(allocated_gpus), lru_cache(4096)(seconds)


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
    jobs = {}
    for first in range(0, len(values) - 1, len(FIELDS)):
        try:
            job = _job(values[first : first + len(FIELDS)])
        except ValueError:
            raise Refused(f"squeue: {values[first]!r:.40} is no job, or has no user") from None
        jobs[job.job_id] = job
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


def _text(text: str) -> str:
    return "" if text == "(null)" else text_of(text)


def _asks(text: str) -> str:
    return "" if text in ("N/A", "(null)") else text


def _exit_code(text: str) -> int:
    """The exit code as a shell gives it; 22.05 prints a wait status, others code:signal."""
    code, colon, signal = text.partition(":")
    if colon:
        return 128 + _count(signal) if _count(signal) else _count(code)
    status = _count(code)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8


def _job(values: list[str]) -> Job:
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
        task_id,
        het_id,
        batch,
        code,
    ) = values
    held = priority == "0"
    state, flags = state_of([text_of(shown)], held=held)
    pending = state is JobState.PENDING
    nodes, most = _count(num_nodes), _count(max_nodes)
    if most == nodes:
        # Also where there is no maximum.
        nodes = most = nodes_asked(tres, pending, nodes, 0)
    return Job(
        job_id=_id(job_id),
        name=text_of(name),
        user=text_of(user),
        uid=_id(uid),
        account=_text(account),
        partition=text_of(partition),
        state=state,
        flags=flags,
        reason=text_of(reason),
        held=held,
        admin_held=reason == "JobHeldAdmin",
        requeue_held=held and REQUEUE_HELD in reason.replace("_", " "),
        restart=_count(restart),
        requeue=requeue == "1",
        nodes=nodes,
        max_nodes=most,
        gpus_per_node=_gpus(_asks(per_node)),
        gpus_total=(0 if pending else _allocated_gpus(tres)) or _gpus(_asks(per_job)),
        tasks=_count(tasks),
        # squeue does not print the flag of an exact task count: `SlurmClient.details` shows it.
        task_counts=_count(tasks_per_node) > 0 or _count(tasks) > max(nodes, most) > 0,
        node_list=() if pending else hosts(_asks(node_list)),
        submit_time=float(_count(submitted)),
        start_time=0.0 if pending else float(_count(started)),
        end_time=0.0 if pending else float(_count(ended)),
        time_limit_s=_seconds(limit),
        work_dir=text_of(work_dir),
        comment=_text(comment),
        eligible_time=float(_count(eligible)),
        priority=_count(priority),
        array=task_id != "N/A" or _count(het_id) > 0,
        batch=batch == "1",
        exit_code=_exit_code(code),
    )
