"""What Slurm says of a job, as one `Job`: the meaning of each field, whoever printed it, of releases 22.05 to 26.05.

Three adapters hand the same values to `job_of`: squeue's fields and its JSON (`squeue`), and PySlurm (`pyslurm`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ones_wrapper.hostlist import expand
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import Job, JobState

_GPUS = re.compile(r"(?:gres[/:])?gpu(?::(?=[0-9]*[^0-9:=,()])([^:=,()]+))?[:=]([0-9]{1,9})(?![0-9A-Za-z_])")
"""Type and count. A type has a character at least that is no digit."""
_ALL_GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,9})(?![0-9])")
_NODES = re.compile(r"(?:^|,)node=([0-9]{1,9})(?![0-9])")
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
DIGITS = re.compile(r"[0-9]{1,15}")

_STANDS_FOR = {
    "CONFIGURING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
}
"""The states of jobs of which a flag alone is shown. Of one that COMPLETES it is not known."""

MOST = 2**53
"""No number of Slurm's is larger; one that is counts as none."""
LONGEST = 8_192
"""Characters kept of a text that a user may choose."""
MOST_TASKS = 10_000
"""Tasks kept of an array, the lowest: a site may allow millions."""
BITSTR = {"SLURM_BITSTR_LEN": "0"}
"""In the environment of what lists tasks: Slurm cuts such a list after 64 characters otherwise."""


def text_of(value: Any) -> str:
    """A text of Slurm's, of bounded length, and such as every database and file system can be asked for: what
    is no character, and NUL, become question marks. It is the user's own all the same, escapes and all."""
    return _characters(str(value)[:LONGEST]) if value else ""


def _characters(text: str) -> str:
    return text if text.isascii() and "\0" not in text else text.encode(errors="replace").decode().replace("\0", "?")


def number(value: Any, default: int = 0) -> int:
    """A number as any release writes it: plain, or as {set, infinite, number}."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MOST <= value <= MOST:
        return default
    # 22.05 writes Slurm's NO_VAL and INFINITE as they are.
    return default if value >= 0xFFFFFFF0 and value < 2**33 else int(value)


def hosts(text: Any) -> tuple[str, ...]:
    """Names in a host list, none where Slurm names none. Raises `Refused` for what is no list of hosts."""
    if not isinstance(text, str) or text in ("", "(null)"):
        return ()
    try:
        return tuple(expand(_characters(text)))
    except ValueError as error:
        raise Refused(f"Slurm's answer is not understood: {error}") from None


def gpus(text: Any) -> int:
    """GPUs named in a TRES or GRES text such as gres/gpu:4, gres:gpu:a100:2 or gpu:1(IDX:0)."""
    return sum(int(count) for _, count in _GPUS.findall(text)) if isinstance(text, str) else 0


def gpu_kind(text: Any) -> str:
    """The type of the GPUs in such a text, empty where it names none. Several stand with commas between, and GPUs of no
    type beside others as an empty one."""
    found = _GPUS.findall(text) if isinstance(text, str) else ()
    return ",".join(sorted({kind for kind, count in found if int(count)}))


def allocated_gpus(text: str) -> int:
    """GPUs in a text of allocated TRES, where those of each type may stand beside the sum."""
    found = _ALL_GPUS.search(text)
    return int(found[1]) if found else gpus(text)


def seconds(text: str) -> float:
    """A time limit such as 1-00:00:00 or 30:00 in seconds; 0 for none."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(map(DIGITS.fullmatch, [*parts, days or "0"])):
        return 0.0
    parts = [*["0"] * (3 - len(parts)), *parts]
    hours, minutes, rest_s = (int(part) for part in parts[-3:])
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + rest_s


def state_of(names: Iterable[str], *, held: bool) -> tuple[JobState, frozenset[str]]:
    """The base state and the flags among Slurm's state names.

    Where one name alone is shown, a flag stands in place of the state: 22.05's JSON, squeue's fields and PySlurm. What
    a job will be that completes is not known then, unless it is held: such a one is being requeued.
    """
    base, flags = JobState.UNKNOWN, set()
    for name in names:
        try:
            base = JobState(name)
        except ValueError:
            flags.add(name)
    if base is JobState.UNKNOWN:
        if held and "COMPLETING" in flags:
            base = JobState.PENDING
        elif len(flags) == 1:
            base = _STANDS_FOR.get(next(iter(flags)), base)
    return base, frozenset(flags)


def exit_status(status: int) -> tuple[int, int]:
    """Exit code and signal in a wait status, which is what 22.05 prints."""
    return status >> 8, status & 0x7F


def tasks_of(text: Any) -> tuple[int, ...]:
    """Tasks in a text such as 3, 1-7%1, 1,3-5 or 0-12:4, ascending, of at most `MOST_TASKS`; without what is none."""
    found: set[int] = set()
    for piece in text.partition("%")[0].strip("[]").split(",") if isinstance(text, str) else ():
        if (match := _TASKS.fullmatch(piece)) is not None:
            low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            found.update(range(low, high + 1, step or 1)[:MOST_TASKS])
            if len(found) > 8 * MOST_TASKS:
                break
    return tuple(sorted(found)[:MOST_TASKS])


REQUEUE_HELD = "requeued in held state"
"""Slurm's words for a job in the hold of `scontrol requeuehold`, in place of a reason where it has but one field."""


def job_of(
    *,
    job_id: int,
    name: Any,
    user: Any,
    uid: int,
    account: Any,
    partition: Any,
    states: Iterable[str],
    reason: str,
    description: str = "",
    priority: int | None,
    restart: int,
    requeue: bool,
    nodes: int,
    max_nodes: int,
    tres: str = "",
    gpus_per_node: int,
    gpus_per_job: int = 0,
    gpus_allocated: int = 0,
    tasks: int,
    tasks_per_node: int,
    exact_tasks: bool = False,
    node_list: Any,
    submit_time: float,
    start_time: float,
    end_time: float,
    eligible_time: float,
    time_limit_s: float,
    work_dir: Any,
    comment: Any,
    part: bool,
    array_id: int = 0,
    array_tasks: tuple[int, ...] = (),
    throttle: int = 0,
    kind: str = "",
    batch: bool,
    exit_code: tuple[int, int],
    switches: int = 0,
    switch_wait_s: float = 0.0,
    excluded: Any = "",
    required: Any = "",
    command: Any = "",
    submit_line: Any = "",
    stdout: Any = "",
) -> Job:
    """A job from what one of the adapters read of it. Raises `Refused` for a list of nodes that is none.

    Texts are as Slurm printed them, counts 0 where it named none. `states` are the base state and the flags, or the one
    name that is shown in place of them. `reason` is the reason's name, or the words in its place where Slurm has but
    one field for both; `description` holds those words where it has two. `priority` is None where it is not known.
    `tres` is what a pending job asks for, and may be what another one has. `gpus_allocated` counts all nodes.
    `exact_tasks`: submitted with a count of tasks, as far as that is shown. `part`: of an array or a heterogeneous job.
    `array_id` counts where there are `array_tasks`: of tasks that were cancelled together nothing tells which they
    were. `exit_code` is the code and the signal.
    """
    held = priority == 0
    state, flags = state_of(states, held=held)
    pending = state is JobState.PENDING
    if max_nodes in (0, nodes):
        # 22.05 goes on showing the nodes of a requeued job's last run, and for want of a maximum none or the same
        # number again; what it asks for now is in its TRES.
        asked = _NODES.search(tres) if pending else None
        nodes = max_nodes = int(asked[1]) if asked is not None else nodes
    requeue_held = held and REQUEUE_HELD in (description if reason == "JobHeldUser" else reason).replace("_", " ")
    code, signal = exit_code
    return Job(
        job_id=job_id,
        name=text_of(name),
        user=text_of(user),
        uid=uid,
        account=text_of(account),
        partition=text_of(partition),
        state=state,
        flags=flags,
        reason="JobHeldUser" if requeue_held else text_of(reason),
        held=held,
        admin_held=reason == "JobHeldAdmin",
        requeue_held=requeue_held,
        restart=restart,
        requeue=requeue,
        nodes=nodes,
        max_nodes=max_nodes if pending else nodes,
        gpus_per_node=gpus_per_node,
        gpus_total=(0 if pending else gpus_allocated or nodes * gpus_per_node) or gpus_per_job,
        tasks=tasks,
        # Without task counts Slurm counts one task a node (of the most, where an update was refused half-way).
        task_counts=exact_tasks or tasks_per_node > 0 or tasks > max(nodes, max_nodes) > 0,
        node_list=() if pending else hosts(node_list),
        submit_time=submit_time,
        start_time=0.0 if pending else start_time,
        end_time=0.0 if pending else end_time,
        eligible_time=eligible_time,
        time_limit_s=time_limit_s,
        work_dir=text_of(work_dir),
        comment=text_of(comment),
        priority=priority or 0,
        array=part,
        array_id=array_id if array_tasks else 0,
        array_tasks=array_tasks if array_id else (),
        throttle=throttle if array_id and array_tasks else 0,
        kind=text_of(kind),
        batch=batch,
        switches=switches,
        switch_wait_s=switch_wait_s,
        excluded=hosts(excluded),
        required=hosts(required),
        command=text_of(command),
        submit_line=text_of(submit_line),
        stdout=text_of(stdout),
        # As a shell gives it.
        exit_code=128 + signal if signal else code,
    )
