"""Reading what Slurm's commands print, of releases 22.05 to 26.05."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ones_wrapper.hostlist import expand
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import Job, JobState, Node, Partition, Reservation

_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z_/:]*)=(\S*)")
_GPUS = re.compile(r"(?:gres[/:])?gpu(?::[^:=,()\d][^:=,()]*)?[:=]([0-9]{1,9})(?![0-9])")
_ALL_GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,9})(?![0-9])")
_NODES = re.compile(r"(?:^|,)node=([0-9]{1,9})(?![0-9])")
_DIGITS = re.compile(r"[0-9]{1,15}")

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

_UNUSABLE = (
    "DOWN",
    "DRAIN",
    "FAIL",
    "MAINT",
    "RESERVED",
    "UNKNOWN",
    "NOT_RESPONDING",
    "POWER",
    "INVAL",
    "REBOOT",
)


MOST = 2**53
"""No number that Slurm tells is larger; one that is counts as none."""
LONGEST = 8_192
"""Characters kept of a text that a user may choose."""


def text_of(value: Any) -> str:
    """A text as Slurm tells it, of bounded length, and such as every database and file system can be asked for: what
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
    return sum(int(count) for count in _GPUS.findall(text)) if isinstance(text, str) else 0


def allocated_gpus(text: str) -> int:
    """GPUs in a text of allocated TRES, where those of each type may stand beside the sum."""
    found = _ALL_GPUS.search(text)
    return int(found[1]) if found else gpus(text)


def _texts(value: Any) -> list[str]:
    return [text_of(v) for v in value] if isinstance(value, list) else [text_of(value)] if value else []


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


def nodes_asked(tres: str, pending: bool, nodes: int, most: int) -> int:
    """Nodes that a job has or asks for.

    22.05 goes on showing the nodes of a requeued job's last run, and no maximum; what it asks for now is in the text
    of its requested TRES.
    """
    asked = _NODES.search(tres)
    return int(asked[1]) if pending and asked is not None and not most else nodes


def _exit_code(value: Any) -> int:
    """The exit code as a shell gives it, 128 + N after signal N; 22.05 writes a wait status, others an object."""
    if isinstance(value, Mapping):
        signal = value.get("signal")
        killed = number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, Mapping) else 0
        return 128 + killed if killed else number(value.get("return_code"))
    status = number(value)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8


REQUEUE_HELD = "requeued in held state"
"""Slurm's words for a job in the hold of `scontrol requeuehold`, in place of a reason where it has but one field."""


def _job(entry: Mapping[str, Any]) -> Job:
    held = number(entry.get("priority"), -1) == 0
    state, flags = state_of(_texts(entry.get("job_state")), held=held)
    reason = text_of(entry.get("state_reason"))
    running_or_done = state is not JobState.PENDING
    nodes = hosts(entry.get("nodes")) if running_or_done else ()
    detail = sum(gpus(text) for text in _texts(entry.get("gres_detail")))
    most = number(entry.get("max_nodes"))
    tres = str(entry.get("tres_req_str") or "")
    node_count = nodes_asked(tres, not running_or_done, number(entry.get("node_count")), most)
    tasks = number(entry.get("tasks"))
    return Job(
        job_id=number(entry.get("job_id")),
        name=text_of(entry.get("name")),
        user=text_of(entry.get("user_name") or entry.get("user_id")),
        uid=_uid(entry),
        account=text_of(entry.get("account")),
        partition=text_of(entry.get("partition")),
        state=state,
        flags=flags,
        reason=reason,
        held=held,
        admin_held=reason == "JobHeldAdmin",
        restart=number(entry.get("restart_cnt")),
        requeue=bool(number(entry.get("requeue")) or entry.get("requeue") is True),
        nodes=node_count,
        max_nodes=most,
        gpus_per_node=gpus(entry.get("tres_per_node")),
        gpus_total=detail or gpus(entry.get("tres_per_job")),
        tasks=tasks,
        # Without task counts Slurm counts one task a node (of the most, where an update was refused half-way).
        task_counts=number(entry.get("tasks_per_node")) > 0
        or "EXACT_TASK_COUNT_REQUESTED" in _texts(entry.get("flags"))
        or tasks > max(node_count, most) > 0,
        node_list=nodes,
        submit_time=float(number(entry.get("submit_time"))),
        start_time=float(number(entry.get("start_time"))) if running_or_done else 0.0,
        end_time=float(number(entry.get("end_time"))) if running_or_done else 0.0,
        time_limit_s=60.0 * number(entry.get("time_limit")),
        work_dir=text_of(entry.get("current_working_directory")),
        comment=text_of(entry.get("comment")),
        eligible_time=float(number(entry.get("eligible_time"))),
        priority=number(entry.get("priority")),
        array=bool(number(entry.get("array_job_id")) or number(entry.get("het_job_id"))),
        batch=bool(entry.get("batch_flag", True)),
        requeue_held=held and reason == "JobHeldUser" and REQUEUE_HELD in text_of(entry.get("state_description")),
        exit_code=_exit_code(entry.get("exit_code")),
    )


def _uid(entry: Mapping[str, Any]) -> int:
    value = entry.get("user_id")
    return number(value, -1) if not isinstance(value, str) else -1


def json_fault(data: Any) -> str:
    """What the JSON says went wrong, empty when nothing did."""
    errors = data.get("errors") if isinstance(data, Mapping) else None
    told = [error for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    return "; ".join(f"{error.get('description') or ''} ({error.get('error') or ''})" for error in told)


def parse_jobs(data: Any) -> dict[int, Job]:
    """Jobs from `squeue --json`."""
    entries = data.get("jobs") if isinstance(data, Mapping) else None
    jobs = (_job(entry) for entry in entries if isinstance(entry, Mapping)) if isinstance(entries, list) else ()
    return {job.job_id: job for job in jobs}


def records(text: str) -> list[dict[str, str]]:
    """One-line records of `scontrol -o`; of a key that stands twice the first counts."""
    found = []
    for line in text.replace("\0", "?").splitlines():
        fields: dict[str, str] = {}
        for key, value in _FIELD.findall(line):
            fields.setdefault(key, value)
        found.append(fields)
    return found


def usable(state: str) -> bool:
    """Whether a node in this state takes jobs: * is no answer, and +FLAG says why not."""
    return not state.endswith("*") and not any(word in state.upper() for word in _UNUSABLE)


def parse_nodes(text: str) -> dict[str, Node]:
    """Nodes from `scontrol -o -d show nodes`."""
    nodes = {}
    for fields in records(text):
        if name := fields.get("NodeName"):
            state = fields.get("State", "UNKNOWN")
            nodes[name] = Node(
                name=name,
                state=state,
                usable=usable(state),
                gpus=gpus(fields.get("Gres")),
                gpus_used=gpus(fields.get("GresUsed")),
                partitions=tuple(fields.get("Partitions", "").split(",")),
                idle=fields.get("CPUAlloc", "0") == "0",
            )
    return nodes


def seconds(text: str) -> float:
    """A time limit such as 1-00:00:00 or 30:00 in seconds; 0 for none."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(map(_DIGITS.fullmatch, [*parts, days or "0"])):
        return 0.0
    parts = [*["0"] * (3 - len(parts)), *parts]
    hours, minutes, rest_s = (int(part) for part in parts[-3:])
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + rest_s


def parse_partitions(text: str) -> dict[str, Partition]:
    """Partitions from `scontrol -o show partitions`."""
    partitions = {}
    for fields in records(text):
        if name := fields.get("PartitionName"):
            partitions[name] = Partition(
                name=name,
                up=fields.get("State", "UP") == "UP",
                node_names=hosts(fields.get("Nodes")),
                max_time_s=seconds(fields.get("MaxTime", "")),
                max_nodes=int(fields["MaxNodes"]) if _DIGITS.fullmatch(fields.get("MaxNodes", "")) else 0,
                whole_nodes=fields.get("OverSubscribe") == "EXCLUSIVE" or fields.get("Exclusive") == "NODE",
                default=fields.get("Default") == "YES",
            )
    return partitions


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Reservations from `scontrol -o show reservations`, with times as numbers (SLURM_TIME_FORMAT=%s)."""

    def at(value: str) -> float:
        return float(value) if _DIGITS.fullmatch(value) else 0.0

    return tuple(
        Reservation(
            name=fields["ReservationName"],
            node_names=hosts(fields.get("Nodes")),
            start_time=at(fields.get("StartTime", "")),
            end_time=at(fields.get("EndTime", "")),
        )
        for fields in records(text)
        if "ReservationName" in fields
    )


def nodes_of(
    nodes: Mapping[str, Node], jobs: Mapping[int, Job], reservations: Iterable[Reservation], now: float
) -> dict[str, Node]:
    """The nodes with what jobs hold of them, those in an active reservation marked unusable.

    What Slurm says of a node's GPUs in use depends on the release and on how it was asked, so the jobs are counted
    as well and the larger figure believed.
    """
    used: Counter[str] = Counter()
    busy: set[str] = set()
    for job in jobs.values():
        if job.pending or (job.ended and not job.completing):
            continue
        busy.update(job.node_list)
        for name in job.node_list:
            used[name] += job.gpus_per_node or -(-job.gpus_total // len(job.node_list))
    reserved = {name for r in reservations if r.start_time <= now < (r.end_time or now + 1) for name in r.node_names}
    return {
        name: replace(
            node,
            gpus_used=min(node.gpus, max(node.gpus_used, used[name])),
            idle=node.idle and name not in busy,
            usable=node.usable and name not in reserved,
        )
        for name, node in nodes.items()
    }
