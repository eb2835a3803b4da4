"""`ones-run`: start the ranks for the allocation as it now is.

Runs in the batch script. The environment that `sbatch` froze still holds the counts of the job's first shape,
so nothing is taken from it but what Slurm sets anew at each start: the job's nodes and the GPUs of a node.
One `srun` task a node starts `ones_wrapper.node`, which forks that node's ranks. Standard library only, so
that it starts fast.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ones_wrapper.hostlist import expand
from ones_wrapper.protocol import directory_name

USAGE_ERROR = 2
"""Exit code where nothing was started because something asked for was missing or contradictory."""

PORTS = range(10_000, 30_000)
"""Below the ports that Linux gives out by itself (32768 and up)."""

STALE = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
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
    "SLURM_NNODES",
    "SLURM_NODELIST",
)
"""Variables that `srun` would obey though they tell of an older shape, or of another step's layout."""


class LaunchError(Exception):
    """Nothing was started; the message says what was wrong and what to do."""


@dataclass(frozen=True)
class Launch:
    """What will be started."""

    command: list[str]
    env: dict[str, str]
    nodes: int
    gpus_per_node: int
    slurm: bool


def master_port(job_id: int, restart: int) -> int:
    """A port for rank 0's store: twenty for a job, one a restart, and the next thousand jobs have others."""
    return PORTS.start + job_id % 1000 * 20 + restart % 20


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise LaunchError(f"{name}={text!r} is not a number")
    return int(text)


def plan(
    env: Mapping[str, str],
    script: str,
    arguments: Sequence[str],
    *,
    job_dir: Path,
    gpus_per_node: int | None = None,
    srun: str | None = "srun",
    now: float = 0.0,
) -> Launch:
    """The command and environment that start SCRIPT on the allocation that `env` tells of.

    `gpus_per_node` is what was asked for on the command line or by ONES_GPUS_PER_NODE; Slurm's own count
    wins, since a resize changes it. `srun` is the path of that program, None where there is none. Outside
    Slurm the ranks run on this machine. Raises `LaunchError`.
    """
    asked = gpus_per_node or _number(env, "ONES_GPUS_PER_NODE")
    if not env.get("SLURM_JOB_ID"):
        return _plan_local(env, script, arguments, job_dir, asked or 1, now)
    if srun is None:
        raise LaunchError("this is a Slurm job, but there is no srun in PATH; add Slurm's bin folder to PATH")
    allocated = _number(env, "SLURM_GPUS_ON_NODE")
    gpus = allocated or asked
    if not gpus:
        raise LaunchError(
            "Slurm gave this job no GPUs that it knows of (SLURM_GPUS_ON_NODE is not set). Submit with --gres=gpu:N, "
            "or at a site that hands out whole nodes say how many ranks a node takes: ones-run --gpus-per-node N, "
            "or ONES_GPUS_PER_NODE=N"
        )
    try:
        hosts = expand(env["SLURM_JOB_NODELIST"])
    except KeyError:
        raise LaunchError("SLURM_JOB_NODELIST is not set; start ones-run in the batch script") from None
    except ValueError as error:
        raise LaunchError(f"SLURM_JOB_NODELIST: {error}") from None
    nodes = _number(env, "SLURM_JOB_NUM_NODES") or len(hosts)
    job_id, restart = _number(env, "SLURM_JOB_ID") or 0, _number(env, "SLURM_RESTART_COUNT") or 0
    command = [
        srun,
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *([f"--gres=gpu:{gpus}", "--gpu-bind=none"] if allocated else []),
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--wait=0",
        *_node_command(script, arguments),
    ]
    clean = {k: v for k, v in env.items() if k not in STALE}
    address = {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(master_port(job_id, restart))}
    clean |= address | _explicit(nodes, gpus, job_dir, now)
    return Launch(command, clean, nodes, gpus, slurm=True)


def _plan_local(
    env: Mapping[str, str], script: str, arguments: Sequence[str], job_dir: Path, ranks: int, now: float
) -> Launch:
    # Several may run on one machine at a time, so the port follows from the process here.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port(os.getpid(), 0))}
    clean = dict(env) | address | _explicit(1, ranks, job_dir, now)
    return Launch(_node_command(script, arguments), clean, 1, ranks, slurm=False)


def _node_command(script: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ones_wrapper.node", script, *arguments]


def _explicit(nodes: int, gpus: int, job_dir: Path, now: float) -> dict[str, str]:
    return {
        "ONES_NODES": str(nodes),
        "ONES_GPUS_PER_NODE": str(gpus),
        "ONES_JOB_DIR": str(job_dir),
        "ONES_LAUNCHED": f"{now:.3f}",
    }


def job_directory(env: Mapping[str, str], cwd: Path) -> Path:
    """Where the job's directory is: ONES_JOB_DIR, or `ones-<job id>` in the working directory."""
    named = env.get("ONES_JOB_DIR")
    return (cwd / named) if named else cwd / directory_name(_number(env, "SLURM_JOB_ID") or 0)


def make_job_directory(path: Path) -> None:
    """Make the job's directory (mode 0755), or check the one that is there.

    Raises `LaunchError` where it is a link, not a directory, another user's, not writable, or its parent is
    missing.
    """
    try:
        path.mkdir()
        path.chmod(0o755)  # the companion may be another user, whatever our umask
        return
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise LaunchError(f"job directory {path}: its parent does not exist; make it first") from None
    except OSError as error:
        raise LaunchError(
            f"job directory {path}: cannot be made ({error.strerror}); set ONES_JOB_DIR to a place you can write to"
        ) from None
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        raise LaunchError(f"job directory {path}: is a link; set ONES_JOB_DIR to the directory itself")
    if not stat.S_ISDIR(state.st_mode):
        raise LaunchError(f"job directory {path}: is not a directory; move it away")
    if state.st_uid != os.geteuid():
        raise LaunchError(f"job directory {path}: belongs to user {state.st_uid}, not to you; choose another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise LaunchError(f"job directory {path}: is not writable; chmod u+rwx it")


def exit_code_path(job_dir: Path, restart: int) -> Path:
    """Where the first node launcher that fails leaves its exit code.

    `srun` returns the highest code of all tasks, and the tasks that it kills because one failed count as 137:
    so the script's own code would be lost.
    """
    return job_dir / f".exit-{restart}"


def _forward(process: subprocess.Popen[bytes], slurm: bool) -> None:
    """Pass signals on to the step, so that `--signal=B:…` and `kill` reach the ranks.

    `srun` answers SIGTERM by killing its tasks at once; it passes SIGUSR2 on, which the node launcher takes
    for the order to stop after a checkpoint.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            stop = number in (signal.SIGTERM, signal.SIGINT)
            process.send_signal(signal.SIGUSR2 if slurm and stop else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)


def start(launch: Launch, job_dir: Path, restart: int) -> int:
    """Start the ranks and wait for them; the exit code is the script's, 128+n where signal n ended it."""
    failed = exit_code_path(job_dir, restart)
    failed.unlink(missing_ok=True)
    # Its own process group: Ctrl-C in a terminal then reaches the ranks once, through us.
    process = subprocess.Popen(
        launch.command, env=launch.env, stdin=subprocess.DEVNULL, start_new_session=not launch.slurm
    )
    _forward(process, launch.slurm)
    code = process.wait()
    if code < 0:
        code = 128 - code
    if code:
        try:
            text = failed.read_text()
            failed.unlink(missing_ok=True)
            code = int(text) or code
        except (OSError, ValueError):
            pass
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ones-run",
        description="Start SCRIPT on every GPU of this Slurm job, one rank a GPU, at the job's present size. "
        "Outside Slurm it runs the ranks on this machine.",
        epilog="The job's directory is ONES_JOB_DIR, or ones-<job id> in the working directory.",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="ranks per node where Slurm does not know of GPUs (whole nodes), and outside Slurm",
    )
    parser.add_argument(
        "--preload",
        metavar="MODULES",
        help="modules that the script imports (torchvision,sklearn.datasets), to be imported once a node instead of "
        "once a rank; not any that initialise CUDA",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and start nothing")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="passed on to it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ones-run`; returns the script's exit code, or 2 where nothing could be started."""
    now = time.time()
    options = _parser().parse_args(argv)
    env = dict(os.environ)
    try:
        if options.gpus_per_node is not None and options.gpus_per_node < 1:
            raise LaunchError(f"--gpus-per-node {options.gpus_per_node}: must be 1 or more")
        if options.preload:
            env["ONES_PRELOAD"] = options.preload
        if not Path(options.script).is_file():
            raise LaunchError(f"script {options.script}: there is no such file (looked from {Path.cwd()})")
        job_dir = job_directory(env, Path.cwd())
        launch = plan(
            env,
            options.script,
            options.arguments,
            job_dir=job_dir,
            gpus_per_node=options.gpus_per_node,
            srun=shutil.which("srun"),
            now=now,
        )
        if options.dry_run:
            print(" ".join(launch.command))
            return 0
        make_job_directory(job_dir)
        return start(launch, job_dir, _number(env, "SLURM_RESTART_COUNT") or 0)
    except LaunchError as error:
        print(f"ones-run: {error}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
