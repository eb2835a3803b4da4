"""What the job has this time, read from what Slurm sets anew at each start.

The environment that `sbatch` froze still holds the counts of the job's first shape, and whoever starts the ranks
would obey them: those variables go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ones_wrapper.hostlist import expand

PORTS = range(10_000, 30_000)
"""Below the ports that Linux gives out by itself (32768 and up)."""

STALE = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_GRES",
    "SLURM_STEP_GRES",
    "SLURM_TRES_PER_TASK",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_MPI_TYPE",
    "SLURM_NNODES",
    "SLURM_NODELIST",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_FD",
    "PMI_PORT",
    "PMI_ID",
    "PMI_JOBID",
    "PMI_UNIVERSE_SIZE",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
"""Variables of an older shape, or of another step's layout, which `srun` and MPI would obey."""

STALE_PREFIXES = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMIX_SERVER_")


class LaunchError(Exception):
    """Nothing was started; the message says what was wrong and what to do."""


@dataclass(frozen=True)
class Allocation:
    """The nodes of one run, and how many ranks each takes."""

    nodes: int
    ranks_per_node: int
    address: str
    """Host of rank 0."""
    hosts: str = ""
    """Slurm's list of the nodes; empty outside Slurm."""
    gpus_known: bool = False
    """Whether Slurm counts GPUs, and hands them out to steps that ask."""
    job_id: int = 0
    restart: int = 0

    @property
    def slurm(self) -> bool:
        """Whether this is a Slurm job."""
        return bool(self.hosts)


def number(env: Mapping[str, str], name: str) -> int | None:
    """An environment variable that is a count; None where it is not set. Raises `LaunchError`."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise LaunchError(f"{name}={text!r} is not a number")
    return int(text)


def master_port(job_id: int, start: int) -> int:
    """A port for rank 0's store: twenty for a job, one each start, and the next thousand jobs have others."""
    return PORTS.start + job_id % 1000 * 20 + start % 20


def allocation(env: Mapping[str, str], asked: int | None) -> Allocation:
    """What `env` tells of the job. `asked` is how many ranks a node takes where Slurm does not know of GPUs;
    its own count wins, since a resize changes it. Raises `LaunchError`.
    """
    restart = number(env, "SLURM_RESTART_COUNT") or 0
    if not env.get("SLURM_JOB_ID"):
        return Allocation(1, asked or 1, "127.0.0.1", restart=restart)
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
    return Allocation(nodes, ranks, hosts[0], listed, bool(known), number(env, "SLURM_JOB_ID") or 0, restart)


def without_stale(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is stale in it."""
    return {k: v for k, v in env.items() if k not in STALE and not k.startswith(STALE_PREFIXES)}
