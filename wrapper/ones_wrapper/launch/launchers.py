"""Programs that can start processes on a job's nodes: one small function for each, by name.

A launcher starts one task on each node: the node launcher, which forks the ranks of that node. If ranks use MPI, it
starts one process for each rank, since MPI's process manager must start them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ones_wrapper.plugins import load
from ones_wrapper.process.placement import LaunchError, NodeAllocation

MPI_TYPES = ("none", "pmi2", "pmix")
"""Plugins (`srun --mpi=...`) by which the processes of a step find each other."""

_INTEL = {"I_MPI_JOB_SIGNAL_PROPAGATION": "enable"}
"""Variable that makes Intel's Hydra forward signals. Without it Hydra kills the ranks."""

_ASK_S = 20.0
"""Seconds in which a program must print its version."""


@dataclass(frozen=True)
class Layout:
    """Processes to start on the nodes of an allocation."""

    allocation: NodeAllocation
    command: Sequence[str]
    direct: bool = False
    """True if the launcher starts each rank; False if it starts one node launcher on each node."""
    mpi: str = "none"
    exported: Sequence[str] = ()
    """Variables that must reach every node."""

    @property
    def tasks_per_node(self) -> int:
        """Processes that the launcher itself starts on each node."""
        return self.allocation.ranks_per_node if self.direct else 1

    @property
    def tasks(self) -> int:
        """Processes that the launcher itself starts."""
        return self.allocation.nodes * self.tasks_per_node


@dataclass(frozen=True)
class Started:
    """A launcher's command, the environment variables that it needs, and its stop signal."""

    command: list[str]
    env: dict[str, str]
    stop: int | None = signal.SIGUSR2
    """Signal that the launcher forwards to the ranks to stop them; None if the launcher's program decides. At SIGTERM
    `srun` and Open MPI end the ranks at once, and Hydra dies of SIGUSR2."""
    launcher: str = ""
    """Name of the launcher, which `ones-run` sets."""


Find = Callable[[str], str | None]
Ask = Callable[[Sequence[str]], str]
"""Function that runs a program and returns its output."""
Launcher = Callable[[Layout, Find, Ask], Started]


def launcher_named(name: str) -> Launcher:
    """Return a launcher of `LAUNCHERS`, of an installed package, or `package.module:function`. Raises `LaunchError`.
    Packages register launchers in the entry points `ones_wrapper.launchers`."""
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    try:
        found: Launcher = load("ones_wrapper.launchers", name, LAUNCHERS)
    except ValueError as error:
        raise LaunchError(f"launcher {error}") from None
    return found


def ask(command: Sequence[str]) -> str:
    """Run a program; return what it prints on stdout and stderr. Raises `LaunchError`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout + done.stderr


def _program(find: Find, *names: str) -> str:
    for name in names:
        if path := find(name):
            return path
    raise LaunchError(
        f"there is no {' or '.join(names)} in PATH; load its module or add its folder to PATH, or choose another "
        f"of {', '.join(LAUNCHERS)} with ones-run --launcher"
    )


def _fresh_counts(layout: Layout) -> dict[str, str]:
    """Return Slurm's variables as if the job had been submitted with this layout. All launchers but srun read them."""
    has = layout.allocation
    if not has.slurm:
        return {}
    each = str(layout.tasks_per_node)
    return {
        "SLURM_NNODES": str(has.nodes),
        "SLURM_JOB_NUM_NODES": str(has.nodes),
        "SLURM_NODELIST": has.hosts,
        "SLURM_NTASKS": str(layout.tasks),
        "SLURM_NPROCS": str(layout.tasks),
        "SLURM_TASKS_PER_NODE": f"{each}(x{has.nodes})" if has.nodes > 1 else each,
    }


def srun(layout: Layout, find: Find = shutil.which, ask: Ask = ask) -> Started:
    """Return command and variables for Slurm's own launcher."""
    has = layout.allocation
    if not has.slurm:
        raise LaunchError("--launcher srun: this is not a Slurm job (SLURM_JOB_ID is not set)")
    program = _program(find, "srun")
    if layout.mpi != "none":
        _check_plugin(layout.mpi, ask([program, "--mpi=list"]))
    gpus = [f"--gres=gpu:{has.ranks_per_node}", "--gpu-bind=none"] if has.gpus_known else []
    counts = [f"--nodes={has.nodes}", f"--ntasks={layout.tasks}", f"--ntasks-per-node={layout.tasks_per_node}"]
    fixed = ["--cpu-bind=none", f"--mpi={layout.mpi}", "--export=ALL", "--kill-on-bad-exit=1", "--wait=0"]
    return Started([program, *counts, *gpus, *fixed, *layout.command], {})


def _check_plugin(mpi: str, listing: str) -> None:
    """Raise `LaunchError` if Slurm does not have the plugin, by the `listing` of `srun --mpi=list`."""
    words = [word.strip() for word in listing.replace(",", "\n").replace(":", "\n").splitlines()]
    has = [word for word in words if word and " " not in word]
    if not any(word == mpi or word.startswith(f"{mpi}_v") for word in has):
        raise LaunchError(
            f"--mpi {mpi}: this Slurm does not have it; srun --mpi=list names {', '.join(has) or 'nothing'}. "
            "Choose one of those that your MPI was built for, or ones-run --launcher mpirun"
        )


def ibrun(layout: Layout, find: Find = shutil.which, ask: Ask = ask) -> Started:
    """Return command and variables for TACC's launcher, which knows the site's MPI. It reads the processes per node
    from two variables."""
    program, each = _program(find, "ibrun"), str(layout.tasks_per_node)
    env = {"IBRUN_TASKS_PER_NODE": each, "TACC_TASKS_PER_NODE": each}
    command = [program, "-n", str(layout.tasks), "-o", "0", *layout.command]
    return Started(command, _fresh_counts(layout) | env | _INTEL, None)


def mpirun(layout: Layout, find: Find = shutil.which, ask: Ask = ask) -> Started:
    """Return command and variables for the launcher of an MPI: Open MPI's, or the Hydra of MPICH, Intel MPI and
    MVAPICH."""
    program = _program(find, "mpirun", "mpiexec")
    count, each = str(layout.tasks), str(layout.tasks_per_node)
    version = ask([program, "--version"])
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE")):
        # Open MPI passes on only its own variables, and allows one process a core, whatever the GPUs.
        exported = [word for name in layout.exported for word in ("-x", name)]
        env, stop = {}, signal.SIGUSR2
        options = ["--map-by", f"ppr:{each}:node:OVERSUBSCRIBE", "--bind-to", "none", *exported]
    elif any(name in version.upper() for name in ("HYDRA", "MPICH", "INTEL(R) MPI")):
        env, stop = _INTEL, signal.SIGTERM
        options = ["-ppn", each, "-genvall"]
    else:
        raise LaunchError(f"{program} is neither Open MPI's nor Hydra's (--version says {version[:100]!r})")
    return Started([program, "-n", count, *options, *layout.command], _fresh_counts(layout) | env, stop)


def local(layout: Layout, find: Find = shutil.which, ask: Ask = ask) -> Started:
    """Return the command that runs the node launcher on this node, without a launcher."""
    if layout.allocation.nodes > 1:
        raise LaunchError(
            f"--launcher local starts ranks only on this node, and the job has {layout.allocation.nodes}; "
            "use srun, ibrun or mpirun"
        )
    if layout.direct:
        raise LaunchError("--launcher local starts no MPI; use ones-run --launcher mpirun, or --backend gloo")
    return Started(list(layout.command), {}, signal.SIGTERM)


LAUNCHERS: dict[str, Launcher] = {"srun": srun, "ibrun": ibrun, "mpirun": mpirun, "local": local}
