"""Free GPUs, and whether a shape finds room among them."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ones.slurm.model import Partition, Shape, Snapshot


def partition_gpus(partition: Partition, snapshot: Snapshot, whole_node_gpus: Mapping[str, int]) -> tuple[int, bool]:
    """GPUs of a full node of the partition, and whether Slurm hands out its nodes whole.

    `whole_node_gpus` names the GPUs of partitions where Slurm knows of none; 0 where nobody knows of any.
    """
    if partition.name in whole_node_gpus:
        return whole_node_gpus[partition.name], True
    return snapshot.gpus_of_node.get(partition.name, 0), partition.whole_nodes


def free_gpus(snapshot: Snapshot, partition: str, whole_node_gpus: Mapping[str, int]) -> dict[str, int]:
    """GPUs that Slurm could hand out now on each node of the partition, 0 on those it would not use."""
    part = snapshot.partitions.get(partition)
    if part is None:
        return {}
    full, whole = partition_gpus(part, snapshot, whole_node_gpus)
    free: dict[str, int] = {}
    for name in part.node_names:
        node = snapshot.nodes.get(name)
        if node is None:
            continue
        if not (part.up and node.usable):
            free[name] = 0
        elif whole:
            free[name] = full if node.idle else 0
        else:
            free[name] = node.gpus - node.gpus_used
    return free


def take(shape: Shape, free: dict[str, int], own: Mapping[str, int] | None = None) -> bool:
    """Set the shape's GPUs aside from `free`, counting the job's `own` GPUs as free; False where it finds no room.

    The fullest nodes that have room are taken first, as Slurm does. What a job gives up of its own is not free yet.
    """
    own = own or {}
    room = {name: free.get(name, 0) + own.get(name, 0) for name in {*free, *own}}
    fitting = sorted((name for name in room if room[name] >= shape.gpus_per_node), key=lambda n: (room[n], n))
    if len(fitting) < shape.nodes:
        return False
    for name in fitting[: shape.nodes]:
        free[name] = max(0, min(free.get(name, 0), room[name] - shape.gpus_per_node))
    return True
