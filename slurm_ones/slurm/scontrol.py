"""Nodes, partitions and reservations, as `scontrol -o` prints them: records whose form has not changed in years."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from slurm_ones.slurm.model import Job, Node, Partition, Reservation
from slurm_ones.slurm.parse import DIGITS, gpu_kind, gpus, hosts, seconds

_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z_/:]*)=(\S*)")
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
                kind=gpu_kind(fields.get("Gres")),
            )
    return nodes


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
                max_nodes=int(fields["MaxNodes"]) if DIGITS.fullmatch(fields.get("MaxNodes", "")) else 0,
                whole_nodes=fields.get("OverSubscribe") == "EXCLUSIVE" or fields.get("Exclusive") == "NODE",
                default=fields.get("Default") == "YES",
            )
    return partitions


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Reservations from `scontrol -o show reservations`, with times as numbers (SLURM_TIME_FORMAT=%s)."""

    def at(value: str) -> float:
        return float(value) if DIGITS.fullmatch(value) else 0.0

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


def parse_topology(text: str) -> dict[str, str]:
    """The leaf switch, or the block, of each node from `scontrol -o show topology`; nothing where there is none."""
    found: dict[str, str] = {}
    for fields in records(text):
        leaf = fields.get("SwitchName") if fields.get("Level") == "0" else fields.get("BlockName")
        # A block of blocks names those that it is made of.
        if leaf and "AggregatedBlock" not in fields:
            for name in hosts(fields.get("Nodes")):
                found.setdefault(name, leaf)
    return found


def nodes_of(
    nodes: Mapping[str, Node],
    jobs: Mapping[int, Job],
    reservations: Iterable[Reservation],
    now: float,
    leaves: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Node]:
    """The nodes with their leaf switch and what jobs hold of them, those in an active reservation marked unusable.

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
            leaf=leaves.get(name, ""),
        )
        for name, node in nodes.items()
    }
