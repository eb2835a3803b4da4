"""Nodes and ranks of this start of the job, and the rank of each process.

Slurm sets the shape at each start, but the environment that `sbatch` stored still has the counts of the job's first
shape. These variables are removed, because launchers would use them. Each process compares the rank from its launcher
with the plan of `ones-run`. A wrong placement fails at the start, since ranks might otherwise train without each other.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from ones_wrapper.process.log import TORCH_MISSING
from ones_wrapper.protocol.hostlist import expand

_STALE = (
    "SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_TRES",
    "SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_GRES",
    "SLURM_STEP_GRES SLURM_TRES_PER_TASK SLURM_CPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_CPU_BIND SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_DISTRIBUTION SLURM_EXPORT_ENV SLURM_MPI_TYPE SLURM_NNODES",
    "SLURM_NODELIST PMI_RANK PMI_SIZE PMI_FD PMI_PORT PMI_ID PMI_JOBID PMI_UNIVERSE_SIZE PMIX_RANK PMIX_NAMESPACE",
    "MPI_LOCALRANKID MPI_LOCALNRANKS",
)
STALE = frozenset(" ".join(_STALE).split())
"""Variables of the job's earlier shape or of another step, which `srun` and MPI would use."""

STALE_PREFIXES = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMIX_SERVER_")


class LaunchError(Exception):
    """Error: nothing was started. The message says what is wrong, and what to do."""


def require_torch() -> None:
    """Raise `LaunchError` if torch is not installed: every rank would fail at its import."""
    if find_spec("torch") is None:
        raise LaunchError(TORCH_MISSING)


@dataclass(frozen=True)
class NodeAllocation:
    """Nodes of one run, and the number of ranks on each node."""

    nodes: int
    ranks_per_node: int
    address: str
    """Host of rank 0."""
    hosts: str = ""
    """Slurm's list of the nodes, compressed; empty outside of Slurm."""
    gpus_known: bool = False
    """True if Slurm manages GPUs, so that a step must request them."""
    job_id: int = 0
    restart: int = 0

    @property
    def slurm(self) -> bool:
        """True if this is a Slurm job."""
        return bool(self.hosts)


def number(env: Mapping[str, str], name: str) -> int | None:
    """Return an environment variable as a number; None if it is not set. Raises `LaunchError` if it is no number."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise LaunchError(f"{name}={text!r} is not a number")
    return int(text)


def free_port() -> int:
    """Return a free port of this machine. It is not reserved: another process may take it."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def allocation(env: Mapping[str, str], asked: int | None) -> NodeAllocation:
    """Return the allocation that `env` describes. `asked` is the number of ranks per node, for sites where Slurm
    manages no GPUs. Slurm's number of GPUs takes precedence, since a resize changes it. Raises `LaunchError`."""
    restart = number(env, "SLURM_RESTART_COUNT") or 0
    if not env.get("SLURM_JOB_ID"):
        return NodeAllocation(1, asked or 1, "127.0.0.1", restart=restart)
    known = number(env, "SLURM_GPUS_ON_NODE")
    ranks = known or asked
    if not ranks:
        raise LaunchError(
            "Slurm gave this job no GPUs that it knows of (SLURM_GPUS_ON_NODE is not set). Submit with --gres=gpu:N, "
            "or at a site that hands out whole nodes say how many ranks a node takes: ones-run --gpus-per-node N, "
            "or ONES_GPUS_PER_NODE=N"
        )
    try:
        listed = env["SLURM_JOB_NODELIST"]
        hosts = expand(listed)
    except KeyError:
        raise LaunchError("SLURM_JOB_NODELIST is not set; start ones-run in the batch script") from None
    except ValueError as error:
        raise LaunchError(f"SLURM_JOB_NODELIST: {error}") from None
    nodes = number(env, "SLURM_JOB_NUM_NODES") or len(hosts)
    return NodeAllocation(nodes, ranks, hosts[0], listed, bool(known), number(env, "SLURM_JOB_ID") or 0, restart)


def idle_gpus(env: Mapping[str, str], world: int) -> str:
    """Return an error message if a launcher other than `ones-run` started more or fewer ranks than the job has GPUs.
    Empty if the numbers are equal, or if Slurm manages no GPUs."""
    each, nodes = _count(env, "SLURM_GPUS_ON_NODE"), _count(env, "SLURM_JOB_NUM_NODES") or 1
    if "ONES_LAUNCHED" in env or not each or each * nodes == world:
        return ""
    gpus = each * nodes
    found = f"uses {world} of its job's {gpus} GPUs" if world < gpus else f"has {world} ranks for {gpus} GPUs"
    return (
        f"this run {found}, and is not resized: start the script with ones-run, which starts one rank on each GPU of "
        "each node (with torchrun: --nproc_per_node=gpu, on all nodes)"
    )


def without_stale(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of an older shape or another step (`STALE`, `STALE_PREFIXES`)."""
    return {k: v for k, v in env.items() if k not in STALE and not k.startswith(STALE_PREFIXES)}


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
"""Variables of each process manager as (rank, size, local rank, local size); empty for a variable that it does not
set."""


@dataclass(frozen=True)
class ProcessNumber:
    """Rank and sizes that a launcher gave to a process; None for a missing one. `source` is the variable with the
    rank."""

    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    source: str = ""


@dataclass(frozen=True)
class Placement:
    """Rank and node of a process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    nodes: int

    def env(self) -> dict[str, str]:
        """Return the variables that torchrun sets for each rank (torch.distributed.run, "Environment Variables"). All
        ranks have the same role. Variables with the same value on all ranks are in `contract`."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world),
        }


def contract(has: NodeAllocation, attempt: int, retries: int) -> dict[str, str]:
    """Return the variables that torchrun sets to the same value on all ranks, except `MASTER_ADDR` and `MASTER_PORT`.

    `attempt` is the number of earlier starts of the ranks in this allocation, `retries` the largest number allowed.
    With these variables scripts and frameworks behave as under torchrun: they neither read ranks from Slurm nor requeue
    the job. At `MASTER_PORT` there is no torchrun agent, but the job's own store, to which `env://` connects
    (`network.rendezvous`).
    """
    return {
        "TORCHELASTIC_RUN_ID": str(has.job_id),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max(attempt, retries)),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _count(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "") if name else ""
    return int(text) if text.isdigit() else None


def find_task(env: Mapping[str, str], launcher: str) -> ProcessNumber:
    """Return rank and sizes that the launcher gave to this process. Raises `LaunchError` if it gave no rank. Under
    `mpirun`, Slurm's variables are used last, since they may be those of the batch script."""
    if launcher == "local":
        return ProcessNumber(0, 1, 0, 1, "local")
    for names in (_SLURM, *_MPI) if launcher == "srun" else (*_MPI, _SLURM):
        rank, size, local_rank, local_size = (_count(env, name) for name in names)
        if rank is not None:
            return ProcessNumber(rank, size, local_rank, local_size, names[0])
    raise LaunchError(
        f"{launcher} gave this process no rank (none of SLURM_PROCID, PMI_RANK, PMIX_RANK, OMPI_COMM_WORLD_RANK is "
        f"set). {_HELP.get(launcher, '')}"
    )


def check(task: ProcessNumber, tasks: int, tasks_per_node: int, launcher: str) -> None:
    """Raise `LaunchError`, with a remedy, unless there are `tasks` processes, `tasks_per_node` on each node, in the
    order of nodes."""
    wrong = ""
    if task.size == 1 < tasks:
        wrong = f"each process believes that it has no others, and there should be {tasks}"
    elif task.size is not None and task.size != tasks:
        wrong = f"there are {task.size} processes, not {tasks}"
    elif task.rank >= tasks:
        wrong = f"this is process {task.rank} (from 0), and there should be {tasks}"
    elif task.local_size is not None and task.local_size != tasks_per_node:
        wrong = f"this node has {task.local_size} processes, not {tasks_per_node}"
    elif task.local_rank is not None and task.local_rank != task.rank % tasks_per_node:
        wrong = f"process {task.rank} is number {task.local_rank} of its node, so that they are not placed node by node"
    if wrong:
        raise LaunchError(f"{launcher} started the processes otherwise than planned: {wrong} ({task.source}). "
                         f"{_HELP.get(launcher, '')}")  # fmt: skip


def own_node(env: Mapping[str, str]) -> int:
    """Return this node's number, for a node launcher. Raises `LaunchError` if it is not as planned."""
    launcher, nodes = env.get("ONES_LAUNCHER", "local"), int(env["ONES_NODES"])
    task = find_task(env, launcher)
    check(task, nodes, 1, launcher)
    return task.rank


def placement_on(node: int, nodes: int, ranks_per_node: int, local_rank: int) -> Placement:
    """Return the placement of a rank that a node launcher forks."""
    rank = node * ranks_per_node + local_rank
    return Placement(rank, nodes * ranks_per_node, local_rank, ranks_per_node, node, nodes)


def own_placement(env: Mapping[str, str]) -> Placement:
    """Return the placement of a rank that the launcher itself started. Raises `LaunchError` if it is not as planned."""
    launcher, nodes, each = env["ONES_LAUNCHER"], int(env["ONES_NODES"]), int(env["ONES_GPUS_PER_NODE"])
    task = find_task(env, launcher)
    check(task, nodes * each, each, launcher)
    return placement_on(task.rank // each, nodes, each, task.rank % each)
