"""Where a process stands in the run: told by whoever started it, and checked against what `ones-run` planned.

A wrong place is found here, at the start, rather than as ranks that train side by side without each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_HELP = {
    "srun": "Submit without task counts (--ntasks…), and start ones-run in the batch script",
    "ibrun": "Look at what `ibrun` makes of IBRUN_TASKS_PER_NODE and TACC_TASKS_PER_NODE, or use --launcher srun",
    "mpirun": "Use the mpirun of the MPI that mpi4py was built for, from the job's own environment",
}

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "", "", ""),
)
"""(rank, size, local rank, local size) as process managers name them; an empty name where one does not tell."""


class PlaceError(Exception):
    """The processes were not started as planned; the message says how, and what to do."""


@dataclass(frozen=True)
class Task:
    """A process as its starter numbers it; None where it does not say."""

    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    source: str = ""


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    nodes: int

    def env(self) -> dict[str, str]:
        """The variables as torch's `env://` and other launchers name them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
        }


def _count(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "") if name else ""
    return int(text) if text.isdigit() else None


def find_task(env: Mapping[str, str], launcher: str) -> Task:
    """What the starter says of this process. Raises `PlaceError` where it says nothing.

    Under `mpirun` Slurm's own variables are those of the batch script or of Hydra's proxies, and do not count.
    """
    if launcher == "local":
        return Task(0, 1, 0, 1, "local")
    for names in (_SLURM, *_MPI) if launcher == "srun" else (*_MPI, _SLURM):
        rank, size, local_rank, local_size = (_count(env, name) for name in names)
        if rank is not None:
            return Task(rank, size, local_rank, local_size, names[0])
    raise PlaceError(
        f"{launcher} told this process no rank (none of SLURM_PROCID, PMI_RANK, PMIX_RANK, OMPI_COMM_WORLD_RANK is "
        f"set). {_HELP.get(launcher, '')}"
    )


def check(task: Task, tasks: int, tasks_per_node: int, launcher: str) -> None:
    """Compare with the plan. Raises `PlaceError` with the reason and what to do."""
    wrong = ""
    if task.size == 1 < tasks:
        wrong = f"each process believes that it is alone, and there should be {tasks}"
    elif task.size is not None and task.size != tasks:
        wrong = f"there are {task.size} processes, not {tasks}"
    elif task.rank >= tasks:
        wrong = f"this is process {task.rank} (from 0), and there should be {tasks}"
    elif task.local_size is not None and task.local_size != tasks_per_node:
        wrong = f"this node has {task.local_size} processes, not {tasks_per_node}"
    elif task.local_rank is not None and task.local_rank != task.rank % tasks_per_node:
        wrong = f"process {task.rank} is number {task.local_rank} of its node, so that they are not placed node by node"
    if wrong:
        raise PlaceError(f"{launcher} started the processes otherwise than planned: {wrong} ({task.source}). "
                         f"{_HELP.get(launcher, '')}")  # fmt: skip


def node_of(env: Mapping[str, str]) -> int:
    """Number of this node, for a node launcher. Raises `PlaceError`."""
    launcher, nodes = env.get("ONES_LAUNCHER", "local"), int(env["ONES_NODES"])
    task = find_task(env, launcher)
    check(task, nodes, 1, launcher)
    return task.rank


def on_node(node: int, nodes: int, ranks_per_node: int, local_rank: int) -> Place:
    """The place of a rank that a node launcher forks."""
    rank = node * ranks_per_node + local_rank
    return Place(rank, nodes * ranks_per_node, local_rank, ranks_per_node, node, nodes)


def own_place(env: Mapping[str, str]) -> Place:
    """The place of a rank that the launcher itself started. Raises `PlaceError`."""
    launcher, nodes, each = env["ONES_LAUNCHER"], int(env["ONES_NODES"]), int(env["ONES_GPUS_PER_NODE"])
    task = find_task(env, launcher)
    check(task, nodes * each, each, launcher)
    return on_node(task.rank // each, nodes, each, task.rank % each)
