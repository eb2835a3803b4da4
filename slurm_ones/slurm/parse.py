"""Parsers of Slurm's output: jobs, nodes, partitions, reservations, topology and the controller's settings.

Jobs come from squeue's columns, its JSON or PySlurm; everything else from scontrol's one-line records. A job's fields
are declared as `fields.Field`, in `SlurmJob` and in `FIELDS`. Columns are preferred: a job takes a few hundred bytes,
in JSON ten kilobytes and half a millisecond.

A user's text cannot pass for a field: a random separator is drawn for each call. squeue gets it in its environment,
which other users cannot read.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any

from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.fields import (
    ALLOCATED_GPUS,
    COUNT,
    DIGITS,
    EXACT_TASKS,
    EXCLUSIVE,
    GRES,
    IS_TASK,
    MEMORY,
    MOST_TASKS,
    PRIORITY,
    STATUS,
    TASK,
    TEXT,
    TEXTS,
    UNSHARED,
    Field,
    fields_of,
    gpu_kind,
    gpus,
    hosts,
    other_gres,
    read,
    seconds,
    text_of,
)
from slurm_ones.slurm.model import JobState, Node, Partition, Quota, Quotas, Reservation, SlurmJob

BITSTR = {"SLURM_BITSTR_LEN": "0"}
"""Environment in which Slurm lists all tasks of an array. By default it cuts the list after 64 characters."""
FORMAT = "SQUEUE_FORMAT2"
"""Environment variable from which squeue takes its columns."""
COMMAND = ("squeue", "--noheader", "--states=all", "--array")
"""Command that lists each task separately. Without `--array` squeue shows an array's waiting tasks together, with the
shape and hold of the first."""
REQUEUE_HELD = "requeued in held state"
"""Slurm's text, in the state or the reason, for a job that `scontrol requeuehold` holds."""

FIELDS = fields_of(SlurmJob) | {
    "states": Field(TEXTS, "State", "job_state", "state"),
    "description": Field(TEXT, "", "state_description"),
    "held_by_priority": Field(PRIORITY, "PriorityLong", "priority", "priority"),
    "requested": Field(TEXT, "tres-alloc", "tres_req_str", "requested_tres"),
    "allocated_gpus": Field(ALLOCATED_GPUS, "tres-alloc", "gres_detail"),
    "gres": Field(GRES, "tres-per-node", "tres_per_node", "gres_per_node"),
    "gpus_per_job": Field(GRES, "tres-per-job", "tres_per_job"),
    "gpus_per_task": Field(GRES, "tres-per-task", "tres_per_task"),
    "tasks_per_node": Field(COUNT, "NTPerNode", "tasks_per_node", "ntasks_per_node"),
    "exact_tasks": Field(EXACT_TASKS, "", "flags", "submit_line"),
    "array_task": Field(TASK, "", "array_task_id", "array_task_id"),
    "is_task": Field(IS_TASK, "ArrayTaskID", "array_job_id", "array_id"),
    "heterogeneous": Field(COUNT, "HetJobID", "het_job_id", "heterogeneous_id"),
    "status": Field(STATUS, "exit_code", "exit_code", "exit_code"),
    "signal": Field(COUNT, "", "", "exit_code_signal"),
    "memory_allocated": Field(MEMORY, "tres-alloc", "tres_alloc_str", "memory"),
    "memory": Field(MEMORY, "tres-alloc", "tres_req_str", "memory"),
    "exclusively": Field(EXCLUSIVE, "Exclusive", "submit_line", "submit_line", since=(26, 5)),
    "unshared": Field(UNSHARED, "OverSubscribe", "shared", before=(26, 5)),
}
"""Fields of a job to read: the fields of `SlurmJob`, then others from which `job_of` derives further fields."""


def columns_of(release: tuple[int, int]) -> tuple[str, ...]:
    """Return the columns to request from this release's squeue."""
    asked = (field.text for field in FIELDS.values() if field.since <= release < field.before)
    return tuple(name for name in dict.fromkeys(asked) if name)


_PLAIN = len(fields_of(SlurmJob))
_MORE = [*FIELDS][_PLAIN:]
_TASKS = [*FIELDS].index("array_tasks")

_NODES = re.compile(r"(?:^|,)node=([0-9]{1,9})(?![0-9])")
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z_/:]*)=(\S*)")
_OF_QOS = re.compile(r" ([^\s=(){}]+)(\([0-9]+\))?=\{([^{}]*)\}")
"""Pattern of the limits that a QOS sets for one user, `name(id)={...}`, or one account, `name={...}`."""
_QUOTA = re.compile(r"(?:^|,)([^,=()]+)=([0-9]{1,15})(?:\(([0-9]{1,15})\))?(?=,|$)")
"""Pattern of a resource, its limit and its use. It does not match a resource without a limit (N)."""
_FACTOR = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII)
_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "MAINT", "RESERVED", "UNKNOWN", "NOT_RESPONDING", "POWER", "INVAL", "REBOOT")
_STANDS_FOR = {
    **dict.fromkeys(("CONFIGURING", "RESIZING", "SIGNALING", "STOPPED"), JobState.RUNNING),
    **dict.fromkeys(("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"), JobState.PENDING),
}
"""Base state that is assumed for each flag if Slurm shows only the flag; none for COMPLETING."""


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Context manager that turns a ValueError into `Refused`; `what` names the command whose answer is parsed."""
    try:
        yield
    except ValueError as error:
        raise Refused(f"{what}: the answer is not understood: {error}") from None


# -- jobs -------------------------------------------------------------------------------------------------------------


@lru_cache(1024)
def state_of(names: tuple[str, ...], *, held: bool) -> tuple[JobState, frozenset[str]]:
    """Split Slurm's state names into base state and flags.

    22.05's JSON, squeue's columns and PySlurm show a single name: a flag if one is set, or else the base state. A
    COMPLETING job's base state is then PENDING if the job is held, since it was requeued, else UNKNOWN.
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


# Many of thousands of jobs have the same requests.
_gpus, _gpu_kind, _other_gres = lru_cache(4096)(gpus), lru_cache(4096)(gpu_kind), lru_cache(4096)(other_gres)


def job_of(row: tuple[Any, ...]) -> SlurmJob:
    """Return the job with these values, one for each of `FIELDS` in order."""
    plain = dict(zip(FIELDS, row[:_PLAIN], strict=False))
    more = SimpleNamespace(**dict(zip(_MORE, row[_PLAIN:], strict=True)))
    held = more.held_by_priority == 0
    state, flags = state_of(more.states, held=held)
    pending = state is JobState.PENDING
    nodes, most, reason, tasks = plain["nodes"], plain["max_nodes"], plain["reason"], plain["tasks"]
    if most in (0, nodes):
        # 22.05 still shows the nodes of a requeued job's last run, and a restarted slurmctld those of an array's task
        # before a change. If the user asked for no maximum, it shows 0 or the same number as the maximum. The present
        # request is in the job's TRES.
        asked = _NODES.search(more.requested) if pending else None
        nodes = most = nodes if asked is None else int(asked[1])
    requeue_held = held and REQUEUE_HELD in (more.description if reason == "JobHeldUser" else reason).replace("_", " ")
    gpus_per_node = _gpus(more.gres)
    array_tasks = plain["array_tasks"] or ((more.array_task,) if more.array_task >= 0 else ())
    # A record of tasks that were cancelled together has no task numbers.
    array_id = plain["array_id"] if array_tasks else 0
    code, killed = more.status
    killed = killed or more.signal
    plain |= {
        "user": plain["user"] or (str(plain["uid"]) if plain["uid"] > 0 else ""),
        "reason": "JobHeldUser" if requeue_held else reason,
        "nodes": nodes,
        "max_nodes": most if pending else nodes,
        "array_id": array_id,
        "array_tasks": array_tasks if array_id else (),
        "throttle": plain["throttle"] if array_id else 0,
    }
    if pending:
        plain |= {"node_list": (), "start_time": 0.0, "end_time": 0.0}
    by_task = 0 if gpus_per_node else _gpus(more.gpus_per_task) * tasks
    return SlurmJob(
        **plain,
        state=state,
        flags=flags,
        held=held,
        admin_held=reason == "JobHeldAdmin",
        requeue_held=requeue_held,
        gpus_per_node=gpus_per_node,
        kind=_gpu_kind(more.gres),
        other_gres=_other_gres(more.gres),
        gpus_total=(0 if pending else more.allocated_gpus or nodes * gpus_per_node)
        or _gpus(more.gpus_per_job)
        or by_task,
        # Without a task count Slurm counts one task for each node (for each of the most nodes, if an update failed
        # half-way).
        task_counts=more.exact_tasks or more.tasks_per_node > 0 or tasks > max(nodes, most) > 0,
        priority=more.held_by_priority or 0,
        array=more.is_task or more.heterogeneous > 0,
        exit_code=128 + killed if killed else code,
        memory_mb=-(-(more.memory if pending else more.memory_allocated) // max(nodes, 1)),
        exclusive=more.exclusively or more.unshared,
    )


def rows(source: str, count: int, column: Callable[[str], list[Any] | None]) -> Iterator[tuple[Any, ...]]:
    """Yield the row of values that `job_of` takes, for each of `count` jobs. `column` returns all jobs' values of a
    field, or None if the source does not show the field."""
    columns = []
    for field in FIELDS.values():
        values = column(name) if (name := getattr(field, source)) else None
        columns.append([field.notation.json(None)] * count if values is None else read(field, source, values))
    return zip(*columns, strict=True)


def separator() -> str:
    """Return a random separator of fields that does not begin with a digit, which squeue would read as a width."""
    return f"~{secrets.token_hex(12)}~"


def format_of(names: Iterable[str], between: str) -> str:
    """Return the value of `FORMAT` for these columns. A separator keeps squeue from padding or cutting a column."""
    return ",".join(f"{name}:{between}" for name in names)


@understood("squeue")
def parse_queue(text: str, names: Sequence[str], between: str) -> dict[int, SlurmJob]:
    """Parse jobs from `squeue --noheader`. Raises `Refused` if the text is not whole rows of these columns."""
    values, width = text.split(between), len(names)
    if (len(values) - 1) % width or values[-1].strip("\n"):
        raise Refused(f"squeue: {len(values) - 1} fields are no whole number of jobs with {width} each")
    columns = {name: values[first:-1:width] for first, name in enumerate(names)}
    jobs: dict[int, SlurmJob] = {}
    more: dict[int, list[int]] = {}
    for row in rows("text", len(values) // width, columns.get):
        if row[0] not in jobs:
            jobs[row[0]] = job_of(row)
        else:
            # Waiting tasks in one record differ only in their task numbers.
            more.setdefault(row[0], []).extend(row[_TASKS])
    for job_id, tasks in more.items():
        job = jobs[job_id]
        jobs[job_id] = replace(job, array_tasks=tuple(sorted({*job.array_tasks, *tasks})[:MOST_TASKS]))
    return jobs


def json_fault(data: Any) -> str:
    """Return the errors that `squeue --json` reports; "" for none."""
    errors = data.get("errors") if isinstance(data, Mapping) else None
    found = [error for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    return "; ".join(f"{error.get('description') or ''} ({error.get('error') or ''})" for error in found)


@understood("squeue --json")
def parse_jobs(data: Any) -> dict[int, SlurmJob]:
    """Parse jobs from `squeue --json`. Raises `Refused` for an invalid list of nodes."""
    listed = data.get("jobs") if isinstance(data, Mapping) else None
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    found = rows("json", len(entries), lambda name: [entry.get(name) for entry in entries])
    jobs = [(entry, job_of(row)) for entry, row in zip(entries, found, strict=True)]
    return {job.job_id: replace(job, stdout=_log(job, entry.get("stdout_expanded"))) for entry, job in jobs}


def _log(job: SlurmJob, expanded: Any) -> str:
    """Return the path of the job's log, with `%j`, `%A` and `%a` filled in if Slurm did not expand them."""
    path = text_of(expanded) or job.stdout
    task = str(job.array_tasks[0]) if len(job.array_tasks) == 1 else ""
    path = path.replace("%j", str(job.job_id)).replace("%A", str(job.array_id or job.job_id)).replace("%a", task)
    return str(PurePosixPath(job.work_dir, path or f"slurm-{job.key}.out"))


# -- nodes, partitions, reservations, topology, settings ---------------------------------------------------------------


def records(text: str) -> list[dict[str, str]]:
    """Parse the one-line records of `scontrol -o`. If a key occurs twice in a line, its first value counts."""
    return [dict(reversed(_FIELD.findall(line))) for line in text.replace("\0", "?").splitlines()]


def usable(state: str) -> bool:
    """Tell whether jobs can start on a node in this state. An appended * means no response, +FLAG a reason."""
    return not state.endswith("*") and not any(word in state.upper() for word in _UNUSABLE)


def _figure(text: str | None) -> int:
    return int(text) if text and DIGITS.fullmatch(text) else 0


def _named(text: str | None) -> str:
    return "" if text in (None, "N/A", "(null)") else text_of(text)


def parse_nodes(text: str) -> dict[str, Node]:
    """Parse nodes from `scontrol -o -d show nodes`."""
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
                kind=gpu_kind(fields.get("Gres")),
                cpus=_figure(fields.get("CPUEfctv") or fields.get("CPUTot")),
                cpus_used=_figure(fields.get("CPUAlloc")),
                memory_mb=_figure(fields.get("RealMemory")),
                memory_used_mb=_figure(fields.get("AllocMem")),
                features=frozenset(_named(fields.get("ActiveFeatures")).split(",")) - {""},
            )
    return nodes


@understood("scontrol")
def parse_partitions(text: str) -> dict[str, Partition]:
    """Parse partitions from `scontrol -o show partitions`."""
    partitions = {}
    for fields in records(text):
        if name := fields.get("PartitionName"):
            partitions[name] = Partition(
                name=name,
                up=fields.get("State", "UP") == "UP",
                closed=fields.get("State", "UP") in ("DOWN", "INACTIVE"),
                node_names=hosts(fields.get("Nodes")),
                max_time_s=seconds(fields.get("MaxTime", "")),
                max_nodes=_figure(fields.get("MaxNodes")),
                whole_nodes=fields.get("OverSubscribe") == "EXCLUSIVE" or fields.get("Exclusive") == "NODE",
                default=fields.get("Default") == "YES",
                qos=_named(fields.get("QoS")),
                tier=_figure(fields.get("PriorityTier")),
                preempt_mode=_named(fields.get("PreemptMode")),
                grace_s=float(_figure(fields.get("GraceTime"))),
            )
    return partitions


@understood("scontrol")
def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Parse reservations from `scontrol -o show reservations`, with times as numbers (SLURM_TIME_FORMAT=%s)."""
    return tuple(
        Reservation(
            name=fields["ReservationName"],
            node_names=hosts(fields.get("Nodes")),
            start_time=float(_figure(fields.get("StartTime"))),
            end_time=float(_figure(fields.get("EndTime"))),
            flags=frozenset(filter(None, _named(fields.get("Flags")).split(","))),
        )
        for fields in records(text)
        if "ReservationName" in fields
    )


def parse_licenses(text: str) -> dict[str, int]:
    """Parse the number of free licences of each name from `scontrol -o show licenses`."""
    return {fields["LicenseName"]: _figure(fields.get("Free")) for fields in records(text) if "LicenseName" in fields}


def parse_quotas(text: str) -> Quotas:
    """Parse quotas from `scontrol -o show assoc_mgr flags=assoc,qos`."""
    found: list[Quota] = []
    parents: dict[str, str] = {}
    modes: dict[str, str] = {}
    for line in text.splitlines():
        fields = next(iter(records(line)), {})
        qos, account, user = (fields.get(name, "").partition("(")[0] for name in ("QOS", "Account", "UserName"))
        if not (qos or account):
            continue
        if qos:
            modes[qos] = fields.get("PreemptMode", "").lower()
        if account and not user:
            parents[account] = fields.get("ParentAccount", "").partition("(")[0]
        own = Quota("", 0, qos=qos, account=account, user=user, partition=_named(fields.get("Partition")))
        found += _quotas(fields.get("GrpTRES"), own)
        found += _quotas(fields.get("MaxTRESPJ"), own._replace(per_job=True))
        for name, uid, inside in _OF_QOS.findall(line):
            whose = {"user": name} if uid else {"account": name}
            key = "MaxTRESPU" if uid else "MaxTRESPA"
            found += _quotas(records(inside)[0].get(key), Quota("", 0, qos=qos)._replace(**whose))
    return Quotas(tuple(found), parents, modes)


def _quotas(tres: str | None, of: Quota) -> list[Quota]:
    return [
        of._replace(resource=name, most=int(most), used=int(used or 0))
        for name, most, used in _QUOTA.findall(tres or "")
    ]


def parse_usage_factors(text: str) -> dict[str, float]:
    """Parse the usage factor of each QOS from `sacctmgr -nP show qos format=name,usagefactor`."""
    rows = (line.rpartition("|") for line in text.splitlines())
    return {name: float(factor) for name, _, factor in rows if name and _FACTOR.fullmatch(factor)}


@understood("scontrol")
def parse_topology(text: str) -> dict[str, str]:
    """Parse the leaf switch of each node, or its block, from `scontrol -o show topology`; {} without a topology."""
    found: dict[str, str] = {}
    for fields in records(text):
        leaf = fields.get("SwitchName") if fields.get("Level") == "0" else fields.get("BlockName")
        # An aggregated block lists the blocks that it consists of, not nodes of its own.
        if leaf and "AggregatedBlock" not in fields:
            for name in hosts(fields.get("Nodes")):
                found.setdefault(name, leaf)
    return found


def nodes_of(
    nodes: Mapping[str, Node],
    jobs: Mapping[int, SlurmJob],
    reservations: Iterable[Reservation],
    now: float,
    leaves: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Node]:
    """Return the nodes with leaf switch and GPUs in use; nodes in an active reservation are marked unusable.

    GPUs in use are the larger of two counts: the node's own, which may be incomplete, and its jobs'.
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
            leaf=leaves.get(name, ""),
        )
        for name, node in nodes.items()
    }


def setting(config: Mapping[str, str], name: str) -> str:
    """Return a setting's value in lower case; "" if Slurm does not show it. The case of the name does not matter."""
    return next((value.strip().lower() for key, value in config.items() if key.lower() == name.lower()), "")


def hides_gpus(config: Mapping[str, str]) -> bool | None:
    """Tell whether device cgroups hide a node's other GPUs from a job; None if unknown. If they do, two blocks on one
    node may be unable to reach each other's GPUs."""
    plugins = setting(config, "TaskPlugin")
    if plugins and "cgroup" not in plugins:
        return False
    return {"yes": True, "no": False}.get(setting(config, "ConstrainDevices"))


def allows_arrays(config: Mapping[str, str]) -> bool:
    """Tell whether job arrays may have several tasks; True if Slurm shows no limit."""
    most = setting(config, "MaxArraySize")
    return not DIGITS.fullmatch(most) or int(most) > 1


def enforces_limits(config: Mapping[str, str]) -> bool:
    """Tell whether Slurm enforces quotas (AccountingStorageEnforce); True if Slurm does not show the setting."""
    enforced = setting(config, "AccountingStorageEnforce")
    return not enforced or any(word in enforced for word in ("limits", "safe", "all"))


_RPC = re.compile(r"count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)")


def mean_rpc_s(sdiag: str) -> float:
    """Return slurmctld's mean seconds per RPC since its statistics were last reset; 0 before the first RPC."""
    by_type = sdiag.partition("statistics by user")[0]
    found = [(int(count), int(total)) for count, total in _RPC.findall(by_type)]
    return sum(total for _, total in found) / 1e6 / max(sum(count for count, _ in found), 1)


def release_of(config: Mapping[str, str]) -> tuple[int, int, int]:
    """Return Slurm's release, such as (26, 5, 3) for 26.05.3; (0, 0, 0) if Slurm does not show it."""
    match = re.match(r"([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?", setting(config, "SLURM_VERSION"))
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match is not None else (0, 0, 0)


def started_at(config: Mapping[str, str]) -> float:
    """Return the Unix time at which slurmctld started, by its own clock; 0 if Slurm does not show it."""
    return float(_figure(setting(config, "BOOT_TIME")))
